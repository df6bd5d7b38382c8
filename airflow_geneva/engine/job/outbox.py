"""The outbox of asset events: jobs whose commits may not have been announced yet.

The plan task writes a mark before the job may commit; the finish task removes it once an event covers all commits of
the job. The finish task finds out from Airflow's events which commits are announced; a mark only names a job to check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from airflow_geneva.engine.storage.files import Storage

if TYPE_CHECKING:
    import lance

JOB_PROPERTY = "geneva.job_id"
ROWS_PROPERTY = "geneva.rows"
"""The transaction property with the number of computed rows that a commit makes visible."""
_MARKS = "outbox"
_AT_ONCE = 4
"""The number of commits that are read concurrently at first: usually there are few, and all are needed."""


@dataclass(frozen=True)
class OutboxEntry:
    """A job whose commits after version `since` may not be announced yet."""

    job_id: str
    since: int


def write_outbox(checkpoints: Storage, outbox: str, mark: OutboxEntry, new: bool = False) -> None:
    """Write a job's mark; if the job is not `new`, keep that of an earlier attempt, which may have committed."""
    name = f"{mark.job_id}.json"
    folder = checkpoints.folder(_MARKS, outbox)
    if new or not folder.exists(name):
        folder.write_json(name, {"since": mark.since})


def read_outbox(checkpoints: Storage, outbox: str) -> list[OutboxEntry]:
    """Return the marks of a column, oldest first."""
    folder = checkpoints.folder(_MARKS, outbox)

    def read(name: str) -> OutboxEntry | None:
        try:
            return OutboxEntry(name.removesuffix(".json"), int(folder.read_json(name)["since"]))
        except FileNotFoundError:
            return None

    found = folder.side_by_side(*(partial(read, name) for name in folder.list_folder()[1]))
    return [mark for mark in found if mark is not None]


def jobs_in_outbox(checkpoints: Storage) -> set[str]:
    """Return the ids of all jobs with a mark, for all columns."""
    return {name.rsplit("/", 1)[-1].removesuffix(".json") for name in checkpoints.list_files(_MARKS)}


def remove_from_outbox(checkpoints: Storage, outbox: str, mark: OutboxEntry) -> None:
    checkpoints.folder(_MARKS, outbox).delete(f"{mark.job_id}.json")


def find_commits(dataset: lance.LanceDataset, since: int, job_ids: Iterable[str]) -> dict[int, str]:
    """Return the table versions after ``since`` that these jobs committed, without versions that were cleaned up."""
    from airflow_geneva.engine.lance_io.history import commits_newest_first

    wanted = set(job_ids)
    commits = commits_newest_first(dataset, int(dataset.version), since + 1, _AT_ONCE)
    found = {commit.version: commit.properties.get(JOB_PROPERTY, "") for commit in commits}
    return {version: found[version] for version in sorted(found) if found[version] in wanted}
