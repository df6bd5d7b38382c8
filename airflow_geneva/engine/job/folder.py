"""The folder of a job's documents: ``_checkpoints/jobs/{id}/``."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.runtime import threading, time, utc_now, uuid
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.storage.files import Storage, as_json
from airflow_geneva.engine.storage.outages import asked_to_end
from airflow_geneva.engine.storage.write_behind import WriteBehind
from airflow_geneva.errors import InvalidInput, StorageError

_LONGEST_PROGRAM = 200

RECORD, CANCEL = "job.json", "cancel.json"
SUBMIT, STATUS, COMMIT, FINISH = "submit", "status", "commit", "finish"
"""Processes with a document each: they submit a shard to Spark, compute it, commit it, and end the job."""
_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,120}$")

STARTED, APPLYING, SUBMITTED, WAKES, SPENT, APPLIED = "started", "applying", "submitted", "wakes", "spent", "applied"
COMMITTING, CHECKED, COMMITTED, FAILURE, ALIVE = "committing", "checked", "committed", "failure", "alive"
"""Parts of a shard's status: start of the last attempt, progress of apply, rows that a service has by submission,
number of times that the task was deferred, amount of a cap that all attempts have spent, result of apply, progress of
the commit, results of its value checks, its result, why the last attempt failed, and the process's heartbeat."""

_WRITER = {STARTED: SUBMIT, WAKES: SUBMIT, COMMITTING: COMMIT, CHECKED: COMMIT, COMMITTED: COMMIT}
"""The process that writes a part, if it is not the computing one."""


_FOR_PEOPLE = {APPLYING, COMMITTING, ALIVE}
"""Parts whose writes no step of the job waits for."""


@dataclass
class _Open:
    """A document that only this process writes while it works on a shard."""

    parts: dict[str, Any]
    written: set[str] = field(default_factory=set)
    over: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)


class JobDocuments:
    """The documents that this process has of a job; other processes that get it have none.

    `own` are those that it wrote while no other process writes any, by name, else None; `open` are those that only this
    process writes while it works on a shard. `behind` writes documents in the background.
    """

    def __init__(self, storage: Storage) -> None:
        self.own: dict[str, dict[str, Any]] | None = None
        self.open: dict[str, _Open] = {}
        self.behind = WriteBehind(storage)

    def __reduce__(self) -> tuple[type[JobDocuments], tuple[Storage]]:
        return JobDocuments, (self.behind.storage,)


def new_job_id() -> str:
    """Return a new job id; ids sort by time, to the microsecond."""
    return f"{utc_now():%Y%m%dT%H%M%S%f}-{uuid.uuid4().hex[:10]}"


def job_start_time(job_id: str) -> datetime | None:
    """Return the time in a job id; None if it has none."""
    try:
        return datetime.strptime(job_id[:21], "%Y%m%dT%H%M%S%f").replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def this_program() -> str:
    """Return the user, the host and the program of this process, as ``ann@desk, airflow-geneva``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"user {os.getuid()}"
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "Python"
    return f"{user}@{socket.gethostname()}, {program}"[:_LONGEST_PROGRAM]


@dataclass(frozen=True)
class JobFolder:
    """The documents of one job. What works on the job in a process shares one object."""

    storage: Storage
    job_id: str
    _documents: JobDocuments = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_documents", JobDocuments(self.storage))

    @staticmethod
    def is_id(text: str) -> bool:
        """Whether a text is a valid job id, which cannot lead outside its folder."""
        return bool(_ID.fullmatch(text)) and ".." not in text

    @staticmethod
    def of(checkpoints: Storage, job_id: str) -> JobFolder:
        """Return the folder of a job below a table's ``_checkpoints``; InvalidInput if the id is not valid."""
        if not JobFolder.is_id(job_id):
            raise InvalidInput(f"{job_id!r} is not a job id.")
        return JobFolder(checkpoints.folder("jobs", job_id), job_id)

    @property
    def alone(self) -> bool:
        """Whether the folder is inside a `written_by_this_process` block, which keeps its documents in memory."""
        return self._documents.own is not None

    @contextmanager
    def written_by_this_process(self, others_go_on: bool = False) -> Iterator[None]:
        """Declare that the job is new, and that no other process writes its documents during the block.

        Documents that this process wrote are not read again, and those of shards are written in the background. On a
        local disk, where writes are fast, nothing changes.

        Args:
            others_go_on: other processes read the documents afterwards; raise StorageError if one is not written.
        """
        if self.storage.local or self.alone:
            yield
            return
        self._documents.own = {}
        try:
            yield
        finally:
            try:
                self._documents.behind.flush(others_go_on)
            finally:
                self._documents.own = None

    def _write(self, name: str, document: dict[str, Any], waited_for: bool = True) -> None:
        own = self._documents.own
        if own is not None:
            own[name] = document
        if self.storage.local or (own is None and name not in self._documents.open):
            self.storage.write_json(name, document)
        else:
            behind = self._documents.behind
            (behind.write if waited_for else behind.put)(name, as_json(document))

    def write_record(self, record: Mapping[str, Any], plan: str | None = None) -> None:
        """Write the job's record, with the fingerprint of its plan if there is something to compute."""
        self._write(RECORD, self._record(record, plan))

    @property
    def record(self) -> dict[str, Any]:
        """The job's record; empty if it was removed."""
        return self.read(RECORD) or {}

    def keep_record(self, record: Mapping[str, Any]) -> None:
        """Keep the record of an `alone` job in memory until the job ends."""
        assert self._documents.own is not None
        self._documents.own[RECORD] = self._record(record, None)

    def _record(self, record: Mapping[str, Any], plan: str | None) -> dict[str, Any]:
        return {"started": time.time(), **record, "id": self.job_id, "plan": plan}

    def update_record(self, **parts: Any) -> None:
        """Change parts of the record, unless it was removed."""
        record = self.read(RECORD)
        if record is not None:
            self._write(RECORD, {**record, **parts})

    def write_result(
        self,
        state: str,
        result: Mapping[str, Any],
        error: str | None = None,
        errors: int = 0,
        about: Mapping[str, Any] | None = None,
        plan: str | None = None,
    ) -> None:
        """Record how the job ended, unless the record was removed or names another plan now."""
        record = self.read(RECORD)
        if record is None or (plan and record.get("plan") not in (None, plan)):
            return
        ended = {"state": state, "ended": time.time(), "result": dict(result), "errors": errors, **(about or {})}
        ended["error"] = None if error is None else mask_secrets(error)
        flush = [self._documents.behind.flush] if self.alone else []
        self.storage.side_by_side(partial(self._write, RECORD, {**record, "ended": ended}), *flush)
        for name, there in list(self._documents.open.items()):
            if name.startswith(FINISH):
                # The record says that the job has ended, so this process needs no more heartbeats.
                there.over = True
                self._documents.behind.discard(name)

    def cancel(self, by: str | None = None) -> None:
        """Ask the processes that compute the job to end it; each looks every few seconds.

        Args:
            by: who asks; by default this program.
        """
        self.storage.write_json(CANCEL, {"by": by or this_program(), "at": time.time(), "attempt": self._attempt()})

    def canceled_by(self) -> str | None:
        """Return who canceled the job since it was planned or resumed; None if it was not canceled."""
        asked = self.storage.read_document(CANCEL)
        return None if asked is None or asked.get("attempt") != self._attempt() else str(asked.get("by"))

    def _attempt(self) -> list[Any]:
        """Identify the attempt at the job that goes on; times of several machines cannot be compared."""
        record = self.read(RECORD) or {}
        return [record.get(name) for name in ("plan", "started", "resumed")]

    def reduce_to_record(self) -> None:
        """Keep the record and the error records, and remove all other documents."""
        names = [name for name in self.storage.list_files() if name != RECORD and not name.startswith("errors/")]
        # Remove the plans first: a cleared task then reports that its plan is missing, even if other files still exist.
        plans = [name for name in names if name.startswith("plan-")]
        self.storage.delete_all(plans)
        fault_point("plans.removed")
        self.storage.delete_all(name for name in names if name not in plans)
        for name in {name.partition("/")[0] for name in names if "/" in name}:
            self.storage.remove_empty_folders(name)

    @contextmanager
    def working_on(self, name: str) -> Iterator[None]:
        """Declare that no other process writes a document during the block, so that it is read only once."""
        opened = self._documents.open
        if name in opened:
            yield
            return
        # The process that ends the job writes nothing but heartbeats.
        opened[name] = _Open({} if name.startswith(FINISH) else self.read(name) or {})
        try:
            yield
        finally:
            del opened[name]
            if not self.alone:
                self._documents.behind.flush()

    def read_shard(self, fingerprint: str, shard: int, by: str = STATUS) -> dict[str, Any]:
        """Read a process's document about a shard; empty if none has worked on it."""
        name = shard_name(by, fingerprint, shard)
        there = self._documents.open.get(name)
        return dict(there.parts) if there is not None else self.read(name) or {}

    def update_shard(self, fingerprint: str, shard: int, by: str = "", **parts: Any) -> None:
        """Write parts of a shard's status and keep the others. Two concurrent attempts may lose a part of it.

        Args:
            by: the process that writes; by default the one to which each part belongs.
        """
        for writer in dict.fromkeys(by or _WRITER.get(part, STATUS) for part in parts):
            new = {part: value for part, value in parts.items() if writer == (by or _WRITER.get(part, STATUS))}
            name = shard_name(writer, fingerprint, shard)
            there = self._documents.open.get(name) or _Open(self.read_shard(fingerprint, shard, writer))
            with _held(there.lock):
                if there.over:
                    continue
                there.parts.update(new)
                if ALIVE in new and ALIVE in there.written and writer != FINISH:
                    # The process of an earlier attempt may still run, so neither removes the other's parts.
                    mine = {part: value for part, value in there.parts.items() if part in there.written}
                    there.parts = {**(self.read(name) or {}), **mine, **new}
                there.written.update(new)
                waited_for = not (self.alone or set(new) <= _FOR_PEOPLE)
                self._write(name, dict(there.parts), waited_for)

    @contextmanager
    def recording_failure(self, fingerprint: str, shard: int, last: bool = False) -> Iterator[None]:
        """Write why the work on a shard failed, for the job's record; a new attempt first removes the earlier reason.

        A reason that a Spark driver has written meanwhile stays, because it says more than the submitting task knows.

        Args:
            last: no other attempt follows, so the job fails too.
        """
        if self.read_shard(fingerprint, shard).get(FAILURE):
            self.update_shard(fingerprint, shard, failure=None)
        try:
            yield
        except BaseException as error:
            if not is_failure(error):
                raise
            with suppress(StorageError):
                failure = self.read_shard(fingerprint, shard).get(FAILURE)
                if last or not failure:
                    failure = failure or {"error": mask_secrets(str(error)), "at": time.time()}
                    self.update_shard(fingerprint, shard, failure={**failure, **({"last": True} if last else {})})
            raise

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a document; None if it does not exist or is damaged."""
        own = self._documents.own
        return self.storage.read_document(name) if own is None else own.get(name)


@dataclass(frozen=True)
class ShardDocuments:
    """What the processes of a job write about one shard of the plan with this fingerprint."""

    folder: JobFolder
    plan: str
    shard: int

    def read(self, by: str = STATUS) -> dict[str, Any]:
        """Read a process's document; empty if none has worked on the shard."""
        return self.folder.read_shard(self.plan, self.shard, by)

    def update(self, **parts: Any) -> None:
        """Write parts of the status and keep the others."""
        self.folder.update_shard(self.plan, self.shard, **parts)

    @property
    def applied(self) -> dict[str, Any] | None:
        """The result of the last attempt that computed the shard."""
        return self.read().get(APPLIED)

    @property
    def failure(self) -> str:
        """The first line of why the last attempt failed; empty if it recorded no failure."""
        return str((self.read().get(FAILURE) or {}).get("error", "")).partition("\n")[0]

    def written_here(self) -> AbstractContextManager[None]:
        """Declare that no other process writes the status during the block, so that it is read only once."""
        return self.folder.working_on(shard_name(STATUS, self.plan, self.shard))


@contextmanager
def _held(lock: threading.RLock) -> Iterator[None]:
    """Hold a lock; a task that was asked to end does not wait for a thread that writes to an unreachable store."""
    while not lock.acquire(timeout=1.0):
        if asked_to_end(sys.exc_info()[1]):
            raise StorageError("The last status is not written, because an earlier write still waits for the store.")
    try:
        yield
    finally:
        lock.release()


def plan_name(fingerprint: str) -> str:
    return f"plan-{fingerprint[:16]}.json"


def shard_name(step: str, fingerprint: str, shard: int) -> str:
    return f"{step}-{fingerprint[:16]}-{shard:04}.json"
