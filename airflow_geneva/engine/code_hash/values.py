"""Find the values to which code refers, and give them a text form that is the same in every process.

Imports only the standard library, so that any Python version can load it and gets the same results.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import logging
import pathlib
import sys
import threading
import types
import uuid
from typing import Any

_BY_REPR = (
    complex,
    range,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.local)


def plain_tokens(value: Any) -> tuple[str | bytes, ...]:
    """Return type and content of a plain value; () for a container, code, or a value without stable content."""
    kind = type(value)
    if value is None or value is Ellipsis or value is NotImplemented or kind is bool:
        return ("singleton", repr(value))
    if kind is int:
        return ("int", hex(value))
    if kind in (str, bytes, bytearray):
        return (kind.__name__, value)
    if kind is float or kind in _BY_REPR:
        return (kind.__name__, repr(value))
    if isinstance(value, pathlib.PurePath):
        return ("path", value.as_posix())
    if is_a(value, "pyarrow.lib", "DataType", "Field", "Schema"):
        return ("arrow", str(value))
    if is_a(value, "numpy", "ndarray", "generic", "dtype"):
        dtype = getattr(value, "dtype", value)
        content = (value.tobytes(),) if hasattr(value, "tobytes") else ()
        return () if dtype.hasobject else ("numpy", dtype.str, str(getattr(value, "shape", "")), *content)
    if isinstance(value, logging.Logger):
        return ("logger", value.name)
    if isinstance(value, _LOCKS):
        return ("lock",)
    if "typing" in (kind.__module__, getattr(value, "__module__", "")) or kind is types.GenericAlias:
        # The typing module builds its objects differently per Python version, and they do not affect results.
        return ("typing",)
    return ()


def cells_of(functions: list[types.FunctionType]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:
                # The cell has no value yet: look the name up in the module instead; it counts as unbound.
                continue
    return found


def function_in(attribute: Any) -> types.FunctionType | None:
    """Return the plain function inside a class attribute: a method, property, static or class method."""
    for name in ("__func__", "fget", "func"):
        attribute = getattr(attribute, name, attribute)
    return attribute if isinstance(attribute, types.FunctionType) else None


def is_code(value: Any) -> bool:
    """Whether a value is a function, method or class, or wraps one."""
    return isinstance(value, (types.FunctionType, types.MethodType, type)) or hasattr(value, "__wrapped__")


def module_of(value: Any) -> str:
    if isinstance(value, types.MethodType):
        return module_of(value.__func__)
    if isinstance(value, types.FunctionType):
        # functools.wraps copies __module__ from the wrapped function; the code is where the globals are.
        return str(value.__globals__.get("__name__", ""))
    return str(getattr(value, "__module__", ""))


def is_udf(value: Any) -> bool:
    """Whether a value is a `UDF`; this module must not import that class."""
    return is_a(value, "airflow_geneva.engine.udf.decorator", "UDF")


def is_a(value: Any, module: str, *names: str) -> bool:
    """Whether a value is an instance of a class with one of these names in a module."""
    return any(base.__module__ == module and base.__name__ in names for base in type(value).__mro__)


def dotted_name(value: Any) -> str:
    """Return the dotted name by which other modules import this object, without private modules, or ''."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    module = getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return ""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if module.startswith("airflow_geneva.") and name in sys.modules["airflow_geneva"].__all__:
        return f"airflow_geneva.{name}"  # independent of its module in this package
    public = [part for part in module.split(".") if not part.startswith("_")]
    return f"{'.'.join(public or [module])}.{name}" if found is value and value is not None else ""


def label_of(value: Any) -> str:
    return f"'{value.__module__}.{value.__qualname__}'"
