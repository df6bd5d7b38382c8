"""List files with sizes and modification times, on a local disk and inside tables on object stores."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# The innermost Lance table that contains a URI, or is it.
_TABLE = re.compile(r"^.*\.lance(?=/|$)")
_COLUMNS = ("path", "size_bytes", "last_modified")


@dataclass(frozen=True)
class FileEntry:
    """One file of a folder.

    Args:
        name: path relative to the folder that was listed.
        size_bytes: size in bytes.
        modified: modification time in seconds since the epoch, by the store's clock.
    """

    name: str
    size_bytes: int
    modified: float

    @property
    def half_written(self) -> bool:
        """Whether it is the temporary file of an unfinished write."""
        return is_half_written(self.name.rsplit("/", 1)[-1])


def is_half_written(file_name: str) -> bool:
    """Whether a name is that of a temporary file of this package, pylance or its object stores."""
    return file_name.startswith(".tmp") or "#" in file_name or ".tmp" in file_name


def local_entries(root: str, folder: str) -> Iterator[FileEntry]:
    """Return all files below a local folder; links are neither followed nor listed.

    Args:
        root: the folder that names are relative to.
        folder: the folder to list, `root` or a folder below it.

    Raises:
        OSError: a folder cannot be read.
    """
    cut = len(root) + 1
    folders = [folder]
    while folders:
        try:
            inside = list(os.scandir(folders.pop()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for item in inside:
            if item.is_dir(follow_symlinks=False):
                folders.append(item.path)
            elif item.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    yield FileEntry(item.path[cut:], status.st_size, status.st_mtime)


def enclosing_table(uri: str) -> str | None:
    """Return the Lance table that contains an object-store URI, or is it; None if there is none."""
    found = _TABLE.match(uri)
    return found[0] if found else None


def table_entries(table: str, folder: str, options: Mapping[str, str]) -> Iterator[FileEntry]:
    """Return all files below a folder of a table, on any store that pylance supports.

    pylance's file sessions give neither sizes nor times; a dataset gives them for all of its files at once.

    Args:
        table: URI of the table.
        folder: a folder inside the table that names are relative to; "" for the table itself.
        options: storage options.
    """
    import lance

    files = lance.dataset(table, storage_options=dict(options) or None).all_files().read_all()
    inside = f"{folder}/" if folder else ""
    for path, size, modified in zip(*(files.column(name) for name in _COLUMNS), strict=True):
        name = path.as_py()
        if name.startswith(inside) and ".." not in name.split("/"):
            yield FileEntry(name[len(inside) :], size.as_py(), modified.as_py().timestamp())


def remove_empty_folders(folder: str) -> None:
    """Remove a local folder if there is no file below it; otherwise remove the empty folders inside it."""
    # Ignore a folder that is gone, or that another process writes into right now.
    with contextlib.suppress(OSError):
        for item in list(os.scandir(folder)):
            if item.is_dir(follow_symlinks=False):
                remove_empty_folders(item.path)
        os.rmdir(folder)
