"""Convert Arrow values to the Python values that a function is called with; what Python cannot hold is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import is_list, nested_types, storage_type

_NANOSECONDS, _DAY = 1_000, 86_400_000
_SHOWN = 100
_EXACT = 2**53


class NotInPython(ValueError):
    """Python cannot hold an Arrow value; the message shows the value."""


def python_values(values: pa.Array | pa.ChunkedArray) -> tuple[Sequence[Any], Mapping[int, NotInPython]]:
    """Return one Python value for each row, None for NULL; and, by row, why Python cannot hold its value."""
    return _each(values, _to_python)


def numpy_items(lists: pa.Array) -> tuple[Sequence[Any], Mapping[int, NotInPython]]:
    """Return one NumPy array for each list, None for NULL; and, by row, why NumPy cannot hold its items."""
    return _each(lists, _to_numpy)


def python_value(scalar: pa.Scalar) -> Any:
    """Return the Python value of an Arrow scalar; `NotInPython` if there is none."""
    found, unreadable = python_values(pa.repeat(scalar, 1))
    for error in unreadable.values():
        raise error
    return found[0]


def _each(values: Any, convert: Any) -> tuple[Sequence[Any], Mapping[int, NotInPython]]:
    try:
        return convert(values), {}
    except Exception:
        found: list[Any] = []
        unreadable: dict[int, NotInPython] = {}
        for row in range(len(values)):
            one = values.slice(row, 1)
            try:
                found += convert(one)
            except Exception as error:
                found.append(None)
                why = str(error) if isinstance(error, NotInPython) else f"{type(error).__name__}: {error}"
                unreadable[row] = NotInPython(f"{_shown(one)}, which Python cannot hold ({why})")
        return found, unreadable


def _to_python(values: Any) -> Sequence[Any]:
    _check_precision(values)
    found: list[Any] = values.to_pylist()
    return found


def _to_numpy(lists: pa.Array) -> Sequence[Any]:
    numbers = lists.flatten()
    while is_list(numbers.type):
        numbers = numbers.flatten()
    if numbers.null_count and numbers.type in (pa.int64(), pa.uint64()):
        bounds = [bound for bound in pc.min_max(numbers).as_py().values() if bound is not None]
        if any(abs(bound) > _EXACT for bound in bounds):
            raise NotInPython("NumPy has only floating numbers beside NULL, which would round it")
    items = (scalar.values for scalar in lists)
    return [None if item is None else item.to_numpy(zero_copy_only=False) for item in items]


def _check_precision(values: pa.Array | pa.ChunkedArray) -> None:
    """Refuse times and dates of which pyarrow would drop a part."""
    if not any(map(_is_finer, nested_types(storage_type(values.type)))):
        return
    for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
        for leaf in _leaves(chunk):
            unit = _DAY if pt.is_date64(leaf.type) else _NANOSECONDS
            ticks = leaf.drop_null().view(pa.int64()) if _is_finer(leaf.type) else pa.array([], pa.int64())
            whole = pc.multiply(pc.divide(ticks, unit), unit)
            if len(ticks) and not pc.all(pc.equal(whole, ticks)).as_py():
                lost = "a time of day within it" if pt.is_date64(leaf.type) else "nanoseconds"
                raise NotInPython(f"it has {lost}")


def _is_finer(data_type: pa.DataType) -> bool:
    return bool(pt.is_date64(data_type) or data_type == pa.time64("ns"))


def _leaves(values: pa.Array) -> list[pa.Array]:
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(values.storage)
    if pt.is_dictionary(kind):
        return _leaves(values.dictionary_decode())
    if pt.is_struct(kind):
        return [leaf for part in values.flatten() for leaf in _leaves(part)]
    if pt.is_map(kind):
        flat = values.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))).flatten()
        return _leaves(flat)
    if is_list(kind) or hasattr(kind, "value_field"):
        return _leaves(values.flatten())
    return [values]


def _shown(one: pa.Array) -> str:
    """Describe a value that Python cannot hold: a time as the number of its units, others as Arrow prints them."""
    try:
        if pt.is_temporal(one.type):
            return f"{one.view(pa.int32() if one.type.bit_width == 32 else pa.int64())[0]} as {one.type}"
        if one.type in (pa.string(), pa.large_string()):
            wanted = pa.binary() if pt.is_string(one.type) else pa.large_binary()
            return f"the bytes {one.view(wanted)[0].as_py()!r:.{_SHOWN}}"
        return f"{' '.join(str(one).split()):.{_SHOWN}}"
    except Exception:  # a value that Arrow cannot print
        return f"a value of {one.type}"
