"""Read jobs for the pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Literal

import numpy as np

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import parse_age
from airflow_geneva.engine.results import DONE
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput
from airflow_geneva.pages.visible import VisibleDatabase

JOBS_A_PAGE = 100
_READ_FOR_ONE = 10
SHARDS_SHOWN = 50
ERRORS_A_PAGE = 25
_MOST_CAUSES = 5
_MOST_COMMITS = 100
_STEPS = 60
_LEAST_RED = 0.6
WIDTH, HEIGHT = 600, 80

ErrorOrder = Literal["newest", "key", "address"]
_SORTED = {
    "newest": [("time", "descending"), ("row_address", "ascending")],
    "key": [("key", "ascending"), ("row_address", "ascending")],
    "address": [("row_address", "ascending"), ("time", "descending")],
}


@dataclass(frozen=True)
class JobsPage:
    """One page of jobs, newest first; `older` is the id before which the next page starts."""

    jobs: tuple[api.Job, ...]
    older: str | None


def list_jobs(
    opened: VisibleDatabase,
    before: str | None = None,
    names: Sequence[str] | None = None,
    most: int = JOBS_A_PAGE,
    state: str = "",
    dag_id: str = "",
    since: str = "",
) -> JobsPage:
    """List the newest jobs of a database that a viewer may see, with ids smaller than `before`.

    `names` are tables and views, all by default; `state` and `dag_id` are those of a job, and `since` is an age, as
    ``24h``; by default any.

    Reads at most ten times as many jobs as it returns; a page that is short because of that still has `older`.
    """
    if before is not None and not api.JobFolder.is_id(before):
        raise InvalidInput(f"{before!r} is not a job id.")
    database = opened.database
    names = database.table_names() if names is None else names
    places = {name: database.location(name).checkpoints for name in names}
    listed = api.JobList.of(places).between(_oldest_id(since), before)
    ids = listed.ids
    found: list[api.Job] = []
    considered = 0
    while considered < min(len(ids), _READ_FOR_ONE * most) and len(found) < most:
        jobs = listed.read(considered, most)
        jobs = [job for job in jobs if state in ("", job.state) and dag_id in ("", job.dag_id)]
        considered = min(considered + most, len(ids))
        found += [job for job in jobs if opened.viewer.may_see_job(opened.conn_id, job)]
    if len(found) > most:
        return JobsPage(tuple(found[:most]), found[most - 1].id)
    return JobsPage(tuple(found), ids[considered - 1][0] if considered < len(ids) else None)


@dataclass(frozen=True)
class SpeedChart:
    """Rows per second of all shards together, over the time from `began` to `ended`."""

    began: float
    ended: float
    speeds: tuple[float, ...]

    @cached_property
    def most(self) -> float:
        return max(self.speeds)

    @cached_property
    def average(self) -> float:
        return sum(self.speeds) / len(self.speeds)

    @property
    def outline(self) -> str:
        """The points of an SVG polygon; each speed is as wide as its part of the time."""
        step = WIDTH / len(self.speeds)
        tops = [(i, HEIGHT * (1 - speed / (self.most or 1.0))) for i, speed in enumerate(self.speeds)]
        points = [f"{x:.1f},{y:.1f}" for i, y in tops for x in (i * step, (i + 1) * step)]
        return " ".join([f"0,{HEIGHT}", *points, f"{WIDTH},{HEIGHT}"])


def chart_speed(shards: Sequence[api.ShardStatus]) -> SpeedChart | None:
    """Add up the speeds of shards, which may run at the same time; None if there are too few samples."""
    known = [np.array(shard.samples).T for shard in shards if len(shard.samples) > 1]
    if not known:
        return None
    began, ended = min(times[0] for times, _ in known), max(times[-1] for times, _ in known)
    edges = np.linspace(began, ended, min(_STEPS, max(len(times) for times, _ in known)))
    if ended <= began or len(edges) < 3:
        return None
    done = sum(np.interp(edges, times, rows) for times, rows in known)
    speeds = np.maximum(np.diff(done) / np.diff(edges), 0.0)
    return SpeedChart(float(began), float(ended), tuple(speeds.tolist()))


@dataclass(frozen=True)
class JobDetails:
    """The data of a job's page: one page of its shards, and the newest table versions that it wrote, oldest first."""

    job: api.Job
    shards: tuple[api.ShardStatus, ...]
    commits: tuple[int, ...]
    page: int = 1
    pages: int = 1

    @property
    def speed(self) -> SpeedChart | None:
        return chart_speed(self.job.shards)

    @staticmethod
    def parts(item: api.Job | api.ShardStatus) -> tuple[tuple[str, int], ...]:
        """Return the number of due rows by the last state that they reached, including rows to do or left."""
        rows = item.rows_pending if isinstance(item, api.Job) else item.rows
        reached = (0, item.rows_committed, item.rows_ready, item.rows_checkpointed)
        steps = (*reached, max(reached) + item.rows_failed, rows)
        ends = [min(max(steps[: at + 1]), rows) for at in range(len(steps))]
        names = ("committed", "ready", "checkpointed", "failed", "left")
        return tuple((name, end - start) for name, start, end in zip(names, ends, ends[1:], strict=False))

    @staticmethod
    def shares(item: api.Job | api.ShardStatus) -> tuple[tuple[str, float], ...]:
        """Return the percentage of rows by the last state that they reached, including failed rows; no empty parts."""
        rows = item.rows_pending if isinstance(item, api.Job) else item.rows
        if isinstance(item, api.Job) and not rows:
            return (("committed", 100.0),) if item.state == DONE else ()
        parts = [(name, 100.0 * count / max(rows, 1)) for name, count in JobDetails.parts(item) if name != "left"]
        # The part of a single failed row would be invisible, so the parts before it are made smaller.
        red = max(parts[-1][1], _LEAST_RED) if parts[-1][1] else 0.0
        room = min(1.0, (100.0 - red) / max(sum(part for _, part in parts[:-1]), 1e-9))
        parts = [*((name, part * room) for name, part in parts[:-1]), ("failed", red)]
        return tuple((name, round(part, 3)) for name, part in parts if part > 0)


def find_job(location: TableLocation, job_id: str, page: int = 1) -> JobDetails | None:
    """Read a job of a table with a page of its shards, failed and moving ones first; None if there is no such job."""
    job = api.read_job(api.JobFolder.of(location.checkpoints, job_id))
    if job is None:
        return None
    at_rest = ("committed", "waiting", "left")
    moving = sorted(job.shown_shards, key=lambda shard: (shard.step != "failed", shard.step in at_rest))
    pages = max(-(-len(moving) // SHARDS_SHOWN), 1)
    page = min(page, pages)
    chosen = moving[(page - 1) * SHARDS_SHOWN : page * SHARDS_SHOWN]
    shown = sorted(chosen, key=lambda shard: shard.index)
    return JobDetails(job, tuple(shown), job.commits[-_MOST_COMMITS:], page, pages)


def _oldest_id(since: str) -> str:
    """Return the id before which all jobs are older than an age; ids sort by time."""
    return f"{datetime.now(timezone.utc) - parse_age('since', since):%Y%m%dT%H%M%S%f}" if since else ""


def request_cancel(location: TableLocation, job_id: str, by: str) -> str | None:
    """Ask the processes of a job to end it; return why that is not possible."""
    folder = api.JobFolder.of(location.checkpoints, job_id)
    job = api.read_job(folder)
    if job is None or not job.open:
        return "The job has ended." if job is None or not job.dead else "No process works on the job any more."
    folder.cancel(by)
    return None


@dataclass(frozen=True)
class ErrorsPage:
    """One page of a job's failed rows in an order, the number of all that are `listed`, and their main causes."""

    records: tuple[api.ErrorRecord, ...]
    order: ErrorOrder
    page: int
    pages: int
    listed: int
    causes: tuple[api.ErrorCause, ...]


def list_errors(location: TableLocation, job_id: str, page: int, order: ErrorOrder) -> ErrorsPage:
    """Return one page of a job's error records; a number beyond the last page gives the last page."""
    errors = api.JobErrors.of(location.checkpoints, job_id)
    pages = max(-(-len(errors) // ERRORS_A_PAGE), 1)
    page = min(page, pages)
    records = errors.page(_SORTED[order], (page - 1) * ERRORS_A_PAGE, ERRORS_A_PAGE)
    return ErrorsPage(tuple(records), order, page, pages, len(errors), tuple(errors.causes()[:_MOST_CAUSES]))
