"""What was submitted to a batch API and is not collected yet, so that a killed task does not submit it again."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from airflow_geneva.checkpoint.keys import key_part
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.storage.files import Storage

FOLDER = "batches"
"""The folder beside the checkpoints, with a folder for each code version of a UDF and column."""

_ROW = "row"
_SUBMITTING_SECONDS = 60.0
_HANDLE, _REPORTED = ".handle.json", ".reported.json"


@dataclass(eq=False)
class Submission:
    """Rows that were given to a service as one batch, or are about to be.

    Args:
        name: identifies it here, and at the service as the key of the batch.
        rows: the keys of its rows, in the order of the batch.
        begun: seconds since the epoch.
        process: what submitted it: the host's name and the process id.
        handle: what `submit` returned; meaningless until it is `sent`.
        reported: rows whose failure ended a try, so that they are submitted again.
        collected: rows whose results this process has taken.
    """

    name: str
    rows: Sequence[bytes]
    job_id: str
    begun: float
    process: str
    handle: Any = None
    sent: bool = False
    reported: set[int] = field(default_factory=set)
    collected: set[int] = field(default_factory=set)

    def may_be_underway(self) -> bool:
        """Whether its process may be about to submit it."""
        host, _, pid = self.process.rpartition(":")
        if host == socket.gethostname() and not _is_alive(int(pid)):
            return False
        return time.time() - self.begun < _SUBMITTING_SECONDS


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Submissions:
    """The submissions of one column and one code version of its UDF; for all threads of a task.

    The rows are written before the batch is submitted, and its handle after. So a kill in between leaves rows without a
    handle, and the service can be asked whether it has a batch of that name.

    Args:
        only_own: ignore what other jobs have submitted.
    """

    def __init__(self, checkpoints: Storage, job_id: str, udf: str, version: str, column: str, only_own: bool) -> None:
        folder = f"{key_part(udf)}_ver-{key_part(version)}_col-{key_part(column)}"
        self.storage = checkpoints.folder(FOLDER, folder)
        self.store = CheckpointStore(self.storage)
        self.job_id = job_id
        self.only_own = only_own
        self._lock = threading.RLock()
        self._of_row: dict[bytes, list[tuple[Submission, int]]] | None = None

    def find(self, rows: Iterable[bytes]) -> list[list[tuple[Submission, int]]]:
        """Return for each row where it was submitted, the newest last, without what has failed and was reported."""
        with self._lock:
            places = self._places()
            return [
                [(one, position) for one, position in places.get(row, ()) if position not in one.reported]
                for row in rows
            ]

    def named(self, names: Iterable[str]) -> list[Submission]:
        """Return the submissions of these names that are still there."""
        return [one for name in names if (one := self._read(name)) is not None]

    def begin(self, rows: Sequence[bytes]) -> Submission:
        """Note that these rows are about to be submitted."""
        begun = time.time()
        name = f"{int(begun * 1_000):013}-{uuid.uuid4().hex}"
        batch = pa.record_batch([pa.array(rows, pa.binary())], names=[_ROW])
        process = f"{socket.gethostname()}:{os.getpid()}"
        about = {"job": self.job_id, "begun": json.dumps(begun), "process": process}
        self.store[name] = batch.replace_schema_metadata(about)
        made = Submission(name, list(rows), self.job_id, begun, process)
        with self._lock:
            self._add(made, self._places())
        return made

    def keep_handle(self, submission: Submission, handle: Any) -> None:
        """Note the handle of a batch that the service has."""
        self.storage.write_json(f"{submission.name}{_HANDLE}", {"handle": handle})
        submission.handle, submission.sent = handle, True

    def report(self, submission: Submission, rows: Iterable[int]) -> None:
        """Note that the failure of rows ends this try."""
        submission.reported.update(rows)
        self.storage.write_json(f"{submission.name}{_REPORTED}", {"rows": sorted(submission.reported)})

    def remove(self, submission: Submission) -> None:
        """Forget a submission, its rows first: without them, its handle means nothing."""
        with self._lock:
            for row in submission.rows:
                self._places()[row] = [place for place in self._places().get(row, ()) if place[0] is not submission]
        del self.store[submission.name]
        self.storage.delete_all([f"{submission.name}{end}" for end in (_HANDLE, _REPORTED)])

    def remove_collected(self) -> None:
        """Forget the submissions of which this process has taken all rows; these are in checkpoints now."""
        with self._lock:
            there = {id(one): one for places in (self._of_row or {}).values() for one, _ in places}
        for one in there.values():
            if len(one.collected | one.reported) >= len(one.rows):
                self.remove(one)

    def path(self, submission: Submission) -> str:
        """Return the URI of the file whose removal forgets a submission."""
        return self.storage.path(f"{submission.name}.lance")

    def _places(self) -> dict[bytes, list[tuple[Submission, int]]]:
        if self._of_row is None:
            self._of_row = {}
            for name in self.store.list_keys():
                found = self._read(name)
                if found is not None and (found.job_id == self.job_id or not self.only_own):
                    self._add(found, self._of_row)
        return self._of_row

    def _add(self, submission: Submission, places: dict[bytes, list[tuple[Submission, int]]]) -> None:
        for position, row in enumerate(submission.rows):
            places.setdefault(row, []).append((submission, position))

    def _read(self, name: str) -> Submission | None:
        """Read a submission; None if its file is damaged, as by a kill before anything was submitted, or gone."""
        try:
            batch = self.store[name]
            metadata = batch.schema.metadata
            job_id, begun, process = (metadata[part].decode() for part in (b"job", b"begun", b"process"))
            found = Submission(name, batch.column(_ROW).to_pylist(), job_id, float(begun), process)
        except (KeyError, TypeError, ValueError):
            return None
        handle = self._document(f"{name}{_HANDLE}")
        if handle is not None and "handle" in handle:
            found.handle, found.sent = handle["handle"], True
        found.reported = set((self._document(f"{name}{_REPORTED}") or {}).get("rows", ()))
        return found

    def _document(self, name: str) -> dict[str, Any] | None:
        try:
            document = self.storage.read_json(name)
        except (FileNotFoundError, ValueError):
            return None
        return document if isinstance(document, dict) else None
