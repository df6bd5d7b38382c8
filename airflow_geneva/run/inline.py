"""Run a shard in this process, with the same units of work as on Spark."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol

from airflow_geneva.apply.skipped_rows import SkipCount, skipped_before
from airflow_geneva.job.folder import APPLY_PROGRESS, JobFolder, progress_name
from airflow_geneva.job.progress import EVERY_SECONDS, ProgressReporter
from airflow_geneva.lance_io.task_memory import return_large_buffers
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.shard import Shard
from airflow_geneva.run.units import RunUnit, Unit, UnitReport, whole_unit
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf.error_policy import Policy
from airflow_geneva.udf.shipping import UdfReference


class Udfs(Protocol):
    """The UDFs of a column or view: in this process, or as they are sent to the executors."""

    @property
    def udf_references(self) -> tuple[UdfReference, ...]: ...

    def policy(self) -> Policy: ...

    def prepare(self, location: TableLocation, work: JobSpec, before: Mapping[int, int]) -> tuple[RunUnit, SkipCount]:
        """Prepare a task; return a function that runs a unit, and the counter of skipped rows."""


def apply_inline(location: TableLocation, work: JobSpec, shard: Shard, udfs: Udfs) -> list[UnitReport]:
    """Compute and stage a shard in this process, one fragment after another.

    With an error policy or a timeout a UDF runs in a child process.

    Raises:
        UdfError: a UDF failed; rows computed before are checkpointed.
    """
    works = shard.to_apply
    if not works:
        return []
    do, skipped = udfs.prepare(location, work, skipped_before(location, work))
    reporter = open_reporter(location, work, shard)
    reporter.skipped = skipped.counted
    try:
        return run_units(do, [whole_unit(item) for item in works], reporter, work.sizing.intra_applier_concurrency)
    finally:
        reporter.keep()


def open_reporter(
    location: TableLocation, work: JobSpec, shard: Shard, every: float = EVERY_SECONDS
) -> ProgressReporter:
    """Start to report the progress of a shard, every so many seconds."""
    storage = JobFolder.of(location.checkpoints, work.job_id).storage
    rows, works = shard.rows_to_run, shard.to_apply
    held = sum(item.rows for item in works) - rows
    name = progress_name(APPLY_PROGRESS, shard.index)
    reporter = ProgressReporter(rows, len(works), storage, name, every=every, rows_held=held)
    reporter.keep()
    return reporter


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
