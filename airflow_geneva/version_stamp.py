"""Which version of a table is the newest, and by which commit: a look at names, without opening the table."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from hashlib import sha256

from airflow_geneva.storage import Storage

_MANIFEST = re.compile(r"(\d+)\.manifest")
_LAST = 2**64 - 1
"""Lance counts the names of versions down from it, so that the newest comes first; older tables count up."""
_START = 64
"""A manifest begins with the transaction that made it, and that with its id."""


@dataclass(frozen=True)
class Stamp:
    """One version of one table.

    Args:
        version: its number.
        commit: tells it from the version of that number of a table that was dropped and made again.
        files: some of its data files, by the ends of their names, when somebody opened it: while one of them is there,
            it is that table, whether the version is left or not. None when nobody looked.
        highest: the highest id of its fragments then, -1 for none; a table that is made again begins with 0.
    """

    version: int
    commit: str
    files: tuple[str, ...] | None = field(default=None, compare=False)
    highest: int = field(default=-1, compare=False)


def newest_stamp(database: Storage, table: str) -> Stamp | None:
    """The newest version of a table; None when there is no such table.

    Costs one listing and one read of 64 bytes, whatever the size of the table.

    Raises:
        StorageError: the store is unreachable or refuses.
        OSError: the same of a local disk.
    """
    versions = _versions(database, table)
    if not versions:
        return None
    newest = max(versions)
    try:
        return Stamp(newest, _commit(database, versions[newest]))
    except FileNotFoundError:  # dropped meanwhile
        return None


def stamp_of(database: Storage, table: str, version: int) -> Stamp | None:
    """A version of a table; None when it is not there, or not any more."""
    for name in (f"{_LAST - version:020}.manifest", f"{version}.manifest"):
        with contextlib.suppress(FileNotFoundError):
            return Stamp(version, _commit(database, f"{_folder(table)}/{name}"))
    return None


def _folder(table: str) -> str:
    return f"{table}.lance/_versions"


def _versions(database: Storage, table: str) -> dict[int, str]:
    folder = _folder(table)
    found = {}
    for name in database.list_folder(folder)[1]:
        if number := _MANIFEST.fullmatch(name):
            version = int(number[1])
            found[_LAST - version if len(number[1]) == 20 else version] = f"{folder}/{name}"
    return found


def _commit(database: Storage, name: str) -> str:
    return sha256(database.read_start(name, _START)).hexdigest()[:16]
