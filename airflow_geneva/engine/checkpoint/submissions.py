"""Record uncollected submissions to batch APIs, so that the retry of a killed task does not submit rows again."""

from __future__ import annotations

import json
import os
import re
import socket
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.keys import key_part
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.runtime import threading, time, uuid
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import StorageError

FOLDER = "batches"
"""The folder beside the checkpoints, with a folder for each code version of a UDF and column."""

_ROW = "row"
_KEY = np.dtype("S16")
_SUBMITTING_SECONDS = 600.0
_HANDLE, _REPORTED, _MISSED = ".handle.json", ".reported.json", ".missed.json"
_CLOCKS_DIFFER = 600.0
_MOST_OPEN_ROWS = 2_000_000
_MOST_PROCESSES = 1 << 31
_NAME = re.compile(r"\d{13}-[0-9a-f]{32}-[0-9a-f]{1,16}-[0-9a-f]{1,16}")

_underway: set[str] = set()
"""Names of the submissions that threads of this process are about to make."""


@dataclass(eq=False)
class Submission:
    """Rows that were submitted to a service as one batch, or are about to be.

    Args:
        name: identifies the submission here, and is the key of the batch at the service.
        rows: number of rows.
        begun: time of the submission in seconds since the epoch.
        process: the submitting process: host name and process id.
        handle: the return value of `submit`; meaningless until `sent` is set.
        reported: for each position in the batch, whether an attempt took the result or failed because of it. Such a row
            is submitted again if it is due again.
        collected: for each position, whether this process has taken the result.
    """

    name: str
    rows: int
    job_id: str
    begun: float
    process: str
    handle: Any = None
    sent: bool = False
    reported: np.ndarray = field(init=False)
    collected: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.reported, self.collected = np.zeros((2, self.rows), bool)

    def may_be_underway(self) -> bool:
        """Whether its process may still be submitting it; clocks may differ by minutes."""
        host, _, pid = self.process.rpartition(":")
        if host == socket.gethostname():
            number = int(pid) if pid.isdecimal() else 0
            if number == os.getpid():
                return self.name in _underway
            if not 0 < number < _MOST_PROCESSES or not _is_alive(number):
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


@dataclass(frozen=True, eq=False)
class _Rows:
    """A submission with the sorted keys of its rows, and the position of each in the batch."""

    submission: Submission
    keys: np.ndarray
    positions: np.ndarray

    @staticmethod
    def of(submission: Submission, keys: np.ndarray) -> _Rows:
        order = np.argsort(keys).astype(np.int32)
        return _Rows(submission, keys[order], order)

    def find(self, wanted: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield each wanted row in this submission, with its position in the batch."""
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        there = np.flatnonzero(self.keys[at] == wanted)
        yield from zip(there.tolist(), self.positions[at[there]].tolist(), strict=True)


class Submissions:
    """The submissions of one column and one code version of its UDF, shared by all threads of a task.

    Rows are recorded before their batch is submitted, and its handle afterwards. After a kill in between, the service
    is asked whether it has a batch of that name. The name ends with the lowest and the highest row id, so that only
    batches that may contain a row are read. Only recently used batches stay in memory.

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
        self._names: set[str] | None = None
        self._known: dict[str, Submission] = {}
        self._open: OrderedDict[str, _Rows] = OrderedDict()

    def find(self, keys: Sequence[bytes], row_ids: pa.Array) -> list[list[tuple[Submission, int]]]:
        """Return the submissions of each row with its positions, newest last, without reported ones.

        Raises:
            StorageError: the rows of a submitted batch cannot be read.
        """
        places: list[list[tuple[Submission, int]]] = [[] for _ in keys]
        wanted, ids = np.array(keys, _KEY), np.asarray(row_ids)
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
        with self._lock:
            if self._names is None:
                self._names = set(filter(_NAME.fullmatch, self.store.list_keys()))
            for name in sorted(self._names):
                lowest, highest = _id_range(name)
                if lowest > high or highest < low or (rows := self._read(name)) is None:
                    continue
                one = rows.submission
                if one.job_id != self.job_id and self.only_own:
                    continue
                for row, position in rows.find(wanted):
                    if not one.reported[position]:
                        places[row].append((one, position))
        return places

    def named(self, names: Iterable[str]) -> list[Submission]:
        """Return the submissions with these names that still exist."""
        with self._lock:
            return [rows.submission for name in names if (rows := self._read(name)) is not None]

    @contextmanager
    def begin(self, keys: Sequence[bytes], row_ids: pa.Array, again: str | None = None) -> Iterator[Submission]:
        """Record rows that the block is about to submit; `again` is the name of an earlier submission of them."""
        begun, ids, rows = time.time(), np.asarray(row_ids), np.array(keys, _KEY)
        name = again or f"{int(begun * 1_000):013}-{uuid.uuid4().hex}-{int(ids.min()):x}-{int(ids.max()):x}"
        if again:
            self.storage.delete(f"{name}{_MISSED}")
        batch = pa.record_batch([pa.array(keys, pa.binary())], names=[_ROW])
        process = f"{socket.gethostname()}:{os.getpid()}"
        about = {"job": self.job_id, "begun": json.dumps(begun), "process": process}
        made = Submission(name, len(rows), self.job_id, begun, process)
        _underway.add(name)
        try:
            self.store[name] = batch.replace_schema_metadata(about)
            with self._lock:
                self._known[name] = made
                self._keep(_Rows.of(made, rows))
                if self._names is not None:
                    self._names.add(name)
            yield made
        finally:
            _underway.discard(name)

    def keep_handle(self, submission: Submission, handle: Any) -> None:
        """Record the handle of a batch that the service has accepted."""
        self.storage.write_json(f"{submission.name}{_HANDLE}", {"handle": handle})
        submission.handle, submission.sent = handle, True

    def missed(self, submission: Submission) -> float:
        """Record that the service does not list a batch; return the minimum number of seconds since the first record.

        The record has a time for each machine, because their clocks may differ by minutes.
        """
        name, host, now = f"{submission.name}{_MISSED}", socket.gethostname(), time.time()
        since = {
            known: float(seconds)
            for known, seconds in (self.storage.read_document(name) or {}).items()
            if isinstance(seconds, (int, float))
        }
        if host not in since:
            since = {**since, host: now}
            self.storage.write_json(name, since)
        return max(now - since[host], now - min(since.values()) - _CLOCKS_DIFFER)

    def report(self, submission: Submission, positions: Iterable[int]) -> None:
        """Record that the failure of rows ends this attempt."""
        submission.reported[list(positions)] = True
        self._write_reported(submission)

    def remove(self, submission: Submission) -> None:
        """Delete the record of a submission, its rows first: the handle is meaningless without them."""
        with self._lock:
            (self._names or set()).discard(submission.name)
            self._open.pop(submission.name, None)
            self._known.pop(submission.name, None)
        del self.store[submission.name]
        self.storage.delete_all([f"{submission.name}{end}" for end in (_HANDLE, _REPORTED, _MISSED)])

    def remove_collected(self) -> None:
        """Delete the records of results that this process has taken, because checkpoints hold them now."""
        with self._lock:
            taken = [one for one in self._known.values() if one.collected.any()]
        for one in taken:
            one.reported |= self._reported(one) | one.collected
            if one.reported.all():
                self.remove(one)
            else:
                self._write_reported(one)

    def path(self, submission: Submission) -> str:
        """Return the URI of the file that records a submission; without the file, the submission is unknown."""
        return self.storage.path(f"{submission.name}.lance")

    def _write_reported(self, submission: Submission) -> None:
        rows = np.flatnonzero(submission.reported).tolist()
        self.storage.write_json(f"{submission.name}{_REPORTED}", {"rows": rows})

    def _reported(self, one: Submission) -> np.ndarray:
        """Read which rows of a submission were reported, by position."""
        found = np.zeros(one.rows, bool)
        rows = (self.storage.read_document(f"{one.name}{_REPORTED}") or {}).get("rows", [])
        if isinstance(rows, list) and all(type(row) is int and 0 <= row < one.rows for row in rows):
            found[rows] = True
        return found

    def _read(self, name: str) -> _Rows | None:
        """Read the rows of a submission; None if they are missing, or are damaged and were never submitted."""
        if (found := self._open.get(name)) is not None:
            self._open.move_to_end(name)
            return found
        handle = self.storage.read_document(f"{name}{_HANDLE}")
        try:
            batch = self.store[name]
            metadata = batch.schema.metadata
            job_id, begun, process = (metadata[part].decode() for part in (b"job", b"begun", b"process"))
            keys = _read_keys(batch.column(_ROW))
            one = self._known.get(name) or Submission(name, len(keys), job_id, float(begun), process)
        except (KeyError, TypeError, ValueError) as error:
            place = self.storage.path(f"{name}.lance")
            if handle is None or not self.storage.exists(f"{name}.lance"):
                return None
            raise StorageError(
                f"{place} is damaged: it has the rows of a batch that was submitted, and its results cannot be taken "
                "without them. Restore the file; or remove it, and the rows are submitted, and paid, again."
            ) from error
        if name not in self._known:
            self._known[name] = one
            one.reported |= self._reported(one)
        if handle is not None and "handle" in handle:
            one.handle, one.sent = handle["handle"], True
        found = _Rows.of(one, keys)
        self._keep(found)
        return found

    def _keep(self, rows: _Rows) -> None:
        """Keep rows in memory, and evict the least recently used submissions beyond the limit."""
        self._open[rows.submission.name] = rows
        while len(self._open) > 1 and sum(one.submission.rows for one in self._open.values()) > _MOST_OPEN_ROWS:
            self._open.popitem(last=False)


def _read_keys(column: pa.Array) -> np.ndarray:
    """Return the keys of rows without making an object of each; ValueError if they are no keys."""
    if column.type != pa.binary() or column.null_count:
        raise ValueError(f"its rows are {column.type}, {column.null_count:,} of them NULL")
    return np.frombuffer(column.cast(pa.binary(_KEY.itemsize)).buffers()[1], _KEY)


def _id_range(name: str) -> tuple[int, int]:
    """Return the lowest and the highest row id of a submission from its name."""
    low, high = name.rsplit("-", 2)[-2:]
    return int(low, 16), int(high, 16)
