"""Lists of files that may be removed beside a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any

from airflow_geneva.engine.display import counted, readable_bytes
from airflow_geneva.engine.storage.files import FileEntry


class FileKind(Enum):
    """A kind of file that a cleanup removes, and what its files are."""

    CHECKPOINTS = "checkpoints", "range and fragment checkpoints"
    STAGED = "staged_files", "staged data files that no version or checkpoint references"
    JOBS = "jobs", "plans, code, progress, errors and records of ended jobs"
    TEMPORARY = "temporary_files", "half-written files"
    MARKS = "marks", "announcement marks of jobs without commits"
    LEDGERS = "ledgers", "ledgers and folds that a newer fold includes"
    SNAPSHOTS = "snapshots", "view snapshots that no version of the view references"
    VALUES = "values", "values that were kept for equal inputs"

    what: str

    def __new__(cls, name: str, what: str) -> FileKind:
        kind = object.__new__(cls)
        kind._value_, kind.what = name, what
        return kind


DEFAULT_TTL = timedelta(days=7)


@dataclass(frozen=True)
class FileGroup:
    """Files of one kind, named relative to the table's folder."""

    kind: FileKind
    files: tuple[FileEntry, ...] = ()

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
    """The files beside a table that are not needed any more, or that were removed.

    Args:
        notes: the possible garbage that was kept, with the reason.
        jobs: ids of the jobs that had ended at the time of the search.
        owners: by staged data file, the checkpoint folder that names it; "" if none does.
        found: time of the search in seconds since the epoch, by the store's clock.
    """

    table: str
    file_groups: tuple[FileGroup, ...]
    notes: tuple[str, ...] = ()
    jobs: frozenset[str] = frozenset()
    version: int = 0
    owners: tuple[tuple[str, str], ...] = ()
    found: float = 0.0

    def below(self, folder: str) -> Garbage:
        """Name the files relative to the folder in which the table's folder lies."""
        groups = (
            FileGroup(one.kind, tuple(replace(file, name=f"{folder}/{file.name}") for file in one.files))
            for one in self.file_groups
        )
        return replace(self, file_groups=tuple(groups))

    @staticmethod
    def joined(parts: Sequence[Garbage]) -> Garbage:
        """Add the garbage of the hidden tables of a view to its own."""
        first, *others = parts
        if not others:
            return first
        kinds = [FileGroup(kind, tuple(f for part in parts for f in part.file_group(kind).files)) for kind in FileKind]
        return replace(first, file_groups=tuple(kinds), notes=tuple(note for part in parts for note in part.notes))

    def file_group(self, kind: FileKind) -> FileGroup:
        return next((file_group for file_group in self.file_groups if file_group.kind == kind), FileGroup(kind))

    @property
    def count(self) -> int:
        return sum(file_group.count for file_group in self.file_groups)

    @property
    def size_bytes(self) -> int:
        return sum(file_group.size_bytes for file_group in self.file_groups)

    def to_json(self) -> dict[str, Any]:
        """Return counts and bytes by kind."""
        return {"table": self.table, **Garbage.add_up([self])}

    def __str__(self) -> str:
        lines = [f"{self.table}: {counted(self.count, 'file')}, {readable_bytes(self.size_bytes)}"]
        for kind in FileKind:
            file_group = self.file_group(kind)
            if file_group.count:
                lines.append(f"  {file_group.count:,} {kind.what}: {readable_bytes(file_group.size_bytes)}")
        lines.extend(f"  Note: {note}" for note in self.notes)
        return "\n".join(lines)

    @staticmethod
    def add_up(tables: Sequence[Garbage]) -> dict[str, Any]:
        """Add up counts, bytes and notes of several tables, as JSON values."""
        kinds = {
            kind.value: {
                "files": sum(table.file_group(kind).count for table in tables),
                "bytes": sum(table.file_group(kind).size_bytes for table in tables),
            }
            for kind in FileKind
        }
        return {
            "files": sum(table.count for table in tables),
            "bytes": sum(table.size_bytes for table in tables),
            "kinds": kinds,
            "notes": [f"{table.table}: {note}" for table in tables for note in table.notes],
        }


def group_files(files: Mapping[FileKind, Iterable[FileEntry]]) -> tuple[FileGroup, ...]:
    """Return one group of files per kind, in the order of the kinds, each sorted by name."""
    return tuple(FileGroup(kind, tuple(sorted(files.get(kind, ()), key=lambda file: file.name))) for kind in FileKind)
