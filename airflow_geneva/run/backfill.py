"""plan → apply → commit → finish in one call."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.job.result import BackfillResult, ShardResult
from airflow_geneva.location import TableLocation
from airflow_geneva.plan.values import Plan
from airflow_geneva.run.inline import apply_inline
from airflow_geneva.run.job import Stopwatch, commit_shard, fail_job, finish_job, start_job
from airflow_geneva.storage import is_engine_error

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF

logger = logging.getLogger("airflow_geneva.run")

RUNNERS = ("spark", "inline")


def check_runner(runner: str) -> None:
    """Refuse an unknown runner before anything is planned."""
    if runner not in RUNNERS:
        raise InvalidInput(f'There is no runner {runner!r}. Use runner="spark" or runner="inline".')


def run_backfill(plan: Plan, location: TableLocation, udf: UDF, runner: str, watch: Stopwatch) -> BackfillResult:
    """Carry a plan out in one call.

    Raises:
        JobFailed: something failed; ``.result`` says what was done all the same.
    """
    if runner == "spark" and any(shard.to_apply for shard in plan.shards):
        from airflow_geneva.run.spark import start_session

        start_session(plan.work)
    plan, saved = start_job(plan, location)
    watch.lap("plan")
    results: list[ShardResult] = []
    try:
        for shard in plan.shards:
            if shard.to_apply and runner == "spark":
                from airflow_geneva.run.spark import apply_in_session

                apply_in_session(location, plan.work, shard, udf)
            else:
                apply_inline(location, plan.work, shard, udf)
            watch.lap("apply")
            results.append(commit_shard(location, saved, shard))
            watch.lap("commit")
        result = finish_job(location, saved, results, watch.seconds)
    except BaseException as error:
        failed = fail_job(location, saved, results, error)
        if not is_engine_error(error):
            raise
        raise JobFailed(
            f"Backfill of {plan.work.table_name}.{plan.work.column} failed (job {plan.work.job_id}): {error}\n"
            "What was computed is kept in checkpoints; run it again to go on from there.",
            failed,
        ) from error
    watch.lap("finish")
    logger.info("%s", result)
    return result
