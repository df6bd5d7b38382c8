"""The results of mapping a batch: values, the rows that failed, and why calls failed."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.errors import UdfError
from airflow_geneva.udf.error_policy import Rules

if TYPE_CHECKING:
    from types import TracebackType

    from airflow_geneva.apply.udf_call import Mapper

_MESSAGE_CHARS = 2_000
_TRACEBACK_CHARS = 8_000


@dataclass(frozen=True)
class RowFailure:
    """A row that failed under a `Skip` rule.

    Args:
        index: the row within the batch.
        rule: position of the `Skip` in the policy, 0 for `"skip"`.
        exception: qualified name of the exception's class, such as `builtins.ValueError`.
        message: its text, up to 2,000 characters.
        traceback: the UDF's own frames, up to 8,000 characters; "" after a timeout or a crash.
        calls: how often the UDF was called on it in this run, including calls with other rows.
        column: for a view, the column that was computed; else "".
    """

    index: int
    rule: int
    exception: str
    message: str
    traceback: str
    calls: int
    column: str = ""


@dataclass(frozen=True, eq=False)
class MappedBatch:
    """The result of a batch.

    Args:
        values: one per row, of the UDF's type; NULL for rows that failed.
        failures: the rows that failed, in order.
        rows_called: number of rows in all calls of the UDF, repeats included.
    """

    values: pa.Array
    failures: tuple[RowFailure, ...]
    rows_called: int

    def first(self, rows: int) -> MappedBatch:
        """Return the result of the first rows only."""
        failures = tuple(failure for failure in self.failures if failure.index < rows)
        return MappedBatch(self.values.slice(0, rows), failures, self.rows_called)


@dataclass(frozen=True)
class CallFailure:
    """Why a call returned no values.

    Args:
        exception: qualified name of the exception's class.
        message: its text.
        traceback: the UDF's own frames, or "".
        fits: positions of the matching rules of the policy, in order.
        complete: whether the message is complete, as for an output that does not fit its column; else the error adds
            UDF, row and traceback.
    """

    exception: str
    message: str
    traceback: str
    fits: tuple[int, ...]
    complete: bool = False

    @staticmethod
    def of(
        error: Exception, fits: tuple[int, ...], trace: TracebackType | None = None, complete: bool = False
    ) -> CallFailure:
        """Describe an exception; ``trace`` is the traceback from the UDF's first frame."""
        text = "" if complete else "".join(traceback.format_exception(type(error), error, trace))
        return CallFailure(
            exception=f"{type(error).__module__}.{type(error).__qualname__}",
            message=_printable(_text_of(error), _MESSAGE_CHARS),
            traceback=_printable(text, _TRACEBACK_CHARS, keep_end=True),
            fits=fits,
            complete=complete,
        )

    @property
    def name(self) -> str:
        """Name of the exception's class, without its module."""
        return self.exception.rpartition(".")[2]


class BatchResults:
    """Collects values, failures and call counts of a batch while it is mapped."""

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

    def put_null(self, row: int) -> None:
        self.put(row, pa.nulls(1, self.mapper.udf.data_type))

    def add_failure(self, row: int, rule: int, trouble: CallFailure) -> None:
        """Record a row as failed under a `Skip` rule."""
        calls = int(self._calls[row])
        self.failures.append(RowFailure(row, rule, trouble.exception, trouble.message, trouble.traceback, calls))

    def mapped(self) -> MappedBatch:
        """Return the result of the batch; call it once all rows are done."""
        return MappedBatch(self._values(self.rows), self._failures(self.rows), int(self._calls.sum()))

    def failed(self, row: int, trouble: CallFailure) -> UdfError:
        """Make the error of the row that fails the job, with the results of the rows before it."""
        error = self.mapper.failure(trouble, self.inputs, row, self.rows, self._values(row))
        error.failures = self._failures(row)
        return error

    def _failures(self, stop: int) -> tuple[RowFailure, ...]:
        before = (failure for failure in self.failures if failure.index < stop)
        return tuple(sorted(before, key=lambda failure: failure.index))

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


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its text cannot be made: {type(broken).__name__})"


def _printable(text: str, most: int, keep_end: bool = False) -> str:
    """Make a text storable as UTF-8 and cut it to a length; of a traceback, the end matters most."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= most:
        return text
    return "..." + text[3 - most :] if keep_end else text[: most - 3] + "..."
