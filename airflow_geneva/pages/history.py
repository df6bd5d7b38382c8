"""The newest jobs of each column, or of a view, as rows of small charts."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_geneva.job.status import Job
from airflow_geneva.pages.access import VisibleDatabase
from airflow_geneva.pages.jobs import list_jobs
from airflow_geneva.pages.tables import describe_table
from airflow_geneva.storage.location import TableLocation

JOBS_SHOWN = 30
_MOST_READ = 300


@dataclass(frozen=True)
class History:
    """The newest ended jobs of a column or view, oldest first."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def charts(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        return (
            ("rows", tuple(job.rows_computed for job in self.jobs)),
            ("seconds", tuple(job.took for job in self.jobs)),
            ("failed", tuple(job.rows_failed for job in self.jobs)),
        )


def read_histories(opened: VisibleDatabase, location: TableLocation) -> list[History]:
    """Read the newest jobs of a table's columns, or of a view, that the viewer may see."""
    names = [item.name for item in describe_table(location).computed]
    most = min(JOBS_SHOWN * max(len(names), 1), _MOST_READ)
    ended = [job for job in list_jobs(opened, names=[location.name], most=most).jobs if not job.open]
    found = {name: [job for job in ended if name == (job.view or job.column)][:JOBS_SHOWN] for name in names}
    return [History(name, tuple(jobs[::-1])) for name, jobs in found.items() if jobs]
