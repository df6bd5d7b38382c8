"""Read a job from its folder, while it runs and after it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from airflow_geneva.errors import DamagedRecord
from airflow_geneva.job.error_records import count_errors_so_far
from airflow_geneva.job.folder import JobFolder, is_job_id
from airflow_geneva.job.heartbeat import HEARTBEAT, RUNNING_TIMEOUT, Heartbeat, heartbeat_timeout
from airflow_geneva.job.result import DONE, FAILED, PARTIAL, PENDING, RUNNING
from airflow_geneva.job.shard_status import WAITING, ShardStatus, in_parallel, read_shards
from airflow_geneva.job.status import AirflowRun, Job
from airflow_geneva.storage.files import Storage

logger = logging.getLogger("airflow_geneva.job")

DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors raised when a document does not have the expected form."""


def read_job(folder: JobFolder, with_shards: bool = True, now: float | None = None) -> Job | None:
    """Read the job of a folder; None if there is none.

    Args:
        with_shards: read the shards of a DONE job too; everything else about it is in two documents.
        now: the time to compare heartbeats with; by default now.

    Raises:
        DamagedRecord: the job's documents are damaged.
    """
    try:
        job = _read(folder, with_shards, time.time() if now is None else now)
        _ = str(job)  # a job that cannot be described is damaged too
    except DAMAGED as error:
        raise DamagedRecord(
            f"The record of job {folder.job_id} in {folder.storage.root} is damaged ({type(error).__name__}: {error}). "
            "Run the backfill or the refresh again, as a new job."
        ) from error
    return job


def _read(folder: JobFolder, with_shards: bool, now: float) -> Job | None:
    try:
        record = folder.storage.read_json("job.json")
    except FileNotFoundError:
        return None
    ended = folder.read("result.json") or record.get("ended")
    heartbeat = Heartbeat.from_json(folder.read(HEARTBEAT))
    shards: tuple[ShardStatus, ...] = ()
    if with_shards or ended is None or ended["state"] != DONE:
        _, names = folder.storage.list_folder()
        planned = folder.read("planned.json") if "planned.json" in names else None
        shards = () if planned is None else read_shards(folder, planned, names)
    job = _job(folder.job_id, record, ended, heartbeat, shards, now)
    return job if job.ended is not None else replace(job, errors=count_errors_so_far(folder.storage))


def job_ids(checkpoints: Storage) -> list[str]:
    """Return the ids of a table's jobs, newest first; one listing, no reads."""
    names, _ = checkpoints.list_folder("jobs")
    return sorted(filter(is_job_id, names), reverse=True)


def read_jobs(checkpoints: Storage, ids: Iterable[str]) -> list[Job]:
    """Read the jobs with these ids, in order, without removed ones; damaged ones are left out with a warning."""
    folders = [JobFolder.of(checkpoints, name) for name in ids]
    return [job for job in in_parallel(_read_listed, folders, checkpoints.local) if job is not None]


def _read_listed(folder: JobFolder) -> Job | None:
    try:
        return read_job(folder, with_shards=False)
    except DamagedRecord as error:
        logger.warning("The list leaves a job out: %s", error)
        return None


def _job(
    job_id: str,
    record: Mapping[str, Any],
    ended: Mapping[str, Any] | None,
    heartbeat: Heartbeat | None,
    shards: tuple[ShardStatus, ...],
    now: float,
) -> Job:
    if ended is not None and _resumed(ended, heartbeat, now):
        ended = None
    if ended is not None:
        swapped = record["kind"] == "refresh" and ended["state"] == DONE
        shards = tuple(shard.at_rest(ended["state"] == FAILED, swapped) for shard in shards)
    run = record.get("airflow")
    last_seen = max(float(record["started"]), heartbeat.at if heartbeat else 0.0, float((ended or {}).get("ended", 0)))
    # A heartbeat from far in the future does not count either: a clock was wrong.
    dead = ended is None and abs(now - last_seen) > heartbeat_timeout(heartbeat, retried=run is not None)
    state = _check_state(_state(record, heartbeat, shards) if ended is None else ended["state"])
    if dead:
        shards = tuple(shard.at_rest(failed=False) for shard in shards)
    pending = int(record.get("rows_pending", 0))
    total = int(record.get("rows_total", 0))
    job = Job(
        id=job_id,
        kind=str(record["kind"]),
        table=str(record["table"]),
        column=_text(record.get("column")),
        view=_text(record.get("view")),
        source=_text(record.get("source")),
        udf=str(record.get("udf", "")),
        udf_version=str(record.get("udf_version", "")),
        where=_text(record.get("where")),
        version=int(record["version"]),
        read_version=record.get("read_version"),
        state=state,
        dead=dead,
        started=float(record["started"]),
        ended=None if ended is None else float(ended["ended"]),
        last_seen=last_seen,
        stage=heartbeat.stage if heartbeat else None,
        rows_total=total,
        rows_pending=pending,
        rows_skipped=total - pending,
        shard_count=int(record.get("shards", 0)),
        shards=shards,
        reasons=dict(record.get("reasons", {})),
        airflow=None if run is None else _airflow_run(run),
    )
    job = _with_shards(job)
    return job if ended is None else _with_result(job, ended)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{value!r} is not a text")


def _airflow_run(run: Mapping[str, Any]) -> AirflowRun:
    return AirflowRun(str(run["dag_id"]), str(run["run_id"]), str(run["task_id"]), int(run["try"]))


def _resumed(ended: Mapping[str, Any], heartbeat: Heartbeat | None, now: float) -> bool:
    """Whether a shard of an ended job was cleared, and runs again."""
    if heartbeat is None or heartbeat.stage not in ("apply", "commit") or heartbeat.at <= float(ended["ended"]):
        return False
    # If the job did not fail, a stage that ended after it was a late task, and no other stage follows.
    follows = not heartbeat.over or ended["state"] == FAILED
    return follows and abs(now - heartbeat.at) <= RUNNING_TIMEOUT


def _state(record: Mapping[str, Any], heartbeat: Heartbeat | None, shards: tuple[ShardStatus, ...]) -> Any:
    begun = heartbeat is not None and heartbeat.stage != "plan"
    begun = begun or any(shard.stage != WAITING for shard in shards)
    # Older versions wrote the record with state RUNNING.
    return RUNNING if begun else record.get("state", PENDING)


def _check_state(state: Any) -> str:
    if state in (PENDING, RUNNING, DONE, PARTIAL, FAILED):
        return str(state)
    raise ValueError(f"unknown state {state!r}")


def _with_shards(job: Job) -> Job:
    seconds: dict[str, float] = {}
    for shard in job.shards:
        for stage, spent in shard.seconds:
            seconds[stage] = round(seconds.get(stage, 0.0) + spent, 3)
    committed = sum(shard.rows_committed for shard in job.shards)
    return replace(
        job,
        rows_computed=sum(shard.rows_computed for shard in job.shards),
        rows_reused=sum(shard.rows_reused for shard in job.shards),
        rows_failed=sum(shard.rows_failed for shard in job.shards),
        rows_left=job.rows_pending - committed,
        rows_checkpointed=sum(shard.rows_checkpointed for shard in job.shards),
        rows_ready=sum(shard.rows_ready for shard in job.shards),
        rows_committed=committed,
        seconds=seconds,
        commits=tuple(sorted({version for shard in job.shards for version in shard.versions})),
    )


def _with_result(job: Job, ended: Mapping[str, Any]) -> Job:
    result = ended["result"]
    committed = int(result["rows_computed"]) + int(result["rows_reused"]) + int(result["rows_failed"])
    return replace(
        job,
        rows_computed=int(result["rows_computed"]),
        rows_reused=int(result["rows_reused"]),
        rows_skipped=int(result["rows_skipped"]),
        rows_failed=int(result["rows_failed"]),
        rows_left=int(result["rows_left"]),
        rows_checkpointed=max(job.rows_checkpointed, committed),
        rows_ready=max(job.rows_ready, committed),
        rows_committed=committed,
        seconds=dict(result["seconds"]),
        commits=tuple(result["commits"]),
        error=ended.get("error"),
        errors=int(ended.get("errors", 0)),
        notes=tuple(result["notes"]),
    )
