"""The jobs of Airflow's DAGs, runs and tasks, by what their plan tasks pushed to XCom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_geneva.database import Database, connect
from airflow_geneva.engine import api
from airflow_geneva.engine.storage.catalogs import catalog_uri
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.storage.files import in_parallel
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.secrets import CATALOG
from airflow_geneva.engine.storage.timeouts import with_short_timeouts
from airflow_geneva.engine.storage.uri import check_name, normalize_uri
from airflow_geneva.errors import InvalidInput
from airflow_geneva.pages.visible import Viewer


@dataclass(frozen=True)
class JobOfRun:
    """A job that a plan task of a DAG run planned, for a table or view."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    lance_conn_id: str
    table: str
    job_id: str
    plan_uri: str

    @property
    def group(self) -> tuple[str, ...]:
        return tuple(self.task_id.split(".")[:-1])

    @staticmethod
    def read(dag_id: str, run_id: str, task_id: str, map_index: int, summary: Any) -> JobOfRun | None:
        """Parse the summary that a plan task pushed; None if it is something else."""
        names = ("lance_conn_id", "table", "job_id", "plan_uri")
        if not isinstance(summary, Mapping) or not all(isinstance(summary.get(name), str) for name in names):
            return None
        return JobOfRun(dag_id, run_id, task_id, map_index, *(summary[name] for name in names))

    def locate(self, database: Database) -> tuple[TableLocation, bool]:
        """Return the location of the job's table, and whether it is in the database, which is the connection's."""
        inside = f"/_checkpoints/jobs/{self.job_id}/"
        table, found, _ = self.plan_uri.rpartition(inside)
        if not found or not api.JobFolder.is_id(self.job_id):
            raise InvalidInput(f"{self.plan_uri!r} is not the plan of a job.")
        if catalog_uri(database.options) and (location := database.location(self.table)).uri == table:
            return location, True
        place, _, name = table.rpartition("/")
        if name != f"{check_name(self.table, 'table')}.lance":
            raise InvalidInput(f"{self.plan_uri!r} is not the plan of a job.")
        own = database.uri == normalize_uri(place)
        if not own:
            options = {key: value for key, value in database.options if key != CATALOG}
            other = connect(place, options)
            database = replace(other, options=with_short_timeouts(other.uri, other.options))
        return database.location(self.table), own


@dataclass(frozen=True)
class FoundJob:
    """A job that a task planned, with the parts that the viewer may see and that could be read."""

    planned: JobOfRun
    job: api.Job | None


def read_jobs_of(planned: Sequence[JobOfRun], databases: Mapping[str, Database], viewer: Viewer) -> list[FoundJob]:
    """Read the records of jobs from the databases of their connections.

    XComs are not trusted, so the viewer's permission is checked for each record.
    """

    def read(one: JobOfRun) -> FoundJob:
        try:
            location, own = one.locate(databases[one.lance_conn_id])
            job = api.read_job(api.JobFolder.of(location.checkpoints, one.job_id), with_shards=False)
        except BaseException as error:
            if not is_failure(error):
                raise
            return FoundJob(one, None)
        visible = job is not None and viewer.may_see_job(one.lance_conn_id if own else None, job)
        return FoundJob(one, job if visible else None)

    found: list[FoundJob] = in_parallel(read, planned, local=False)
    return found


def job_of_task(jobs: Sequence[JobOfRun], task_id: str, map_index: int) -> JobOfRun | None:
    """Return the job of a task: the job that it planned, or else that of the innermost task group around it.

    None if there is no such job, or more than one.
    """
    own = [job for job in jobs if job.task_id == task_id and job.map_index == map_index]
    if own:
        return own[0]
    groups = tuple(task_id.split(".")[:-1])
    around = [job for job in jobs if job.group == groups[: len(job.group)]]
    innermost = max((len(job.group) for job in around), default=0)
    chosen = [job for job in around if len(job.group) == innermost]
    return chosen[0] if len(chosen) == 1 else None
