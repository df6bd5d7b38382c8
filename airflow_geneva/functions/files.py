"""Read the files that a column names by path or URI."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast
from urllib.parse import quote, unquote, urljoin, urlsplit

import pyarrow as pa

from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.limits.calls import retry_after, seconds_of, table_at_hand
from airflow_geneva.engine.limits.rate_limit import RateLimited
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.documents import Expansion
from airflow_geneva.engine.storage.engine_errors import is_outage
from airflow_geneva.engine.storage.files import Storage, read_local
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import is_absolute
from airflow_geneva.engine.storage.refusals import is_access_refused
from airflow_geneva.engine.storage.uri import is_local, normalize_uri, web_server
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.settings import check_memory, check_number
from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.functions.made import make

_AT_A_TIME = 32
_MOST_REDIRECTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
_OK = 200
_GONE = (404, 410)
_REFUSED = (401, 403, 407, 451)
_TOO_MANY = 429
_OF_SERVER = 500
_PART_BYTES = 1 << 16
_HOSTS = 64
"""Number of web servers to which connections are kept."""
_SAME = {"s3a": "s3", "s3n": "s3"}
_PLAIN = re.compile(r"[A-Za-z0-9/._ -]*")
_ALLOW_MORE = "Give read_file(max_bytes=...) more, if the file is right."


@dataclass(frozen=True)
class _Moved:
    """A file is at another address."""

    uri: str


class _Closed(ConnectionError):
    """A server is away for a while, and says for how long."""

    def __init__(self, said: str, seconds: float) -> None:
        super().__init__(said)
        self.seconds = seconds


class _ReadFile:
    """Read a file by its path or URI."""

    name = "read_file"
    revision = 1
    max_bytes: int
    timeout: float
    retries: int
    per_host: int

    def __init__(self) -> None:
        self.hosts: dict[str, asyncio.Semaphore] = {}

    @cached_property
    def web(self) -> Any:
        """Connections to web servers, which are kept between requests."""
        import urllib3

        return urllib3.PoolManager(num_pools=_HOSTS, maxsize=self.per_host, retries=False)

    async def __call__(self, uri: str) -> bytes | None:
        if uri is None:
            return None
        table = table_at_hand()
        if table is None:
            raise InvalidInput(
                "read_file reads what a table names, in the places of the table's database, and is called for none. "
                'Use it in a column or a query: table.query().select({"file": (read_file(), ["uri"])}).'
            )
        for left in reversed(range(self.retries + 1)):
            try:
                return await self._follow(table, uri)
            except (ConnectionError, TimeoutError, asyncio.TimeoutError, RateLimited) as error:
                if not left:
                    raise _of_last(error, uri, self.timeout) from error
                backoff = min(_FIRST_PAUSE * 2 ** (self.retries - left), _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
                asked = error.seconds if isinstance(error, _Closed) else retry_after(error)
                await asyncio.sleep(max(asked or 0.0, backoff))
        raise AssertionError

    async def _follow(self, table: TableLocation, uri: str) -> bytes:
        """Read a file, and follow redirects; waiting for a place at a host does not count as time of the try."""
        spent = 0.0
        for _ in range(_MOST_REDIRECTS + 1):
            at_once = self.per_host if _of_web(uri) else _AT_A_TIME
            host = self.hosts.setdefault(_host_of(uri), asyncio.Semaphore(at_once))
            await host.acquire()
            began = time.monotonic()
            found = await self._in_thread(host, table, uri, self.timeout - spent)
            if isinstance(found, bytes):
                return found
            uri, spent = found.uri, spent + time.monotonic() - began
        raise ValueError(f"{_shown(uri)} comes after {_MOST_REDIRECTS} redirects, and is another one.")

    async def _in_thread(
        self, host: asyncio.Semaphore, table: TableLocation, uri: str, seconds: float
    ) -> bytes | _Moved:
        """Read a file in a thread that no end of a process waits for; it has its place at its host until it ends."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def end(data: bytes | _Moved | None, error: BaseException | None) -> None:
            host.release()
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(data)

        def run() -> None:
            data, error = None, None
            try:
                data = self._read(table, uri, seconds)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(end, data, error)

        threading.Thread(target=copy_context().run, args=(run,), name="geneva-read", daemon=True).start()
        return cast("bytes | _Moved", await asyncio.wait_for(done, seconds))

    def _read(self, table: TableLocation, uri: str, seconds: float) -> bytes | _Moved:
        document = "A value that read_file was given"
        found = _checked(table, uri, document)
        if _of_web(found):
            return self._download(table, found, seconds)
        if is_local(found) and not is_local(uri) and (decoded := unquote(found)) != found:
            with suppress(FileNotFoundError):  # the name itself has a percent sign
                return self._read_stored(table, _checked(table, decoded, document))
        return self._read_stored(table, found)

    def _read_stored(self, table: TableLocation, uri: str) -> bytes:
        """Read a file of a disk or an object store."""
        try:
            if is_local(uri):
                return read_local(uri, self.max_bytes)
            parts = urlsplit(uri)
            scheme, key = _SAME.get(parts.scheme, parts.scheme), parts.path.removeprefix("/")
            root, options = f"{scheme}://{parts.netloc}", table.options_at(uri)
            if _PLAIN.fullmatch(key) is None and "//" not in key:
                # pylance encodes the name within a folder once more, and takes that of the folder as it is.
                return Storage(f"{root}/{quote(key)}", options).read_bytes("", self.max_bytes)
            return Storage(root, options).read_bytes(key, self.max_bytes)
        except IsADirectoryError:
            raise ValueError(f"{uri} is a folder.") from None
        except FileNotFoundError:
            raise FileNotFoundError(f"There is no file {uri}.") from None
        except StorageError as error:
            cause = error.__cause__ or error
            if is_access_refused(cause):
                raise PermissionError(str(error)) from None
            raise (ConnectionError(str(error)) if is_outage(cause) else error) from None
        except ValueError as error:
            todo = f" {_ALLOW_MORE}" if "more than" in str(error) else ""
            raise ValueError(f"{error}.{todo}") from None

    def _download(self, table: TableLocation, uri: str, seconds: float) -> bytes | _Moved:
        """Read a file of a web server, or return the allowed place to which it redirects."""
        from urllib3 import Timeout, exceptions as errors

        until = time.monotonic() + seconds
        given = {name.lower(): value for name, value in table.options_of_place(_without_query(uri)) or ()}
        headers = {"accept-encoding": "identity", **given}
        left = Timeout(total=max(seconds, 0.001))
        try:
            response = self.web.request(
                "GET", uri, headers=headers, timeout=left, preload_content=False, redirect=False
            )  # fmt: skip
            try:
                if not (location := response.get_redirect_location()):
                    return self._body(response, uri, until)
            finally:
                response.close() if not response.closed else response.release_conn()
        except errors.TimeoutError as error:
            raise TimeoutError(f"{_shown(uri)} gave no answer within {self.timeout:g} s.") from error
        except errors.LocationValueError:
            raise ValueError(f"{_shown(uri)!r} is no address of a web server.") from None
        except errors.HTTPError as error:
            raise ConnectionError(f"{_shown(uri)} cannot be read: {mask_secrets(str(error))}") from None
        before = f"A redirect of {_shown(uri)}"
        try:
            target = urljoin(uri, location)
        except ValueError as error:
            raise ValueError(f"{before} leads to no address: {error}.") from None
        if not _of_web(target):
            raise ValueError(f"{before} leads to {_shown(target)!r}, which is no web server.")
        return _Moved(_checked(table, target, before))

    def _body(self, response: Any, uri: str, until: float) -> bytes:
        """Return the body of an answer, expanded piece by piece if a proxy has compressed it."""
        _check_status(response, uri)
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        expansion = Expansion() if encoding in ("gzip", "x-gzip", "deflate") else None
        if expansion is None and encoding not in ("", "identity"):
            raise ValueError(f"{_shown(uri)} is compressed ({encoding!r:.50}), which was not asked for.")
        data = bytearray()
        while part := response.read1(_PART_BYTES, decode_content=False):
            for piece in [part] if expansion is None else expansion.pieces(part):
                data += piece
                if len(data) > self.max_bytes:
                    raise ValueError(f"{_shown(uri)} has more than {self.max_bytes:,} bytes. {_ALLOW_MORE}")
            if time.monotonic() > until:  # the call has failed already
                raise TimeoutError(f"{_shown(uri)} was not read within {self.timeout:g} s.")
        return bytes(data)


def _of_web(uri: str) -> bool:
    return uri.lower().startswith(("http://", "https://"))


def _host_of(uri: str) -> str:
    """Return the web server of a URI; "" for a disk, an object store, or what is no URI."""
    with suppress(ValueError):
        parts = urlsplit(uri)
        return web_server(parts.scheme, parts.netloc) if _of_web(uri) else ""
    return ""


def _checked(table: TableLocation, uri: str, document: str) -> str:
    """Return a URI that may be opened, in the form in which it is; `InvalidInput` for any other one."""
    if _of_web(uri):
        scheme, rest = uri.split("://", 1)
        uri = f"{scheme.lower()}://{rest}"
        table.places.check(_without_query(uri), document)
        return uri
    if not is_absolute(uri):
        raise InvalidInput(
            f"{document} is {uri!r:.300}, which leads nowhere without a folder. Store whole paths or URIs: s3://..., "
            "https://..., /data/...; SQL can put the folder before it, in a view."
        )
    found = normalize_uri(uri)
    table.places.check(found, document)
    return found


def _without_query(uri: str) -> str:
    return uri.partition("#")[0].partition("?")[0]


def _shown(uri: str) -> str:
    """Return a URI for a message, without what may hold a signature."""
    return _without_query(uri)[:300]


def _check_status(response: Any, uri: str) -> None:
    status = response.status
    if status == _OK:
        return
    said = f"{_shown(uri)} answered {status}{f' {response.reason}' if response.reason else ''}."
    if status in _GONE:
        raise FileNotFoundError(said)
    if status == _TOO_MANY or status >= _OF_SERVER:
        seconds = seconds_of(response.headers)
        raise RateLimited(said, retry_after=seconds) if status == _TOO_MANY else _Closed(said, seconds)
    if status in _REFUSED:
        raise PermissionError(
            f"{said} If it needs a login, give its headers: connect(..., allowed_places={{place: "
            '{"authorization": ...}}), in Airflow as a connection of the place.'
        )
    raise ValueError(said)


def _of_last(error: BaseException, uri: str, timeout: float) -> Exception:
    """Return the error of the last try, for an error policy."""
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return TimeoutError(f"{_shown(uri)} was not read within {timeout:g} s.")
    if isinstance(error, _Closed):
        return ConnectionError(str(error))
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def read_file(
    *, max_bytes: int | str = "64m", timeout: float = 60.0, retries: int = 3, per_host: int = 16, **settings: Any
) -> UDF:
    """Make a UDF that reads the files that a column names by path or URI; NULL stays NULL.

    It reads many files at a time. As `preprocess=` of another function, it reads ahead of its calls. A file may be
    opened if it lies in the database or in an allowed place (`connect(..., allowed_places=[...])`), on a disk, an
    object store, or behind `https://`. Object stores are read with the storage
    options of the place, or else of the database; `https://` with the headers that the place has as storage options.

    A missing file raises `FileNotFoundError`, a refused one `PermissionError`, one that is too large `ValueError`, and
    one that cannot be read after all retries `ConnectionError`, `TimeoutError` or `RateLimited`.

    Args:
        max_bytes: maximum size of a file, in bytes or as `"64m"`.
        timeout: maximum seconds of a try.
        retries: number of further tries after a connection failed, a try took too long, or a server answered with 429
            or an error of its own; the pause before each is doubled, and at least what the server asks for.
        per_host: maximum number of files that a process reads from one web server at a time.
        settings: arguments of the decorator `udf`, such as `on_error`. By default `max_in_flight` is 32 files.
    """
    size = check_memory(max_bytes, "max_bytes")
    if size is None or check_number("timeout", timeout, above_zero=True) is None:
        raise InvalidInput("read_file was given None for max_bytes or timeout. Leave it out for the default.")
    check_whole("retries", retries, least=0, most=20)
    check_whole("per_host", per_host)
    chosen = {**settings, "max_in_flight": settings.get("max_in_flight") or _AT_A_TIME}
    how = {"max_bytes": size, "timeout": timeout, "retries": retries, "per_host": per_host}
    return make(_ReadFile, pa.large_binary(), {}, chosen, **how)
