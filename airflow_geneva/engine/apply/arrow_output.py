"""Convert what a UDF returns to an Arrow array of exactly the declared type."""

from __future__ import annotations

import inspect
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.lance_io.arrays import castable, convert_array, is_list, storage_type
from airflow_geneva.engine.lance_io.blobs import as_blobs, is_blob_type


class OutputMismatch(TypeError):
    """An output does not fit the declared type; `row_index` is its row, if known."""

    def __init__(self, message: str, row_index: int | None = None) -> None:
        super().__init__(message)
        self.row_index = row_index


_DOES_NOT_FIT = (pa.ArrowException, OutputMismatch, TypeError, ValueError, OverflowError, AttributeError)


_IGNORED = "PYARROW_IGNORE_TIMEZONE"
_was_ignored, _one_at_a_time = threading.Event(), threading.RLock()


@contextmanager
def _time_zones() -> Iterator[None]:
    """Make pyarrow respect time zones: importing `pyspark.pandas`, as pandera does, makes this process ignore them."""
    if _IGNORED in os.environ:
        _was_ignored.set()
    if not _was_ignored.is_set():
        yield
        return
    with _one_at_a_time:
        ignored = os.environ.pop(_IGNORED, None)
        try:
            yield
        finally:
            if ignored is not None:
                os.environ[_IGNORED] = ignored


def array_from_values(values: Sequence[Any], data_type: pa.DataType) -> pa.Array:
    """Convert one Python or NumPy value per row, or raise `OutputMismatch` at the first row whose value does not fit.

    None becomes NULL, and so does a struct field that a dict lacks. A struct is a dict, a NamedTuple or a dataclass.
    """
    if _has_struct(data_type) and not isinstance(values, np.ndarray):
        values = [_as_dict(value, data_type) for value in values]
    with _time_zones():
        try:
            return _convert(values, data_type)
        except _DOES_NOT_FIT as error:
            for value in filter(inspect.iscoroutine, values):
                value.close()  # or Python warns that it was never awaited
            for row, value in enumerate(values):
                if inspect.iscoroutine(value):
                    raise OutputMismatch(
                        "it is a coroutine: define the function with `async def`, and `await` it", row
                    ) from error
                try:
                    _convert([value], data_type)
                except _DOES_NOT_FIT as alone:
                    raise OutputMismatch(str(alone), row) from alone
            raise OutputMismatch(str(error)) from error


def _has_struct(data_type: pa.DataType) -> bool:
    return pa.types.is_struct(data_type) or (is_list(data_type) and _has_struct(data_type.value_type))


def _as_dict(value: Any, data_type: pa.DataType) -> Any:
    """Convert NamedTuples and dataclasses for structs, also those inside lists and structs, to dicts."""
    if is_list(data_type):
        return [_as_dict(item, data_type.value_type) for item in value] if isinstance(value, (list, tuple)) else value
    if is_dataclass(value) and not isinstance(value, type):
        value = {part.name: getattr(value, part.name) for part in fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    nested = [part for part in data_type if _has_struct(part.type)] if isinstance(value, dict) else []
    changed = {part.name: _as_dict(value[part.name], part.type) for part in nested if part.name in value}
    return value | changed if changed else value


def array_from_result(result: Any, data_type: pa.DataType) -> pa.Array:
    """Convert the result of an array or record-batch UDF: an Arrow or NumPy array, or a record batch for a struct."""
    if isinstance(result, pa.RecordBatch) and pa.types.is_struct(data_type):
        result = result.to_struct_array()
    if isinstance(result, np.ndarray):
        if result.ndim == 0:
            raise OutputMismatch("a NumPy array without dimensions does not have one value per row")
        values: Any = result if result.ndim == 1 and result.dtype != object else list(result)
        return array_from_values(values, data_type)
    if isinstance(result, pa.ChunkedArray):
        result = result.combine_chunks() if result.num_chunks != 1 else result.chunk(0)
    if not isinstance(result, pa.Array):
        raise OutputMismatch("expected a pa.Array or a NumPy array")
    if result.type == data_type:
        return result
    if is_blob_type(data_type):
        return array_from_values(result.to_pylist(), data_type)
    if not castable(result.type, data_type):
        raise OutputMismatch(f"expected {data_type}")
    try:
        return convert_array(result, data_type)
    except pa.ArrowException as error:
        raise OutputMismatch(str(error)) from error


def _convert(values: Sequence[Any], data_type: pa.DataType) -> pa.Array:
    if is_blob_type(data_type):
        return as_blobs(values)
    stored = storage_type(data_type)
    if stored != data_type:
        return convert_array(_convert([_to_storage(value, data_type) for value in values], stored), data_type)
    if isinstance(values, np.ndarray):
        made = pa.array(values)
        if not castable(made.type, data_type):
            raise OutputMismatch(f"a NumPy array of {values.dtype} is not {data_type}")
        return made.cast(data_type, safe=True)
    item = data_type.value_type if is_list(data_type) else pa.null()
    if pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item):
        made = _stack(values, data_type)
        if made is not None:
            return made
    if _needs_check(data_type):
        _check_lossless(values, data_type)
    try:
        made = pa.array(values, data_type)
    except pa.ArrowException:
        # Arrow accepts only one-dimensional NumPy arrays, and dates only in the unit of the column.
        made = pa.array([_to_python(value) for value in values], data_type)
    if isinstance(made, pa.ChunkedArray):
        raise OutputMismatch("one batch has more than 2 GB of output: set a smaller batch_size, or a large_ type")
    return made


def _stack(values: Sequence[Any], data_type: pa.DataType) -> pa.Array | None:
    """Build lists from NumPy vectors without a loop over their items; None unless all values are such vectors."""
    vectors = [value for value in values if value is not None]
    kinds = set(map(type, vectors))
    if np.ndarray not in kinds:
        return None
    dimensions = {vector.ndim for vector in vectors if isinstance(vector, np.ndarray)} - {1}
    if dimensions:
        raise OutputMismatch(f"expected a list of numbers, got a NumPy array of {dimensions.pop()} dimensions")
    first = vectors[0]
    if len(kinds) > 1 or first.dtype.kind not in "iufb" or any(vector.dtype != first.dtype for vector in vectors):
        return None
    lengths = [0 if value is None else len(value) for value in values]
    mask = pa.array([value is None for value in values]) if len(vectors) < len(values) else None
    if pa.types.is_fixed_size_list(data_type):
        size = data_type.list_size
        for row, value in enumerate(values):
            if value is not None and len(value) != size:
                raise OutputMismatch(f"expected a list of {size} values, got an array of {len(value)}", row)
        hole = np.zeros(size, first.dtype)
        flat = np.concatenate([hole if value is None else value for value in values])
        return pa.FixedSizeListArray.from_arrays(_numbers(flat, data_type.value_type), type=data_type, mask=mask)
    large = pa.types.is_large_list(data_type)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if large else pa.int32())
    make = pa.LargeListArray.from_arrays if large else pa.ListArray.from_arrays
    return make(offsets, _numbers(np.concatenate(vectors), data_type.value_type), type=data_type, mask=mask)


def _numbers(flat: np.ndarray[Any, Any], value_type: pa.DataType) -> pa.Array:
    made = pa.array(flat)
    if not castable(made.type, value_type):
        raise OutputMismatch(f"a NumPy array of {flat.dtype} does not hold {value_type}")
    return made.cast(value_type, safe=True)


def _check_lossless(values: Any, data_type: pa.DataType) -> None:
    """Reject floats for integer and temporal types, and unknown struct keys: Arrow would silently drop data."""
    if pa.types.is_integer(data_type) or pa.types.is_temporal(data_type):
        kinds = set(map(type, values))
        if np.ndarray in kinds:
            kinds |= {value.dtype.type for value in values if isinstance(value, np.ndarray)}
        for kind in kinds:
            if issubclass(kind, (float, np.floating)):
                raise OutputMismatch(f"a {kind.__name__} is not {data_type}")
    elif is_list(data_type):
        if _needs_check(data_type.value_type):
            items = chain.from_iterable(value for value in values if value is not None)
            _check_lossless(list(items), data_type.value_type)
    elif pa.types.is_struct(data_type):
        rows = [value for value in values if isinstance(value, dict)]
        names = {field.name for field in data_type}
        for row in rows:
            if not row.keys() <= names:
                unknown = sorted(map(str, row.keys() - names))
                raise OutputMismatch(f"the keys {unknown!r} are not fields of the struct, which has {sorted(names)!r}")
        for field in data_type:
            if _needs_check(field.type):
                _check_lossless([row.get(field.name) for row in rows], field.type)


def _needs_check(data_type: pa.DataType) -> bool:
    if is_list(data_type):
        return _needs_check(data_type.value_type)
    return bool(pa.types.is_integer(data_type) or pa.types.is_temporal(data_type) or pa.types.is_struct(data_type))


def _to_python(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.astype("datetime64[us]").tolist() if value.dtype.kind == "M" else value.tolist()
    if isinstance(value, dict):
        return {key: _to_python(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_python(item) for item in value]
    return value


def _to_storage(value: Any, data_type: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(data_type, pa.BaseExtensionType):
        if data_type.extension_name == "lance.bfloat16" and not isinstance(value, bytes):
            from lance.arrow import bfloat16_array

            number = value.as_float() if hasattr(value, "as_float") else float(value)
            return bfloat16_array([number]).storage[0].as_py()
        if isinstance(value, uuid.UUID):
            return value.bytes
        return int(value) if isinstance(value, bool) else _to_storage(value, data_type.storage_type)
    if pa.types.is_struct(data_type) and isinstance(value, dict):
        types = {field.name: field.type for field in data_type}
        return {name: _to_storage(item, types[name]) if name in types else item for name, item in value.items()}
    if pa.types.is_map(data_type):
        pairs = value.items() if isinstance(value, dict) else value
        kinds = data_type.key_type, data_type.item_type
        return [tuple(_to_storage(item, kind) for item, kind in zip(pair, kinds, strict=True)) for pair in pairs]
    if is_list(data_type) and not isinstance(value, (str, bytes)):
        return [_to_storage(item, data_type.value_type) for item in value]
    return value
