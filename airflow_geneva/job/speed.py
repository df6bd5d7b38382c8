"""How fast UDFs were in a job, to estimate how long the next one takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from airflow_geneva.job.folder import RECORD, JobFolder
from airflow_geneva.job.status import job_ids
from airflow_geneva.storage.files import Storage

_MOST_JOBS_READ = 100
_SAME = ("kind", "column", "udf", "udf_version")


@dataclass(frozen=True)
class UdfSpeed:
    """What the UDFs of a job took.

    Args:
        rows: rows that they ran on.
        seconds: time to read, compute and stage these rows, summed over the threads and tasks that did it.
        first_seconds: time of the slowest first call of a task, which may load a model.
        bytes: size of the computed values in memory.
    """

    rows: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    bytes: int = 0

    def __add__(self, other: UdfSpeed) -> UdfSpeed:
        return UdfSpeed(
            self.rows + other.rows,
            self.seconds + other.seconds,
            max(self.first_seconds, other.first_seconds),
            self.bytes + other.bytes,
        )

    def seconds_for(self, rows: int) -> float:
        """Estimate the seconds of one thread for so many rows, with the time to load a model."""
        return self.first_seconds + rows * self.seconds / max(self.rows, 1)

    def bytes_for(self, rows: int) -> float:
        """Estimate the size of so many computed values."""
        return rows * self.bytes / max(self.rows, 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: object) -> UdfSpeed:
        """Read what a document says; without rows if it says nothing, or if it is damaged."""
        if not isinstance(document, Mapping):
            return UdfSpeed()
        try:
            seconds, first_seconds = float(document["seconds"]), float(document["first_seconds"])
            return UdfSpeed(int(document["rows"]), seconds, first_seconds, int(document["bytes"]))
        except (LookupError, TypeError, ValueError):
            return UdfSpeed()


def read_speed(checkpoints: Storage, described: Mapping[str, Any]) -> UdfSpeed | None:
    """Return the speed in the newest job of the same column or view and UDF versions; None if none computed rows.

    Args:
        described: what the record of such a job says of it.
    """
    for name in islice(job_ids(checkpoints), _MOST_JOBS_READ):
        folder = JobFolder.of(checkpoints, name)
        record = folder.read(RECORD) or {}
        if all(record.get(part) == described.get(part) for part in _SAME):
            speed = UdfSpeed.from_json((folder.read_end(record) or {}).get("speed"))
            if speed.rows:
                return speed
    return None
