"""Weigh rows by a UDF's `batch_by`: a function of the inputs, or the name of an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.apply.udf_call import describe_failure, users_frames
from airflow_geneva.engine.failures import CallFailure
from airflow_geneva.engine.lance_io.to_python import python_values
from airflow_geneva.engine.storage.engine_errors import as_failure
from airflow_geneva.engine.udf.error_policy import Rules, matching_rules_of
from airflow_geneva.engine.udf.signature import read_signature

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF

Weights: TypeAlias = npt.NDArray[np.float64]


def weigh(udf: UDF, inputs: pa.RecordBatch, rules: Rules) -> tuple[Weights, dict[int, CallFailure]]:
    """Return the weight of each row, and why some rows have none. NULL, and a row of NULLs, weighs 0."""
    if isinstance(udf.batch_by, str):
        return _numbers(inputs.column(position_of(udf, inputs.schema.names))), {}
    function = _function_of_batches(udf.batch_by)
    try:
        return _weights(function, inputs), {}
    except BaseException as raised:
        as_failure(raised)
        # A row that cannot be weighed must not affect the others.
        found, troubles = np.zeros(inputs.num_rows), dict[int, CallFailure]()
        for row in range(inputs.num_rows):
            try:
                found[row] = _weights(function, inputs.slice(row, 1))[0]
            except BaseException as raised_by_row:
                error = as_failure(raised_by_row)
                troubles[row] = describe_failure(error, matching_rules_of(rules, type(error)), users_frames(error))
        return found, troubles


def position_of(udf: UDF, columns: Sequence[str]) -> int:
    """Return the position of the input that `batch_by` names: a parameter of the function, or a column."""
    parameters = udf.signature.parameters if udf.form == "array" else ()
    return parameters.index(udf.batch_by) if udf.batch_by in parameters else list(columns).index(udf.batch_by)


def _function_of_batches(function: Callable[..., Any]) -> Callable[[pa.RecordBatch], Any]:
    form = read_signature(function, "batch_by").form
    if form == "record_batch":
        return function
    if form == "array":
        return lambda batch: function(*batch.columns)
    return lambda batch: [
        None if all(value is None for value in row) else function(*row)
        for row in zip(*map(_values, batch.columns), strict=True)
    ]


def _values(column: pa.Array) -> Sequence[Any]:
    values, unreadable = python_values(column)
    for error in unreadable.values():
        raise error
    return values


def _weights(function: Callable[[pa.RecordBatch], Any], inputs: pa.RecordBatch) -> Weights:
    found = _numbers(function(inputs))
    if len(found) != inputs.num_rows:
        raise ValueError(f"batch_by returned {len(found)} weights for {inputs.num_rows} rows.")
    return found


def _numbers(values: Any) -> Weights:
    array = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
    numbers = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return np.asarray(np.nan_to_num(numbers, nan=0.0, posinf=np.inf), np.float64)
