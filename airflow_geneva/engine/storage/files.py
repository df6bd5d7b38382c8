"""List, read and write small files on any store that pylance supports."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import re
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.runtime import Future, ThreadPoolExecutor, threading, uuid
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.documents import LARGEST_BYTES, parse
from airflow_geneva.engine.storage.engine_errors import describe_store_error, engine_errors, is_failure, is_outage
from airflow_geneva.engine.storage.outages import PATIENCE, wait_out
from airflow_geneva.engine.storage.requests import count_requests
from airflow_geneva.engine.storage.secrets import remember_options
from airflow_geneva.engine.storage.uri import is_local, join, normalize_uri
from airflow_geneva.errors import InvalidInput, StorageError

if TYPE_CHECKING:
    import pyarrow as pa
    from _typeshed import SupportsWrite
    from lance.file import LanceFileReader, LanceFileSession, LanceFileWriter

_A = TypeVar("_A")
_T = TypeVar("_T")
_Target = TypeVar("_Target", bound="SupportsWrite[bytes]")
_PIPE_BYTES = 1 << 16
_TRIES = 5
_COUNTS_AT = 16
"""Where the numbers of buffers and of columns lie in a Lance file, from its end."""

# pylance's file session raises RuntimeError where a local disk raises OSError.
_STORE_ERRORS = (OSError, RuntimeError)

# The Lance table that contains a folder of checkpoints, or else the innermost one that contains a URI, or is it.
_TABLE = re.compile(r"^.*(?=/_checkpoints(?:/|$))|^.*\.lance(?=/|$)")
# Where this package's own folders begin in a path; a link in them could lead to the folders of another table.
_OWN = re.compile(r"/(?:_checkpoints|_geneva)(?=/|$)")


@contextlib.contextmanager
def _store_errors(task: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except _STORE_ERRORS as error:
        raise StorageError(f"Cannot {task}: {describe_store_error(error)}{advice}") from error


@dataclass(frozen=True)
class FileEntry:
    """One file: its path relative to the folder that was listed, and its time in seconds by the store's clock."""

    name: str
    size_bytes: int
    modified: float

    @property
    def half_written(self) -> bool:
        return _is_half_written(self.name)


def _is_half_written(name: str) -> bool:
    """Whether a path names a temporary file of this package, pylance or its object stores."""
    file = name.rsplit("/", 1)[-1]
    return "#" in file or ".tmp" in file


def _is_missing(error: BaseException) -> bool:
    """Whether a store answered that an object does not exist; a missing bucket is another error."""
    text = str(error).lower()
    return " not found: " in text and "nosuchbucket" not in text and "containernotfound" not in text


def freeze_options(options: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return storage options as sorted pairs; InvalidInput, without their values, if they do not map text to text."""
    if isinstance(options, Mapping) and (wrong := [k for k, v in options.items() if not isinstance(v, str)]):
        raise InvalidInput(f"The values of storage options are text, which those of {wrong} are not: quote them.")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidInput(
            f'Storage options are given by name, {{"region": "..."}}, not as a {type(options).__name__}.'
        )
    frozen = tuple(sorted((options or {}).items()))
    remember_options(frozen)
    return frozen


@functools.lru_cache(maxsize=64)
def _session(root: str, options: tuple[tuple[str, str], ...], patient: bool, pid: int) -> LanceFileSession:
    from lance.file import LanceFileSession

    count_requests()
    try:
        return LanceFileSession(root, **pylance_access(options, patient))
    except ValueError as error:
        if "No object store provider" not in str(error):
            raise
        scheme = root.partition("://")[0]
        raise InvalidInput(
            f"Lance has no storage for {scheme}://. Give a path, or a URI such as s3://bucket/db, gs:// or az://."
        ) from error


@dataclass(frozen=True)
class Storage:
    """A folder on a local disk or an object store, with its storage options (credentials) as sorted pairs."""

    root: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @staticmethod
    def at(root: str, options: Mapping[str, str] | None = None) -> Storage:
        return Storage(normalize_uri(root), freeze_options(options))

    def folder(self, *parts: str) -> Storage:
        return Storage(join(self.root, *parts), self.options)

    @property
    def session(self) -> LanceFileSession:
        """The Lance file session of this folder, one per process; pylance's retries last as long as the patience."""
        return _session(self.root, self.options, PATIENCE in dict(self.options), os.getpid())

    def _ask(self, request: Callable[[LanceFileSession], _T]) -> _T:
        """Send a request, and repeat it during an outage: here pylance itself retries for a few seconds only."""
        return wait_out(self.root, self.options, lambda: request(_session(self.root, self.options, False, os.getpid())))

    @property
    def local(self) -> bool:
        return is_local(self.root)

    def side_by_side(self, *calls: Callable[[], Any]) -> list[Any]:
        """Make independent calls and return their results; on an object store, make them in parallel."""
        return in_threads(lambda call: call(), calls, 1 if self.local else AT_A_TIME)

    def path(self, name: str) -> str:
        """Return the URI of a file below this folder, or of the folder itself for ""; reject a name outside of it."""
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise InvalidInput(f"{name!r} would be outside {self.root}. A name must stay inside its folder.")
        return join(self.root, name) if name else self.root

    def is_linked(self, path: str) -> bool:
        """Whether a local path is a symbolic link, or behind one, within a table or this folder."""
        if not self.local:
            return False
        own = _OWN.search(self.root)
        top = self.root[: own.start()] if own else self.root
        while len(path) >= len(top) > 1:
            if os.path.islink(path):
                return True
            path = os.path.dirname(path)
        return False

    def _refuse_link(self, path: str) -> None:
        if self.is_linked(path):
            raise StorageError(
                f"{path} is a symbolic link, or behind one: links in a table are not followed. Remove it."
            )

    def open_reader(self, name: str, columns: list[str] | None = None) -> LanceFileReader:
        """Open a Lance file; FileNotFoundError if a link leads to it."""
        if self.is_linked(self.path(name)):
            raise FileNotFoundError(self.path(name))
        if self.local:
            _check_footer(self.path(name))
        return self.session.open_reader(name, columns)

    @contextlib.contextmanager
    def open_whole(self, name: str, most_bytes: int) -> Iterator[LanceFileReader]:
        """Open a Lance file to read all of it with one request; `open_reader` needs a second one for the size.

        ValueError: a file on an object store has more than `most_bytes` bytes.
        """
        if self.local:
            yield self.open_reader(name)
            return
        from lance.file import LanceFileReader

        with tempfile.NamedTemporaryFile(prefix="geneva-", suffix=".lance", buffering=0) as file:
            _download(self.session, name, file, most_bytes)
            _check_footer(file.name)
            yield LanceFileReader(file.name)

    def open_writer(self, name: str, schema: pa.Schema) -> LanceFileWriter:
        """Open a new Lance file; StorageError if a link leads to its folder."""
        folder = os.path.dirname(self.path(name))
        self._refuse_link(folder)
        for left in reversed(range(_TRIES)):
            try:
                return self.session.open_writer(name, schema=schema)
            except OSError as error:
                # As in `_temporary_file`: a cleanup may have removed the folder while it was empty.
                if not (self.local and left and "No such file" in str(error)):
                    raise
        raise AssertionError

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write one file atomically; `StorageError` if the store is unreachable, full or read-only."""
        target = self.path(name)
        with _store_errors(f"write {target}", " Check that the location exists and is writable."):
            if not self.local:
                with tempfile.TemporaryDirectory(prefix="geneva-") as scratch:
                    local = Path(scratch) / "document"
                    local.write_bytes(data)
                    self._ask(lambda session: session.upload_file(local, name))
                return
            self._refuse_link(os.path.dirname(target))
            file = _temporary_file(os.path.dirname(target))
            try:
                with file:
                    file.write(data)
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise

    def read_bytes(self, name: str, most_bytes: int = LARGEST_BYTES) -> bytes:
        """Read a document; raises the errors of `_reading`, and ValueError if it has more than `most_bytes` bytes."""
        with self._reading(name) as source:
            if self.local:
                return read_local(source, most_bytes)
            return self._ask(lambda session: _download(session, name, io.BytesIO(), most_bytes).getvalue())

    def read_part(self, name: str, start: int, length: int) -> bytes:
        """Read ``length`` bytes from ``start``; the file must be long enough. See `_reading` for the errors."""
        with self._reading(name) as source:
            if not self.local:
                return bytes(self._ask(lambda session: session.read_range(name, start, length)))
            with open(source, "rb") as file:
                file.seek(start)
                return file.read(length)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[str]:
        """Yield the URI of a file, and convert the errors of reading it.

        Raises:
            FileNotFoundError: the file does not exist, or a link leads to it.
            StorageError: any other error.
        """
        source = self.path(name)
        if self.is_linked(source):
            raise FileNotFoundError(source)
        try:
            yield source
        except FileNotFoundError:
            raise
        except _STORE_ERRORS as error:
            if not self.local and not is_outage(error) and (_is_missing(error) or not self.exists(name)):
                raise FileNotFoundError(source) from error
            raise StorageError(f"Cannot read {source}: {describe_store_error(error)}") from error

    def write_json(self, name: str, document: Any) -> None:
        self.write_bytes(name, as_json(document))

    def read_json(self, name: str) -> Any:
        """Read a JSON document; raises the errors of `read_bytes`, and ValueError if it is damaged (see `parse`)."""
        return parse(self.read_bytes(name))

    def read_document(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object; None if it does not exist or is damaged."""
        try:
            document = self.read_json(name)
        except (FileNotFoundError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def exists(self, name: str) -> bool:
        if self.local:
            return os.path.exists(self.path(name)) and not self.is_linked(self.path(name))
        with _store_errors(f"reach {self.root}"):
            return self._ask(lambda session: session.contains(name))

    def list_files(self, folder: str = "") -> list[str]:
        """Return the names of all files below a folder, relative to this one, without half-written files and links."""
        with _store_errors(f"list {join(self.root, folder)}"):
            if self.local:
                # This lists 100,000 files ten times faster than the session does.
                cut = len(self.root) + 1
                found = [item.path[cut:] for item in self._files_below(folder)]
            else:
                found = self._ask(lambda session: session.list(folder or None))
                found = [name for name in found if name.rstrip("/") != folder]
        return [name for name in found if not _is_half_written(name)]

    def list_entries(self, half_written: bool = False) -> list[FileEntry]:
        """Return all files below this folder with sizes and times, named relative to it; skip links.

        On an object store, the whole table is listed. A folder outside a Lance table raises `StorageError`.
        """
        found = self._local_entries() if self.local else self._remote_entries()
        return [entry for entry in found if half_written or not entry.half_written]

    def _files_below(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Yield the files below a local folder; links are neither followed nor yielded."""
        folders = [folder]
        while folders:
            for item in self._inside(folders.pop()):
                if item.is_dir(follow_symlinks=False):
                    folders.append(item.path[len(self.root) + 1 :])
                elif item.is_file(follow_symlinks=False):
                    yield item

    def _inside(self, folder: str) -> list[os.DirEntry[str]]:
        """Return the entries of a local folder; none if it does not exist or a link leads to it."""
        path = self.path(folder)
        if self.is_linked(path):
            return []
        try:
            with os.scandir(path) as found:
                return list(found)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _local_entries(self) -> Iterator[FileEntry]:
        cut = len(self.root) + 1
        with _store_errors(f"list {self.root}"):
            for item in self._files_below(""):
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    yield FileEntry(item.path[cut:], status.st_size, status.st_mtime)

    def _remote_entries(self) -> Iterator[FileEntry]:
        """Read sizes and times of all files from the dataset: file sessions provide neither."""
        import lance

        table = _TABLE.match(self.root)
        if table is None:
            raise StorageError(
                f"The files of {self.root} cannot be listed with their sizes: on an object store that works inside "
                "a Lance table only."
            )
        with engine_errors(lambda error: StorageError(f"Cannot list {self.root}: {describe_store_error(error)}")):
            access = pylance_access(self.options)
            files = self._ask(lambda _: lance.LanceDataset(table[0], **access).all_files().read_all())
        top = f"{self.root}/"[len(table[0]) + 1 :]
        for path, size, modified in zip(*map(files.column, ("path", "size_bytes", "last_modified")), strict=True):
            name = path.as_py()
            if name.startswith(top) and ".." not in name.split("/"):
                yield FileEntry(name[len(top) :], size.as_py(), modified.as_py().timestamp())

    def remove_empty_folders(self, folder: str) -> None:
        """Remove a folder without files, and the empty folders in it; object stores have no folders."""
        if self.local and not self.is_linked(self.path(folder)):
            for path, _, _ in os.walk(self.path(folder), topdown=False):
                # Ignore a folder that no longer exists or is not empty: another process may be writing into it.
                with contextlib.suppress(OSError):
                    os.rmdir(path)

    def list_folder(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the files directly in a folder, without links."""
        with _store_errors(f"list {join(self.root, folder)}"):
            if self.local:
                inside = self._inside(folder)
                folders = [item.name for item in inside if item.is_dir(follow_symlinks=False)]
                files = [item.name for item in inside if item.is_file(follow_symlinks=False)]
            else:
                found = self._ask(lambda session: session.list_with_delimiter(folder or None))
                folders, files = (
                    [path.rsplit("/", 1)[-1] for path in (str(path).rstrip("/") for path in group) if path != folder]
                    for group in (found.common_prefixes, found.objects)  # an empty folder's marker is an object
                )
        return sorted(folders), sorted(name for name in files if not _is_half_written(name))

    def delete(self, name: str) -> None:
        with _store_errors(f"delete {self.path(name)}"):
            if self.local:
                self._refuse_link(os.path.dirname(self.path(name)))
                Path(self.path(name)).unlink(missing_ok=True)
                return
            try:
                self._ask(lambda session: session.delete_file(name))
            except _STORE_ERRORS as error:
                if not _is_missing(error):
                    raise

    def delete_all(self, names: Iterable[str]) -> None:
        """Remove files, if they exist; on an object store in parallel."""
        if self.local:
            for name in names:
                self._delete_one(name)
            return
        in_threads(self._delete_one, names)

    def _delete_one(self, name: str) -> None:
        self.delete(name)
        fault_point("file.removed")


def _check_footer(path: str | Path) -> None:
    """Raise OSError if a Lance file names more columns than it has room for: pylance would end the process."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _COUNTS_AT, 0))
        counts = struct.unpack("<2I", file.read(8).ljust(8, b"\0"))
    if 16 * sum(counts) > size:
        raise OSError(errno.EIO, f"{path} is damaged: its footer names {counts[1]:,} columns")


def _download(session: LanceFileSession, name: str, target: _Target, most_bytes: int) -> _Target:
    """Write a file of an object store to `target`; ValueError if it has more than `most_bytes` bytes.

    pylance downloads a file of any size, so it writes to a pipe, which is closed at the limit.
    """
    source, sink = os.pipe()
    copied, failure = Future[int](), None
    # A pool for one call would cost as much as a small file.
    thread = threading.Thread(target=_copy, args=(source, target, most_bytes, copied), daemon=True)
    thread.start()
    try:
        session.download_file(name, f"/dev/fd/{sink}")
    except _STORE_ERRORS as error:
        failure = error
    finally:
        os.close(sink)
        thread.join()
    if copied.result() > most_bytes:
        raise ValueError(f"{name} has more than {most_bytes:,} bytes")
    if failure is not None:
        raise failure
    return target


def _copy(source: int, target: SupportsWrite[bytes], most_bytes: int, copied: Future[int]) -> None:
    """Copy a pipe until it ends or exceeds the limit, and give the number of bytes."""
    size = 0
    try:
        with open(source, "rb", buffering=0) as pipe:
            while size <= most_bytes and (data := pipe.read(_PIPE_BYTES)):
                target.write(data)
                size += len(data)
        copied.set_result(size)
    except BaseException as error:
        copied.set_exception(error)


def read_local(path: str | Path, most_bytes: int) -> bytes:
    """Read a file of this machine; ValueError if it is none, such as a pipe, or has more than `most_bytes` bytes."""
    # Opening a pipe would wait for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        mode = os.fstat(file.fileno())
        if not (stat.S_ISREG(mode.st_mode) or stat.S_ISDIR(mode.st_mode)):
            raise ValueError(f"{path} is not a file")
        data = file.read(most_bytes + 1) if mode.st_size <= most_bytes else None
    if data is None or len(data) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} bytes")
    return data


def as_json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


AT_A_TIME = 32
"""The number of parallel requests to a store."""


def in_threads(call: Callable[[_A], _T], items: Iterable[_A], threads: int = AT_A_TIME) -> list[_T]:
    """Call a function with each item in threads, and return the results in the order of the items.

    A process that is asked to stop does not wait for calls that a store blocks.
    """
    items = list(items)
    if len(items) <= 1 or threads == 1:
        return [call(item) for item in items]
    pool = ThreadPoolExecutor(threads)
    try:
        return list(pool.map(call, items))
    except BaseException as error:
        pool.shutdown(wait=is_failure(error), cancel_futures=True)
        raise
    finally:
        pool.shutdown(wait=False)


def _temporary_file(folder: str) -> BinaryIO:
    """Create a temporary file, and its folder if needed; retry, because a cleanup may remove the empty folder."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            os.makedirs(folder, exist_ok=True)
            return open(os.path.join(folder, f".tmp{uuid.uuid4().hex}"), "xb")
    raise FileNotFoundError(folder)


_READERS = 16


def in_parallel(read: Callable[[_A], _T], items: Iterable[_A], local: bool) -> list[_T]:
    """Read many small documents, in parallel where each costs a round trip."""
    if local:
        return [read(item) for item in items]
    return in_threads(read, items, _READERS)
