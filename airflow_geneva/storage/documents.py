"""Documents that others may have written: JSON of bounded size and depth, checked against the types of its readers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

LARGEST_BYTES = 16 << 20
_DEEPEST = 64
_LARGEST_INT = 1 << 64
_LARGEST_FLOAT = 1e18
_LATEST_TIME = 253_402_300_799
"""The last second of the year 9999."""

_T = TypeVar("_T")


def parse(data: str | bytes) -> Any:
    """Parse JSON that may be damaged, or written to do damage.

    Raises:
        ValueError: it is no JSON, too large or nested too deeply, or holds a number or text that cannot be shown.
    """
    if len(data) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES:,} bytes")
    try:
        found = json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check(found, _DEEPEST)
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _check(value: object, depth: int) -> None:
    if isinstance(value, str):
        value.encode()  # half a surrogate pair can be written as an escape; UnicodeEncodeError is a ValueError
    elif isinstance(value, float):
        if not abs(value) < _LARGEST_FLOAT:
            raise ValueError(f"{value} is too large a number")
    elif isinstance(value, int):
        if not -_LARGEST_INT < value < _LARGEST_INT:
            raise ValueError("it holds too large a number")
    elif isinstance(value, (list, dict)):
        if depth == 0:
            raise ValueError("it is nested too deeply")
        if isinstance(value, dict):
            for name, item in value.items():
                name.encode()
                _check(item, depth - 1)
        else:
            for item in value:
                _check(item, depth - 1)


def well_typed(value: _T) -> _T:
    """Return a dataclass if its fields have the types with which they are annotated.

    Raises:
        TypeError: one of them has not.
    """
    for name, kind in _hints(type(value)).items():
        if not fits(found := getattr(value, name), kind):
            raise TypeError(f"{name} is {found!r:.80}")
    return value


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has an annotated type; a dataclass, whether all of its fields have."""
    if kind is Any:
        return True
    if kind is None or kind is NoneType:
        return value is None
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(fits(one, arguments[0]) for one in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            fits(name, arguments[0]) and fits(item, arguments[1]) for name, item in value.items()
        )
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not isinstance(value, origin or kind):
        return False
    return not is_dataclass(kind) or all(fits(getattr(value, name), hint) for name, hint in _hints(kind).items())


def check_time(seconds: Any) -> float:
    """Return seconds since the epoch; ValueError if no calendar has such a day."""
    if not (fits(seconds, float) and math.isfinite(seconds) and 0 <= seconds <= _LATEST_TIME):
        raise ValueError(f"{seconds!r:.80} is not a time")
    return float(seconds)


def _read_hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


_hints: Callable[[Any], dict[str, Any]] = cache(_read_hints)
