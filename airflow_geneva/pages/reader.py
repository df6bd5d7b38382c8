"""A reader process: reads tables for the API server, which itself opens none, parses no SQL and asks no store.

It answers several requests at once, each in a thread of its own. Frames on its socket are a header and a pickle; both
ends are this package's own processes. About the rights of a request's user it asks the API server.
"""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.timeouts import panics_as_errors
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError
from airflow_geneva.pages.visible import Viewer

MOST_DATA_BYTES = 2_000_000_000
"""Memory that a reader may allocate after its start: `RLIMIT_DATA`."""
MOST_CPU_SECONDS = 60
"""CPU time, for each of the machine's cores, that a reader may use after its newest request began: `RLIMIT_CPU`."""
MOST_FRAME_BYTES = 64_000_000

READY, DO, ASK, TOLD, DONE, FAILED = range(6)
QUESTIONS = ("may_read_dag", "may_read_connection", "may_see_table", "may_see_source")
"""What a reader may ask the API server about a user."""
_HEADER = struct.Struct("!QBQ")
_VIEWER = "viewer"
_OUT_OF_MEMORY = 70


def send(channel: socket.socket, number: int, kind: int, body: bytes) -> None:
    """Write a frame of a request; callers hold the lock of the channel."""
    channel.sendall(_HEADER.pack(number, kind, len(body)) + body)


def receive(channel: socket.socket) -> tuple[int, int, bytes]:
    """Read a frame: number of its request, kind and body; `EOFError` if the other end is closed."""
    number, kind, size = _HEADER.unpack(_read(channel, _HEADER.size))
    return number, kind, _read(channel, size)


def _read(channel: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    view, at = memoryview(found), 0
    while at < size:
        count = channel.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return bytes(found)


def pack(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(body: bytes) -> Any:
    return pickle.loads(body)  # noqa: S301 - from the other end of the socket


def pack_call(call: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickle a call. The user stays in the API server; the reader gets a stand-in that asks the server."""
    written = io.BytesIO()
    _CallPickler(written, pickle.HIGHEST_PROTOCOL).dump((call, arguments))
    return written.getvalue()


class _CallPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return _VIEWER if isinstance(value, Viewer) else None


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, body: bytes, viewer: Viewer) -> None:
        super().__init__(io.BytesIO(body))
        self._viewer = viewer

    def persistent_load(self, name: str) -> Viewer:
        return self._viewer


class _AskingViewer(Viewer):
    """The user of a request, whose rights the API server knows; each question is asked once."""

    def __init__(self, ask: Callable[[str, tuple[str, ...]], bool]) -> None:
        for name in QUESTIONS:
            setattr(self, name, cache(lambda *about, _name=name: ask(_name, about)))


class _Requests:
    """The requests that this process answers."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._told: dict[int, SimpleQueue[bool | None]] = {}

    def serve(self) -> None:
        """Answer until the API server closes the channel, or is gone."""
        while True:
            try:
                number, kind, body = receive(self._channel)
            except (EOFError, OSError):
                os._exit(0)
            if kind == TOLD:
                told = self._told.get(number)
                if told is not None:  # a thread may ask that its request has left behind
                    told.put(unpack(body))
                continue
            allow_cpu_time()
            self._told[number] = SimpleQueue()
            threading.Thread(target=self._answer, args=(number, body), name="geneva-read", daemon=True).start()

    def _answer(self, number: int, body: bytes) -> None:
        asking, answers = threading.Lock(), self._told[number]

        def ask(name: str, about: tuple[str, ...]) -> bool:
            with asking:
                told = None
                if number in self._told:
                    self._send(number, ASK, (name, about))
                    told = answers.get()
            if told is None:
                raise StorageError("Airflow cannot say what the user of this request may see.")
            return told

        try:
            with panics_as_errors("What was asked for"):
                call, arguments = _CallUnpickler(body, _AskingViewer(ask)).load()
                found = pack(call(*arguments))
            if len(found) > MOST_FRAME_BYTES:
                raise InvalidInput(
                    f"What was asked for takes {len(found):,} bytes, and {MOST_FRAME_BYTES:,} is the limit of a page. "
                    "Ask for less, or read the table in a program."
                )
            self._send_bytes(number, DONE, found)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except BaseException as error:  # it is raised in the API server
            self._send_bytes(number, FAILED, _pack_error(error))
        finally:
            del self._told[number]
            answers.put(None)

    def _send(self, number: int, kind: int, value: Any) -> None:
        self._send_bytes(number, kind, pack(value))

    def _send_bytes(self, number: int, kind: int, body: bytes) -> None:
        try:
            with self._sending:
                send(self._channel, number, kind, body)
        except OSError:
            os._exit(0)


def _pack_error(error: BaseException) -> bytes:
    """Pickle an error with the text of its traceback; an exit or what cannot be pickled becomes a `GenevaError`."""
    text = mask_secrets("".join(traceback.format_exception(error)))
    if not isinstance(error, Exception):
        return pack((GenevaError(f"{type(error).__name__}: {error}"), text))
    try:
        packed = pack((error, text))
        unpack(packed)
    except Exception:
        packed = pack((GenevaError(f"{type(error).__name__}: {error}"), text))
    return packed


def exit_reason(code: int) -> str:
    """Say why a reader ended, by the code that `subprocess` returns."""
    if code == _OUT_OF_MEMORY:
        return f"it needed more than {MOST_DATA_BYTES:,} bytes of memory"
    if code == -24:  # SIGXCPU
        return f"it used {MOST_CPU_SECONDS} seconds of CPU time for each core"
    return f"signal {-code} ended it" if code < 0 else f"it exited with code {code}"


def allow_cpu_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = int(used.ru_utime + used.ru_stime) + MOST_CPU_SECONDS * (os.cpu_count() or 1)
    soft = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, most))


def allow_memory() -> None:
    """Limit what is allocated from now on; address space of libraries, which map gigabytes, does not count."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    with open("/proc/self/statm", encoding="ascii") as found:
        wanted = int(found.read().split()[5]) * resource.getpagesize() + MOST_DATA_BYTES
    soft = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, most))


def main(channel: int) -> None:
    """Serve requests from a socket, which the API server gives by its file descriptor."""
    # Ctrl-C and systemd signal every process of the server, which answers open requests before it closes the channel.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Imported now, so that no request waits for it.
    import lance  # noqa: F401

    from airflow_geneva.pages import databases, plan, runs  # noqa: F401

    if sys.platform == "linux":
        allow_memory()
    server = socket.socket(fileno=channel)
    send(server, 0, READY, b"")
    _Requests(server).serve()
