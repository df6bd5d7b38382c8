"""Find the job that an Airflow task works for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_geneva.errors import InvalidInput
from airflow_geneva.job.folder import is_job_id
from airflow_geneva.operators._airflow_internals import xcoms_of_run
from airflow_geneva.pages.databases import open_database
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.storage.uri import check_name, normalize_uri

# Not imported from the operators: that would load large parts of Airflow and Spark into the API server.
_SUMMARY = "summary"


@dataclass(frozen=True)
class PlannedJob:
    """A job that a task of a DAG run planned.

    Args:
        task_id, map_index: the plan task.
        lance_conn_id: the connection it used.
        table: the table or view.
        job_id: the job.
        plan_uri: URI of its plan.
    """

    task_id: str
    map_index: int
    lance_conn_id: str
    table: str
    job_id: str
    plan_uri: str

    @property
    def group(self) -> tuple[str, ...]:
        """The task groups around the plan task."""
        return tuple(self.task_id.split(".")[:-1])

    @staticmethod
    def read(task_id: str, map_index: int, summary: Any) -> PlannedJob | None:
        """Parse the summary that a plan task pushed; None if it is something else."""
        names = ("lance_conn_id", "table", "job_id", "plan_uri")
        if not isinstance(summary, Mapping) or not all(isinstance(summary.get(name), str) for name in names):
            return None
        return PlannedJob(task_id, map_index, *(summary[name] for name in names))

    def locate(self) -> tuple[TableLocation, bool]:
        """Return the location of the job's table, and whether it is in the connection's database.

        Raises:
            InvalidInput: the connection does not exist, or the URI is not that of a plan.
        """
        inside = f"/{check_name(self.table, 'table')}.lance/_checkpoints/jobs/{self.job_id}/"
        place, found, _ = self.plan_uri.rpartition(inside)
        if not found or not is_job_id(self.job_id):
            raise InvalidInput(f"{self.plan_uri!r} is not the plan of a job.")
        database = open_database(self.lance_conn_id)
        own = database.uri == normalize_uri(place)
        if not own:
            database = open_database(self.lance_conn_id, place)
        return database.location(self.table), own


def jobs_of_run(dag_id: str, run_id: str) -> list[PlannedJob]:
    """Return the jobs that the plan tasks of a DAG run planned."""
    found = (PlannedJob.read(*row) for row in xcoms_of_run(dag_id, run_id, _SUMMARY))
    return [planned for planned in found if planned is not None]


def job_of_task(jobs: Sequence[PlannedJob], task_id: str, map_index: int) -> PlannedJob | None:
    """Return the job that a task works for: its own plan's, else that of the innermost task group around it.

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
