"""Read jobs for the pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from airflow_geneva.database import Database
from airflow_geneva.errors import InvalidInput
from airflow_geneva.job.error_records import ErrorRecord, read_errors
from airflow_geneva.job.folder import JobFolder, is_job_id
from airflow_geneva.job.progress import ShardStatus, in_parallel
from airflow_geneva.job.result import DONE
from airflow_geneva.job.status import Job, job_ids, read_job, read_jobs
from airflow_geneva.pages.access import CurrentUser
from airflow_geneva.storage.location import TableLocation

JOBS_A_PAGE = 100
_READ_FOR_ONE = 10
Shares = tuple[tuple[str, float], ...]
SHARDS_SHOWN = 50
ERRORS_A_PAGE = 25
_MOST_ERRORS = 1_000
_MOST_COMMITS = 100


@dataclass(frozen=True)
class JobsPage:
    """One page of jobs, newest first.

    Args:
        jobs: those that the viewer may see.
        older: the id before which the next page starts; None if there are no older jobs.
    """

    jobs: tuple[Job, ...]
    older: str | None


def list_jobs(
    database: Database,
    conn_id: str,
    viewer: CurrentUser,
    before: str | None = None,
    table: str | None = None,
    most: int = JOBS_A_PAGE,
) -> JobsPage:
    """List the newest jobs of a database that a viewer may see.

    Reads at most ten times as many jobs as it returns; a page that is short because of that still has `older`.

    Args:
        before: only jobs with smaller ids.
        table: only jobs of this table.
        most: maximum number of jobs.

    Raises:
        InvalidInput: ``before`` is not a job id, or ``table`` is not a table name.
    """
    if before is not None and not is_job_id(before):
        raise InvalidInput(f"{before!r} is not a job id.")
    names = database.table_names() if table is None else [table]
    places = {name: database.location(name).checkpoints for name in names}
    local = all(place.local for place in places.values())
    listed = in_parallel(lambda name: [(job_id, name) for job_id in job_ids(places[name])], names, local)
    ids = sorted((item for group in listed for item in group if before is None or item[0] < before), reverse=True)
    found: list[Job] = []
    looked_at = 0
    while looked_at < min(len(ids), _READ_FOR_ONE * most) and len(found) < most:
        chunk = ids[looked_at : looked_at + most]
        looked_at += len(chunk)
        jobs = [
            job for name in names for job in read_jobs(places[name], [at for at, owner in chunk if owner == name])
        ]  # fmt: skip
        jobs.sort(key=lambda job: job.id, reverse=True)
        found += [job for job in jobs if viewer.may_see_job(conn_id, job)]
    if len(found) > most:
        return JobsPage(tuple(found[:most]), found[most - 1].id)
    return JobsPage(tuple(found), ids[looked_at - 1][0] if looked_at < len(ids) else None)


@dataclass(frozen=True)
class JobDetails:
    """The data of a job's page.

    Args:
        job: the job.
        shards: the shards to show; failed and running ones are chosen first.
        commits: the newest table versions that it wrote, oldest first.
    """

    job: Job
    shards: tuple[ShardStatus, ...]
    commits: tuple[int, ...]

    @property
    def failed(self) -> int:
        """Number of failed rows; for a running or failed job the number of error records."""
        return max(self.job.rows_failed, self.job.errors)

    @property
    def shares(self) -> Shares:
        """The segments of the whole job's progress bar."""
        job = self.job
        if not job.rows_pending:
            return (("committed", 100.0),) if job.state == DONE else ()
        return _shares(job.rows_pending, job.rows_committed, job.rows_ready, job.rows_checkpointed)

    @property
    def bars(self) -> list[tuple[ShardStatus, Shares]]:
        """The shown shards with the segments of their progress bars."""
        return [
            (shard, _shares(shard.rows, shard.rows_committed, shard.rows_ready, shard.rows_checkpointed))
            for shard in self.shards
        ]


def _shares(rows: int, committed: int, ready: int, checkpointed: int) -> Shares:
    """Return the percentage of rows by the last state that they reached, without empty parts."""
    reached = (("committed", 0, committed), ("ready", committed, ready), ("checkpointed", ready, checkpointed))
    parts = ((name, 100.0 * (min(end, rows) - min(start, rows)) / max(rows, 1)) for name, start, end in reached)
    return tuple((name, round(part, 3)) for name, part in parts if part > 0)


def find_job(location: TableLocation, job_id: str) -> JobDetails | None:
    """Read a job of a table with its shards; None if there is no such job.

    Raises:
        InvalidInput: it is not a job id.
    """
    job = read_job(JobFolder.of(location.checkpoints, job_id))
    if job is None:
        return None
    at_rest = ("committed", "waiting", "left")
    moving = sorted(job.shards, key=lambda shard: (shard.stage != "failed", shard.stage in at_rest))
    shown = sorted(moving[:SHARDS_SHOWN], key=lambda shard: shard.index)
    return JobDetails(job, tuple(shown), job.commits[-_MOST_COMMITS:])


@dataclass(frozen=True)
class ErrorsPage:
    """A page of a job's failed rows.

    Args:
        records: the records of this page.
        page, pages: 1-based page number, and number of pages.
        read: number of records that were read; not all are read if there are very many.
        kinds: the most frequent exceptions with their counts, most frequent first.
    """

    records: tuple[ErrorRecord, ...]
    page: int
    pages: int
    read: int
    kinds: tuple[tuple[str, int], ...]


def list_errors(location: TableLocation, job_id: str, page: int) -> ErrorsPage:
    """Return one page of a job's error records, newest first.

    Args:
        page: 1-based page number; a number beyond the last page gives the last page.
    """
    records = read_errors(location.checkpoints, job_id, most=_MOST_ERRORS)
    pages = max(-(-len(records) // ERRORS_A_PAGE), 1)
    page = min(max(page, 1), pages)
    kinds = Counter(record.exception for record in records).most_common(5)
    chosen = records[(page - 1) * ERRORS_A_PAGE : page * ERRORS_A_PAGE]
    return ErrorsPage(tuple(chosen), page, pages, len(records), tuple(kinds))
