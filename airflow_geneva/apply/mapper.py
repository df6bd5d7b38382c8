"""Call a UDF on a batch of rows, and hold its output to the type it declared."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.annotations import is_list
from airflow_geneva.apply.arrow_output import OutputMismatch, array_from_result, array_from_values
from airflow_geneva.errors import InvalidInput, UdfError
from airflow_geneva.signature import union_members

if TYPE_CHECKING:
    from types import TracebackType

    from airflow_geneva.udf import UDF


class Mapper:
    """A UDF with the input columns it is called on.

    Args:
        udf: the UDF.
        input_columns: columns of the batches, in the order of its parameters; None: the UDF's own, which for a
            record-batch UDF may be all there are.
    """

    def __init__(self, udf: UDF, input_columns: Sequence[str] | None = None) -> None:
        self.udf = udf
        self.input_columns = udf.resolve_inputs(input_columns)

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        """Compute the output of a batch: one value a row, of exactly `udf.data_type`.

        Args:
            batch: rows with the input columns, named as in the table; other columns are not looked at.

        Raises:
            InvalidInput: an input column is not in the batch, or there twice.
            UdfError: the UDF raised, or its output has another length or type.
        """
        inputs = self._inputs(batch)
        if batch.num_rows == 0:
            return pa.array([], self.udf.data_type)
        if self.udf.form == "scalar":
            return self._map_rows(inputs)
        return self._map_batch(inputs)

    def _inputs(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self.input_columns is None:
            return batch
        bad = [name for name in self.input_columns if batch.schema.get_field_index(name) < 0]
        if bad:
            raise InvalidInput(
                f"UDF {self.udf.name!r} expects input columns {bad!r}, which are not found, or not once, in a "
                f"batch with the columns {batch.schema.names!r}."
            )
        return pa.record_batch(
            [batch.column(name) for name in self.input_columns],
            schema=pa.schema([batch.schema.field(name) for name in self.input_columns]),
        )

    def _map_rows(self, inputs: pa.RecordBatch) -> pa.Array:
        columns = [self._row_values(inputs.column(i), i) for i in range(inputs.num_columns)]
        results: list[Any] = []
        append = results.append
        function = self._function()
        try:
            for value in map(function, *columns):
                append(value)
        except Exception as error:
            raise self._raised(error, error.__traceback__, inputs, len(results), self._computed(results)) from error
        try:
            return array_from_values(results, self.udf.data_type)
        except OutputMismatch as mismatch:
            row = mismatch.row_index or 0
            got = type(results[row])
            raise self._mismatch(
                f"row {row} of the batch: {mismatch}",
                f"{got.__name__} {results[row]!r:.200}",
                inputs,
                row,
                self._computed(results[:row]),
            ) from mismatch

    def _map_batch(self, inputs: pa.RecordBatch) -> pa.Array:
        arguments = [inputs] if self.udf.form == "record_batch" else inputs.columns
        function = self._function()
        try:
            result = function(*arguments)
        except Exception as error:
            raise self._raised(error, error.__traceback__, inputs, None, None) from error
        try:
            output = array_from_result(result, self.udf.data_type)
        except OutputMismatch as mismatch:
            got = str(result.type) if isinstance(result, (pa.Array, pa.ChunkedArray)) else type(result).__name__
            raise self._mismatch(str(mismatch), got, inputs, None, None) from mismatch
        if len(output) != inputs.num_rows:
            raise UdfError(
                f"UDF {self.udf.name!r} returned {len(output)} values for a batch of {inputs.num_rows} rows. "
                f"Expected length: {inputs.num_rows}. Got: {len(output)}. {self._schemas(inputs)}"
            )
        return output

    def _function(self) -> Callable[..., Any]:
        try:
            return self.udf.function
        except Exception as error:
            text = traceback.format_exc()
            raise UdfError(f"UDF {self.udf.name!r} could not be set up: {error!r}\n{text}") from error

    def _row_values(self, column: pa.Array, position: int) -> Sequence[Any]:
        annotation = self.udf.signature.annotation_at(position)
        wants_numpy = any(getattr(m, "__origin__", m) is np.ndarray for m in union_members(annotation))
        if wants_numpy and is_list(column.type):
            return [None if value is None else _numpy_values(value) for value in _list_items(column)]
        values: list[Any] = column.to_pylist()
        return values

    def _computed(self, results: list[Any]) -> pa.Array | None:
        try:
            return array_from_values(results, self.udf.data_type)
        except OutputMismatch:
            return None

    def _schemas(self, inputs: pa.RecordBatch) -> str:
        schema = ", ".join(f"{field.name}: {field.type}" for field in inputs.schema)
        return (
            f"Input batch schema: {schema}. UDF expects input_columns: {list(inputs.schema.names)!r}. "
            f"UDF output type: {self.udf.data_type}."
        )

    def _mismatch(
        self, problem: str, got: str, inputs: pa.RecordBatch, row: int | None, computed: pa.Array | None
    ) -> UdfError:
        return UdfError(
            f"UDF {self.udf.name!r} failed with type error: {problem}. {self._schemas(inputs)} Got: {got}.",
            row_index=row,
            computed=computed,
        )

    def _raised(
        self,
        error: Exception,
        trace: TracebackType | None,
        inputs: pa.RecordBatch,
        row: int | None,
        computed: pa.Array | None,
    ) -> UdfError:
        # The first frame is this file's.
        text = "".join(traceback.format_exception(type(error), error, trace.tb_next if trace else None))
        where = f"a batch of {inputs.num_rows} rows" if row is None else f"row {row} of a batch of {inputs.num_rows}"
        return UdfError(
            f"UDF {self.udf.name!r} raised {type(error).__name__} on {where}: {error}\n{self._schemas(inputs)}\n{text}",
            row_index=row,
            computed=computed,
        )


def _list_items(column: pa.Array) -> list[pa.Array | None]:
    return [scalar.values for scalar in column]


def _numpy_values(values: pa.Array) -> Any:
    return values.to_numpy(zero_copy_only=False)
