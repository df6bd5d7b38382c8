"""Preprocess rows before a UDF is called on them; its stage's results are added to the rows as Arrow columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import BatchMapper, BegunBatch, StopComputing
from airflow_geneva.engine.apply.reader import CheckpointSizer, RowBatch
from airflow_geneva.engine.apply.udf_call import MappedBatch, Mapper
from airflow_geneva.engine.failures import CallFailure, RowFailure
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.limits.rate_limit import count, metered
from airflow_geneva.engine.runtime import SimpleQueue, time
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.errors import DeviceFailed, UdfError

VALUE, STATE = "__geneva_preprocessed", "__geneva_preprocess_state"
"""Columns of a batch: a stage's values, and its state for each row: NULL until it has run, "", or a failure as JSON."""

_DONE = ""
_FOUND_AGAIN = (UdfError, DeviceFailed, StopComputing)
_PART_SECONDS, _FIRST_ROWS = 0.25, 4


def prepared_columns(batch: pa.RecordBatch, of: str = "") -> list[pa.Array]:
    """Return the values and states that a stage added to a batch, or nothing if it has not run."""
    names = batch.schema.names
    return [batch.column(name + of) for name in (VALUE, STATE) if name + of in names]


def with_prepared(batch: pa.RecordBatch, prepared: Sequence[pa.Array], of: str = "") -> pa.RecordBatch:
    for name, column in zip((VALUE, STATE), prepared, strict=False):
        batch = batch.append_column(name + of, column)
    return batch


def prepare_some(mapper: BatchMapper, batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Preprocess some rows of a batch, given in ascending order; the stage counts as not run for the others."""
    if not len(rows):
        return batch
    if len(rows) == batch.num_rows:
        return mapper.prepare(batch)
    made = mapper.prepare(rows_at(batch, pa.array(rows)))
    at = np.full(batch.num_rows, -1)
    at[rows] = np.arange(len(rows))
    positions = pa.array(at, mask=at < 0)
    for name in made.schema.names[batch.num_columns :]:
        batch = batch.append_column(name, rows_at(made.column(name), positions))
    return batch


class PreprocessedMapper(BatchMapper):
    """Calls a UDF on the values of its stage, which runs ahead in `prepare`, or else when the call begins.

    The UDF is not called on rows on which the stage failed: they have failed under the same policy.

    Args:
        inner: calls the UDF.
        call: the UDF, with the stage's value as its input.
        stages: the stage, once for each concurrent run.
    """

    def __init__(self, inner: BatchMapper, call: Mapper, stages: Sequence[BatchMapper]) -> None:
        self.inner = inner
        self.call = call
        self.stages = stages
        self.calls_at_a_time, self.calls_rows = inner.calls_at_a_time, inner.calls_rows
        self.prepares_at_a_time = len(stages)
        # What an async stage reads may be of any size, so only a few rows are begun before the first sizes are known.
        self.prepares_rows = next((stage.calls_at_a_time for stage in stages if stage.calls_at_a_time), None)
        self._free = SimpleQueue[BatchMapper]()
        for stage in stages:
            self._free.put(stage)

    def close(self) -> None:
        self.inner.close()
        for stage in self.stages:
            stage.close()

    def prepare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        # A failure that names no row occurs again when the call begins, and is raised there.
        with suppress(*_FOUND_AGAIN):
            batch = with_prepared(batch, self._preprocess(batch))
        return batch

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        try:
            values, states = self._prepared(batch)
        except _FOUND_AGAIN as error:
            return _Failed(error)
        if states.null_count == 0 and not any(told := states.to_pylist()):
            return self.inner.begin(self._inputs(values))
        told = states.to_pylist()
        failed = {row: parse(text) for row, text in enumerate(told) if text}
        stop = next((row for row, failure in failed.items() if "text" in failure), len(told))
        rows = [row for row in range(stop) if row not in failed]
        begun = self.inner.begin(self._inputs(rows_at(values, pa.array(rows, pa.int64()))))
        return _BegunBesideFailures(begun, rows, stop, failed)

    def _preprocess(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Run the stage; return values and states, up to a row that fails the job."""
        stage = self._free.get()
        fatal: dict[int, str] = {}
        try:
            with metered() as meter:
                mapped = stage(batch)
        except UdfError as error:
            if (row := error.row_index) is None or error.computed is None:
                raise
            told = {"text": str(error), "call": error.call and asdict(error.call)}
            fatal, mapped = {row: json.dumps(told)}, MappedBatch(error.computed, error.failures, 0)
        finally:
            self._free.put(stage)
            count(meter.usage.reported)  # the UDF's calls count the rows
        values, rows = mapped.values, len(mapped.values)
        states: list[str | None] = [_DONE] * rows + [None] * (batch.num_rows - rows)
        for failure in mapped.failures:
            told = {name: value for name, value in asdict(failure).items() if name not in ("index", "column", "also")}
            states[failure.index] = json.dumps(told)
        for row, text in fatal.items():
            states[row] = text
            values = rows_at(values, pa.array([*range(rows), *[None] * (batch.num_rows - rows)], pa.int64()))
        return values, pa.array(states, pa.string())

    def _prepared(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Return the stage's values and states of all rows before one that fails the job."""
        prepared = prepared_columns(batch)
        if not prepared:
            return self._preprocess(batch)
        values, states = prepared
        if not states.null_count:
            return values, states
        told = states.to_pylist()
        fatal = next((row for row, text in enumerate(told) if text and "text" in parse(text)), len(told))
        due = [row for row in range(fatal) if told[row] is None]
        if not due:
            return values, states
        order = np.arange(len(told))
        order[due] = len(told) + np.arange(len(due))
        more = self._preprocess(rows_at(batch, pa.array(due, pa.int64())))
        joined = (pa.concat_arrays(both) for both in zip((values, states), more, strict=True))
        values, states = (rows_at(both, pa.array(order)) for both in joined)
        return values, states

    def _inputs(self, values: pa.Array) -> pa.RecordBatch:
        """Return the batch on which the UDF is called: the stage's value, or its fields."""
        if self.call.udf.form == "record_batch":
            return pa.record_batch(values.flatten(), names=[field.name for field in values.type])
        return pa.record_batch([values], names=list(self.call.input_columns or ()))


@dataclass(frozen=True)
class _Failed(BegunBatch):
    """A batch whose stage failed, so that no row is called."""

    error: BaseException

    @property
    def unfinished(self) -> int:
        return 0

    def result(self) -> MappedBatch:
        raise self.error

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        return [], None


@dataclass(frozen=True)
class _BegunBesideFailures(BegunBatch):
    """A batch with rows on which the stage failed; the other rows are called, up to one that fails the job.

    Args:
        rows: the rows on which the UDF is called.
        stop: the row that fails the job, or the number of rows.
    """

    begun: BegunBatch
    rows: Sequence[int]
    stop: int
    failed: Mapping[int, dict[str, Any]]

    @property
    def unfinished(self) -> int:
        return self.begun.unfinished

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        rows, values = self.begun.cancel()
        return [self.rows[row] for row in rows], values

    def result(self) -> MappedBatch:
        stop, error = self.stop, None
        try:
            mapped = self.begun.result()
        except UdfError as failed:
            if failed.row_index is None:
                raise
            failed.row_index = stop = self.rows[failed.row_index]
            if failed.computed is None:
                raise
            error, mapped = failed, MappedBatch(failed.computed, failed.failures, 0)
        at = dict(zip(self.rows, range(len(mapped.values)), strict=False))
        values = rows_at(mapped.values, pa.array([at.get(row) for row in range(stop)], pa.int64()))
        of_stage = [RowFailure(row, **told) for row, told in self.failed.items() if row < stop]
        of_calls = [replace(failure, index=self.rows[failure.index]) for failure in mapped.failures]
        failures = tuple(sorted((*of_stage, *of_calls), key=lambda failure: failure.index))
        if error is None and (fatal := self.failed.get(stop)) is not None:
            call = fatal["call"]
            error = UdfError(fatal["text"], stop, call=call and _call_failure(call))
        if error is not None:
            error.computed, error.failures = values, failures
            raise error
        return MappedBatch(values, failures, mapped.rows_called)


def _call_failure(told: Mapping[str, Any]) -> CallFailure:
    return CallFailure(**{**told, "fits": tuple(told["fits"]), "nulls": tuple(told["nulls"])})


@dataclass(frozen=True)
class Part:
    """Rows that a stage processes together; `ends` marks the last part of a call."""

    rows: RowBatch
    ends: bool


class RowsAhead:
    """Cuts the rows of calls into parts that take a fraction of a second to preprocess, and preprocesses them.

    Args:
        mapper: the mapper whose stages run, in `prepares_at_a_time` threads.
        rows_of_call: returns the current number of rows of a call; None: any number.
        limit: maximum bytes of the rows of a call; the threads together work on at most half of that.
    """

    def __init__(self, mapper: BatchMapper, rows_of_call: Callable[[], int | None], limit: int) -> None:
        self.mapper = mapper
        self.threads = mapper.prepares_at_a_time
        self._rows_of_call = rows_of_call
        self._limit = limit
        self._sizer = CheckpointSizer(_PART_SECONDS, rows=_FIRST_ROWS)
        self._fitting = RowsPerBudget(max(limit // 2 // max(self.threads, 1), 1))
        self._width = 0.0

    def parts(self, batches: Iterable[RowBatch], run: Ranges) -> Iterator[Part]:
        """Cut the rows of a fragment into parts by the number of rows to compute."""
        begun = 0
        for rows in batches:
            chosen = rows.chosen(run)
            picked = np.arange(len(rows.offsets)) if chosen is None else np.flatnonzero(chosen)
            at, taken = 0, 0
            while at < len(rows.offsets):
                size = min(self._sizer.rows, self._fitting.careful_rows, len(picked) - taken)
                size = min(size, self.mapper.prepares_rows or size)
                if (of_call := self._rows_of_call()) is not None:
                    size = min(size, max(of_call - begun, 1))
                taken, begun = taken + size, begun + size
                until = len(rows.offsets) if taken == len(picked) else int(picked[taken - 1]) + 1
                ends = of_call is None or begun >= of_call or begun * self._width >= self._limit
                yield Part(rows.part(at, until), ends)
                at, begun = until, 0 if ends else begun

    def prepare(self, rows: RowBatch, run: Ranges) -> RowBatch:
        """Return rows with the stages' values and states for the rows to compute."""
        chosen = rows.chosen(run)
        picked = np.arange(len(rows.offsets)) if chosen is None else np.flatnonzero(chosen)
        if not len(picked):
            return rows
        began = time.monotonic()
        made = prepare_some(self.mapper, rows.columns, picked)
        self._sizer.record(len(picked), time.monotonic() - began)
        self._fitting.record(len(picked), made.nbytes)
        self._width = made.nbytes / len(picked)
        return replace(rows, columns=made)


def joined(parts: Sequence[RowBatch]) -> Iterator[RowBatch]:
    """Join consecutive prepared parts of a fragment; parts whose stage failed stay separate."""
    for _, group in groupby(parts, key=lambda rows: rows.columns.schema.names):
        found = list(group)
        yield found[0] if len(found) == 1 else RowBatch.joined(found)
