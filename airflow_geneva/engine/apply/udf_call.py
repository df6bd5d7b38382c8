"""Call a UDF on a batch of rows, check its values against the declared type, and describe the rows that fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.advice import lacks_access, may_pass, null_inputs
from airflow_geneva.engine.apply.device import is_device_failure, is_out_of_memory, release
from airflow_geneva.engine.apply.event_loop import call_within
from airflow_geneva.engine.apply.group_calls import group_arguments
from airflow_geneva.engine.counts import Usage
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.failures import CallFailure, RowFailure
from airflow_geneva.engine.lance_io.arrays import column_at, find_field, is_list, rows_at
from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_result, array_from_values
from airflow_geneva.engine.lance_io.to_python import NotInPython, numpy_items, python_values
from airflow_geneva.engine.limits.calls import limited
from airflow_geneva.engine.limits.rate_limit import count
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.storage.engine_errors import as_failure
from airflow_geneva.engine.udf.error_policy import Rules, matching_rules_of
from airflow_geneva.engine.udf.fold import FoldedCall
from airflow_geneva.engine.udf.packages import how_to_install, missing_package
from airflow_geneva.errors import GenevaError, InvalidInput, UdfError

if TYPE_CHECKING:
    from types import CodeType, TracebackType

    from airflow_geneva.engine.apply.source_rows import SourceRows
    from airflow_geneva.engine.udf import UDF

_MESSAGE_CHARS = 2_000
_NOT_USERS = (
    "airflow_geneva.engine.apply.",
    "airflow_geneva.engine.lance_io.",
    "airflow_geneva.engine.limits.",
    "airflow_geneva.engine.udf.fold",
    "asyncio.",
)
_TRACEBACK_CHARS = 8_000
_FORMATTED: ProcessMemo[tuple[tuple[CodeType, int, int], ...], str] = ProcessMemo(64)
"""The texts of tracebacks, by the code and the lines that they go through."""


@dataclass(frozen=True, eq=False)
class MappedBatch:
    """The values of a batch, NULL for failed rows, its failures in row order, and the number of rows in all calls."""

    values: pa.Array
    failures: tuple[RowFailure, ...]
    rows_called: int


_NO_FIT = CallFailure("UdfError", "", "", (), complete=True)


def describe_failure(
    error: Exception,
    fits: tuple[int, ...],
    trace: TracebackType | None = None,
    complete: bool = False,
    udf: UDF | None = None,
) -> CallFailure:
    """Describe an exception; ``trace`` is the traceback from the UDF's first frame, ``udf`` the UDF that raised."""
    too_large = udf is not None and is_out_of_memory(error, udf.out_of_memory)
    text = "" if complete else _traceback_of(error, trace)
    return CallFailure(
        exception=f"{type(error).__module__}.{type(error).__qualname__}",
        message=_printable(_text_of(error), _MESSAGE_CHARS),
        traceback=_printable(text, _TRACEBACK_CHARS, keep_end=True),
        fits=fits,
        complete=complete,
        passing=may_pass(error),
        lacks_access=lacks_access(error),
        out_of_memory=too_large,
        device_failed=udf is not None and not too_large and is_device_failure(repr(error)),
    )


class Mapper:
    """A UDF and its input columns; a record-batch UDF without any is called on all columns.

    `known_to_fit` is the largest batch that fitted into the device's memory in earlier jobs. `source` has
    the rows of groups for a UDF that takes iterators of batches, whose batches have only row ids.
    """

    def __init__(
        self,
        udf: UDF,
        input_columns: Sequence[str] | None = None,
        known_to_fit: float = inf,
        source: SourceRows | None = None,
    ) -> None:
        self.udf = udf
        self.source = source
        self.known_to_fit = known_to_fit
        self.input_columns = udf.resolve_inputs(input_columns)

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        """Compute one value per row; `UdfError` if the UDF raised, or its output has another length or type."""
        inputs = self.inputs(batch)
        if batch.num_rows == 0:
            return pa.nulls(0, self.udf.data_type)
        function = self.set_up()
        if self.udf.form == "scalar":
            return self._map_rows(inputs, function)
        return self.map_batch(inputs, function)

    def inputs(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Select the UDF's input columns, in order; `InvalidInput` if the batch lacks one or has it twice."""
        if self.input_columns is None or self.udf.groups == "batches":
            return batch
        found = {name: _column_at(batch, name) for name in dict.fromkeys(self.input_columns)}
        bad = [name for name, column in found.items() if column is None]
        if bad:
            raise InvalidInput(
                f"UDF {self.udf.name!r} expects input columns {bad!r}, which are not found, or not once, in a "
                f"batch with the columns {batch.schema.names!r}."
            )
        given = [column for name in self.input_columns if (column := found[name]) is not None]
        return pa.record_batch([values for _, values in given], schema=pa.schema([field for field, _ in given]))

    def set_up(self, mark: Callable[[bool], None] = lambda begins: None) -> Callable[..., Any]:
        """Return the function that all calls of a job use; it keeps to the UDF's limit.

        For an async UDF, call this in the event loop that will run the calls; the function enforces the timeout.

        Args:
            mark: called with True when a call begins, and with False when it waits for the limit.

        Raises:
            UdfError: the UDF's class cannot be instantiated.
        """
        try:
            function = self.udf.function
        except BaseException as raised:
            error = as_failure(raised)
            raise UdfError(f"UDF {self.udf.name!r} could not be set up: {describe_set_up(error)}") from error
        if self.udf.is_async:
            function = partial(call_within, function, self.udf.timeout)
        return limited(function, self.udf.limit, self.udf.name, self.udf.is_async, mark)

    def count_call(self, rows: int) -> None:
        """Count a call that was made, with its rows and their declared cost."""
        count(Usage(rows=rows, declared=rows * (self.udf.cost or 0.0)))

    def map_batch(self, inputs: pa.RecordBatch, function: Callable[..., Any]) -> pa.Array:
        try:
            result = function(*self.batch_arguments(inputs))
        except BaseException as raised:
            error = as_failure(raised)
            raise self._raised(error, inputs, None, None) from error
        return self.batch_output(result, inputs)

    def batch_arguments(self, inputs: pa.RecordBatch) -> list[Any]:
        """Return the arguments of a call on a whole batch."""
        return [inputs] if self.udf.form == "record_batch" else inputs.columns

    def rows_of_calls(self, inputs: pa.RecordBatch) -> list[tuple[int, int]]:
        """Return the rows of each call on a batch: one call, unless the UDF's class cuts the rows into requests."""
        cut = getattr(self.udf.func, "rows_of_requests", None)
        return [(0, inputs.num_rows)] if cut is None else list(cut(*self.batch_arguments(inputs)))

    def batch_output(self, result: Any, inputs: pa.RecordBatch) -> pa.Array:
        """Convert the result of a call on a whole batch to the declared type; `UdfError` if it does not fit."""
        try:
            output = array_from_result(result, self.udf.data_type)
        except OutputMismatch as mismatch:
            if mismatch.raised is not None:
                raise self._raised(mismatch.raised, inputs, None, None) from mismatch.raised
            got = str(result.type) if isinstance(result, (pa.Array, pa.ChunkedArray)) else type(result).__name__
            raise self._mismatch(str(mismatch), got, inputs) from mismatch
        if len(output) != inputs.num_rows:
            raise UdfError(
                f"UDF {self.udf.name!r} returned {counted(len(output), 'value')} for a batch of "
                f"{counted(inputs.num_rows, 'row')}. Expected length: {inputs.num_rows}. Got: {len(output)}. "
                f"{self._schemas(inputs)}",
                call=_NO_FIT,
            )
        return output

    def arguments(self, inputs: pa.RecordBatch) -> tuple[list[Sequence[Any]], dict[int, UdfError]]:
        """Return the arguments of a scalar UDF, for each column the values of all rows, and why a row has none."""
        columns: list[Sequence[Any]] = []
        missing: dict[int, UdfError] = {}
        if self.udf.groups is not None and self.udf.groups != "scalar":
            fold = self.udf.function if self.udf.fold is not None else None
            assert fold is None or isinstance(fold, FoldedCall)
            return group_arguments(inputs, self.udf.groups, self.input_columns or (), self.source, fold), missing
        for at, name in enumerate(inputs.schema.names):
            values, unreadable = self._row_values(inputs.column(at), at)
            columns.append(values)
            missing |= {row: self._input_error(name, row, why) for row, why in unreadable.items() if row not in missing}
        return columns, missing

    def unfit(
        self, mismatch: OutputMismatch, value: Any, inputs: pa.RecordBatch, row: int, rules: Rules
    ) -> CallFailure:
        """Describe the failure of one row's value that cannot be converted, under the rules of a policy."""
        if (raised := mismatch.raised) is not None:
            return describe_failure(raised, matching_rules_of(rules, type(raised)), users_frames(raised), udf=self.udf)
        return unfit_row(self.type_error(mismatch, value, inputs, row), rules)

    def type_error(self, mismatch: OutputMismatch, value: Any, inputs: pa.RecordBatch, row: int) -> UdfError:
        """Make the error about one row's value that does not fit the type."""
        try:
            shown = f"{value!r:.200}"
        except Exception as broken:
            shown = f"(its repr cannot be made: {type(broken).__name__})"
        return self._mismatch(f"row {row} of the batch: {mismatch}", f"{type(value).__name__} {shown}", inputs, row)

    def failure(
        self, trouble: CallFailure, inputs: pa.RecordBatch, row: int | None, rows: int, computed: pa.Array | None = None
    ) -> UdfError:
        """Make the error for a failed call on a row or the whole batch; ``computed`` has the values before the row."""
        if trouble.complete:
            return UdfError(trouble.message, row, computed)
        if row is not None:
            trouble = replace(trouble, nulls=null_inputs(inputs, row))
        where = f"a batch of {counted(rows, 'row')}" if row is None else f"row {row} of a batch of {rows}"
        return UdfError(
            f"UDF {self.udf.name!r} raised {trouble.name} on {where}: {trouble.message}\n{self._schemas(inputs)}\n"
            f"{trouble.traceback}",
            row,
            computed,
            call=trouble,
        )

    def _map_rows(self, inputs: pa.RecordBatch, function: Callable[..., Any]) -> pa.Array:
        columns, missing = self.arguments(inputs)
        stop = min(missing, default=inputs.num_rows)
        results: list[Any] = []
        append = results.append
        try:
            for value in map(function, *(columns if not missing else [column[:stop] for column in columns])):
                append(value)
        except BaseException as raised:
            error = as_failure(raised)
            raise self._raised(error, inputs, len(results), self._computed(results)) from error
        finally:
            self.count_call(min(len(results) + 1, stop))
        try:
            values = array_from_values(results, self.udf.data_type)
        except OutputMismatch as mismatch:
            row = mismatch.row_index or 0
            if mismatch.raised is not None:
                own = self._raised(mismatch.raised, inputs, row, self._computed(results[:row]))
                raise own from mismatch.raised
            type_error = self.type_error(mismatch, results[row], inputs, row)
            type_error.computed = self._computed(results[:row])
            raise type_error from mismatch
        if missing:
            missing[stop].computed = values
            raise missing[stop]
        return values

    def _row_values(self, column: pa.Array, position: int) -> tuple[Sequence[Any], Mapping[int, NotInPython]]:
        as_numpy = self.udf.signature.takes_numpy(position) and is_list(column.type)
        return numpy_items(column) if as_numpy else python_values(column)

    def _input_error(self, column: str, row: int, why: NotInPython) -> UdfError:
        return UdfError(
            f"UDF {self.udf.name!r} cannot be called on row {row} of the batch: its input {column!r} is {why}. Correct "
            "the row, leave it out with where=, or take whole columns, by annotating the parameters as pa.Array.",
            row,
        )

    def _computed(self, results: list[Any]) -> pa.Array | None:
        with suppress(OutputMismatch):
            return array_from_values(results, self.udf.data_type)
        return None

    def _schemas(self, inputs: pa.RecordBatch) -> str:
        schema = ", ".join(f"{field.name}: {field.type}" for field in inputs.schema)
        return (
            f"Input batch schema: {schema}. UDF expects input_columns: {list(inputs.schema.names)!r}. "
            f"UDF output type: {self.udf.data_type}."
        )

    def _mismatch(self, problem: str, got: str, inputs: pa.RecordBatch, row: int | None = None) -> UdfError:
        return UdfError(
            f"UDF {self.udf.name!r} failed with type error: {problem}. {self._schemas(inputs)} Got: {got}.",
            row,
            call=_NO_FIT if row is None else None,
        )

    def _raised(self, error: Exception, inputs: pa.RecordBatch, row: int | None, computed: pa.Array | None) -> UdfError:
        trouble = describe_failure(error, (), users_frames(error), udf=self.udf)
        return self.failure(trouble, inputs, row, inputs.num_rows, computed)


def _column_at(batch: pa.RecordBatch, name: str) -> tuple[pa.Field, pa.Array] | None:
    """Return a column of a batch, or a field of a struct under its path; None if it is missing or ambiguous."""
    if (at := batch.schema.get_field_index(name)) >= 0:
        return batch.schema.field(at), batch.column(at)
    root = name.partition(".")[0]
    at = batch.schema.get_field_index(root)
    found = find_field({root: batch.schema.field(at)}, name) if at >= 0 else None
    return None if found is None else (found.with_name(name), column_at(batch, name))


def describe_set_up(error: BaseException) -> str:
    """Say why a UDF cannot be set up: with the traceback, unless the message says what to do."""
    if isinstance(error, GenevaError):
        return str(error)
    if package := missing_package(repr(error)):
        return f"{error!r}. {how_to_install(package)}"
    return f"{error!r}\n{''.join(traceback.format_exception(error))}"


def call_failure_of(error: UdfError, rules: Rules, udf: UDF) -> CallFailure:
    """Convert an error of `Mapper.map_batch` to a `CallFailure`."""
    own = error.__cause__
    if not isinstance(own, Exception) or isinstance(own, OutputMismatch):
        return describe_failure(error, matching_rules_of(rules, UdfError), complete=True)
    found = describe_failure(own, matching_rules_of(rules, type(own)), users_frames(own), udf=udf)
    if found.out_of_memory:
        release(error)
    return found


def unfit_row(error: UdfError, rules: Rules) -> CallFailure:
    """Describe the failure of a row whose input or value does not fit, under the rules of a policy."""
    return describe_failure(error, matching_rules_of(rules, UdfError), complete=True)


def is_of_a_row(error: UdfError) -> bool:
    """Whether the result of a whole batch does not fit because of some rows, which calls with fewer rows find."""
    mismatch = error.__cause__
    return isinstance(mismatch, OutputMismatch) and mismatch.row_index is not None


def users_frames(error: Exception) -> TracebackType | None:
    """Return an exception's traceback from the UDF's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_NOT_USERS):
        trace = trace.tb_next
    return trace


class BatchResults:
    """Collects values, failures and call counts of a batch while it is mapped."""

    def __init__(self, mapper: Mapper, inputs: pa.RecordBatch, rules: Rules) -> None:
        self.mapper = mapper
        self.inputs = inputs
        self.rules = rules
        self.rows = inputs.num_rows
        self.failures: list[RowFailure] = []
        self.causes: dict[int, BaseException | None] = {}
        self._parts: dict[int, pa.Array] = {}
        self._calls = np.zeros(self.rows, np.int64)

    def begin_again(self, keep: bool) -> BatchResults:
        """Return new results with the calls counted so far, and with `keep` also with the finished rows."""
        again = BatchResults(self.mapper, self.inputs, self.rules)
        again._calls = self._calls.copy()
        if keep:
            again._parts, again.causes = dict(self._parts), dict(self.causes)
            again.failures = [failure for failure in list(self.failures) if again.has(failure.index)]
        return again

    def has(self, row: int) -> bool:
        """Whether a call of this row alone is done, with a value or as a failure to skip."""
        return row in self._parts

    def called(self, start: int, stop: int) -> None:
        """Count a call on these rows."""
        self.mapper.count_call(stop - start)
        self.answered(start, stop)

    def answered(self, start: int, stop: int) -> None:
        """Count a call on these rows in this batch only; `Mapper.count_call` counts it for the job."""
        self._calls[start:stop] += 1

    def put(self, start: int, values: pa.Array) -> None:
        if len(values):
            self._parts[start] = values

    def add_failure(self, row: int, rule: int, trouble: CallFailure) -> None:
        """Record a row as failed under a `Skip` rule."""
        calls = int(self._calls[row])
        self.failures.append(RowFailure(row, rule, trouble.exception, trouble.message, trouble.traceback, calls))

    def succeeded(self) -> tuple[list[int], pa.Array | None]:
        """Return the rows that have a value so far, without failed ones, and their values."""
        failed = {failure.index for failure in self.failures}
        parts = [(start, self._parts[start]) for start in sorted(self._parts)]
        rows = [start + at for start, values in parts for at in range(len(values))]
        good = [at for at, row in enumerate(rows) if row not in failed]
        if not good:
            return [], None
        return [rows[at] for at in good], rows_at(pa.concat_arrays([values for _, values in parts]), pa.array(good))

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
                f"The output of UDF {self.mapper.udf.name!r} for a batch of {counted(self.rows, 'row')} cannot be "
                f"combined: {error}. Set a smaller batch_size, or a large_ type."
            ) from error


def _traceback_of(error: Exception, trace: TracebackType | None) -> str:
    """Format an exception; many rows fail at the same lines, whose texts are made once."""
    if error.__cause__ or error.__context__ or hasattr(error, "exceptions"):
        return "".join(traceback.format_exception(type(error), error, trace))
    lines: list[tuple[CodeType, int, int]] = []
    tb = trace
    while tb is not None:
        lines.append((tb.tb_frame.f_code, tb.tb_lineno, tb.tb_lasti))
        tb = tb.tb_next
    if (found := _FORMATTED.get(key := tuple(lines))) is None:
        head = "Traceback (most recent call last):\n" if key else ""
        found = _FORMATTED[key] = head + "".join(traceback.format_tb(trace))
    return found + "".join(traceback.format_exception_only(type(error), error))


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its text cannot be made: {type(broken).__name__})"


def _printable(text: str, most: int, keep_end: bool = False) -> str:
    """Make a text storable as UTF-8, mask credentials, and cut it; `keep_end` keeps its end, as for a traceback."""
    text = mask_secrets(text.encode("utf-8", "backslashreplace").decode())
    if len(text) <= most:
        return text
    return "..." + text[3 - most :] if keep_end else text[: most - 3] + "..."
