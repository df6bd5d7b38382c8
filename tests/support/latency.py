"""A proxy in front of an HTTP server that delays and logs every request, and may fail some requests."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote, urlsplit

from airflow_geneva.engine.counts import StoreRequests

_END_OF_HEAD = b"\r\n\r\n"
_REASON = (
    b"<Error><Code>ConditionalRequestConflict</Code><Message>A conflicting operation is going on.</Message></Error>"
)
_REFUSED = {
    "unavailable": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "denied": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 45\r\n\r\n<Error><Code>ExpiredToken</Code></Error>     ",
    "conflict": b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%s" % (len(_REASON), _REASON),
}

Trouble = Literal["", "unavailable", "denied", "conflict", "lost", "slow"]
"""The fate of a request: forwarded; refused with 503, 403 or 409; executed but its answer lost; or delayed for long."""


@dataclass(frozen=True)
class Request:
    """One request with the times at which it arrived and at which its answer was complete."""

    method: str
    path: str
    began: float
    ended: float

    def __str__(self) -> str:
        return f"{self.method} {unquote(self.path)}"


_KINDS = {"GET": "reads", "HEAD": "reads", "PUT": "writes", "DELETE": "deletes"}
_FALLS_DUE = re.compile(r"/_checkpoints/jobs/[^/]+/(status|commit|finish)-[^/]+\.json$")


def _kind(request: Request) -> str:
    if "?delete" in request.path:
        return "deletes"
    return "lists" if "list-type=" in request.path else _KINDS[request.method]


class Requests(list[Request]):
    """The requests of a run."""

    def needed(self) -> Requests:
        """Return the requests without repeated writes of status documents, which depend on the machine's speed."""
        last = {request.path: request for request in self if request.method == "PUT"}
        return Requests(
            request
            for request in self
            if request.method != "PUT" or not _FALLS_DUE.search(unquote(request.path)) or last[request.path] is request
        )

    @property
    def by_kind(self) -> StoreRequests:
        """The number of requests of each kind that a job counts."""
        return StoreRequests(**Counter(map(_kind, self)))

    @property
    def depth(self) -> int:
        """Number of round trips that had to wait for another one: the longest chain of requests one after another."""
        depth, free = 0, 0.0
        for request in sorted(self, key=lambda request: request.ended):
            if request.began >= free:
                depth, free = depth + 1, request.ended
        return depth


@dataclass
class SlowProxy:
    """Forwards requests to a server after `seconds` each; connections are kept open as the server keeps them.

    Args:
        trouble: returns the fate of a request, from its method and path.
    """

    endpoint: str
    seconds: float = 0.05
    trouble: Callable[[str, str], Trouble] = lambda method, path: ""
    log: Requests = field(default_factory=Requests)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def counting(self) -> Iterator[Requests]:
        """Collect the requests of a block."""
        self.log = found = Requests()
        yield found
        self.log = Requests()

    @contextmanager
    def running(self) -> Iterator[SlowProxy]:
        loop, ready = asyncio.new_event_loop(), threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        def run() -> None:
            loop.create_task(serve())
            loop.run_forever()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(30)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(_end_others(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(self.endpoint)
        theirs, to_server = await asyncio.open_connection(address.hostname, address.port)
        try:
            while head := await _head(reader):
                began, (method, path, _) = time.monotonic(), head.split(b"\r\n", 1)[0].decode().split(" ", 2)
                body = await _body(reader, head)
                trouble = self.trouble(method, path)
                await asyncio.sleep(self.seconds + 0.5 * (trouble == "slow"))
                if trouble in _REFUSED:
                    writer.write(_REFUSED[trouble])
                    await writer.drain()
                    continue
                to_server.write(head + body)
                answer = await _head(theirs)
                if not answer:
                    break
                while answer.startswith(b"HTTP/1.1 100"):
                    answer = await _head(theirs)
                empty = method == "HEAD" or answer.split(b" ", 2)[1] in (b"204", b"304")
                content = b"" if empty else await _body(theirs, answer)
                self.log.append(Request(method, path, began, time.monotonic()))
                if trouble == "lost":
                    break
                writer.write(answer + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for stream in (writer, to_server):
                stream.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(_END_OF_HEAD)
    except asyncio.IncompleteReadError:
        return b""


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in head.split(b"\r\n"))}
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        found = b""
        while True:
            line = await reader.readline()
            found += line + await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            if line.split(b";")[0].strip() == b"0":
                return found
    return await reader.readexactly(int(fields.get(b"content-length", b"0")))
