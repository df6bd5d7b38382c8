"""Select the error records of rows that fail now, and group records with the same cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.display import Listed, Summary, counted
from airflow_geneva.engine.job.error_records import FILE, ErrorRecord, newest_records, read_records
from airflow_geneva.engine.job.folder import RECORD, JobFolder
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.results import DONE, PARTIAL
from airflow_geneva.engine.storage.files import Storage

_VALUE = re.compile(r"""'[^']*'|"[^"]*"|(?<![A-Za-z_])[-+]?\d[\w.+-]*""")
"""The parts in which messages of one cause usually differ: quoted texts and numbers."""


_Cause: TypeAlias = tuple[str, str, str]
"""A column, an exception, and the first line of its message."""


@dataclass(frozen=True)
class ErrorCause:
    """The number of rows of a column that failed for one cause.

    Args:
        column: the column.
        exception: name of the exception's class.
        message: the first line of its text, with ``...`` for quoted texts and numbers if these differ.
        rows: number of records.
    """

    column: str
    exception: str
    message: str
    rows: int

    @property
    def kind(self) -> str:
        """The exception's name as it is written in code."""
        return self.exception.removeprefix("builtins.")


@dataclass(frozen=True, repr=False)
class ErrorGroup(ErrorCause, Listed):
    """Rows of a column that failed for one cause; `example` is the newest record."""

    example: ErrorRecord

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "example": self.example.to_json()}

    @property
    def cells(self) -> tuple[str, ...]:
        """What a row of a table says of it."""
        named = self.example.key or str(self.example.row_address)
        return f"{self.rows:,}", self.column, self.kind, self.message[:200], named

    def __str__(self) -> str:
        rows = f"{counted(self.rows, 'row')} of {self.column}"
        return f"{rows}: {self.kind}: {self.message}\n  for example {self.example}"


@dataclass(frozen=True)
class JobErrors:
    """The error records of one job, without their tracebacks: counted by cause, and read in full page by page.

    Beyond a million records, or 256 MiB, all counts are lower bounds.
    """

    job: Storage
    records: pa.Table

    @staticmethod
    def of(checkpoints: Storage, job_id: str) -> JobErrors:
        job = JobFolder.of(checkpoints, job_id).storage
        return JobErrors(job, newest_records(job, ("exception", "message", "key", "row_address", FILE)))

    def __len__(self) -> int:
        return int(self.records.num_rows)

    def causes(self) -> list[ErrorCause]:
        """Count the records by cause, the most frequent first."""
        cause = ["column", "exception", "message"]
        counts = self.records.group_by(cause).aggregate([([], "count_all")]).to_pylist()
        return _by_cause({(row["column"], row["exception"], row["message"]): row["count_all"] for row in counts})

    def page(self, order: Sequence[tuple[str, str]], start: int, rows: int) -> list[ErrorRecord]:
        """Read some records in an order, from the files that hold them.

        Args:
            order: columns, each with ``ascending`` or ``descending``. Keys are compared as numbers if all of them are.
        """
        records = self.records
        with suppress(pa.ArrowInvalid):
            keys = records.column("key").cast(pa.int64())
            records = records.set_column(records.schema.get_field_index("key"), "key", keys)
        sorted_rows = pc.sort_indices(records, sort_keys=list(order))
        return read_records(self.job, self.records.take(sorted_rows.slice(start, rows)))


class ErrorGroups(list[ErrorGroup]):
    """Groups of failed rows, the largest first, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        title = f"{counted(sum(group.rows for group in self), 'failed row')}, {counted(len(self), 'cause')}"
        headings = ("rows", "column", "exception", "message", "example: key or row address")
        return Summary(title, headings, [group.cells for group in self]).html()


def group_errors(records: Iterable[ErrorRecord]) -> ErrorGroups:
    """Group records, newest first, by column, exception and message; the largest group comes first."""
    counts, newest = Counter[_Cause](), dict[_Cause, ErrorRecord]()
    for record in records:
        line = record.message.partition("\n")[0]
        counts[record.column, record.exception, line] += 1
        newest.setdefault((record.column, record.exception, _VALUE.sub("...", line)), record)
    return ErrorGroups(
        ErrorGroup(**vars(cause), example=newest[cause.column, cause.exception, _VALUE.sub("...", cause.message)])
        for cause in _by_cause(counts)
    )


def _by_cause(counts: Mapping[_Cause, int]) -> list[ErrorCause]:
    found: dict[_Cause, dict[str, int]] = {}
    for (column, exception, line), rows in counts.items():
        found.setdefault((column, exception, _VALUE.sub("...", line)), {})[line] = rows
    causes = [
        ErrorCause(column, exception, pattern if len(lines) > 1 else next(iter(lines)), sum(lines.values()))
        for (column, exception, pattern), lines in found.items()
    ]
    return sorted(causes, key=lambda cause: -cause.rows)


def failing_now(
    checkpoints: Storage, records: Sequence[ErrorRecord], failed_ids: Callable[[str], Collection[int]]
) -> list[ErrorRecord]:
    """Return the newest record of each row that fails now, from records that are sorted newest first.

    A row fails now if it has no value because the UDF failed on it, or if the last job of its column recorded it and
    has failed or still runs.

    Args:
        failed_ids: returns the ids of rows that have no value in a column because its UDF failed.
    """
    of_column = cache(failed_ids)
    latest = {column: max(r.job_id for r in records if r.column == column) for column in {r.column for r in records}}
    unfinished = {column: _unfinished(checkpoints, column, job_id) for column, job_id in latest.items()}
    chosen: dict[tuple[str, int], ErrorRecord] = {}
    for record in records:
        key = (record.column, record.row_id)
        current = unfinished[record.column] and record.job_id == latest[record.column]
        if key not in chosen and (current or record.row_id in of_column(record.column)):
            chosen[key] = record
    return list(chosen.values())


def _unfinished(checkpoints: Storage, column: str, job_id: str) -> bool:
    """Whether a job is the last one of its column or view, and is neither DONE nor PARTIAL."""
    for newest in job_ids(checkpoints):
        folder = JobFolder.of(checkpoints, newest)
        record = folder.read(RECORD) or {}
        if newest == job_id:
            return (record.get("ended") or {}).get("state") not in (DONE, PARTIAL)
        if record.get("column") in (None, column):
            return False
    return False
