"""Reduce old jobs to their records; newer jobs keep all documents, so that their tasks can still be cleared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_geneva.errors import DamagedRecord
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.outbox import jobs_in_outbox
from airflow_geneva.job.record import job_ids, read_job, read_jobs
from airflow_geneva.job.result import DONE, PARTIAL
from airflow_geneva.storage.files import Storage

_KEPT_WHOLE = 16
_MOST_AT_ONCE = 100
_DONE_UNTIL = "tidied.json"


def reduce_old_jobs(checkpoints: Storage) -> None:
    """Remove plans, progress and shard results of a table's old jobs; keep their records and error records.

    These jobs are not reduced: the newest ones, open ones, those with commits to announce, and failed or dead ones
    until a later job for the same column or view is DONE. Each job is checked once.

    Args:
        checkpoints: the table's ``_checkpoints`` folder.

    Raises:
        StorageError: the store is unreachable or read-only.
    """
    state = _read_state(checkpoints)
    until, later = str(state.get("until", "")), [str(name) for name in state.get("later", ())]
    old = sorted(job_ids(checkpoints)[_KEPT_WHOLE:])
    names = [name for name in old if name in later] + [name for name in old if name > until][:_MOST_AT_ONCE]
    if names:
        kept = _reduce(checkpoints, names)
        checkpoints.write_json(_DONE_UNTIL, {"until": max(until, *names), "later": kept[-_MOST_AT_ONCE:]})


def busy_targets(checkpoints: Storage, but: str) -> set[str]:
    """Return the ``target`` (column or view) of each open job of a table.

    Args:
        but: id of a job to ignore.
    """
    later = set(map(str, _read_state(checkpoints).get("later", ())))
    names = job_ids(checkpoints)
    chosen = [name for at, name in enumerate(names) if name != but and (at < _KEPT_WHOLE or name in later)]
    return {job.target for job in read_jobs(checkpoints, chosen) if job.open}


def _reduce(checkpoints: Storage, names: Sequence[str]) -> list[str]:
    """Reduce the jobs that may be reduced, and return the others, oldest first."""
    announced_later = jobs_in_outbox(checkpoints)
    made_up_for: set[str] = set()
    kept: list[str] = []
    for name in sorted(set(names), reverse=True):
        folder = JobFolder.of(checkpoints, name)
        try:
            job = read_job(folder, with_shards=False)
        except DamagedRecord:
            continue
        if job is None:
            continue
        done = job.ended is not None and job.state in (DONE, PARTIAL)
        if job.open or name in announced_later or not (done or job.target in made_up_for):
            kept.append(name)
        else:
            folder.reduce_to_record()
        if done and job.state == DONE:
            made_up_for.add(job.target)
    return kept[::-1]


def _read_state(checkpoints: Storage) -> dict[str, Any]:
    try:
        document = checkpoints.read_json(_DONE_UNTIL)
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
