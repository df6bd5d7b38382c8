"""How fast UDFs were in a job, to estimate how long the next one takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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
        first_seconds, first_rows: time and rows of the slowest first call of a fragment, which may load a model.
        bytes: size of the computed values in memory.
    """

    rows: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_rows: int = 0
    bytes: int = 0

    def __add__(self, other: UdfSpeed) -> UdfSpeed:
        first = max(self, other, key=lambda speed: speed.first_seconds)
        return replace(
            first,
            rows=self.rows + other.rows,
            seconds=self.seconds + other.seconds,
            bytes=self.bytes + other.bytes,
        )

    def seconds_for(self, rows: int) -> float:
        """Estimate the seconds of one thread for so many rows, with the time to load a model."""
        if self.rows <= self.first_rows:  # one call: it cannot be known what of it was the loading
            return self.first_seconds * max(rows / max(self.first_rows, 1), 1.0)
        per_row = max(self.seconds - self.first_seconds, 0.0) / (self.rows - self.first_rows)
        return self.first_seconds + max(rows - self.first_rows, 0) * per_row

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
            rows, first_rows, size = (int(document[name]) for name in ("rows", "first_rows", "bytes"))
            return UdfSpeed(rows, float(document["seconds"]), float(document["first_seconds"]), first_rows, size)
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
