"""Collect values, failures and call counts of a batch while it is mapped."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.outcome import CallFailure, MappedBatch, RowFailure
from airflow_geneva.apply.policy import Rules
from airflow_geneva.apply.udf_call import Mapper
from airflow_geneva.errors import UdfError


class BatchResults:
    """Collects the results of one batch.

    Args:
        inputs: the rows that it is called on.
        rules: its error policy.
    """

    def __init__(self, mapper: Mapper, inputs: pa.RecordBatch, rules: Rules) -> None:
        self.mapper = mapper
        self.inputs = inputs
        self.rules = rules
        self.rows = inputs.num_rows
        self.failures: list[RowFailure] = []
        self._parts: dict[int, pa.Array] = {}
        self._calls = np.zeros(self.rows, np.int64)

    def called(self, start: int, stop: int) -> None:
        """Count one call of each of these rows."""
        self._calls[start:stop] += 1

    def put(self, start: int, values: pa.Array) -> None:
        """Store the values of rows from ``start`` on."""
        if len(values):
            self._parts[start] = values

    def leave(self, row: int) -> None:
        """Set the value of a row to NULL."""
        self.put(row, pa.nulls(1, self.mapper.udf.data_type))

    def add_failure(self, row: int, rule: int, trouble: CallFailure) -> None:
        """Record a row as failed under a rule."""
        failure = RowFailure(
            row, rule, trouble.exception, trouble.message, trouble.traceback, int(self._calls[row])
        )  # fmt: skip
        self.failures.append(failure)

    def mapped(self) -> MappedBatch:
        """Return the result of the batch; call it once all rows are done."""
        failures = tuple(sorted(self.failures, key=lambda failure: failure.index))
        return MappedBatch(self._values(self.rows), failures, int(self._calls.sum()))

    def failed(self, row: int, trouble: CallFailure) -> UdfError:
        """Make the error of the row that fails the job, with the results of the rows before it."""
        error = self.mapper.failure(trouble, self.inputs, row, self.rows, self._values(row))
        error.failures = tuple(
            sorted((failure for failure in self.failures if failure.index < row), key=lambda failure: failure.index)
        )
        return error

    def _values(self, stop: int) -> pa.Array:
        parts = [self._parts[start].slice(0, stop - start) for start in sorted(self._parts) if start < stop]
        if len(parts) == 1:
            return parts[0]
        try:
            return pa.concat_arrays(parts) if parts else pa.nulls(0, self.mapper.udf.data_type)
        except pa.ArrowInvalid as error:
            raise UdfError(
                f"The output of UDF {self.mapper.udf.name!r} for a batch of {self.rows} rows cannot be combined: "
                f"{error}. Set a smaller batch_size, or a large_ type."
            ) from error
