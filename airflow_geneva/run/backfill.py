"""Run a backfill in one call: plan → apply → commit → finish."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.heartbeat import writing_heartbeats
from airflow_geneva.job.result import BackfillResult, ShardResult
from airflow_geneva.lance_io.engine_errors import is_failure
from airflow_geneva.lance_io.table_versions import reporting_remade
from airflow_geneva.plan.model import Plan
from airflow_geneva.plan.saved_plan import SavedPlan
from airflow_geneva.plan.shard import Shard
from airflow_geneva.run.column_stages import Stopwatch, commit_shard, fail_job, failure_message, finish_job, record_job
from airflow_geneva.run.column_target import ColumnUdf
from airflow_geneva.run.inline import apply_inline
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf.shipping import UdfReference

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF

logger = logging.getLogger("airflow_geneva.run")

RUNNERS = ("spark", "inline")


def check_runner(runner: str) -> None:
    """Reject an unknown runner before planning."""
    if runner not in RUNNERS:
        raise InvalidInput(f'There is no runner {runner!r}. Use runner="spark" or runner="inline".')


@dataclass(frozen=True)
class PreparedBackfill:
    """A backfill whose record and plan are written, and that has not run yet.

    Args:
        plan, saved: the plan in memory and as stored.
        location: the table.
        udf: the loaded UDF.
        runner: ``spark`` or ``inline``.
        watch: measures the time of each stage.
    """

    plan: Plan
    saved: SavedPlan
    location: TableLocation
    udf: UDF
    runner: str
    watch: Stopwatch


def run_backfill(plan: Plan, location: TableLocation, udf: UDF, runner: str, watch: Stopwatch) -> BackfillResult:
    """Run a plan from start to end.

    Raises:
        JobFailed: something failed; ``.result`` says what was completed before.
    """
    return run_prepared(prepare_backfill(plan, location, udf, runner, watch))


def prepare_backfill(plan: Plan, location: TableLocation, udf: UDF, runner: str, watch: Stopwatch) -> PreparedBackfill:
    """Start the session if the backfill needs one, and write the job's record and plan.

    Raises:
        JavaNotFound: there is no active session, and no Java to start one.
        StorageError: the table's folder is read-only or unreachable.
    """
    if runner == "spark" and any(shard.to_apply for shard in plan.shards):
        from airflow_geneva.spark.session import open_session

        watch.lap("plan")
        open_session(plan.work.sizing.concurrency)
        watch.lap("spark")
    plan, saved = record_job(plan, location)
    watch.lap("plan")
    return PreparedBackfill(plan, saved, location, udf, runner, watch)


def run_prepared(started: PreparedBackfill) -> BackfillResult:
    """Compute and commit the shards one after another, and finish the job.

    Raises:
        JobFailed: something failed; ``.result`` says what was completed before.
    """
    plan, saved, location, watch = started.plan, started.saved, started.location, started.watch
    folder = JobFolder.of(location.checkpoints, plan.work.job_id)
    job = folder.storage
    results: list[ShardResult] = []
    try:
        with reporting_remade(saved.work.tables, location.options):
            for shard in plan.shards:
                with folder.recording_failure(saved.fingerprint, shard.index):
                    with writing_heartbeats(job, "apply"):
                        _apply(started, shard)
                    watch.lap("apply")
                    with writing_heartbeats(job, "commit"):
                        results.append(commit_shard(location, saved, shard))
                    watch.lap("commit")
            with writing_heartbeats(job, "finish") if plan.shards else nullcontext():
                result = finish_job(location, saved, results, watch.seconds)
    except BaseException as error:
        failed = fail_job(location, saved, results, error, watch.seconds)
        if not is_failure(error):
            raise
        raise JobFailed(failure_message(f"Backfill of {plan.work.target}", plan.work.job_id, error), failed) from error
    logger.info("%s", result)
    return result


def _apply(started: PreparedBackfill, shard: Shard) -> None:
    if shard.to_apply and started.runner == "spark":
        from airflow_geneva.spark.tasks import apply_in_session

        apply_in_session(started.location, started.plan.work, shard, ColumnUdf(UdfReference.of(started.udf)))
    else:
        apply_inline(started.location, started.plan.work, shard, ColumnUdf(started.udf))
