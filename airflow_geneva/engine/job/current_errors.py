"""Select the error records of rows that fail now, and group records with the same cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from airflow_geneva.engine.display import Listed, counted
from airflow_geneva.engine.job.error_records import ErrorRecord
from airflow_geneva.engine.job.folder import RECORD, JobFolder
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.results import DONE, PARTIAL
from airflow_geneva.engine.storage.files import Storage

_VALUE = re.compile(r"""'[^']*'|"[^"]*"|(?<![A-Za-z_])[-+]?\d[\w.+-]*""")
"""The parts in which messages of one cause usually differ: quoted texts and numbers."""


@dataclass(frozen=True, repr=False)
class ErrorGroup(Listed):
    """Rows of a column that failed for one cause.

    Args:
        column: the column.
        exception: name of the exception's class.
        message: the first line of its text, with ``...`` for quoted texts and numbers if these differ.
        rows: number of records.
        example: the newest record.
    """

    column: str
    exception: str
    message: str
    rows: int
    example: ErrorRecord

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "example": self.example.to_json()}

    def __str__(self) -> str:
        rows = f"{counted(self.rows, 'row')} of {self.column}"
        return f"{rows}: {self.example.kind}: {self.message}\n  for example {self.example}"


def group_errors(records: Iterable[ErrorRecord]) -> list[ErrorGroup]:
    """Group records, newest first, by column, exception and message; the largest group comes first."""
    found: dict[tuple[str, str, str], list[ErrorRecord]] = {}
    for record in records:
        message = _VALUE.sub("...", record.message.partition("\n")[0])
        found.setdefault((record.column, record.exception, message), []).append(record)
    groups = []
    for (column, exception, pattern), rows in found.items():
        texts = {record.message.partition("\n")[0] for record in rows}
        groups.append(ErrorGroup(column, exception, pattern if len(texts) > 1 else texts.pop(), len(rows), rows[0]))
    return sorted(groups, key=lambda group: -group.rows)


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
