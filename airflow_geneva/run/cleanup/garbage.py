"""What may be removed from beside a table, and how old it has to be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow_geneva.entries import Entry
from airflow_geneva.errors import InvalidInput

CHECKPOINTS, STAGED, JOBS, TEMPORARY, MARKS, LEDGERS, SNAPSHOTS = (
    "checkpoints", "staged_files", "jobs", "temporary_files", "marks", "ledgers", "snapshots",
)  # fmt: skip

KINDS = {
    CHECKPOINTS: "checkpoints of ranges and fragments",
    STAGED: "staged data files that no version and no checkpoint names",
    JOBS: "plans, code, progress, errors and records of ended jobs",
    TEMPORARY: "half-written files",
    MARKS: "announcement marks of jobs without commits",
    LEDGERS: "ledgers and folds that a newer fold covers",
    SNAPSHOTS: "snapshots of views that no version of the view names",
}

DEFAULT_TTL = timedelta(days=7)

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_TTL = re.compile(r"(\d{1,9})([smhdw])")


def parse_ttl(ttl: timedelta | str) -> timedelta:
    """How old something has to be, as a time span.

    Args:
        ttl: a time span, or a text such as ``7d``, ``12h`` or ``30m``.

    Raises:
        InvalidInput: it is something else, or not longer than nothing.
    """
    span = ttl
    if isinstance(span, str):
        match = _TTL.fullmatch(span.strip().lower())
        span = timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else timedelta(0)
    if not isinstance(span, timedelta) or span <= timedelta(0):
        raise InvalidInput(
            f"ttl={ttl!r} is not an age. Give a number with a unit, such as 7d, 12h or 30m, or a timedelta above zero."
        )
    return span


@dataclass(frozen=True)
class Pile:
    """Files of one kind.

    Args:
        kind: one of :data:`KINDS`.
        files: named relative to the table's folder.
    """

    kind: str
    files: tuple[Entry, ...] = ()

    @property
    def count(self) -> int:
        return len(self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]


@dataclass(frozen=True)
class Garbage:
    """What nobody needs any more beside a table, or what was removed of it.

    Args:
        table: the table's name.
        piles: the files, by kind.
        notes: what was kept although it may be garbage, and why.
        jobs: ids of the jobs that had ended when this was found.
        version: the table's newest version then.
        owners: for a staged data file's name, the folder of the checkpoints that named it; "" when none did.
        found: when it was found, in seconds since the epoch by the clock of the store.
    """

    table: str
    piles: tuple[Pile, ...]
    notes: tuple[str, ...] = ()
    jobs: frozenset[str] = frozenset()
    version: int = 0
    owners: tuple[tuple[str, str], ...] = ()
    found: float = 0.0

    def pile(self, kind: str) -> Pile:
        return next((pile for pile in self.piles if pile.kind == kind), Pile(kind))

    @property
    def count(self) -> int:
        return sum(pile.count for pile in self.piles)

    @property
    def size_bytes(self) -> int:
        return sum(pile.size_bytes for pile in self.piles)

    def to_json(self) -> dict[str, Any]:
        """Counts and bytes by kind."""
        return {"table": self.table, **add_up([self])}

    def __str__(self) -> str:
        lines = [f"{self.table}: {self.count:,} files, {readable_bytes(self.size_bytes)}"]
        for kind, what in KINDS.items():
            pile = self.pile(kind)
            if pile.count:
                lines.append(f"  {pile.count:,} {what}: {readable_bytes(pile.size_bytes)}")
        lines.extend(f"  Note: {note}" for note in self.notes)
        return "\n".join(lines)


def add_up(found: Iterable[Garbage]) -> dict[str, Any]:
    """Counts, bytes and notes of several tables, as JSON takes them."""
    tables = list(found)
    kinds = {
        kind: {
            "files": sum(table.pile(kind).count for table in tables),
            "bytes": sum(table.pile(kind).size_bytes for table in tables),
        }
        for kind in KINDS
    }
    return {
        "files": sum(table.count for table in tables),
        "bytes": sum(table.size_bytes for table in tables),
        "kinds": kinds,
        "notes": [f"{table.table}: {note}" for table in tables for note in table.notes],
    }


def piles_of(files: dict[str, Iterable[Entry]]) -> tuple[Pile, ...]:
    """Piles in the order of the kinds, each sorted by name."""
    return tuple(Pile(kind, tuple(sorted(files.get(kind, ()), key=lambda file: file.name))) for kind in KINDS)


def readable_bytes(size: float) -> str:
    """A size as people read it."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
