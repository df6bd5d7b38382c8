"""Compute a shard in this process: one unit after another, or several in threads. Spark's tasks run theirs so, too."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from airflow_geneva.apply.batch_api import StillWaiting
from airflow_geneva.apply.skipped_rows import skipped_before
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.meter import measured
from airflow_geneva.job.progress import EVERY_SECONDS, ProgressReporter, usage_of
from airflow_geneva.lance_io.task_memory import return_large_buffers
from airflow_geneva.limits.rate_limit import Meter
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.shard import Shard
from airflow_geneva.run import caps
from airflow_geneva.run.caps import CapReached
from airflow_geneva.run.prepare import Udfs, open_target, prepare
from airflow_geneva.run.units import RunUnit, Target, Unit, UnitReport, whole_unit
from airflow_geneva.storage.location import TableLocation


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
        target = opened.at_begin(len(units))
        with prepare(location, work, udfs, skipped_before(location, work), counting, target) as (do, skipped):
            reporter.skipped, reporter.failed = skipped.counted, lambda: skipped.failed

            def run(unit: Unit, report: Callable[[int], None]) -> UnitReport:
                def both(rows: int) -> None:
                    report(rows)
                    on_rows(rows)

                try:
                    return do(unit, both)
                except StillWaiting:
                    waiting.append(unit)
                    raise

            reports = run_units(run, units, reporter, work.sizing.intra_applier_concurrency)
        return [*reports, do.rest()]

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


def run_units(do: RunUnit, units: Sequence[Unit], reporter: ProgressReporter, threads: int = 1) -> list[UnitReport]:
    """Run units one after another, or several at a time in threads; the first error is raised at their end.

    A unit that waits for a service does not keep the others from being submitted.
    """
    return_large_buffers()
    lock = threading.Lock()

    def add_rows(rows: int) -> None:
        with lock:
            reporter.add_rows(rows)

    def run(unit: Unit) -> UnitReport:
        try:
            report = do(unit, add_rows)
        except StillWaiting as still:
            return UnitReport(False, waiting=still.batches)
        if report.staged:
            with lock:
                reporter.add_ready(unit.work.rows - report.failed)
        return report

    reports = list[UnitReport]()
    try:
        for report in map(run, units) if threads <= 1 or len(units) <= 1 else _in_threads(run, units, threads):
            reports.append(report)
    except CapReached as reached:
        reached.reports = reports
        raise
    return reports


def _in_threads(run: Callable[[Unit], UnitReport], units: Sequence[Unit], threads: int) -> Iterator[UnitReport]:
    """Run units in threads and yield their reports as they end; begin none after one has failed."""
    left = deque(units)

    def run_next() -> UnitReport | None:
        try:
            unit = left.popleft()
        except IndexError:
            return None
        try:
            return run(unit)
        except BaseException:
            left.clear()
            raise

    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in as_completed([pool.submit(run_next) for _ in units]):
                if (report := future.result()) is not None:
                    yield report
        finally:
            left.clear()
