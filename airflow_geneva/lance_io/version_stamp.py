"""Find a table's newest version and its commit from file names, without opening the table."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from hashlib import sha256

from airflow_geneva.storage.files import Storage

_MANIFEST = re.compile(r"(\d+)\.manifest")
_LAST = 2**64 - 1
"""Lance names manifests by this number minus the version, so that the newest sorts first; older tables count up."""
_START = 64
"""Bytes to read: a manifest begins with its transaction, which begins with a unique id."""


@dataclass(frozen=True)
class VersionStamp:
    """Identifies one version of one table.

    Args:
        commit: hash of the commit; it differs from that of the same version of a table that was created again.
        files: ends of the names of some data files, if the table was opened: while one of these files exists, it is
            still the same table, even if the version was cleaned up. None if the table was not opened.
        highest_fragment_id: its highest fragment id, -1 for none; a table that is created again starts from 0.
    """

    version: int
    commit: str
    files: tuple[str, ...] | None = field(default=None, compare=False)
    highest_fragment_id: int = field(default=-1, compare=False)


def newest_stamp(database: Storage, table: str) -> VersionStamp | None:
    """Return the newest version of a table; None if there is no such table.

    Costs one listing and one read of 64 bytes, for any size of the table.
    """
    versions = _versions(database, table)
    if not versions:
        return None
    newest = max(versions)
    try:
        return VersionStamp(newest, _commit(database, versions[newest]))
    except FileNotFoundError:  # dropped meanwhile
        return None


def stamp_of(database: Storage, table: str, version: int) -> VersionStamp | None:
    """Return a version of a table; None if it does not exist or was cleaned up."""
    for name in (f"{_LAST - version:020}.manifest", f"{version}.manifest"):
        with contextlib.suppress(FileNotFoundError):
            return VersionStamp(version, _commit(database, f"{_folder(table)}/{name}"))
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
