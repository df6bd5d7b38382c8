"""What tasks of Airflow's DAGs and runs pushed to XCom: the jobs that they planned, and their errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from airflow_geneva.database import Database
from airflow_geneva.operators._airflow_internals import xcoms
from airflow_geneva.pages.access import open_database
from airflow_geneva.pages.runs import JobOfRun

# Not imported from the operators: that would load large parts of Airflow and Spark into the API server.
_SUMMARY = "summary"
_ERROR = "error"
JOBS_OF_A_DAG = 30


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


def databases_of(planned: Iterable[JobOfRun]) -> Mapping[str, Database]:
    """Open the databases of the jobs' connections, without those that cannot be read."""
    found: dict[str, Database] = {}
    for conn_id in {one.lance_conn_id for one in planned}:
        with suppress(Exception):  # only the job's own row says so
            found[conn_id] = open_database(conn_id)
    return found
