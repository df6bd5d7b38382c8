"""Find the commits of a column or view that no asset event has announced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from airflow_geneva.engine.job.folder import JobFolder, job_start_time
from airflow_geneva.engine.job.outbox import OutboxEntry, find_commits, read_outbox, remove_from_outbox
from airflow_geneva.engine.lance_io.table_versions import stamp_of
from airflow_geneva.engine.results import DONE, PARTIAL
from airflow_geneva.engine.run.pipeline import PlannedJob

IsOurs = Callable[[int, "str | None"], bool]
"""Whether a version of the table, with a commit's stamp, is one of this table."""


@dataclass(frozen=True)
class Unannounced:
    """The versions that an event announces, and the stamp of the newest."""

    from_version: int
    to_version: int
    commit: str | None


def find_unannounced(
    job: PlannedJob, last_announced: Callable[[IsOurs, datetime | None], int | None]
) -> Unannounced | None:
    """Return the unannounced commits of this job and of earlier ones; None if there are none.

    Entries of jobs that have ended, and whose commits are announced, are removed from the outbox.

    Args:
        last_announced: returns the version that the newest event since a time announced, of those that are ours.
    """
    spec, location = job.spec, job.location
    checkpoints = location.checkpoints
    dataset, marks = checkpoints.side_by_side(location.open, partial(read_outbox, checkpoints, spec.outbox))
    jobs = {mark.job_id: mark for mark in marks}
    if not spec.of_view:
        jobs.setdefault(spec.job_id, OutboxEntry(spec.job_id, spec.version))

    def is_ours(version: int, commit: str | None) -> bool:
        # The asset also has events of a table that was created again, or of another database on the connection.
        if version > dataset.version:
            return False
        stamp = stamp_of(location, version)
        return commit is None or stamp is None or stamp.commit == commit

    announced = last_announced(is_ours, job_start_time(min(jobs, default=spec.job_id)))
    oldest = min((mark.since for mark in jobs.values()), default=int(dataset.version))
    commits = find_commits(dataset, max(oldest, announced or 0), jobs)

    def remove_if_announced(mark: OutboxEntry) -> None:
        ended = JobFolder.of(checkpoints, mark.job_id).record.get("ended") or {}
        committed = (ended.get("result") or {}).get("commits") or ()
        # It may have committed and ended after the versions were read: the next finish finds it.
        if ended.get("state") in (DONE, PARTIAL) and max(committed, default=0) <= dataset.version:
            remove_from_outbox(checkpoints, spec.outbox, mark)

    done = (mark for mark in marks if mark.job_id not in commits.values())
    newest = partial(stamp_of, location, max(commits)) if commits else lambda: None
    stamp, *_ = checkpoints.side_by_side(newest, *(partial(remove_if_announced, mark) for mark in done))
    if not commits:
        return None
    first = min(jobs[job_id].since for job_id in commits.values())
    return Unannounced(first if announced is None else announced, max(commits), None if stamp is None else stamp.commit)
