"""A proxy in front of a server; it can refuse connections for some time, or lose the answer to a request."""

from __future__ import annotations

import logging
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to a server; `down` cuts them and refuses new ones until `up`."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        self._server = (address.hostname, address.port)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._watched: dict[re.Pattern[bytes], Callable[[], None]] = {}
        self._lost: re.Pattern[bytes] | None = None
        self._listener: socket.socket | None = None
        self._port = 0
        self.refusing = threading.Event()
        self.up()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(128)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self.refusing.clear()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def down(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
            cut, self._open = self._open, set()
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for each in cut:
            _cut(each)
        self.refusing.set()

    def down_for(self, seconds: float) -> None:
        self.down()
        timer = threading.Timer(seconds, self.up)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        self.down()

    def at_request(self, line: bytes, act: Callable[[], None]) -> None:
        """Act once, before a request whose first line matches is forwarded."""
        self._watched[re.compile(line)] = act

    def lose_answer(self, line: bytes) -> None:
        """Let the server execute the next request whose first line matches, and cut the connection then."""
        self._lost = re.compile(line)

    @property
    def has_lost(self) -> bool:
        return self._lost is None

    @property
    def watched(self) -> int:
        """Number of requests that are still expected."""
        return len(self._watched)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                _cut(client)
                continue
            with self._lock:
                alive = self._listener is listener
                if alive:
                    self._open |= {client, server}
            if not alive:
                _cut(client)
                _cut(server)
                continue
            losing = threading.Event()
            for take, give, watch in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(take, give, watch, losing), daemon=True).start()

    def _pass(self, take: socket.socket, give: socket.socket, requests: bool, losing: threading.Event) -> None:
        with suppress(OSError):
            while data := take.recv(1 << 16):
                if requests:
                    self._look(data.partition(b"\r\n")[0], losing)
                elif losing.is_set():
                    break
                give.sendall(data)
        _cut(take)
        _cut(give)
        with self._lock:
            self._open -= {take, give}

    def _look(self, line: bytes, losing: threading.Event) -> None:
        if self._lost is not None and self._lost.search(line):
            self._lost = None
            losing.set()
        for pattern in [pattern for pattern in self._watched if pattern.search(line)]:
            if (act := self._watched.pop(pattern, None)) is not None:
                act()


def _cut(each: socket.socket) -> None:
    with suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


@pytest.fixture
def proxy(endpoint: str) -> Iterator[Proxy]:
    made = Proxy(endpoint)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def at_log(logger: str, text: str, act: Callable[[], None]) -> Iterator[list[str]]:
    """Act when a line with this text is logged; yield all lines that are logged in the block."""
    lines: list[str] = []

    class Acting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if text in lines[-1]:
                act()

    handler, into = Acting(), logging.getLogger(logger)
    into.addHandler(handler)
    try:
        yield lines
    finally:
        into.removeHandler(handler)
