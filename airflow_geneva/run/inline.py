"""Run a plan in this process: the very same units as on Spark."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from airflow_geneva.job.progress import Reporter
from airflow_geneva.job.record import JobFolder
from airflow_geneva.location import TableLocation
from airflow_geneva.plan.values import Shard, Work
from airflow_geneva.run.task import Bench, UnitReport, run_unit
from airflow_geneva.run.units import Unit, whole_unit

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF


def apply_inline(location: TableLocation, work: Work, shard: Shard, udf: UDF) -> list[UnitReport]:
    """Compute a shard in this process, fragment by fragment.

    Raises:
        UdfError: the UDF failed; what was computed before it did is kept.
    """
    works = shard.to_apply
    if not works:
        return []
    storage = JobFolder.of(location.checkpoints, work.job_id).storage
    rows = sum(min(item.rows, len(item.missing)) for item in works)
    reporter = Reporter(rows, len(works), storage, f"progress-{shard.index:04}.json")
    return run_units(
        Bench.at(location, work), [whole_unit(item) for item in works], udf, reporter,
        work.sizing.intra_applier_concurrency,
    )  # fmt: skip


def run_units(
    bench: Bench, units: Sequence[Unit], udf: UDF, reporter: Reporter, threads: int = 1
) -> list[UnitReport]:  # fmt: skip
    """Run units one after another, or several at a time in threads.

    Raises:
        UdfError: of the first unit that failed, after the running ones have ended.
    """
    if threads <= 1 or len(units) <= 1:
        reports = []
        for unit in units:
            reports.append(run_unit(bench, unit, udf, reporter.add_rows))
            reporter.ready += reports[-1].staged
        return reports
    lock = threading.Lock()

    def add_rows(rows: int) -> None:
        with lock:
            reporter.add_rows(rows)

    reports = []
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(run_unit, bench, unit, udf, add_rows) for unit in units]
        try:
            for future in as_completed(futures):
                reports.append(future.result())
                reporter.ready += reports[-1].staged
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return reports
