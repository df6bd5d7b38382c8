"""Write documents behind the work: one thread per process writes the newest content of each."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from airflow_geneva.errors import StorageError
from airflow_geneva.storage.files import in_threads

if TYPE_CHECKING:
    from airflow_geneva.storage.files import Storage

logger = logging.getLogger("airflow_geneva.storage")
_EVERY_SECONDS = 1.0
_Key = tuple[str, str]


class WriteBehind:
    """Writes documents in the background; of several contents of a document, only the newest.

    A document is written at most once a second. A write that fails is logged once and dropped, because a later
    content follows or the document is for people only.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[_Key, tuple[Storage, bytes]] = {}
        self._written: dict[_Key, float] = {}
        self._writing: _Key | None = None
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None
        self._warned = False

    def put(self, storage: Storage, name: str, content: bytes) -> None:
        """Write a document soon, unless a newer content replaces this one before; raises as `flush`."""
        with self._changed:
            if self._crash is not None:
                raise self._crashed(storage, self._crash)
            self._waiting[storage.root, name] = (storage, content)
            self._start()
            self._changed.notify_all()

    def flush(self, storage: Storage) -> None:
        """Write all documents of a folder that wait, side by side, and wait for the one that is being written.

        Raises:
            StorageError: the thread that writes has crashed since the last flush, so a document may be lost.
        """
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
        """Forget a document that waits."""
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
        except StorageError as error:
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
