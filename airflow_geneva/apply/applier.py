"""Run a UDF over ranges of a fragment and write checkpoints of the computed rows."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.advice import advise
from airflow_geneva.apply.batch_api import StillWaiting
from airflow_geneva.apply.batch_mapper import BatchMapper, BegunBatch, StopComputing
from airflow_geneva.apply.event_loop import LOOP
from airflow_geneva.apply.reader import CheckpointSizer, LearnedSizes, ReadSize, RowBatch, read_rows, windows
from airflow_geneva.apply.skipped_rows import ErrorLog, SkipCount, fatal_failure
from airflow_geneva.checkpoint.provenance import Failures
from airflow_geneva.checkpoint.records import (
    ROW_ID,
    RangeContent,
    RowRuns,
    computed_rows,
    decode_runs,
    encode_runs,
    merge_runs,
    write_range,
)
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.errors import StorageError, UdfError
from airflow_geneva.faults import fault_point
from airflow_geneva.job.speed import UdfSpeed
from airflow_geneva.lance_io.arrays import rows_where, single_batch
from airflow_geneva.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.limits.rate_limit import affordable_rows
from airflow_geneva.plan.model import JobSpec, RefreshSpec
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.plan.sizing import Sizing
from airflow_geneva.storage.files import Storage
from airflow_geneva.udf.error_policy import Retry, rules_of
from airflow_geneva.udf.packages import missing_package

if TYPE_CHECKING:
    import lance

    from airflow_geneva.udf import UDF

logger = logging.getLogger("airflow_geneva.apply")

_AHEAD = 16
_WATCHED_SECONDS = 0.1
_NO_IDS, _NO_VALUES = np.empty(0, np.uint64), pa.nulls(0)


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of one step: the offsets ``[start, end)``, and in run-length form the rows that the UDF ran on.

    `looked_at` also has the due rows that the filter did not select; None: these are the rows that the UDF ran on.
    `row_ids` are those of the runs, not kept for long. Failed rows have the value NULL.
    """

    start: int
    end: int
    runs: RowRuns
    row_ids: RowIds
    values: pa.Array
    looked_at: Ranges | None
    failed: Ranges = field(default_factory=Ranges.empty)

    def without_rows(self) -> StepResult:
        """Return the result without its values and row ids, which take memory."""
        return replace(self, values=_NO_VALUES, row_ids=_NO_IDS)


def joint_looked_at(steps: Sequence[StepResult], runs: RowRuns) -> Ranges:
    """Return the rows that were looked at in all steps, whose rows that ran are given."""
    found = [step.looked_at for step in steps]
    parts = [computed_rows(runs)] if None in found else []
    return Ranges.union([*parts, *(rows for rows in found if rows is not None)])


@dataclass(eq=False)
class _BegunStep:
    """A step whose calls may be in flight; `kept` is set once its rows, or those before a failing one, are kept."""

    span: tuple[int, int]
    offsets: Offsets
    ids: RowIds
    looked_at: Ranges | None
    size: int
    calls: BegunBatch
    since: float = field(default_factory=time.monotonic)
    kept: int = 0


@dataclass
class _PendingCheckpoint:
    store: CheckpointStore
    work: JobSpec
    fragment: FragmentWork
    errors: ErrorLog
    steps: list[StepResult] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    rows: int = 0
    bytes: int = 0

    def add(self, step: StepResult) -> None:
        if self.bytes + step.values.nbytes > self.work.sizing.checkpoint_bytes:
            self.flush()
        self.steps.append(replace(step, row_ids=_NO_IDS))
        self.rows += len(step.values)
        self.bytes += step.values.nbytes

    def is_due(self, interval: float, least: int, most: int | None) -> bool:
        if most is not None and self.rows >= most:
            return True
        waited = time.monotonic() - self.since >= interval
        return (waited and self.rows >= least) or self.bytes >= self.work.sizing.checkpoint_bytes

    def flush(self) -> None:
        # Write the errors first: the checkpoint says that failed rows need not run again.
        self.errors.write()
        if self.steps:
            runs = merge_runs([step.runs for step in self.steps])
            looked_at = joint_looked_at(self.steps, runs)
            values = pa.concat_arrays([step.values for step in self.steps])
            offsets, ids = decode_runs(runs)
            failed = Ranges.union(step.failed for step in self.steps)
            failures = Failures.next(self.work.job_id, failed, self.work.tried(self.fragment))
            rows = RangeContent(offsets, ids, looked_at, failures, self.work.agreement)
            write_range(self.store, self.work.key(self.fragment), self.steps[0].start, self.steps[-1].end, values, rows)
        self.steps, self.rows, self.bytes, self.since = [], 0, 0, time.monotonic()


class Applier:
    """Runs one UDF over fragments of one table version; `udf`, or None, gives the sizes.

    `on_rows` is called after every step, and may raise StopComputing. `speed` is of the rows computed so far.
    """

    def __init__(
        self,
        dataset: lance.LanceDataset,
        store: CheckpointStore,
        job: Storage,
        work: JobSpec,
        udf: UDF | None,
        mapper: BatchMapper,
        reads: Sequence[str] | Mapping[str, str],
        skipped: SkipCount,
        sizes: LearnedSizes,
        on_rows: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self.dataset, self.reads = dataset, reads
        self.store, self.job, self.work = store, job, work
        self.on_rows = on_rows
        self.speed = UdfSpeed()
        self.mapper = mapper
        self.waiting: dict[str, int] = {}
        self.skipped = skipped
        self.attempts = max((rule.attempts for rule in rules_of(skipped.policy) if isinstance(rule, Retry)), default=1)
        self.row_by_row = udf is not None and udf.form == "scalar"
        self.batch_size = work.sizing.batch_size or (udf.batch_size if udf else None)
        self.interval = work.sizing.checkpoint_interval
        self.fitting = sizes.outputs
        self.finished = 0.0
        self.sizes = sizes
        self.sizer = sizes.sizer = sizes.sizer or self._make_sizer(work.sizing, udf)

    def _make_sizer(self, sizing: Sizing, udf: UDF | None) -> CheckpointSizer:
        sizer = CheckpointSizer.of(
            sizing.checkpoint_size or (udf.checkpoint_size if udf else None),
            sizing.min_checkpoint_size or (udf.min_checkpoint_size if udf else None),
            sizing.max_checkpoint_size or (udf.max_checkpoint_size if udf else None),
            self.interval,
        )
        if self.row_by_row and sizing.watched:
            # A step is many calls then, and a job stops at its cap only between steps.
            return replace(sizer, seconds=_WATCHED_SECONDS, rows=sizer.least)
        return sizer

    def compute(
        self, fragment: FragmentWork, live: Ranges, run: Ranges, keep_last: bool = True
    ) -> Iterator[StepResult]:
        """Run the UDF on the live, selected rows of ``run``, in physical order.

        If it fails, or waits for a service at the end, the rows before are checkpointed. ``keep_last`` also writes a
        checkpoint of the last steps, which a caller that stages the whole fragment does not need.
        """
        pending = _PendingCheckpoint(self.store, self.work, fragment, ErrorLog(self.work, fragment, self.job))
        begun = deque[_BegunStep]()
        try:
            for rows in self._read(fragment, live, run):
                for step in self._begin_steps(rows, run, begun, pending):
                    begun.append(step)
                    while self._is_first_due(begun):
                        yield from self._finish(begun, pending)
            while begun:
                yield from self._finish(begun, pending)
            if self.waiting:
                raise StillWaiting(self.waiting)
        except BaseException:
            try:
                self._keep_succeeded(begun, pending)
                pending.flush()
            except StorageError as unkept:
                if self.waiting:
                    raise
                logger.warning(
                    "Cannot write a last checkpoint, so the rows computed since the one before are lost: %s", unkept
                )
            raise
        if keep_last:
            pending.flush()
        else:
            pending.errors.write()

    def _read(self, fragment: FragmentWork, live: Ranges, run: Ranges) -> Iterator[RowBatch]:
        limit = self.work.sizing.batch_bytes
        size = self.sizes.reads = self.sizes.reads or ReadSize.of(self.dataset, self.reads, limit, self.batch_size)
        for window in windows(run):
            yield from read_rows(self.dataset, fragment.files, live, window, self.reads, self.work.where, size)

    def _begin_steps(
        self, rows: RowBatch, run: Ranges, begun: Collection[_BegunStep], pending: _PendingCheckpoint
    ) -> Iterator[_BegunStep]:
        due = rows.mask(run)
        chosen = due
        if rows.selected is not None:
            chosen = rows.selected if due is None else due & rows.selected
        picked = None if chosen is None else np.flatnonzero(chosen)
        at, count, start, taken = 0, len(rows.offsets), rows.start, 0
        while at < count:
            # Size steps by the rows to run, not by the rows read: with a sparse filter, steps would be tiny.
            taken += self._step_rows(pending.rows + sum(len(step.offsets) for step in begun))
            if picked is None:
                until = min(taken, count)
            else:
                until = count if taken >= len(picked) else int(picked[taken - 1]) + 1
            end = rows.end if until == count else int(rows.offsets[until])
            yield self._begin_step(rows, slice(at, until), (start, end), due, chosen)
            at, start = until, end

    def _is_first_due(self, begun: Sequence[_BegunStep]) -> bool:
        """Whether to finish the first step before one more is begun; wait until that is clear.

        Of an async UDF as many calls wait as are in flight. A slow one holds up the others only when so many are done
        beyond it that their rows take the memory of a step, or that they are `_AHEAD` times as many.
        """
        at_a_time = self.mapper.calls_at_a_time
        rows = sum(len(step.offsets) for step in begun)
        calls = rows if self.row_by_row else len(begun)
        full = rows >= self._fitting_rows or sum(step.size for step in begun) >= self.work.sizing.batch_bytes
        while begun and not full and calls < _AHEAD * at_a_time:
            ended = LOOP.ended
            if not begun[0].calls.unfinished:
                break
            self.on_rows(0)  # what ended behind a slow call may have cost all that a cap allows
            if sum(step.calls.unfinished for step in begun) < 2 * at_a_time:
                return False
            LOOP.wait_for_call(ended)
        return bool(begun)

    @property
    def _fitting_rows(self) -> int:
        # A batch_size from the user wins over the margin for values that suddenly get much wider.
        return self.fitting.careful_rows if self.batch_size is None else self.fitting.rows

    def _step_rows(self, waiting: int) -> int:
        """Return the rows of the next step, while so many wait for a checkpoint or are begun."""
        size: float = self.sizer.rows
        if self.row_by_row and self.mapper.calls_at_a_time:
            size = self.mapper.calls_at_a_time
        if self.batch_size is not None:
            size = min(size, self.batch_size) if self.row_by_row else self.batch_size
        elif self.row_by_row:  # a job stops at its cap only between two steps
            threads = self.work.sizing.intra_applier_concurrency
            size = min(size, affordable_rows(self.sizes.computed, threads, self.attempts))
        size = min(size, self._fitting_rows)
        if self.sizer.most is not None:
            size = min(size, self.sizer.most - waiting % self.sizer.most)
        return int(size)

    def _begin_step(
        self, rows: RowBatch, part: slice, span: tuple[int, int], due: np.ndarray | None, chosen: np.ndarray | None
    ) -> _BegunStep:
        offsets, ids, batch = rows.offsets[part], rows.row_ids[part], rows.columns[part]
        looked_at = None
        if rows.selected is not None:
            looked_at = Ranges.from_offsets(offsets if due is None else offsets[due[part]])
        if chosen is not None and not (mask := chosen[part]).all():
            kept = np.flatnonzero(mask)
            offsets, ids = offsets[kept], ids[kept]
            batch = single_batch(rows_where(pa.Table.from_batches([batch]), pa.array(mask)))
        if self.mapper.needs_row_ids:
            batch = batch.append_column(ROW_ID, pa.array(ids, pa.uint64()))
        return _BegunStep(span, offsets, ids, looked_at, batch.nbytes, self.mapper.begin(batch))

    def _finish(self, begun: deque[_BegunStep], pending: _PendingCheckpoint) -> Iterator[StepResult]:
        """Wait for the first step, which leaves the queue, and keep its rows; yield it unless a service has them."""
        try:
            step = self._result(begun[0], pending)
        except StillWaiting as still:
            self.waiting |= still.batches
            begun.popleft()
            return
        begun.popleft()
        self._keep(step, pending)
        fault_point("apply.step")
        yield step
        if pending.is_due(self.interval, self.sizer.least, self.sizer.most):
            pending.flush()

    def _result(self, begun: _BegunStep, pending: _PendingCheckpoint) -> StepResult:
        span, offsets, ids = begun.span, begun.offsets, begun.ids
        at_work = max(begun.since, self.finished) if self.mapper.calls_at_a_time else time.monotonic()
        try:
            mapped = begun.calls.result()
        except UdfError as error:
            raise self._explained(error, begun, pending) from error
        self.finished = time.monotonic()
        seconds, size = self.finished - at_work, mapped.values.nbytes
        # What a call takes sizes a step; calls at the same time share the time that their rows took.
        self.sizer.record(len(offsets), self.finished - begun.since if self.mapper.calls_at_a_time else seconds)
        self.fitting.record(len(offsets), size)
        self.sizes.computed += len(offsets)
        loading = (0.0, 0) if self.speed.rows else (seconds, len(offsets))
        self.speed += UdfSpeed(len(offsets), seconds, *loading, size)
        failed = pending.errors.add(mapped.failures, offsets, ids)
        step = StepResult(span[0], span[1], encode_runs(offsets, ids), ids, mapped.values, begun.looked_at, failed)
        if mapped.failures:
            # Do not count rows that failed in an earlier job again: a limit would then fail every later job.
            before = Ranges.union(again for _, again in self.work.tried(pending.fragment)).mask(offsets)
            first = [failure for failure in mapped.failures if not before[failure.index]]
            try:
                self.skipped.add(Counter(failure.rule for failure in first))
            except UdfError:
                begun.kept = len(offsets)
                self._keep_last(step, pending)
                raise
        return step

    def _keep_succeeded(self, begun: Iterable[_BegunStep], pending: _PendingCheckpoint) -> None:
        """Cancel the calls of begun steps, and keep the rows that are done: they may have been paid for."""
        for step in begun:
            rows, values = step.calls.cancel()
            later = [at for at, row in enumerate(rows) if row >= step.kept]
            if later and values is not None:
                chosen = np.array([rows[at] for at in later])
                offsets, ids = step.offsets[chosen], step.ids[chosen]
                looked_at = None if step.looked_at is None else Ranges.from_offsets(offsets)
                span = (int(offsets[0]), int(offsets[-1]) + 1)
                found = values.take(pa.array(later))
                self._keep_last(StepResult(*span, encode_runs(offsets, ids), ids, found, looked_at), pending)

    def _keep(self, step: StepResult, pending: _PendingCheckpoint) -> None:
        if self.sizer.most is not None and pending.rows + len(step.values) > self.sizer.most:
            pending.flush()
        pending.add(step)
        self.skipped.add_failed(len(step.failed))
        self.on_rows(len(step.values))

    def _keep_last(self, step: StepResult, pending: _PendingCheckpoint) -> None:
        """Keep a step before an error is raised, which a reason to stop must not replace."""
        with suppress(StopComputing):
            self._keep(step, pending)

    def _explained(self, error: UdfError, begun: _BegunStep, pending: _PendingCheckpoint) -> UdfError:
        """Name the failing row in the error, and keep the step's rows before it."""
        fragment, span, offsets, ids = pending.fragment, begun.span, begun.offsets, begun.ids
        whole = f"fragment {fragment.id}{' of its source' if isinstance(self.work, RefreshSpec) else ''}"
        if error.row_index is None:
            where = f"rows {span[0]} to {span[1]} of {whole}"
        else:
            offset = int(offsets[error.row_index])
            where = f"row {offset} of {whole} (row address {fragment.id << 32 | offset})"
        if error.row_index and error.computed is not None:
            end, done = int(offsets[error.row_index]), ids[: error.row_index]
            runs = encode_runs(offsets[: error.row_index], done)
            failed = pending.errors.add(error.failures, offsets, ids)
            begun.kept = error.row_index
            self._keep_last(StepResult(span[0], end, runs, done, error.computed, None, failed), pending)
        if error.row_index is not None:
            pending.errors.add([fatal_failure(error, error.row_index)], offsets, ids)
            self.skipped.add_failed(1)
            with suppress(StopComputing):
                self.on_rows(1)
        target = f"{self.work.target}.{error.column}" if error.column else self.work.target
        version = None if isinstance(self.work, RefreshSpec) else self.work.udf_version
        cause, _, details = str(error).partition("\n")
        parts = [f"Computing {target} failed at {where}: {cause}", advise(error, version)]
        if not missing_package(str(error)):
            parts.append(details)
        text = self.work.with_source_paths("\n".join(part for part in parts if part))
        return UdfError(text, error.row_index, call=error.call)
