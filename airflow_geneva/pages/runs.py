"""Find the jobs of Airflow's DAGs, runs and tasks, by what their plan tasks pushed to XCom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_geneva.engine.job.folder import JobFolder, is_job_id
from airflow_geneva.engine.job.shard_status import in_parallel
from airflow_geneva.engine.job.status import Job, read_job
from airflow_geneva.engine.lance_io.engine_errors import is_failure
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import check_name, normalize_uri
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._airflow_internals import xcoms
from airflow_geneva.pages.access import CurrentUser, open_database

# Not imported from the operators: that would load large parts of Airflow and Spark into the API server.
_SUMMARY = "summary"
_ERROR = "error"
JOBS_OF_A_DAG = 30


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

    def locate(self) -> tuple[TableLocation, bool]:
        """Return the location of the job's table, and whether it is in the connection's database."""
        inside = f"/_checkpoints/jobs/{self.job_id}/"
        table, found, _ = self.plan_uri.rpartition(inside)
        if not found or not is_job_id(self.job_id):
            raise InvalidInput(f"{self.plan_uri!r} is not the plan of a job.")
        database = open_database(self.lance_conn_id)
        if database.in_catalog and (location := database.location(self.table)).uri == table:
            return location, True
        place, _, name = table.rpartition("/")
        if name != f"{check_name(self.table, 'table')}.lance":
            raise InvalidInput(f"{self.plan_uri!r} is not the plan of a job.")
        own = database.uri == normalize_uri(place)
        if not own:
            database = open_database(self.lance_conn_id, place)
        return database.location(self.table), own


def jobs_of_run(dag_id: str, run_id: str) -> list[JobOfRun]:
    """Return the jobs that tasks of a DAG run planned."""
    found = (JobOfRun.read(dag_id, *row) for row in xcoms(dag_id, _SUMMARY, run_id))
    return [planned for planned in found if planned is not None]


def jobs_of_dag(dag_id: str) -> list[JobOfRun]:
    """Return the newest jobs that tasks of a DAG planned, newest first."""
    found = (JobOfRun.read(dag_id, *row) for row in xcoms(dag_id, _SUMMARY, most=JOBS_OF_A_DAG))
    return [planned for planned in found if planned is not None]


def error_of_run(dag_id: str, run_id: str) -> str | None:
    """Return the error that a task of a DAG run pushed; a task that has a job records its error there."""
    return next((str(value) for *_, value in xcoms(dag_id, _ERROR, run_id)), None)


@dataclass(frozen=True)
class FoundJob:
    """A job that a task planned, with the parts that the viewer may see and that could be read."""

    planned: JobOfRun
    job: Job | None


def read_jobs_of(planned: Sequence[JobOfRun], viewer: CurrentUser) -> list[FoundJob]:
    """Read the records of jobs; XComs are not trusted, so the viewer's permission is checked for each record."""

    def read(one: JobOfRun) -> FoundJob:
        try:
            location, own = one.locate()
            job = read_job(JobFolder.of(location.checkpoints, one.job_id), with_shards=False)
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
