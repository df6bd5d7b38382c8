"""Read what others may have written beside a table: JSON of limited size, depth and number of values, and packed bytes.

What comes out has been checked once: values are compared with annotated types by `well_typed`. Arrow data passes
`airflow_geneva.engine.storage.arrow_documents`, and archives of code `airflow_geneva.engine.udf.code_archive`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import EllipsisType, NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

LARGEST_BYTES = 16 << 20
"""The largest document, as it is stored."""

LARGEST_PLAN = 256 << 20
"""The largest part of a plan, which has a line for each fragment of a shard; only a part that XCom names is parsed."""

MOST_VALUES = 1 << 20
"""The most values, names and lists of a document, each of which takes up to 80 bytes of memory."""

MOST_PLAN_VALUES = 32 << 20

_DEEPEST = 64
_PIECE = 64 << 10
_LARGEST_INT = 1 << 64
_LARGEST_FLOAT = 1e18
_LATEST_TIME = 253_402_300_799
"""The last second of the year 9999."""

_T = TypeVar("_T")
_Check: TypeAlias = Callable[[Any], bool]


def parse(data: str | bytes, most_bytes: int = LARGEST_BYTES, most_values: int = MOST_VALUES) -> Any:
    """Parse JSON that may be damaged or malicious.

    Args:
        most_values: the most commas, colons and opening brackets, those in texts included.

    Raises:
        ValueError: it is not JSON, too large or nested too deeply, or holds a number or text that cannot be shown.
    """
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    marks = ",:[{" if isinstance(data, str) else (b",", b":", b"[", b"{")
    if len(data) > most_values and sum(map(data.count, marks)) > most_values:  # type: ignore[arg-type]
        raise ValueError(f"it has more than {most_values:,} values")
    try:
        found = json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check(found)
    return found


def expand(packed: bytes, most_bytes: int) -> bytes:
    """Decompress what `zlib.compress` made, and stop at a limit.

    Raises:
        ValueError: it is damaged, or has more than `most_bytes` bytes.
    """
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(packed, most_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from None
    if len(found) > most_bytes:
        raise ValueError(f"it expands to more than {most_bytes:,} bytes")
    if not reader.eof or reader.unused_data:
        raise ValueError("it is damaged: its compressed bytes end too early or too late")
    return found


class Expansion:
    """Decompresses gzip or zlib data that comes in parts, a small piece at a time."""

    def __init__(self) -> None:
        self._reader = zlib.decompressobj(zlib.MAX_WBITS | 32)

    @property
    def ended(self) -> bool:
        return self._reader.eof

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yield what a part expands to, in pieces of at most 64 KB; `ValueError` if it is damaged."""
        while True:
            try:
                found = self._reader.decompress(part, _PIECE)
            except zlib.error as error:
                raise ValueError(f"it is damaged: {error}") from None
            if found:
                yield found
            part = self._reader.unconsumed_tail
            if self._reader.eof or (not part and len(found) < _PIECE):
                return


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _check(document: object) -> None:
    """Check every value of a document, one level of nesting after another."""
    level: list[Any] = [[document]]
    for _ in range(_DEEPEST + 1):
        below: list[Any] = []
        for container in level:
            if type(container) is dict:
                _check_values(container, below)
                container = container.values()
            _check_values(container, below)
        if not below:
            return
        level = below
    raise ValueError("it is nested too deeply")


def _check_values(values: Any, below: list[Any]) -> None:
    """Check the values of a container, and add the containers in it to `below`."""
    for value in values:
        kind = type(value)
        if kind is str:
            if not value.isascii():
                value.encode()  # half a surrogate pair can be written as an escape; UnicodeEncodeError is a ValueError
        elif kind is int:
            if not -_LARGEST_INT < value < _LARGEST_INT:
                raise ValueError("it holds too large a number")
        elif kind is float:
            if not abs(value) < _LARGEST_FLOAT:
                raise ValueError(f"{value} is too large a number")
        elif kind is list or kind is dict:
            below.append(value)


def well_typed(value: _T) -> _T:
    """Return a dataclass unchanged if the values of its fields have the annotated types.

    Raises:
        TypeError: a value has another type.
    """
    for name, fits in _fields(type(value)):
        if not fits(found := getattr(value, name)):
            raise TypeError(f"{name} is {found!r:.80}")
    return value


def _check_fields(kind: Any) -> list[tuple[str, _Check]]:
    hints = get_type_hints(kind)
    return [(field.name, _check_of(hints[field.name])) for field in fields(kind)]


_fields: Callable[[Any], list[tuple[str, _Check]]] = cache(_check_fields)


def _check_of(kind: Any) -> _Check:
    """Return a function that checks whether a value has a type; for a dataclass, also the types of its fields."""
    origin, arguments = get_origin(kind), get_args(kind)
    checks = [_check_of(one) for one in arguments if not isinstance(one, (str, EllipsisType))]
    if kind is Any:
        return lambda value: True
    if kind in (None, NoneType):
        return lambda value: value is None
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        return lambda value: isinstance(value, numbers) and not isinstance(value, bool)
    if origin in (Union, UnionType):
        return lambda value: any(check(value) for check in checks)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin is tuple and len(arguments) != len(checks):
        return lambda value: isinstance(value, tuple) and all(map(checks[0], value))
    if origin is tuple:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(checks)
            and all(check(one) for check, one in zip(checks, value, strict=True))
        )
    if origin in (list, Sequence):
        return lambda value: isinstance(value, (list, tuple)) and all(map(checks[0], value))
    if origin in (dict, Mapping):
        of_name, of_item = checks
        return lambda value: (
            isinstance(value, Mapping) and all(map(of_name, value)) and all(map(of_item, value.values()))
        )
    made = origin or kind
    if is_dataclass(kind):
        return lambda value: (
            isinstance(value, made) and all(check(getattr(value, name)) for name, check in _fields(made))
        )
    return lambda value: isinstance(value, made)


def check_time(seconds: Any) -> float:
    """Return seconds since the epoch unchanged; ValueError if they are not a time from 1970 to 9999."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 <= seconds <= _LATEST_TIME):
        raise ValueError(f"{seconds!r:.80} is not a time")
    return float(seconds)
