"""Jobs whose commits may still have to be announced to whoever waits for changes of a column.

A mark is written before a job may commit, and removed once an announcement covers all its commits. Whether one does is
asked of those who received it; a mark only says which jobs to ask about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.lance_io.history import commits_back
from airflow_geneva.storage import Storage

if TYPE_CHECKING:
    import lance

JOB_PROPERTY = "geneva.job_id"
_MARKS = "unannounced"


@dataclass(frozen=True)
class Mark:
    """A job that may have commits to announce.

    Args:
        job_id: the job.
        since: the table version it was planned on; its commits come after.
    """

    job_id: str
    since: int


def write_mark(checkpoints: Storage, field_id: int, mark: Mark) -> None:
    """Remember a job; a mark of an earlier try of it stays, as that one may have committed."""
    name = f"{mark.job_id}.json"
    folder = _folder(checkpoints, field_id)
    if not folder.exists(name):
        folder.write_json(name, {"since": mark.since})


def read_marks(checkpoints: Storage, field_id: int) -> list[Mark]:
    """The remembered jobs of a column, oldest first."""
    folder = _folder(checkpoints, field_id)
    _, names = folder.list_folder()
    marks = []
    for name in names:
        try:
            marks.append(Mark(name.removesuffix(".json"), int(folder.read_json(name)["since"])))
        except FileNotFoundError:
            continue
    return marks


def marked_jobs(checkpoints: Storage) -> set[str]:
    """The remembered jobs of all columns."""
    return {name.rsplit("/", 1)[-1].removesuffix(".json") for name in checkpoints.list_files(_MARKS)}


def remove_mark(checkpoints: Storage, field_id: int, mark: Mark) -> None:
    _folder(checkpoints, field_id).delete(f"{mark.job_id}.json")


def find_commits(dataset: lance.LanceDataset, since: int, job_ids: Iterable[str]) -> dict[int, str]:
    """Table versions after ``since`` that carry one of the jobs' ids; versions that were cleaned up are left out."""
    wanted = set(job_ids)
    commits = commits_back(dataset, int(dataset.version), since + 1)
    found = {commit.version: commit.properties.get(JOB_PROPERTY, "") for commit in commits}
    return {version: found[version] for version in sorted(found) if found[version] in wanted}


def _folder(checkpoints: Storage, field_id: int) -> Storage:
    return checkpoints.folder(_MARKS, f"field-{field_id}")
