"""Read and write small files on any store that pylance supports."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.faults import fault_point
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.storage.listing import (
    FileEntry,
    enclosing_table,
    is_half_written,
    local_entries,
    remove_empty_folders,
    table_entries,
)
from airflow_geneva.storage.uri import is_local, join, normalize_uri

if TYPE_CHECKING:
    from lance.file import LanceFileSession

_TRIES = 5
_THREADS = 16

# pylance's file session raises RuntimeError where a local disk raises OSError.
_STORE_ERRORS = (OSError, RuntimeError)


def freeze_options(options: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Turn storage options into a hashable value."""
    return tuple(sorted((options or {}).items()))


@functools.lru_cache(maxsize=64)
def _session(root: str, options: tuple[tuple[str, str], ...], pid: int) -> LanceFileSession:
    from lance.file import LanceFileSession

    return LanceFileSession(root, storage_options=dict(options) or None)


@dataclass(frozen=True)
class Storage:
    """A folder on a local disk or an object store, with the credentials to reach it.

    Args:
        root: normalized URI of the folder.
        options: storage options as sorted pairs; never shown by ``repr``.
    """

    root: str
    options: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Storage({self.root!r})"

    @staticmethod
    def at(root: str, options: Mapping[str, str] | None = None) -> Storage:
        return Storage(normalize_uri(root), freeze_options(options))

    def folder(self, *parts: str) -> Storage:
        """A folder below this one."""
        return Storage(join(self.root, *parts), self.options)

    @property
    def session(self) -> LanceFileSession:
        """The Lance file session of this folder, one per process."""
        return _session(self.root, self.options, os.getpid())

    @property
    def local(self) -> bool:
        return is_local(self.root)

    def path(self, name: str) -> str:
        """Return the URI of a file below this folder; reject a name that leads outside."""
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise InvalidInput(f"{name!r} would be outside {self.root}. A name must stay inside its folder.")
        return join(self.root, name)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write one file atomically.

        Raises:
            StorageError: the store is unreachable, full or read-only.
        """
        target = self.path(name)
        try:
            if self.local:
                folder = os.path.dirname(target)
                handle, temporary = _temporary_file(folder)
                try:
                    with os.fdopen(handle, "wb") as file:
                        file.write(data)
                    os.replace(temporary, target)
                except BaseException:
                    os.unlink(temporary)
                    raise
                return
            with tempfile.TemporaryDirectory(prefix="geneva-") as scratch:
                local = Path(scratch) / "document"
                local.write_bytes(data)
                self.session.upload_file(local, name)
        except _STORE_ERRORS as error:
            raise StorageError(
                f"Cannot write {target}: {error}. Check that the location exists and is writable."
            ) from error

    def read_bytes(self, name: str) -> bytes:
        """Read one file.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the store is unreachable or denies access.
        """
        source = self.path(name)
        if self.local:
            try:
                return Path(source).read_bytes()
            except FileNotFoundError:
                raise
            except _STORE_ERRORS as error:
                raise StorageError(f"Cannot read {source}: {error}.") from error
        with tempfile.TemporaryDirectory(prefix="geneva-") as scratch:
            local = Path(scratch) / "document"
            try:
                self.session.download_file(name, local)
            except _STORE_ERRORS as error:
                if not self.exists(name):
                    raise FileNotFoundError(source) from error
                raise StorageError(f"Cannot read {source}: {error}.") from error
            return local.read_bytes()

    def read_start(self, name: str, length: int) -> bytes:
        """Read the first ``length`` bytes of a file that is at least that long.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the store is unreachable or denies access.
        """
        source = self.path(name)
        try:
            if not self.local:
                return bytes(self.session.read_range(name, 0, length))
            with open(source, "rb") as file:
                return file.read(length)
        except FileNotFoundError:
            raise
        except _STORE_ERRORS as error:
            if not self.exists(name):
                raise FileNotFoundError(source) from error
            raise StorageError(f"Cannot read {source}: {error}.") from error

    def write_json(self, name: str, document: Any) -> None:
        self.write_bytes(name, json.dumps(document, separators=(",", ":"), sort_keys=True).encode())

    def read_json(self, name: str) -> Any:
        return json.loads(self.read_bytes(name))

    def exists(self, name: str) -> bool:
        if self.local:
            return os.path.exists(self.path(name))
        try:
            return self.session.contains(name)
        except _STORE_ERRORS as error:
            raise StorageError(f"Cannot reach {self.root}: {error}.") from error

    def list_files(self, folder: str = "") -> list[str]:
        """Return the names of all files below a folder, relative to this one, without half-written files."""
        if self.local:
            # os.walk lists 100,000 files ten times faster than the session does.
            top = self.path(folder) if folder else self.root
            cut = len(self.root) + 1
            return [
                f"{base}/{file}"[cut:] for base, _, files in os.walk(top) for file in files if not is_half_written(file)
            ]
        try:
            found = self.session.list(folder or None)
        except _STORE_ERRORS as error:
            raise StorageError(f"Cannot list {join(self.root, folder)}: {error}.") from error
        return [name for name in found if not is_half_written(name.rsplit("/", 1)[-1])]

    def list_entries(self, folder: str = "", half_written: bool = False) -> list[FileEntry]:
        """Return all files below a folder with sizes and times, named relative to this one; skip links.

        On an object store the folder must be inside a Lance table; the whole table is listed.

        Args:
            half_written: include the temporary files of unfinished writes.

        Raises:
            StorageError: the store is unreachable or denies access, or the folder is not inside a table.
        """
        found = self._local_entries(folder) if self.local else self._remote_entries(folder)
        return [entry for entry in found if half_written or not entry.half_written]

    def _local_entries(self, folder: str) -> list[FileEntry]:
        top = self.path(folder) if folder else self.root
        try:
            return list(local_entries(self.root, top))
        except OSError as error:
            raise StorageError(f"Cannot list {top}: {error}.") from error

    def _remote_entries(self, folder: str) -> list[FileEntry]:
        table = enclosing_table(self.root)
        if table is None:
            raise StorageError(
                f"The files of {self.root} cannot be listed with their sizes: on an object store that works inside "
                "a Lance table only."
            )
        with engine_errors(lambda error: StorageError(f"Cannot list {join(self.root, folder)}: {error}.")):
            found = table_entries(table, self.root[len(table) :].strip("/"), dict(self.options))
        return [entry for entry in found if not folder or entry.name.startswith(f"{folder}/")]

    def remove_empty_folders(self, folder: str) -> None:
        """Remove a folder without files, and the empty folders in it; object stores have no folders."""
        if self.local:
            remove_empty_folders(self.path(folder))

    def list_folder(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the files directly in a folder."""
        if self.local:
            top = self.path(folder) if folder else self.root
            try:
                entries = list(os.scandir(top))
            except (FileNotFoundError, NotADirectoryError):
                return [], []
            files = [e.name for e in entries if not e.is_dir() and not is_half_written(e.name)]
            return sorted(e.name for e in entries if e.is_dir()), sorted(files)
        try:
            result = self.session.list_with_delimiter(folder or None)
        except _STORE_ERRORS as error:
            raise StorageError(f"Cannot list {join(self.root, folder)}: {error}.") from error
        names = [[str(path).rstrip("/").rsplit("/", 1)[-1] for path in group] for group in _groups(result)]
        return sorted(names[0]), sorted(name for name in names[1] if not is_half_written(name))

    def delete(self, name: str) -> None:
        """Remove one file, if it exists."""
        try:
            if self.local:
                Path(self.path(name)).unlink(missing_ok=True)
            elif self.session.contains(name):
                self.session.delete_file(name)
        except _STORE_ERRORS as error:
            raise StorageError(f"Cannot delete {self.path(name)}: {error}.") from error

    def delete_all(self, names: Iterable[str]) -> None:
        """Remove files, if they exist; in parallel where each costs a round trip."""
        if self.local:
            for name in names:
                self._delete_one(name)
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._delete_one, names))

    def _delete_one(self, name: str) -> None:
        self.delete(name)
        fault_point("file.removed")


def _temporary_file(folder: str) -> tuple[int, str]:
    """Create a temporary file, and its folder if needed; retry, as a cleanup may remove the empty folder."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            os.makedirs(folder, exist_ok=True)
            return tempfile.mkstemp(prefix=".tmp", dir=folder)
    raise FileNotFoundError(folder)


def _groups(result: Any) -> tuple[Iterable[str], Iterable[str]]:
    return result.common_prefixes, result.objects
