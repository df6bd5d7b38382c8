"""Convert what a function returns, and rows that a user gives, to an Arrow array of exactly the declared type."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import castable, convert_array, convert_exactly, is_list, storage_type
from airflow_geneva.engine.lance_io.blobs import as_blobs, is_blob_type
from airflow_geneva.engine.lance_io.plain_values import Rule, in_native_order, rule_of
from airflow_geneva.engine.lance_io.sound_arrays import missing_field, sound
from airflow_geneva.engine.runtime import threading
from airflow_geneva.engine.storage.engine_errors import as_failure


class OutputMismatch(TypeError):
    """An output does not fit the declared type.

    Args:
        row_index: its row, if known; calls with fewer rows find the other rows that do not fit.
        raised: the exception, if the value itself raised one while it was converted.
    """

    def __init__(self, message: str, row_index: int | None = None, raised: Exception | None = None) -> None:
        super().__init__(message)
        self.row_index = row_index
        self.raised = raised


_OURS = ("airflow_geneva.engine.", "pyarrow.", "numpy.", "lance.")
_REFUSALS = (pa.ArrowException, OutputMismatch, TypeError, ValueError, OverflowError, AttributeError)
_TOO_LARGE = "one batch has more than 2 GB of output: set a smaller batch_size, or a large_ type"

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

    None becomes NULL, and so does a struct field that a dict lacks. A struct is a dict, a dataclass, a model of
    pydantic, or a tuple with an item for each field. A list is any container, by position.
    """
    with _time_zones():
        if isinstance(values, np.ndarray):
            _check_dtype(values, data_type)
            return _of_rows(values, (values[row : row + 1] for row in range(len(values))), _from_numpy, data_type)
        try:
            made = _at_once(values, data_type)
        except BaseException as error:
            as_failure(error)
        else:
            if made is not None:
                return made
        return _one_by_one(values, data_type)


def array_from_result(result: Any, data_type: pa.DataType) -> pa.Array:
    """Convert the result of an array or record-batch UDF: an Arrow or NumPy array, or a record batch for a struct."""
    if isinstance(result, np.ndarray):
        if result.ndim == 0:
            raise OutputMismatch("a NumPy array without dimensions does not have one value per row")
        values: Any = result if result.ndim == 1 and result.dtype != object else list(result)
        return array_from_values(values, data_type)
    if isinstance(result, pa.RecordBatch) and pa.types.is_struct(data_type):
        result = result.to_struct_array()
    if not isinstance(result, (pa.Array, pa.ChunkedArray)):
        raise OutputMismatch("expected a pa.Array or a NumPy array")
    try:
        result = sound(result)
        if isinstance(result, pa.ChunkedArray):
            result = result.combine_chunks() if result.num_chunks != 1 else result.chunk(0)
    except pa.ArrowInvalid as error:
        raise OutputMismatch(f"the array is not valid: {error}", 0) from error
    if result.type == data_type:
        _check_fields(result)
        return result
    if is_blob_type(data_type):
        return array_from_values(result.to_pylist(), data_type)
    if not castable(result.type, data_type):
        raise OutputMismatch(f"expected {data_type}")
    try:
        made = convert_exactly(result, data_type)
    except pa.ArrowException as error:
        raise OutputMismatch(str(error)) from error
    _check_fields(made)
    return made


@functools.lru_cache(maxsize=64)
def _rule(data_type: pa.DataType) -> tuple[Rule, bool]:
    """Return the rule of a type, and whether it is its own storage type."""
    return rule_of(data_type), storage_type(data_type) == data_type


def _rule_of(data_type: pa.DataType) -> tuple[Rule, pa.DataType]:
    """Return the rule of a type, and its storage type."""
    try:
        rule, is_stored = _rule(data_type)
    except TypeError:  # Lance's extension types have no hash
        rule, is_stored = rule_of(data_type), False
    return rule, data_type if is_stored else storage_type(data_type)


def _at_once(values: Sequence[Any], data_type: pa.DataType) -> pa.Array | None:
    """Convert values that pyarrow stores as they are; None if there may be others."""
    if is_blob_type(data_type):
        return as_blobs(values)
    item = data_type.value_type if is_list(data_type) else pa.null()
    if pt.is_integer(item) or pt.is_floating(item) or pt.is_boolean(item):
        made = _stack(values, data_type)
        if made is not None:
            return made
    rule, stored = _rule_of(data_type)
    return _made(values, stored, data_type) if rule.are_exact(values) else None


def _made(values: Sequence[Any], stored: pa.DataType, data_type: pa.DataType) -> pa.Array:
    made = pa.array(values, stored)
    if isinstance(made, pa.ChunkedArray):
        raise OutputMismatch(_TOO_LARGE)
    _check_fields(made)
    return made if made.type == data_type else convert_array(made, data_type)


def _check_fields(values: pa.Array) -> None:
    """Refuse NULL in a nested field that is not nullable, which pylance refuses for all rows of a file."""
    if (name := missing_field(values)) is not None:
        raise OutputMismatch(f"the field {name!r} is NULL, and the type says that it is not nullable", 0)


def _one_by_one(values: Sequence[Any], data_type: pa.DataType) -> pa.Array:
    coroutines = [row for row, value in enumerate(values) if inspect.iscoroutine(value)]
    for row in coroutines:
        values[row].close()  # or Python warns that it was never awaited
    if coroutines:
        raise OutputMismatch("it is a coroutine: define the function with `async def`, and `await` it", coroutines[0])
    if is_blob_type(data_type):
        return _of_rows(values, ([value] for value in values), lambda given, kind: as_blobs(given), data_type)
    rule, stored = _rule_of(data_type)
    plain: list[Any] = []
    for row, value in enumerate(values):
        try:
            plain.append(rule.of(value))
        except BaseException as error:
            raise _mismatch(error, row) from error

    def make(given: Sequence[Any], kind: pa.DataType) -> pa.Array:
        return _made(given, stored, kind)

    return _of_rows(plain, ([value] for value in plain), make, data_type)


def _of_rows(values: Any, rows: Iterable[Any], make: Any, data_type: pa.DataType) -> pa.Array:
    """Convert all values, or raise `OutputMismatch` at the first of `rows` that cannot be converted alone."""
    try:
        made: pa.Array = make(values, data_type)
        return made
    except BaseException as error:
        for row, alone in enumerate(rows):
            try:
                make(alone, data_type)
            except BaseException as of_row:
                raise _mismatch(of_row, row) from of_row
        raise _mismatch(error, None) from error


def _mismatch(error: BaseException, row: int | None) -> OutputMismatch:
    """Describe why a value cannot be converted: it does not fit, or its own code raised an exception."""
    failure = as_failure(error)
    trace = failure.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    of_value = trace is not None and not trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS)
    if of_value or not isinstance(failure, _REFUSALS):
        return OutputMismatch(f"it raised {type(failure).__name__} while it was converted", row, failure)
    return OutputMismatch(str(failure), row)


def _check_dtype(values: np.ndarray[Any, Any], data_type: pa.DataType) -> None:
    try:
        fits = is_blob_type(data_type) or castable(pa.array(in_native_order(values[:0])).type, data_type)
    except pa.ArrowException as error:
        raise OutputMismatch(str(error)) from error
    if not fits:
        raise OutputMismatch(f"a NumPy array of {values.dtype} is not {data_type}")


def _from_numpy(values: np.ndarray[Any, Any], data_type: pa.DataType) -> pa.Array:
    if is_blob_type(data_type):
        return as_blobs(values)
    return convert_exactly(pa.array(in_native_order(values)), data_type)


def _stack(values: Sequence[Any], data_type: pa.DataType) -> pa.Array | None:
    """Build lists from NumPy vectors without a loop over their items; None unless all values are such vectors."""
    vectors = [value for value in values if value is not None]
    kinds = set(map(type, vectors))
    if kinds != {np.ndarray}:
        return None
    first = vectors[0]
    if first.dtype.kind not in "iufb" or any(one.dtype != first.dtype or one.ndim != 1 for one in vectors):
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
    made = pa.array(in_native_order(flat))
    if not castable(made.type, value_type):
        raise OutputMismatch(f"a NumPy array of {flat.dtype} does not hold {value_type}")
    return convert_exactly(made, value_type)
