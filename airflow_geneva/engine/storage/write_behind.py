"""Write the documents of a folder in the background: one thread writes the newest content of each document."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.files import in_threads
from airflow_geneva.engine.storage.outages import asked_to_end
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    from airflow_geneva.engine.storage.files import Storage

logger = logging.getLogger("airflow_geneva.storage")
_EVERY_SECONDS, _GRACE_SECONDS = 1.0, 5.0


class WriteBehind:
    """Writes documents of a folder; a newer content of a document replaces one that is still queued.

    A document is written at most once a second. The first failed write is logged. Failed writes are not repeated,
    because a newer content follows or the document is for people only. The thread ends when no document is queued.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._written: dict[str, float] = {}
        self._writing: str | None = None
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None
        self._warned = False
        self._lost: dict[str, StorageError] = {}

    def put(self, name: str, content: bytes) -> None:
        """Queue a document; a newer content may replace this one before it is written. Raises as `flush` does."""
        with self._changed:
            if self._crash is not None:
                raise self._crashed(self._crash)
            self._waiting[name] = content
            # So a job that takes less than a second writes each of its documents once.
            self._written.setdefault(name, time.monotonic())
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="geneva-write-behind", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def write(self, name: str, content: bytes) -> None:
        """Write a document now: drop a queued content of it, and wait for a write of it that is in progress.

        Raises:
            StorageError: the document could not be written.
        """
        with self._changed:
            self._waiting.pop(name, None)
            while self._writing == name:
                self._changed.wait(1.0)
                if asked_to_end(sys.exc_info()[1]):
                    place = self.storage.path(name)
                    raise StorageError(f"{place} is not written: an earlier write waits for the store.")
        self.storage.write_bytes(name, content)

    def flush(self, all_needed: bool = False) -> None:
        """Write all queued documents in parallel, and wait for a write that is in progress.

        A process that is asked to stop waits for a few seconds only.

        Args:
            all_needed: also raise StorageError if one of the documents could not be written.

        Raises:
            StorageError: the writing thread has crashed since the last flush, so a document may be lost.
        """
        if asked_to_end(sys.exc_info()[1]):
            ending = threading.Thread(target=self._flush, name="geneva-flush", daemon=True)
            ending.start()
            ending.join(_GRACE_SECONDS)
            return
        self._flush()
        if all_needed and self._lost:
            raise next(iter(self._lost.values()))

    def _flush(self) -> None:
        while True:
            with self._changed:
                crash, self._crash = self._crash, None
                if crash is not None:
                    raise self._crashed(crash)
                mine = [name for name in self._waiting if name != self._writing]
                if not mine and self._writing is None:
                    return
                if not mine:
                    self._changed.wait(1.0)
                    continue
                writes = [(name, self._waiting.pop(name)) for name in mine]
            in_threads(lambda write: self._write(*write), writes)

    def discard(self, name: str) -> None:
        """Drop a queued document."""
        with self._changed:
            self._waiting.pop(name, None)

    def _crashed(self, crash: BaseException) -> StorageError:
        return StorageError(f"The thread that writes the documents of {self.storage.root} has crashed: {crash!r}.")

    def _run(self) -> None:
        while True:
            with self._changed:
                name = self._next()
                if name is None:
                    self._thread = None
                    return
                content = self._waiting.pop(name)
                self._writing = name
            try:
                self._write(name, content)
            except BaseException as crash:
                self._crash = crash
                raise
            finally:
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()

    def _write(self, name: str, content: bytes) -> None:
        try:
            self.storage.write_bytes(name, content)
            self._lost.pop(name, None)
        except StorageError as error:
            self._lost[name] = error
            if not self._warned:
                self._warned = True
                logger.warning("Cannot write %s; the work goes on: %s", self.storage.path(name), error)
        finally:
            self._written[name] = time.monotonic()

    def _next(self) -> str | None:
        """Block until a document is due to be written, and return its name; None if no document is queued."""
        while self._waiting:
            now = time.monotonic()
            due = {name: self._written.get(name, -1e9) + _EVERY_SECONDS - now for name in self._waiting}
            name = min(due, key=lambda name: due[name])
            if due[name] <= 0:
                return name
            self._changed.wait(due[name])
        return None
