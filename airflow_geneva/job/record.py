"""Where a job's documents lie: ``_checkpoints/jobs/{id}/``."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from airflow_geneva.errors import InvalidInput
from airflow_geneva.storage import Storage

_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,120}$")


def new_job_id() -> str:
    """A name that sorts by time, to the microsecond."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:10]}"


@dataclass(frozen=True)
class JobFolder:
    """The documents of one job.

    Args:
        storage: the job's folder.
        job_id: its name.
    """

    storage: Storage
    job_id: str

    @staticmethod
    def of(checkpoints: Storage, job_id: str) -> JobFolder:
        """The folder of a job below a table's ``_checkpoints``.

        Raises:
            InvalidInput: the id would leave its folder.
        """
        if not _ID.fullmatch(job_id) or ".." in job_id:
            raise InvalidInput(f"{job_id!r} is not a job id.")
        return JobFolder(checkpoints.folder("jobs", job_id), job_id)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Announce the job; written before anything else of it. How an earlier try of it ended is forgotten."""
        self.storage.delete("result.json")
        self.storage.write_json("job.json", {"started": time.time(), **record, "id": self.job_id})

    def read_record(self) -> dict[str, Any] | None:
        """The announcement, with state and result once the job ended; None when there is no such job."""
        record = self._read("job.json")
        if record is not None:
            record.update(self._read("result.json") or {})
        return record

    def write_result(self, state: str, result: Mapping[str, Any], error: str | None = None) -> None:
        """Say how the job ended."""
        self.storage.write_json(
            "result.json", {"state": state, "ended": time.time(), "result": dict(result), "error": error}
        )  # fmt: skip

    def write_shard(self, stage: str, fingerprint: str, shard: int, document: Mapping[str, Any]) -> None:
        """Keep what ``apply`` or ``commit`` did with one shard of one plan."""
        self.storage.write_json(shard_name(stage, fingerprint, shard), dict(document))

    def read_shard(self, stage: str, fingerprint: str, shard: int) -> dict[str, Any] | None:
        return self._read(shard_name(stage, fingerprint, shard))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = self.storage.read_json(name)
        except (FileNotFoundError, ValueError):
            return None
        return document


def shard_name(stage: str, fingerprint: str, shard: int) -> str:
    return f"{stage}-{fingerprint[:16]}-{shard:04}.json"


def read_jobs(checkpoints: Storage, newest: int | None = None) -> list[dict[str, Any]]:
    """Records of a table's jobs, newest first."""
    names, _ = checkpoints.list_folder("jobs")
    chosen: list[str] = sorted(names, reverse=True)[:newest]
    found = (JobFolder.of(checkpoints, name).read_record() for name in chosen if _ID.fullmatch(name))
    return [record for record in found if record is not None]
