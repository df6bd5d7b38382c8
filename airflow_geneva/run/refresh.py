"""Run a refresh of a view in one call: plan → apply → verify → swap."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from airflow_geneva.commit.view_state import CommittedViewState
from airflow_geneva.errors import JobFailed
from airflow_geneva.faults import fault_point
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.heartbeat import writing_heartbeats
from airflow_geneva.job.result import FAILED, PENDING, BackfillResult
from airflow_geneva.lance_io.engine_errors import is_failure
from airflow_geneva.lance_io.table_versions import reporting_cleaned_up, reporting_remade
from airflow_geneva.plan.model import JobSpec, Plan
from airflow_geneva.plan.refresh import plan_refresh
from airflow_geneva.plan.request import RefreshRequest
from airflow_geneva.plan.saved_plan import SavedPlan, save_plan
from airflow_geneva.plan.shard import Shard
from airflow_geneva.run.column_stages import (
    Stopwatch,
    failure_message,
    log_reused_checkpoints,
    record_failure,
    shard_sizes,
    store_code,
)
from airflow_geneva.run.inline import apply_inline
from airflow_geneva.run.view_stages import finish_refresh
from airflow_geneva.run.view_target import ViewUdfs
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf import UDF, load_stored_udf
from airflow_geneva.views.definition import ViewDefinition

logger = logging.getLogger("airflow_geneva.run")


def load_udfs(definition: ViewDefinition) -> dict[str, UDF]:
    """Import the UDFs of a view, by column.

    Raises:
        InvalidInput: one cannot be imported here.
    """
    return {column.name: load_stored_udf(str(column.udf.import_path)) for column in definition.columns if column.udf}


def plan(view: TableLocation, definition: ViewDefinition, source: TableLocation, request: RefreshRequest) -> Plan:
    """Plan a refresh; writes nothing. Raises as :func:`airflow_geneva.plan.refresh.plan_refresh`."""
    udfs = load_udfs(definition)
    dataset = view.open()
    with reporting_cleaned_up(view, dataset):
        return plan_refresh(view, definition, source, udfs, CommittedViewState(view, dataset), request)


def run_refresh(
    view: TableLocation,
    definition: ViewDefinition,
    source: TableLocation,
    request: RefreshRequest,
    runner: str,
) -> BackfillResult:
    """Run a refresh from start to end.

    Raises:
        InvalidInput, CodeChanged: nothing was started.
        JobFailed: the job failed; ``.result`` says what was completed before.
    """
    watch = Stopwatch()
    made = plan(view, definition, source, request)
    assert made.swap is not None
    if runner == "spark" and any(shard.to_apply for shard in made.shards):
        from airflow_geneva.spark.session import open_session

        watch.lap("plan")
        open_session(made.work.sizing.concurrency)
        watch.lap("spark")
    saved = record_refresh(made, view)
    watch.lap("plan")
    job = JobFolder.of(view.checkpoints, made.work.job_id)
    udfs = load_udfs(definition)
    try:
        with reporting_remade(saved.work.tables, view.options):
            for shard in made.shards:
                with writing_heartbeats(job.storage, "apply"), job.recording_failure(saved.fingerprint, shard.index):
                    apply_shard(view, definition, udfs, made.work, shard, runner)
                watch.lap("apply")
            with writing_heartbeats(job.storage, "finish") if made.shards else nullcontext():
                result = finish_refresh(view, saved, made.swap, made.shards, watch.seconds)
    except BaseException as error:
        failed = BackfillResult(made.work.job_id, FAILED, rows_skipped=made.rows_skipped, rows_left=made.rows_pending)
        record_failure(view, failed, error)
        if not is_failure(error):
            raise
        raise JobFailed(failure_message(f"Refresh of view {view.name!r}", made.work.job_id, error), failed) from error
    logger.info("%s", result)
    return result


def record_refresh(
    made: Plan, view: TableLocation, run: str = "", ship_code: bool = False, about: Mapping[str, Any] | None = None
) -> SavedPlan:
    """Write a refresh's record and plan; from then on any process can resume the job.

    Args:
        run: distinguishes two runs of one plan.
        ship_code: store the code of the UDFs beside the plan, for workers that do not have it.
        about: more fields for the job record, e.g. the Airflow run.

    Raises:
        StorageError: the view's folder is read-only or unreachable.
    """
    folder = JobFolder.of(view.checkpoints, made.work.job_id)
    if ship_code and made.shards:
        made = made.with_work(codes=store_code(made.work, folder.storage))
    if made.shards or (made.swap and (made.swap.gone or made.swap.advances)):
        made = made.with_work(tables=tuple(table.stamped(view.options) for table in made.work.tables))
    work = made.work
    folder.write_record(
        {
            **work.describe(),
            "state": PENDING,
            "rows_total": made.rows_total,
            "rows_pending": made.rows_pending,
            "shards": len(made.shards),
            "reasons": made.reasons,
            **(about or {}),
        }
    )
    fault_point("plan.recorded")
    alive = writing_heartbeats(folder.storage, "plan") if made.shards else nullcontext()
    with reporting_remade(work.tables, view.options), alive:
        saved = save_plan(made, folder.storage, run)
        if made.shards:
            folder.write_planned(saved.fingerprint, [shard_sizes(shard) for shard in made.shards])
    fault_point("plan.saved")
    log_reused_checkpoints(made)
    return saved


def apply_shard(
    view: TableLocation, definition: ViewDefinition, udfs: Mapping[str, UDF], work: JobSpec, shard: Shard, runner: str
) -> None:
    """Compute a shard and stage its rows."""
    if shard.to_apply and runner == "spark":
        from airflow_geneva.spark.tasks import apply_in_session

        apply_in_session(view, work, shard, ViewUdfs.of(definition, udfs).sent())
        return
    apply_inline(view, work, shard, ViewUdfs.of(definition, udfs))
