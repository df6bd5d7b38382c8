"""Write documents in the background: one thread per process writes the newest content of each document."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from airflow_geneva.engine.storage.files import in_threads
from airflow_geneva.engine.storage.outages import asked_to_end
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    from airflow_geneva.engine.storage.files import Storage

logger = logging.getLogger("airflow_geneva.storage")
_EVERY_SECONDS, _GRACE_SECONDS = 1.0, 5.0
_Key = tuple[str, str]


class WriteBehind:
    """Writes documents in the background; a newer content of a document replaces one that is still queued.

    A document is written at most once a second. The first failed write is logged. Failed writes are not repeated,
    because a newer content follows or the document is for people only.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[_Key, tuple[Storage, bytes]] = {}
        self._written: dict[_Key, float] = {}
        self._writing: _Key | None = None
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None
        self._warned = False
        self._lost: dict[_Key, StorageError] = {}

    def put(self, storage: Storage, name: str, content: bytes) -> None:
        """Queue a document; a newer content may replace this one before it is written. Raises as `flush` does."""
        with self._changed:
            if self._crash is not None:
                raise self._crashed(storage, self._crash)
            self._waiting[storage.root, name] = (storage, content)
            # So a job that takes less than a second writes each of its documents once.
            self._written.setdefault((storage.root, name), time.monotonic())
            self._start()
            self._changed.notify_all()

    def write(self, storage: Storage, name: str, content: bytes) -> None:
        """Write a document now: drop a queued content of it, and wait for a write of it that is in progress.

        Raises:
            StorageError: the document could not be written.
        """
        key = storage.root, name
        with self._changed:
            self._waiting.pop(key, None)
            while self._writing == key:
                self._changed.wait(1.0)
                if asked_to_end(sys.exc_info()[1]):
                    raise StorageError(f"{storage.path(name)} is not written: an earlier write waits for the store.")
        storage.write_bytes(name, content)

    def flush(self, storage: Storage, all_needed: bool = False) -> None:
        """Write all queued documents of a folder in parallel, and wait for a write that is in progress.

        A process that is asked to stop waits for a few seconds only.

        Args:
            all_needed: also raise StorageError if one of the documents could not be written.

        Raises:
            StorageError: the writing thread has crashed since the last flush, so a document may be lost.
        """
        if asked_to_end(sys.exc_info()[1]):
            ending = threading.Thread(target=self._flush, args=(storage,), name="geneva-flush", daemon=True)
            ending.start()
            ending.join(_GRACE_SECONDS)
            return
        self._flush(storage)
        if all_needed and (lost := next((self._lost[key] for key in self._lost if key[0] == storage.root), None)):
            raise lost

    def _flush(self, storage: Storage) -> None:
        while True:
            with self._changed:
                crash, self._crash = self._crash, None
                if crash is not None:
                    raise self._crashed(storage, crash)
                busy = self._writing
                mine = [key for key in self._waiting if key[0] == storage.root and key != busy]
                if not mine and (busy is None or busy[0] != storage.root):
                    return
                if not mine:
                    self._changed.wait(1.0)
                    continue
                writes = [(key, *self._waiting.pop(key)) for key in mine]
            in_threads(lambda write: self._write(*write), writes)

    def discard(self, storage: Storage, name: str) -> None:
        """Drop a queued document."""
        with self._changed:
            self._waiting.pop((storage.root, name), None)

    def _crashed(self, storage: Storage, crash: BaseException) -> StorageError:
        return StorageError(f"The thread that writes the documents of {storage.root} has crashed: {crash!r}.")

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="geneva-write-behind", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                with self._changed:
                    key = self._next()
                    storage, content = self._waiting.pop(key)
                    self._writing = key
                self._write(key, storage, content)
            except BaseException as crash:
                self._crash = crash
                raise
            finally:
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()

    def _write(self, key: _Key, storage: Storage, content: bytes) -> None:
        try:
            storage.write_bytes(key[1], content)
            self._lost.pop(key, None)
        except StorageError as error:
            self._lost[key] = error
            if not self._warned:
                self._warned = True
                logger.warning("Cannot write %s; the work goes on: %s", storage.path(key[1]), error)
        finally:
            self._written[key] = time.monotonic()

    def _next(self) -> _Key:
        """Block until a document is due to be written."""
        while True:
            now = time.monotonic()
            due = {key: self._written.get(key, -1e9) + _EVERY_SECONDS - now for key in self._waiting}
            key = min(due, key=lambda key: due[key], default=None)
            if key is not None and due[key] <= 0:
                return key
            self._changed.wait(None if key is None else due[key])


BEHIND = WriteBehind()


def _after_fork() -> None:
    global BEHIND
    BEHIND = WriteBehind()


os.register_at_fork(after_in_child=_after_fork)
