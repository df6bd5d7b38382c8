"""Carry out a stored plan, of a column or a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from airflow_geneva.errors import InvalidInput
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.result import BackfillResult, ShardResult
from airflow_geneva.lance_io.table_versions import reporting_remade
from airflow_geneva.plan.model import JobSpec, RefreshSpec
from airflow_geneva.plan.saved_plan import SavedPlan
from airflow_geneva.plan.shard import Shard
from airflow_geneva.run.column_stages import commit_shard, finish_job
from airflow_geneva.run.column_target import ColumnTarget, ColumnUdf
from airflow_geneva.run.inline import Udfs, apply_inline
from airflow_geneva.run.units import Target, UnitReport, is_shard_staged
from airflow_geneva.run.view_stages import fail_refresh, finish_refresh, verify_shard
from airflow_geneva.run.view_target import ViewTarget, ViewUdfs
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf import load_udf
from airflow_geneva.udf.shipping import UdfReference


def planned_udfs(work: JobSpec) -> Udfs:
    """Return the UDFs of a plan, in the planned versions.

    Raises:
        InvalidInput: the plan has a UDF without an import path.
    """
    if isinstance(work, RefreshSpec):
        return ViewUdfs.planned(work.query)
    if work.definition.import_path is None:
        raise InvalidInput(
            f"UDF {work.udf_name!r} has no import path, so no other process can load it. Move it to a module."
        )
    return ColumnUdf(UdfReference(work.definition.import_path, work.udf_version))


def has_planned_version(udfs: Udfs) -> bool:
    """Whether this process has the planned code versions.

    Raises:
        InvalidInput: a UDF cannot be imported here.
    """
    return all(
        load_udf(str(udf_reference.import_path)).code_version == udf_reference.version
        for udf_reference in udfs.udf_references
    )


def apply_in_process(location: TableLocation, work: JobSpec, shard: Shard, udfs: Udfs) -> list[UnitReport]:
    """Compute and stage a shard in this process.

    Raises:
        UdfError: a UDF failed; rows computed before are checkpointed.
        TableRemade: a table was dropped and created again.
    """
    with reporting_remade(work.tables, location.options):
        return apply_inline(location, work, shard, udfs)


def is_shard_ready(location: TableLocation, work: JobSpec, shard: Shard) -> bool:
    """Whether a shard is computed and staged, so that only the commit is left."""
    target: Target = ViewTarget.at(location, work) if isinstance(work, RefreshSpec) else ColumnTarget.at(location, work)
    return is_shard_staged(target, shard)


def commit_stored_shard(location: TableLocation, saved: SavedPlan, shard: Shard) -> ShardResult:
    """Commit a shard of a column; verify a shard of a view, which is swapped at the end.

    Raises:
        CommitConflict: other writers kept changing the table until all retries were used.
        TableRemade: a table was dropped and created again.
    """
    with reporting_remade(saved.work.tables, location.options):
        return (verify_shard if isinstance(saved.work, RefreshSpec) else commit_shard)(location, saved, shard)


def finish_stored_plan(
    location: TableLocation, saved: SavedPlan, committed: Sequence[ShardResult], seconds: Mapping[str, float]
) -> BackfillResult:
    """Add up a job and record how it ended: FAILED if a shard is missing; otherwise swap a view.

    Args:
        committed: the recorded results of the plan's shards.

    Raises:
        InvalidInput: the plan's documents were removed or changed.
        CommitConflict: other writers kept changing the view until all retries were used.
        TableRemade: a table was dropped and created again.
    """
    with reporting_remade(saved.work.tables, location.options):
        return _finish(location, saved, committed, seconds)


def _finish(
    location: TableLocation, saved: SavedPlan, committed: Sequence[ShardResult], seconds: Mapping[str, float]
) -> BackfillResult:
    if not isinstance(saved.work, RefreshSpec):
        return finish_job(location, saved, committed, seconds)
    there = {result.shard for result in committed}
    missing = [index for index in range(len(saved.shards)) if index not in there]
    if missing:
        return fail_refresh(location, saved, missing, seconds)
    job = JobFolder.of(location.checkpoints, saved.work.job_id).storage
    shards = [saved.load_shard(job, index) for index in range(len(saved.shards))]
    return finish_refresh(location, saved, saved.load_swap(job), shards, seconds)
