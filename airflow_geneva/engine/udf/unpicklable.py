"""Find the part of a notebook's function that cannot be sent to another process."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getmodule
from types import CodeType, FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]


def what_cannot_be_pickled(function: Any) -> str:
    """Name the innermost part of a function, class or object that cannot be pickled, such as `global 'lock'`."""
    return _find(function, set()) or f"{type(function).__name__} {getattr(function, '__name__', '')!r}"


def _find(value: Any, seen: set[int]) -> str:
    for what, part in _parts(value):
        if id(part) in seen or _is_pickled(part):
            continue
        seen.add(id(part))
        inner = _find(part, seen) if what else ""
        return inner or f"{what} ({type(part).__module__}.{type(part).__qualname__})"
    return ""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that are pickled with a value, each with its name for the user."""
    if isinstance(value, FunctionType):
        for name in sorted(_names(value.__code__)):
            if name in value.__globals__:
                yield f"global {name!r}", value.__globals__[name]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"variable {name!r} of the function around it", cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield "a default value", default
    elif isinstance(value, type):
        yield from ((f"{name!r} of class {value.__name__!r}", part) for name, part in vars(value).items())
    else:
        attributes = getattr(value, "__dict__", {})
        yield from ((f"attribute {name!r}", part) for name, part in attributes.items())
        if getmodule(type(value)) is None or type(value).__module__ == "__main__":
            yield f"class {type(value).__name__!r}", type(value)


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _is_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
