"""Compute a shard in this process. Spark's tasks run their units in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import replace

from airflow_geneva.engine.apply.skipped_rows import skipped_before
from airflow_geneva.engine.job.folder import ShardDocuments
from airflow_geneva.engine.job.meter import JobMeter
from airflow_geneva.engine.job.progress import EVERY_SECONDS, ProgressReporter, usage_of
from airflow_geneva.engine.lance_io.task_memory import return_large_buffers
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.run import caps
from airflow_geneva.engine.run.prepare import Udfs, open_target, prepare
from airflow_geneva.engine.run.task import GRACE_SECONDS, TaskRunner
from airflow_geneva.engine.run.units import Target, Unit, UnitReport, whole_unit
from airflow_geneva.engine.runtime import threading
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.requests import RequestMeter

_TICK_SECONDS = 0.05


def apply_inline(
    location: TableLocation,
    spec: JobSpec,
    shard: Shard,
    udfs: Udfs,
    on_rows: Callable[[int], None] = lambda rows: None,
    documents: ShardDocuments | None = None,
    target: Target | None = None,
    wait: Callable[[Mapping[str, int]], None] = lambda waiting: None,
    meter: Meter | None = None,
) -> list[UnitReport]:
    """Compute and stage a shard in this process; if a UDF fails, the rows computed before are checkpointed.

    Args:
        on_rows: called with the number of rows after every step; it may raise StopComputing.
        documents: where progress is recorded; without them it is only logged.
        target: the column or view, if it is already open.
        wait: called with the rows that a service has, before it is polled again; it may raise StillWaiting.
        meter: counts the usage of calls.
    """
    tasks = shard.to_apply
    if not tasks:
        return []
    reporter, counting = open_reporter(spec, shard, documents), meter or Meter()
    reporter.usage = lambda: counting.usage
    opened = target or open_target(location, spec)
    units, done = [whole_unit(item) for item in tasks], list[UnitReport]()
    try:
        while units:
            begun, opened = opened.at_begin(len(units)), replace(opened, listed=None)
            with (
                prepare(location, spec, udfs, skipped_before(location, spec), counting, begun) as task,
                Reporting(reporter, task, on_rows) as reporting,
            ):
                reports = task.run(units, reporting.add_rows, reporting.add_unit)
            done += [report for report in reports if not report.waiting]
            # Poll the batches until the last one has arrived.
            units = reporting.waiting
            if units:
                reporter.keep()
                reporter.look()
                wait(sum(reports, UnitReport(True)).waiting)
        reporter.rows_failed = sum(report.failed for report in done)
        return done
    except caps.CapReached as reached:
        reached.reports = [*done, *reached.reports]
        raise
    finally:
        reporter.keep()


def open_reporter(
    spec: JobSpec, shard: Shard, documents: ShardDocuments | None, every: float = EVERY_SECONDS
) -> ProgressReporter:
    index, rows, tasks = shard.index, shard.rows_to_run, shard.to_apply
    held = sum(item.rows for item in tasks) - rows
    every = min(every, caps.LOOK_SECONDS) if spec.sizing.watched else every
    reporter = ProgressReporter(rows, len(tasks), every=every, rows_held=held, store_requests=RequestMeter())
    JobMeter.current().reporters[index] = reporter
    if documents is not None:
        reporter.used_before = usage_of([documents.read()])
        reporter.write = lambda progress: documents.update(applying=progress)
        reporter.check = lambda: caps.stop_if_canceled(documents.folder)
    reporter.keep()
    return reporter


class Reporting:
    """Reports the progress of a task during a block, in a thread, so that the function does not wait for the store.

    Args:
        on_rows: called with the number of rows after every step.
    """

    def __init__(
        self, reporter: ProgressReporter, task: TaskRunner, on_rows: Callable[[int], None] = lambda rows: None
    ) -> None:
        self.waiting: list[Unit] = []
        """The units with rows that a service has not answered yet."""
        self._reporter = reporter
        reporter.busy = lambda: task.busy
        reporter.skipped, reporter.failed = task.skipped.counted, lambda: task.skipped.failed
        self._on_rows = on_rows
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._stop: BaseException | None = None
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="geneva-progress", daemon=True
        )

    def add_rows(self, rows: int) -> None:
        """Count computed rows, or raise the error that ended the thread: StopComputing if the job was stopped."""
        self._reporter.rows_done += rows
        if self._stop is not None:
            raise self._stop
        self._on_rows(rows)

    def add_unit(self, report: UnitReport, unit: Unit) -> None:
        """Count a unit that is done, or collect a waiting one."""
        with self._lock:
            if report.staged:
                self._reporter.add_ready(unit.task.rows - report.failed)
            if report.waiting:
                self.waiting.append(unit)

    def _run(self) -> None:
        try:
            while not self._ended.wait(_TICK_SECONDS):
                self._reporter.tick()
        except BaseException as stop:
            self._stop = stop

    def __enter__(self) -> Reporting:
        return_large_buffers()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(None if error[0] is None else GRACE_SECONDS)
