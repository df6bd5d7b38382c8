"""The stages of a backfill job other than apply: start it, commit its shards, finish it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from airflow_geneva.checkpoint.facts import append_ledger, fold_ledgers, seen
from airflow_geneva.checkpoint.provenance import version_label
from airflow_geneva.commit.column import ShardCommitter
from airflow_geneva.commit.verify import Candidate
from airflow_geneva.errors import StorageError, TableRemade
from airflow_geneva.faults import fault_point
from airflow_geneva.job.error_records import count_errors
from airflow_geneva.job.folder import COMMITTING, JobFolder, progress_name
from airflow_geneva.job.heartbeat import writing_heartbeats
from airflow_geneva.job.outbox import JOB_PROPERTY, find_commits
from airflow_geneva.job.progress import ProgressReporter
from airflow_geneva.job.result import FAILED, PENDING, BackfillResult, ShardResult, combine_shards
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.lance_io.filters import where_columns
from airflow_geneva.lance_io.fragments import columns_of
from airflow_geneva.lance_io.table_versions import reporting_remade
from airflow_geneva.plan.model import BackfillSpec, CodeArchive, JobSpec, Plan
from airflow_geneva.plan.saved_plan import SavedPlan, save_plan
from airflow_geneva.plan.shard import Shard
from airflow_geneva.run.column_target import ColumnTarget
from airflow_geneva.run.housekeeping import run_maintenance
from airflow_geneva.run.units import staged_or_restaged
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf.definition import MIXED_VERSIONS_KEY
from airflow_geneva.udf.shipping import code_sha256, zip_code

logger = logging.getLogger("airflow_geneva.run")
_MIXED = "mixed:"


def store_code(work: JobSpec, job: Storage) -> tuple[CodeArchive, ...]:
    """Store the UDFs' modules or packages beside the plan, each once, so that the whole run uses the planned code."""
    modules = {udf.import_path.partition(":")[0]: udf.import_path for udf in work.udfs if udf.import_path}
    found = {}
    for path in modules.values():
        archive = zip_code(path)
        if archive is not None:
            digest = code_sha256(archive)
            found[digest] = CodeArchive(f"code-{digest[:16]}.zip", digest)
            job.write_bytes(found[digest].zip, archive)
    return tuple(found.values())


def record_job(
    plan: Plan, location: TableLocation, run: str = "", ship_code: bool = False, about: Mapping[str, Any] | None = None
) -> tuple[Plan, SavedPlan]:
    """Write a job's record and plan; from then on any process can resume the job.

    Args:
        run: distinguishes two runs of one plan.
        ship_code: store the UDF's code beside the plan, for workers that do not have it.
        about: more fields for the job record, e.g. the Airflow run.

    Raises:
        StorageError: the table's folder is read-only or unreachable.
        TableRemade: the table was dropped and created again.
    """
    work = plan.work
    assert isinstance(work, BackfillSpec)
    folder = JobFolder.of(location.checkpoints, work.job_id)
    if plan.shards:
        plan = plan.with_work(tables=(work.written.stamped(location.options),))
    if ship_code:
        plan = plan.with_work(codes=store_code(work, folder.storage))
    folder.write_record(
        {
            **work.describe(),
            "state": PENDING,
            "rows_total": plan.rows_total,
            "rows_pending": plan.rows_pending,
            "shards": len(plan.shards),
            "reasons": plan.reasons,
            **(about or {}),
        }
    )
    fault_point("plan.recorded")
    alive = writing_heartbeats(folder.storage, "plan") if plan.shards else nullcontext()
    with reporting_remade(plan.work.tables, location.options), alive:
        append_ledger(location.checkpoints, work.field_id, work.job_id, plan.learned)
        saved = save_plan(plan, folder.storage, run)
        if plan.shards:
            folder.write_planned(saved.fingerprint, [shard_sizes(shard) for shard in plan.shards])
    fault_point("plan.saved")
    log_reused_checkpoints(plan)
    return plan, saved


def log_reused_checkpoints(plan: Plan) -> None:
    """Log which checkpoints a job reuses, and which it cannot use."""
    fragments, rows = plan.rows_held
    target = plan.work.target
    if fragments:
        logger.info("Collected %s checkpointed fragments with %s rows for %s.", f"{fragments:,}", f"{rows:,}", target)
    for mismatch in plan.mismatches.shown:
        logger.warning("Checkpoint data files mismatch for %s, %s; it is not used.", target, mismatch)
    if plan.mismatches.more:
        logger.warning(
            "Checkpoint data files mismatch for %s in %s more fragments.", target, f"{plan.mismatches.more:,}"
        )


def shard_sizes(shard: Shard) -> dict[str, int]:
    """Return the sizes of a shard for the job's record, before it runs."""
    staged = [fragment.rows for fragment in shard.fragments if fragment.staged]
    held = sum(fragment.rows for fragment in shard.to_apply) - shard.rows_to_run
    return {
        "rows": shard.rows,
        "fragments": len(shard.fragments),
        "staged": len(staged),
        "rows_staged": sum(staged),
        "rows_held": held,
    }


def commit_shard(location: TableLocation, saved: SavedPlan, shard: Shard) -> ShardResult:
    """Commit a shard's staged fragments; restage from checkpoints what was removed.

    Raises:
        CommitConflict: other writers kept changing the table until all retries were used.
        TableRemade: the table was dropped and created again.
    """
    began = time.monotonic()
    work = saved.work
    assert isinstance(work, BackfillSpec)
    target = ColumnTarget.at(location, work)
    candidates: list[Candidate] = []
    missing: list[tuple[int, str]] = []
    for fragment in shard.fragments:
        index = target.index(fragment)
        staged = staged_or_restaged(target, fragment, index)
        if staged is None:
            was_staged = index.staged_at(fragment.place) is not None
            gone, never = "its staged data file is gone or no longer fits", "not all of its rows are computed"
            missing.append((fragment.id, gone if was_staged else never))
            continue
        candidates.append(Candidate(fragment, staged))
    committer = ShardCommitter(
        location.open,
        location.checkpoints,
        work,
        columns_of(
            target.source,
            work.inputs,
            where_columns(work.where, target.source.schema.names),
            work.column,
        ),
        target.source,
        saved.fingerprint,
        len(saved.shards),
    )
    folder = JobFolder.of(location.checkpoints, saved.work.job_id)
    ready = sum(candidate.work.rows for candidate in candidates)
    reporter = ProgressReporter(
        shard.rows,
        len(shard.fragments),
        folder.storage,
        progress_name(COMMITTING, shard.index),
        rows_ready=ready,
        ready=len(candidates),
    )
    reporter.keep()
    result = committer.commit(shard, candidates, missing, reporter.set_committed)
    result = replace(result, seconds=round(time.monotonic() - began, 3))
    folder.write_shard("commit", saved.fingerprint, shard.index, result.to_json())
    return result


def finish_job(
    location: TableLocation, saved: SavedPlan, shards: Iterable[ShardResult], seconds: Mapping[str, float] | None = None
) -> BackfillResult:
    """Add up the shards, fold the column's ledgers, and record how the job ended: FAILED if a shard is missing."""
    work = saved.work
    assert isinstance(work, BackfillSpec)
    began = time.monotonic()
    fault_point("finish.begin")
    shards = list(shards)
    record_mixed_versions(location, work, shards, whole=len({shard.shard for shard in shards}) == len(saved.shards))
    result, missing = _combine_shards(location, saved, shards)
    result = result.with_seconds(**(seconds or {}))
    if not {version for shard in shards for version in shard.versions} <= set(result.commits):
        work.written.look(location.options)
    error = None
    if missing:
        result = replace(result, state=FAILED)
        error = missing_shards_error(JobFolder.of(location.checkpoints, work.job_id), saved, missing)
    if result.commits:
        append_ledger(location.checkpoints, work.field_id, work.job_id, [seen(result.version)])
    folded = fold_ledgers(location.checkpoints, work.field_id)
    folder = JobFolder.of(location.checkpoints, work.job_id)
    errors = count_errors(folder.storage) if saved.shards else 0
    result = result.with_seconds(finish=time.monotonic() - began)
    folder.write_result(result.state, result.to_json(), error, errors)
    if folded and not missing:
        run_maintenance(location, work)
    fault_point("finish.end")
    return result


def missing_shards_error(folder: JobFolder, saved: SavedPlan, missing: Sequence[int]) -> str:
    """Return the error for a job's record when shards were not committed."""
    error = f"{len(missing)} of {len(saved.shards)} shards were not committed: {missing[:20]}."
    failed = folder.read_shard("failed", saved.fingerprint, missing[0])
    return error if failed is None else f"{error} Shard {missing[0]}: {failed['error']}"


def fail_job(
    location: TableLocation,
    saved: SavedPlan,
    shards: Iterable[ShardResult],
    error: BaseException,
    seconds: Mapping[str, float] | None = None,
) -> BackfillResult:
    """Record that a job failed, and which rows it committed before; other computed rows stay in checkpoints."""
    result = replace(_combine_shards(location, saved, shards)[0], state=FAILED).with_seconds(**(seconds or {}))
    record_failure(location, result, error)
    return result


def failure_message(what: str, job_id: str, error: BaseException) -> str:
    """Return the error message of a job; if the table was created again, no checkpoint is left."""
    kept = "\nComputed rows are kept in checkpoints; run it again to continue from there."
    return f"{what} failed (job {job_id}): {error}{'' if isinstance(error, TableRemade) else kept}"


def record_failure(location: TableLocation, result: BackfillResult, error: BaseException) -> None:
    """Write the result of a failed job; a failed write is only logged."""
    folder = JobFolder.of(location.checkpoints, result.job_id)
    message = str(error) or type(error).__name__
    try:
        folder.write_result(FAILED, result.to_json(), message, count_errors(folder.storage))
    except StorageError as unkept:
        # The caller raises the original error.
        logger.warning("Cannot record that job %s failed: %s", result.job_id, unkept)


def _combine_shards(
    location: TableLocation, saved: SavedPlan, shards: Iterable[ShardResult]
) -> tuple[BackfillResult, list[int]]:
    """Combine the committed shards into one result, and list the missing shards; their rows count as left."""
    work = saved.work
    assert isinstance(work, BackfillSpec)
    there = {result.shard: result for result in shards}
    missing = [index for index in range(len(saved.shards)) if index not in there]
    commits = tuple(find_commits(location.open(), work.version, [work.job_id]))
    result = combine_shards(work.job_id, there.values(), saved.rows_skipped, work.version, work.version, saved.notes)
    left = result.rows_left + sum(saved.shards[index]["rows"] for index in missing)
    version = max(commits, default=work.version)
    return replace(result, commits=commits, version=version, rows_left=left), missing


class Stopwatch:
    """Measures seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


def record_mixed_versions(
    location: TableLocation, work: BackfillSpec, shards: Sequence[ShardResult], whole: bool
) -> None:
    """Write, change or remove the note ``mixed:<version>,<version>``; usually there is nothing to change.

    The note is for readers of the table; the column's ledgers say which rows have which version.

    Args:
        shards: the committed shards.
        whole: whether all planned shards were committed.

    Raises:
        TableRemade: the table was dropped and created again.
    """
    import lance

    if not shards:
        return
    taken = work.continue_from if any(shard.rows_taken for shard in shards) else ()
    makers = sorted({version_label(maker) for maker in (*work.makers, *taken)})
    left = not whole or any(shard.rows_left for shard in shards)
    dataset = location.open()
    field = next((field for field in dataset.lance_schema.fields() if field.id() == work.field_id), None)
    if field is None:
        return
    noted = (dataset.schema.field(field.name()).metadata or {}).get(MIXED_VERSIONS_KEY.encode(), b"").decode()
    wanted = noted
    if makers:
        wanted = _MIXED + ",".join([*makers, work.udf_version])
    elif not (left or work.where or work.read_version):
        wanted = ""
    if wanted == noted:
        return
    operation = lance.LanceOperation
    update = operation.UpdateMap({MIXED_VERSIONS_KEY: wanted or None}, False)
    transaction = lance.Transaction(
        read_version=dataset.version,
        operation=operation.UpdateConfig(field_metadata_updates={work.field_id: update}),
        transaction_properties={JOB_PROPERTY: work.job_id},
    )
    options = dataset._storage_options
    work.written.look(location.options)
    fault_point("note.write")
    try:
        with engine_errors():
            committed = lance.LanceDataset.commit(dataset.uri, transaction, storage_options=options)
    except EngineError as error:
        logger.warning("Cannot write the note %r to the metadata of column %s: %s", wanted, work.column, error)
        return
    fault_point("note.written")
    work.written.check_after_commit(location.options, committed, transaction)
