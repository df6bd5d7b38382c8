"""Run a shard in this process, with the same units of work as on Spark."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from airflow_geneva.apply.skipped_rows import SkipCount, skipped_before
from airflow_geneva.job.folder import APPLY_PROGRESS, JobFolder, progress_name
from airflow_geneva.job.progress import ProgressReporter
from airflow_geneva.lance_io.task_memory import return_large_buffers
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.shard import Shard
from airflow_geneva.run.column_target import BackfillContext
from airflow_geneva.run.column_task import UdfRunner, run_unit
from airflow_geneva.run.units import RunUnit, Unit, UnitReport, whole_unit
from airflow_geneva.storage.location import TableLocation

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF


def apply_inline(location: TableLocation, work: JobSpec, shard: Shard, udf: UDF) -> list[UnitReport]:
    """Compute a shard in this process, one fragment after another.

    With an error policy or a timeout the UDF runs in a child process.

    Raises:
        UdfError: the UDF failed; rows computed before are checkpointed.
    """
    if not shard.to_apply:
        return []
    unit_context = BackfillContext.at(location, work)
    udf_runner = UdfRunner.of(udf, work, skipped_before(location, work))
    return run_shard_inline(
        location,
        work,
        shard,
        lambda unit, on_rows: run_unit(unit_context, unit, udf_runner, on_rows),
        udf_runner.skipped,
    )


def run_shard_inline(
    location: TableLocation, work: JobSpec, shard: Shard, do: RunUnit, skipped: SkipCount
) -> list[UnitReport]:  # fmt: skip
    """Run all units of a shard in this process.

    Raises:
        UdfError: the UDF failed; rows computed before are checkpointed.
    """
    works = shard.to_apply
    if not works:
        return []
    storage = JobFolder.of(location.checkpoints, work.job_id).storage
    rows = sum(min(item.rows, len(item.missing)) for item in works)
    held = sum(item.rows for item in works) - rows
    reporter = ProgressReporter(rows, len(works), storage, progress_name(APPLY_PROGRESS, shard.index), rows_held=held)
    reporter.skipped = skipped.counted
    reporter.keep()
    try:
        return run_units(do, [whole_unit(item) for item in works], reporter, work.sizing.intra_applier_concurrency)
    finally:
        reporter.keep()


def run_units(do: RunUnit, units: Sequence[Unit], reporter: ProgressReporter, threads: int = 1) -> list[UnitReport]:
    """Run units one after another, or several at a time in threads.

    Args:
        do: runs one unit, and reports rows as they are computed.
        reporter: counts rows and fragments.

    Raises:
        UdfError: the error of the first unit that failed, raised after running units have ended.
    """
    return_large_buffers()
    if threads <= 1 or len(units) <= 1:
        reports = []
        for unit in units:
            reports.append(do(unit, reporter.add_rows))
            if reports[-1].staged:
                reporter.add_ready(unit.work.rows)
        return reports
    lock = threading.Lock()

    def add_rows(rows: int) -> None:
        with lock:
            reporter.add_rows(rows)

    reports = []
    with ThreadPoolExecutor(threads) as pool:
        futures = {pool.submit(do, unit, add_rows): unit for unit in units}
        try:
            for future in as_completed(futures):
                reports.append(future.result())
                if reports[-1].staged:
                    reporter.add_ready(futures[future].work.rows)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return reports
