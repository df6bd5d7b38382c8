"""Hand what touches a table, a store or SQL to reader processes, and replace those that die or take too long."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Any, TypeVar
from zlib import crc32

from airflow_geneva.errors import StorageError
from airflow_geneva.pages.reader import (
    ASK,
    DO,
    DONE,
    QUESTIONS,
    READY,
    TOLD,
    exit_reason,
    pack,
    pack_call,
    receive,
    send,
    unpack,
)
from airflow_geneva.pages.visible import Viewer

_T = TypeVar("_T")

READERS = 2
ANSWER_SECONDS = 30.0
"""How long a reader may take for one request; then it gets no others, and is replaced."""
START_SECONDS = 60.0
_STOP_SECONDS = 5.0
_BOOT = """
import json, socket, sys
channel = int(sys.argv[1])
path = open(channel, "rb", buffering=0, closefd=False).readline()
sys.path[:] = json.loads(path)
from airflow_geneva.pages.reader import main
main(channel)
"""
logger = logging.getLogger("airflow_geneva.pages")


class ReaderLost(StorageError):
    """The process that answered a request ended, or took too long; the message has an id that the log has, too."""


class _Died(Exception):
    """A reader ended while it answered a request; `alone` if it never had another."""

    def __init__(self, reason: str, alone: bool) -> None:
        super().__init__(reason)
        self.alone = alone


class _TooLate(Exception):
    """A reader did not answer in time."""

    def __init__(self) -> None:
        super().__init__(f"it took longer than {ANSWER_SECONDS:g} seconds")


class Reader:
    """A reader process, which several threads may ask at the same time."""

    def __init__(self) -> None:
        self.retired = False
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._answers: dict[int, SimpleQueue[tuple[int, bytes] | None]] = {}
        self._number = 0
        self._reason = ""
        self._started = threading.Event()
        self._channel, other = socket.socketpair()
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(ANSWER_SECONDS), 0))
        try:
            # An exec of its own: forking a process with threads of Lance would hang. Nothing secret is on the command
            # line, and Airflow's own variables stay here. Arrow's own allocator maps a gigabyte at once.
            kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")}
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={**kept, "ARROW_DEFAULT_MEMORY_POOL": "system"},
            )
        finally:
            other.close()
        self._channel.sendall(json.dumps([os.path.abspath(part or os.curdir) for part in sys.path]).encode() + b"\n")
        threading.Thread(target=self._listen, name="geneva-reader", daemon=True).start()

    @property
    def usable(self) -> bool:
        return not self.retired and not self._reason

    def ask(self, viewer: Viewer, body: bytes) -> Any:
        """Return the result of a packed call, or raise its error.

        Raises:
            _Died: the process ended.
            _TooLate: it did not answer within `ANSWER_SECONDS`, after its start.
        """
        self._started.wait(START_SECONDS)
        until = time.monotonic() + ANSWER_SECONDS
        answers: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answers
            if self._reason:
                answers.put(None)
        try:
            self._send(number, DO, body)
            while True:
                try:
                    answer = answers.get(timeout=max(until - time.monotonic(), 0.0))
                except Empty:
                    self.retire()
                    raise _TooLate from None
                if answer is None:
                    raise _Died(self._reason, alone=self._number == 1)
                kind, found = answer
                value = unpack(found)
                if kind == DONE:
                    return value
                if kind != ASK:
                    error, text = value
                    error.__cause__ = _InReader(text)
                    raise error
                name, about = value
                if name not in QUESTIONS:
                    raise AssertionError(name)
                told = None  # if Airflow cannot say, the reader gives up, too
                try:
                    told = bool(getattr(viewer, name)(*about))
                finally:
                    self._send(number, TOLD, pack(told))
        finally:
            with self._lock:
                del self._answers[number]
                ends = self.retired and not self._answers
            if ends:
                self.stop()

    def retire(self) -> None:
        """Take no more requests, and end the process when its other requests have been answered."""
        self.retired = True

    def stop(self) -> None:
        self.process.kill()

    def leave(self) -> None:
        """Close the channel in a process that was forked: the reader is of the process that started it."""
        self._channel.close()

    def _send(self, number: int, kind: int, body: bytes) -> None:
        try:
            with self._sending:
                send(self._channel, number, kind, body)
        except OSError:  # it is gone, or takes nothing; the listener says so
            self.stop()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, kind, body = receive(self._channel)
                if kind == READY:
                    self._started.set()
                with self._lock:
                    answers = self._answers.get(number)
                if answers is not None:
                    answers.put((kind, body))
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_SECONDS)
        self.process.kill()
        with self._lock:
            self._reason = exit_reason(self.process.wait())
            for answers in self._answers.values():
                answers.put(None)
        self._started.set()
        self._channel.close()


class _InReader(Exception):
    """The traceback of an error in a reader, as text."""


class Readers:
    """The readers of this process, which start when they are first needed."""

    def __init__(self, most: int = READERS) -> None:
        self._readers: list[Reader | None] = [None] * most
        self._spare: Reader | None = None
        self._begin()

    def _begin(self) -> None:
        self._lock, self._alone = threading.Lock(), threading.Lock()
        self._left = 0

    def forget(self) -> None:
        """Begin anew in a process that was forked, in which another thread's locks stay locked."""
        for reader in (*self._readers, self._spare):
            if reader is not None:
                reader.leave()
        self._readers, self._spare = [None] * len(self._readers), None
        self._begin()

    def read(self, viewer: Viewer, key: Hashable, call: Callable[..., _T], *arguments: Any) -> _T:
        """Return the result of a call in a reader, or raise its error.

        Calls with one key are made by one reader, which keeps what it has counted. A call whose reader died is made
        again, by a reader that answers one at a time: only a call that ends a reader that had no other is given up.

        Args:
            viewer: whose rights the reader may ask about.
            key: the database and the table.
            call: a function of a module that needs no Airflow; it, its arguments and its result are pickled.

        Raises:
            ReaderLost: the reader died, or took longer than `ANSWER_SECONDS`.
        """
        body = pack_call(call, arguments)
        try:
            try:
                return self._of(key).ask(viewer, body)  # type: ignore[no-any-return]
            except _Died as died:
                if died.alone:
                    raise
            with self._turn():
                return self._ask_alone(viewer, body)  # type: ignore[no-any-return]
        except (_Died, _TooLate) as lost:
            told = token_hex(4)
            logger.error("A reader process was lost in %s (id %s): %s", call.__name__, told, lost)
            raise ReaderLost(
                f"The process that reads tables for Airflow's API server did not answer: {lost}. Another one has "
                f"taken its place, so other pages are not affected. The log of the API server says more at id {told}."
            ) from None

    def _of(self, key: Hashable) -> Reader:
        first = crc32(repr(key).encode()) % len(self._readers)
        with self._lock:
            found = self._readers[first]
            if found is None or not found.usable:
                found = self._readers[first] = Reader()
        return found

    def _ask_alone(self, viewer: Viewer, body: bytes) -> Any:
        if self._spare is not None and self._spare.usable:
            with suppress(_Died):  # a count that an earlier request left behind may have ended it
                return self._spare.ask(viewer, body)
        self._spare = Reader()
        return self._spare.ask(viewer, body)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for a turn at the reader, which answers one request at a time and ends after the last one."""
        with self._lock:
            self._left += 1
        try:
            if not self._alone.acquire(timeout=START_SECONDS):
                raise _TooLate
            try:
                yield
            finally:
                self._alone.release()
        finally:
            with self._lock:
                self._left -= 1
                if not self._left and self._spare is not None:
                    self._spare.stop()
                    self._spare = None

    def stop(self) -> None:
        """End all readers; the next request starts others."""
        with self._lock:
            for reader in self._readers:
                if reader is not None:
                    reader.stop()
            self._readers = [None] * len(self._readers)


READING = Readers()
os.register_at_fork(after_in_child=READING.forget)


def read(viewer: Viewer, key: Hashable, call: Callable[..., _T], *arguments: Any) -> _T:
    """Make a call in a reader of this process; see `Readers.read`."""
    return READING.read(viewer, key, call, *arguments)
