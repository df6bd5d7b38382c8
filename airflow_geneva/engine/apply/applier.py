"""Call the UDFs of a task on rows as they are read, in steps, and hand over the results."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.advice import advise
from airflow_geneva.engine.apply.batch_api import StillWaiting
from airflow_geneva.engine.apply.batch_mapper import (
    BatchMapper,
    BegunBatch,
    StopComputing,
    first_has_ended,
    wait_for_first,
)
from airflow_geneva.engine.apply.event_loop import LOOP
from airflow_geneva.engine.apply.queues import Unkept
from airflow_geneva.engine.apply.reader import CheckpointSizer, RowBatch, UnreadableFragment
from airflow_geneva.engine.apply.skipped_rows import (
    SkipCount,
    error_records,
    failed_columns,
    failed_offsets,
    fatal_failure,
)
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.checkpoint.provenance import RowsByColumn
from airflow_geneva.engine.checkpoint.records import ROW_ID, RowRuns, encode_runs
from airflow_geneva.engine.counts import Usage
from airflow_geneva.engine.failures import RowFailure
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.error_records import ErrorRecord
from airflow_geneva.engine.job.speed import UdfSpeed
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.table_key import RowNames
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.limits.rate_limit import affordable_rows, used_so_far
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.udf.error_policy import Retry, rules_of
from airflow_geneva.engine.udf.packages import missing_package
from airflow_geneva.errors import UdfError

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF

_AHEAD = 16
_WATCHED_SECONDS = 0.1
_PAID_CALLS, _PAID_PART = 500, 0.1
PAID_SECONDS = 1.0
"""Seconds after which results of paid calls may be checkpointed, even if `checkpoint_interval` is longer."""
_NO_IDS, _NO_VALUES = np.empty(0, np.uint64), pa.nulls(0)


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of one step: the offsets ``[start, end)``, and the rows on which the UDF ran, run-length encoded.

    `filter_evaluated` also has the due rows that the filter did not select; None: the same rows as `runs`. `row_ids`
    are the row ids of `runs`, which are soon dropped. Failed rows have the value NULL; those of a view are also given
    by the columns that failed. If `unkept` is set, a checkpoint is due after this step. A step without offsets only
    carries the error record of the row that failed the job.
    """

    start: int
    end: int
    runs: RowRuns
    row_ids: RowIds
    values: pa.Array
    filter_evaluated: Ranges | None
    failed: Ranges = field(default_factory=Ranges.empty)
    failed_columns: RowsByColumn = ()
    records: tuple[ErrorRecord, ...] = ()
    unkept: Unkept | None = None

    def without_rows(self) -> StepResult:
        """Return the result without its values and row ids, which take memory."""
        return replace(self, values=_NO_VALUES, row_ids=_NO_IDS)


@dataclass(eq=False)
class _FragmentCalls:
    """The started steps of one fragment, and totals of its finished steps.

    `put` and `end` are those of `Applier.compute`.
    """

    fragment: FragmentTask
    put: Callable[[StepResult, bool], None]
    end: Callable[[BaseException | None, Unkept, UdfSpeed], None]
    begun: deque[_BegunStep] = field(default_factory=deque)
    are_all_begun: bool = False
    unreadable: UnreadableFragment | None = None
    waiting: dict[str, int] = field(default_factory=dict)
    speed: UdfSpeed = field(default_factory=UdfSpeed)
    unkept: Unkept = field(default_factory=lambda: Unkept(time.monotonic()))
    size: int = 0
    paid_before: Usage = field(default_factory=used_so_far)


@dataclass(eq=False)
class _BegunStep:
    """A step whose calls may be in flight; its first `kept` rows have been handed over."""

    of: _FragmentCalls
    span: tuple[int, int]
    offsets: Offsets
    ids: RowIds
    filter_evaluated: Ranges | None
    size: int
    calls: BegunBatch
    since: float = field(default_factory=time.monotonic)
    kept: int = 0


class Applier:
    """Calls the UDFs of a task on the rows of one fragment after another.

    Calls of an async UDF stay in flight from one fragment to the next; results are handed over in row order. `udf`, if
    given, provides default sizes. `on_rows` is called after every step, and may raise StopComputing. `names` has the
    key of a row that ends the job. `fitting` estimates the number of rows whose results fit in memory. With `windows`,
    a step is a window of rows, which the mapper cuts into batches.
    """

    def __init__(
        self,
        spec: JobSpec,
        udf: UDF | None,
        mapper: BatchMapper,
        skipped: SkipCount,
        fitting: RowsPerBudget,
        windows: bool = False,
    ) -> None:
        self.spec = spec
        self.mapper = mapper
        self.skipped = skipped
        self.on_rows: Callable[[int], None] = lambda rows: None
        self.names: RowNames | None = None
        self.attempts = max((rule.attempts for rule in rules_of(skipped.policy) if isinstance(rule, Retry)), default=1)
        self.row_by_row = udf is not None and udf.form == "scalar"
        self.windows = windows
        self.batch_size = None if windows else spec.sizing.batch_size or (udf.batch_size if udf else None)
        self.interval = spec.sizing.checkpoint_interval
        self.fitting = fitting
        self.computed = 0
        self.open = deque[_FragmentCalls]()
        self.sizer = self._make_sizer(spec.sizing, udf)
        self.began, self.finished, self.called = inf, 0.0, 0.0

    def _make_sizer(self, sizing: Sizing, udf: UDF | None) -> CheckpointSizer:
        sizer = CheckpointSizer.of(
            sizing.checkpoint_size or (udf.checkpoint_size if udf else None),
            sizing.min_checkpoint_size or (udf.min_checkpoint_size if udf else None),
            sizing.max_checkpoint_size or (udf.max_checkpoint_size if udf else None),
            self.interval,
        )
        if not self.row_by_row:
            return sizer
        # A step makes one call per row, and a job is stopped only between steps: the first ones tell how slow it is.
        seconds = _WATCHED_SECONDS if sizing.watched else sizer.seconds
        return replace(sizer, seconds=seconds, rows=sizer.least)

    def compute(
        self,
        fragment: FragmentTask,
        run: Ranges,
        batches: Iterable[RowBatch],
        put: Callable[[StepResult, bool], None],
        end: Callable[[BaseException | None, Unkept, UdfSpeed], None],
    ) -> None:
        """Call the UDF on the selected rows of ``run``, in the order of the batches.

        Calls may still be in flight when it returns; the next `compute`, or `finish`, hands over their results.

        Args:
            put: called with each result, and whether it is one of the last before an error is raised.
            end: called after the last result with an error or None, the rows since the last checkpoint, and the speed;
                the error is StillWaiting if a batch API has not answered all rows, and UnreadableFragment if not all
                rows can be read.
        """
        calls = _FragmentCalls(fragment, put, end)
        self.open.append(calls)
        try:
            for rows in batches:
                for step in self._begin_steps(calls, rows, run):
                    calls.begun.append(step)
                    while self._is_first_due():
                        self._finish_first()
        except UnreadableFragment as unreadable:
            calls.unreadable = unreadable
        calls.are_all_begun = True
        self._end_finished()

    def finish(self) -> None:
        """Wait for all calls, and hand over their results."""
        while any(self._begun):
            self._finish_first()

    def finish_ended(self) -> bool:
        """Hand over, in row order, the results that are available without waiting; return whether steps are left."""
        while any(self._begun) and first_has_ended(step.calls for step in self._begun):
            self._finish_first()
        return any(self._begun)

    def _finish_first(self) -> None:
        """Wait for the calls of the first step, and hand over its rows unless a batch API has not answered them."""
        wait_for_first([step.calls for step in self._begun])
        step = next(self._begun)
        at_work = max(step.since, self.finished) if self.mapper.calls_at_a_time else time.monotonic()
        try:
            mapped = step.calls.result()
        except StillWaiting as still:
            step.of.waiting |= still.batches
            step.of.begun.popleft()
        except UdfError as error:
            raise self._explained(error, step) from error
        else:
            result = self._result(step, mapped, at_work)
            step.of.begun.popleft()
            self._keep(step.of, result)
        self._end_finished()

    def cancel(self, error: BaseException) -> None:
        """Cancel the calls in flight because of an error, and hand over the rows that are done."""
        try:
            self._keep_succeeded(self._begun)
        finally:
            while self.open:
                calls = self.open.popleft()
                calls.end(error, calls.unkept, calls.speed)

    @property
    def _begun(self) -> Iterator[_BegunStep]:
        """The started steps, in row order."""
        return chain.from_iterable(calls.begun for calls in self.open)

    def _end_finished(self) -> None:
        while self.open and self.open[0].are_all_begun and not self.open[0].begun:
            calls = self.open.popleft()
            error = calls.unreadable or (StillWaiting(calls.waiting) if calls.waiting else None)
            calls.end(error, calls.unkept, calls.speed)

    def _begin_steps(self, calls: _FragmentCalls, rows: RowBatch, run: Ranges) -> Iterator[_BegunStep]:
        due = rows.mask(run)
        chosen = due
        if rows.selected is not None:
            chosen = rows.selected if due is None else due & rows.selected
        picked = None if chosen is None else np.flatnonzero(chosen)
        at, count, start, taken = 0, len(rows.offsets), rows.start, 0
        while at < count:
            # Size steps by the rows to run, not by the rows read: with a sparse filter, steps would be tiny.
            taken += self._step_rows(calls.unkept.rows + sum(len(step.offsets) for step in calls.begun))
            if picked is None:
                until = min(taken, count)
            else:
                until = count if taken >= len(picked) else int(picked[taken - 1]) + 1
            end = rows.end if until == count else int(rows.offsets[until])
            yield self._begin_step(calls, rows, slice(at, until), (start, end), due, chosen)
            at, start = until, end

    def _is_first_due(self) -> bool:
        """Whether to finish the first step before starting another one; wait until this is decided.

        The queue holds `calls_at_a_time` calls beside those in flight. A slow call blocks later ones only when the
        started rows fill the memory of a step, or when `_AHEAD` times `calls_at_a_time` calls are started.
        """
        begun, at_a_time = list(self._begun), self.mapper.calls_at_a_time
        rows = sum(len(step.offsets) for step in begun)
        calls = rows if self.mapper.calls_rows else len(begun)
        full = rows >= self._fitting_rows or sum(step.size for step in begun) >= self.spec.sizing.batch_bytes
        while begun and not full and calls < _AHEAD * at_a_time:
            ended = LOOP.ended
            if first_has_ended(step.calls for step in begun):
                break
            self.on_rows(0)  # calls that ended behind a slow one may have used up the job's cap
            if sum(step.calls.unfinished for step in begun) < 2 * at_a_time:
                return False
            LOOP.wait_for_call(ended)
        return bool(begun)

    @property
    def rows_of_call(self) -> int | None:
        """The number of rows that a stage hands over at a time, those of a call or window; None: any number."""
        return self.sizer.rows if self.windows else self.batch_size

    @property
    def _fitting_rows(self) -> int:
        # A user's batch_size takes precedence over the safety margin for values that suddenly get much wider.
        return self.fitting.careful_rows if self.batch_size is None else self.fitting.rows

    def _step_rows(self, waiting: int) -> int:
        """Return the number of rows of the next step; `waiting` rows are started or not in a checkpoint yet."""
        size: float = self.sizer.rows
        if self.mapper.calls_rows:
            size = self.mapper.calls_at_a_time
        if self.batch_size is not None:
            size = min(size, self.batch_size) if self.row_by_row else self.batch_size
        elif self.row_by_row:  # a job stops at its cap only between two steps
            threads = self.spec.sizing.intra_applier_concurrency
            size = min(size, affordable_rows(self.computed, threads, self.attempts))
        size = min(size, self._fitting_rows)
        if self.sizer.most is not None:
            size = min(size, self.sizer.most - waiting % self.sizer.most)
        return int(size)

    def _begin_step(
        self,
        calls: _FragmentCalls,
        rows: RowBatch,
        part: slice,
        span: tuple[int, int],
        due: np.ndarray | None,
        chosen: np.ndarray | None,
    ) -> _BegunStep:
        offsets, ids, batch = rows.offsets[part], rows.row_ids[part], rows.columns[part]
        filter_evaluated = None
        if rows.selected is not None:
            filter_evaluated = Ranges.from_offsets(offsets if due is None else offsets[due[part]])
        if chosen is not None and not (mask := chosen[part]).all():
            kept = np.flatnonzero(mask)
            offsets, ids = offsets[kept], ids[kept]
            batch = rows_at(batch, pa.array(kept))
        if self.mapper.needs_row_ids:
            batch = batch.append_column(ROW_ID, pa.array(ids, pa.uint64()))
        return _BegunStep(calls, span, offsets, ids, filter_evaluated, batch.nbytes, self.mapper.begin(batch))

    def _result(self, begun: _BegunStep, mapped: MappedBatch, at_work: float) -> StepResult:
        """Record the time since `at_work` and the size of a step's results, and make its `StepResult`."""
        span, offsets, ids = begun.span, begun.offsets, begun.ids
        self.began, self.finished = min(self.began, at_work), time.monotonic()
        seconds, size = self.finished - at_work, mapped.values.nbytes
        self.called += seconds
        # The full duration of a call determines step sizes; for the speed, concurrent calls share the elapsed time.
        self.sizer.record(len(offsets), self.finished - begun.since if self.mapper.calls_at_a_time else seconds)
        self.fitting.record(len(offsets), size)
        self.computed += len(offsets)
        calls = begun.of
        loading = (0.0, 0) if calls.speed.rows else (seconds, len(offsets))
        calls.speed += UdfSpeed(len(offsets), seconds, *loading, size, called=seconds)
        step = self._step(calls.fragment, span, offsets, ids, mapped.values, begun.filter_evaluated, mapped.failures)
        if mapped.failures:
            # Do not count rows that failed in an earlier job again: a limit would then fail every later job.
            before = Ranges.union(again for _, again in self.spec.tried(calls.fragment)).mask(offsets)
            first = [failure for failure in mapped.failures if not before[failure.index]]
            try:
                self.skipped.add(Counter(failure.rule for failure in first))
            except UdfError:
                begun.kept = len(offsets)
                self._keep_last(calls, step)
                raise
        return step

    def _step(
        self,
        fragment: FragmentTask,
        span: tuple[int, int],
        offsets: Offsets,
        ids: RowIds,
        values: pa.Array,
        filter_evaluated: Ranges | None = None,
        failures: Sequence[RowFailure] = (),
        count: int | None = None,
    ) -> StepResult:
        """Make the result of the first ``count`` rows of a step, which have values; later rows may be in `failures`."""
        failed, columns = Ranges.from_offsets(failed_offsets(failures, offsets)), failed_columns(failures, offsets)
        records = error_records(self.spec, fragment, failures, offsets, ids)
        offsets, ids = offsets[:count], ids[:count]
        return StepResult(*span, encode_runs(offsets, ids), ids, values, filter_evaluated, failed, columns, records)

    def _keep_succeeded(self, begun: Iterable[_BegunStep]) -> None:
        """Cancel the calls of started steps, and keep their finished rows, which may have been paid for."""
        for step in begun:
            rows, values = step.calls.cancel()
            later = [at for at, row in enumerate(rows) if row >= step.kept]
            if later and values is not None:
                chosen = np.array([rows[at] for at in later])
                offsets, ids = step.offsets[chosen], step.ids[chosen]
                filter_evaluated = None if step.filter_evaluated is None else Ranges.from_offsets(offsets)
                span = (int(offsets[0]), int(offsets[-1]) + 1)
                last = self._step(step.of.fragment, span, offsets, ids, values.take(pa.array(later)), filter_evaluated)
                self._keep_last(step.of, last)

    def _keep(self, calls: _FragmentCalls, step: StepResult, is_last: bool = False) -> None:
        fault_point("apply.step")
        calls.unkept.rows += len(step.values)
        calls.size += step.values.nbytes
        if self._is_checkpoint_due(calls):
            step = replace(step, unkept=calls.unkept)
            calls.unkept, calls.size, calls.paid_before = Unkept(time.monotonic()), 0, used_so_far()
        calls.put(step, is_last)
        self.skipped.add_failed(len(step.failed))
        self.on_rows(len(step.values))

    def _is_checkpoint_due(self, calls: _FragmentCalls) -> bool:
        """Whether a checkpoint is due: half its interval or bytes suffice, as it is written while rows are computed."""
        rows = calls.unkept.rows
        if self.sizer.most is not None and rows >= self.sizer.most:
            return True
        waited = time.monotonic() - calls.unkept.since
        due = waited >= self.interval / 2 or self._cost_enough(waited, calls.paid_before)
        return (due and rows >= self.sizer.least) or calls.size >= self.spec.sizing.checkpoint_bytes // 2

    def _cost_enough(self, seconds: float, before: Usage) -> bool:
        """Whether the calls since the last checkpoint have reached the cost that a kill may lose."""
        used, most = used_so_far(), self.spec.sizing.checkpoint_cost
        paid, count = used.paid - before.paid, used.calls - before.calls
        if most is not None:
            return paid > 0 and paid >= most
        part = paid / used.paid if used.paid else count / max(used.calls, 1)
        return count >= _PAID_CALLS or (seconds >= PAID_SECONDS and part >= _PAID_PART)

    def _keep_last(self, calls: _FragmentCalls, step: StepResult) -> None:
        """Keep a step before an error is raised; StopComputing must not replace that error."""
        with suppress(StopComputing):
            self._keep(calls, step, is_last=True)

    def _explained(self, error: UdfError, begun: _BegunStep) -> UdfError:
        """Name the failing row in the error, and keep the step's rows before it."""
        calls, fragment = begun.of, begun.of.fragment
        span, offsets, ids = begun.span, begun.offsets, begun.ids
        whole = f"fragment {fragment.id}{' of its source' if self.spec.of_view else ''}"
        if error.row_index is None:
            where = f"rows {span[0]} to {span[1]} of {whole}"
        else:
            offset = int(offsets[error.row_index])
            named = self.names.of([int(ids[error.row_index])])[0] if self.names else ""
            key = f", key {named}" if named else ""
            where = f"row {offset} of {whole} (row address {fragment.id << 32 | offset}{key})"
        if (row := error.row_index) is not None:
            failures = [fatal_failure(error, row)]
            if row and error.computed is not None:
                step = self._step(fragment, (span[0], offset), offsets, ids, error.computed, None, error.failures, row)
                begun.kept = row
                self._keep_last(calls, step)
            calls.put(self._step(fragment, (offset, offset), offsets, ids, _NO_VALUES, None, failures, 0), True)
            self.skipped.add_failed(1)
            with suppress(StopComputing):
                self.on_rows(1)
        target = f"{self.spec.target}.{error.column}" if error.column else self.spec.target
        version = None if self.spec.of_view else self.spec.udf_version
        cause, _, details = str(error).partition("\n")
        parts = [f"Computing {target} failed at {where}: {cause}", advise(error, version)]
        if not missing_package(str(error)):
            parts.append(details)
        text = self.spec.with_source_paths("\n".join(part for part in parts if part))
        return UdfError(text, error.row_index, call=error.call)
