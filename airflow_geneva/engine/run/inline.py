"""Compute a shard in this process. Spark's tasks run their units so, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace

from airflow_geneva.engine.apply.skipped_rows import skipped_before
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.meter import measured
from airflow_geneva.engine.job.progress import EVERY_SECONDS, ProgressReporter, usage_of
from airflow_geneva.engine.lance_io.task_memory import return_large_buffers
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.run import caps
from airflow_geneva.engine.run.prepare import Udfs, open_target, prepare
from airflow_geneva.engine.run.task import GRACE_SECONDS, TaskRunner
from airflow_geneva.engine.run.units import Target, Unit, UnitReport, whole_unit
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.services.limits.rate_limit import Meter

_TICK_SECONDS = 0.05


def apply_inline(
    location: TableLocation,
    work: JobSpec,
    shard: Shard,
    udfs: Udfs,
    on_rows: Callable[[int], None] = lambda rows: None,
    plan: str = "",
    target: Target | None = None,
    wait: Callable[[Mapping[str, int]], None] = lambda waiting: None,
    meter: Meter | None = None,
) -> list[UnitReport]:
    """Compute and stage a shard in this process; if a UDF fails, the rows computed before are checkpointed.

    Args:
        on_rows: called with the number of rows after every step; it may raise StopComputing.
        plan: fingerprint of the plan; without it, progress is only logged.
        target: the column or view, if it is open.
        wait: called with the rows that a service has, before it is asked again; it may raise StillWaiting.
        meter: counts what calls use.
    """
    works = shard.to_apply
    if not works:
        return []
    reporter, counting = open_reporter(location, work, shard, plan), meter or Meter()
    reporter.usage = lambda: counting.usage
    opened = target or open_target(location, work)

    def compute(units: Sequence[Unit]) -> list[UnitReport]:
        nonlocal opened
        target, opened = opened.at_begin(len(units)), replace(opened, listed=None)
        with prepare(location, work, udfs, skipped_before(location, work), counting, target) as (run, skipped):
            reporter.skipped, reporter.failed = skipped.counted, lambda: skipped.failed
            return run_units(run, units, reporter, on_rows, waiting.append)

    units, waiting, done = [whole_unit(item) for item in works], list[Unit](), list[UnitReport]()
    try:
        while units:
            waiting.clear()
            reports = compute(units)
            done += [report for report in reports if not report.waiting]
            # Batches are asked for until the last one is there.
            units = list(waiting)
            if units:
                reporter.keep()
                wait(sum(reports, UnitReport(True)).waiting)
        reporter.rows_failed = sum(report.failed for report in done)
        return done
    finally:
        reporter.keep()


def open_reporter(
    location: TableLocation, work: JobSpec, shard: Shard, plan: str, every: float = EVERY_SECONDS
) -> ProgressReporter:
    folder = JobFolder.of(location.checkpoints, work.job_id)
    index, rows, works = shard.index, shard.rows_to_run, shard.to_apply
    held = sum(item.rows for item in works) - rows
    every = min(every, caps.LOOK_SECONDS) if work.sizing.watched else every
    reporter = ProgressReporter(rows, len(works), every=every, rows_held=held)
    measured().reporters[index] = reporter
    if plan:
        reporter.used_before = usage_of([folder.read_shard(plan, index)])
        reporter.write = lambda progress: folder.update_shard(plan, index, applying=progress)
    reporter.keep()
    return reporter


def run_units(
    run: TaskRunner,
    units: Sequence[Unit],
    reporter: ProgressReporter,
    on_rows: Callable[[int], None] = lambda rows: None,
    on_waiting: Callable[[Unit], None] = lambda unit: None,
) -> list[UnitReport]:
    """Run the units of a task and report their progress; `on_waiting` is called with units that a service has."""
    return_large_buffers()
    reporter.busy = lambda: run.busy
    lock = threading.Lock()

    def add_unit(report: UnitReport, unit: Unit) -> None:
        with lock:
            if report.staged:
                reporter.add_ready(unit.work.rows - report.failed)
            if report.waiting:
                on_waiting(unit)

    with _Ticking(reporter) as ticking:

        def add_rows(rows: int) -> None:
            reporter.rows_done += rows
            ticking.check()
            on_rows(rows)

        return run(units, add_rows, add_unit)


class _Ticking:
    """Writes progress in a thread of its own, for the time of a block: the function does not wait for the store."""

    def __init__(self, reporter: ProgressReporter) -> None:
        self._reporter = reporter
        self._ended = threading.Event()
        self._stop: BaseException | None = None
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="geneva-progress", daemon=True
        )

    def check(self) -> None:
        """Raise what ended the thread: StopComputing if the job was stopped meanwhile."""
        if self._stop is not None:
            raise self._stop

    def _run(self) -> None:
        try:
            while not self._ended.wait(_TICK_SECONDS):
                self._reporter.tick()
        except BaseException as stop:
            self._stop = stop

    def __enter__(self) -> _Ticking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(None if error[0] is None else GRACE_SECONDS)
