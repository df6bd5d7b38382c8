"""A catalog of tables that hands out credentials for an S3 server, which end after some seconds.

It is two real HTTP servers. One forwards the requests of the namespace specification to pylance's own server and adds
credentials to its answers; the other forwards requests to the S3 server, and refuses those with credentials that have
ended.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from lance.namespace import RestAdapter

from tests.support.object_store import KEY, SECRET, options_of

TOKEN = "the-token-of-the-catalog"
"""What the catalog wants to see in the header Authorization, and what no file may contain."""
_PER_CONNECTION = {"connection", "host", "content-length", "transfer-encoding", "authorization", "expect"}
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"

Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def serving(answer: Callable[[str, str, Mapping[str, str], bytes], Answer]) -> Iterator[str]:
    """Run an HTTP server and yield its address; `answer` gets method, path, headers and body of each request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = answer(self.command, self.path, dict(self.headers.items()), body)
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if self.command != "HEAD" and status not in (204, 304):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.request_queue_size = 128
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


_own = threading.local()


def _forward(url: str, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
    place = urlsplit(url)
    kept: dict[str, http.client.HTTPConnection] = _own.__dict__.setdefault("connections", {})
    for again in (False, True):
        connection = kept.setdefault(url, http.client.HTTPConnection(place.hostname or "", place.port, timeout=60))
        try:
            connection.request(method, path, body or None, dict(headers))
            answer = connection.getresponse()
            content = answer.read()
            break
        except (http.client.HTTPException, ConnectionError):
            kept.pop(url).close()
            if again:
                raise
    found = {name: value for name, value in answer.getheaders() if name.lower() not in _PER_CONNECTION}
    if method == "HEAD" and (length := answer.getheader("Content-Length")):
        found["Content-Length"] = length
    return answer.status, found, content


@dataclass
class VendingCatalog:
    """A running catalog with its tables in a bucket.

    Args:
        endpoint: the S3 server, which knows no other credentials than its own.
        seconds: for how long credentials that are handed out are good.
        described: the tables that were asked for, in the words of the address.
        refused: requests to the store with credentials that had ended.
        failing: how many of the next requests to the catalog fail, as in an outage.
    """

    endpoint: str
    root: str
    seconds: float
    url: str = ""
    store: str = ""
    described: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    requests: int = 0
    failing: int = 0
    _ends: dict[str, float] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _relocated: dict[str, str] = field(default_factory=dict)
    _adapter: str = ""

    @property
    def properties(self) -> dict[str, str]:
        return {"uri": self.url, "headers.Authorization": f"Bearer {TOKEN}"}

    @contextmanager
    def running(self) -> Iterator[VendingCatalog]:
        storage = {f"storage.{name}": value for name, value in options_of(self.endpoint).items()}
        with ExitStack() as stack:
            adapter = stack.enter_context(RestAdapter("dir", {"root": self.root, **storage}, port=0))
            self._adapter = f"http://127.0.0.1:{adapter.port}"
            self.url = stack.enter_context(serving(self._catalog))
            self.store = stack.enter_context(serving(self._store))
            yield self

    def move(self, table: str, location: str) -> None:
        """Answer with another location of a table from now on."""
        self._relocated[table] = location

    @property
    def secrets(self) -> list[str]:
        """The secret keys that were handed out."""
        return [f"secret-of-{key}." for key in self._ends]

    def _catalog(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if self.failing:
            self.failing -= 1
            return 503, {"Content-Type": "application/json"}, json.dumps({"error": "busy", "code": 17}).encode()
        if {name.lower(): value for name, value in headers.items()}.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"Content-Type": "application/json"}, json.dumps({"error": "no token", "code": 16}).encode()
        kept = {name: value for name, value in headers.items() if name.lower() not in _PER_CONNECTION}
        status, found, content = _forward(self._adapter, method, path, kept, body)
        parts = urlsplit(path).path.split("/")
        if status == 200 and parts[-1] in ("describe", "declare") and parts[-3] == "table":
            self.described.append(parts[-2])
            answer = json.loads(content)
            if moved := self._relocated.get(parts[-2].replace("%24", ".").replace("$", ".")):
                answer["location"] = moved
            answer["storage_options"] = self._grant()
            content = json.dumps(answer).encode()
        return status, found, content

    def _grant(self) -> dict[str, str]:
        key, ends = f"grant-{next(self._numbers)}", time.time() + self.seconds
        self._ends[key] = ends
        given = {**options_of(self.store), "aws_access_key_id": key, "aws_secret_access_key": f"secret-of-{key}."}
        return {**given, "expires_at_millis": str(int(ends * 1000))}

    def _store(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        given = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
        key = given.partition("Credential=")[2].partition("/")[0]
        self.requests += 1
        if time.time() > self._ends.get(key, 0):
            self.refused.append(f"{method} {path} with {key or 'no key'}")
            return 403, {"Content-Type": "application/xml"}, _EXPIRED
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in _PER_CONNECTION and not name.lower().startswith("x-amz-security")
        }
        request = AWSRequest(method, f"{self.endpoint}{path}", data=body or None, headers=kept)
        S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(request)
        return _forward(self.endpoint, method, path, dict(request.headers.items()), body)
