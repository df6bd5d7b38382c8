"""Which UDF version computed the value of a row, and in how many runs the UDF failed on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.storage.documents import parse

MOST_RUNS = 3
"""Number of runs in which a row may fail under one UDF version; after that, only ``errors_only`` runs it again."""

ADOPTED = "adopted"
"""Stands for the version that made a value which a user took over for a UDF version, as no job had computed it."""

PriorFailures = tuple[tuple[int, Ranges], ...]
"""Physical offsets of rows that failed in earlier runs, by the number of these runs."""


@dataclass(frozen=True, order=True)
class Provenance:
    """The origin of a row's value: its UDF version, and the version whose code computed it, if that is another one.

    `made_by` is `ADOPTED` for a value that no job of the table computed and that counts as the version's. After
    `failures` runs in which the UDF failed on the row, its value is NULL.
    """

    version: str
    made_by: str = ""
    failures: int = 0

    @property
    def kind(self) -> str:
        """The text that facts store. Versions contain no colon."""
        if self.failures:
            return f"failed:{self.failures}:{self.version}"
        return f"taken:{self.version}:{self.made_by}" if self.made_by else f"computed:{self.version}"

    @staticmethod
    def of(text: str) -> Provenance | None:
        """Parse the text of a fact; None if the fact is about something else."""
        kind, _, rest = text.partition(":")
        if kind == "computed":
            return Provenance(rest)
        first, _, second = rest.partition(":")
        if kind == "taken":
            return Provenance(first, made_by=second)
        return Provenance(second, failures=int(first)) if kind == "failed" else None

    @property
    def maker(self) -> str:
        """The version whose code computed the value; of an adopted value, the version that it counts as."""
        return self.version if self.made_by in ("", ADOPTED) else self.made_by

    def is_value_of(self, version: str) -> bool:
        """Whether the value was computed by a version, or counts as that version's."""
        return not self.failures and version in (self.version, self.made_by)


def prior_failures_of(known: dict[Provenance, Ranges], version: str | None = None) -> PriorFailures:
    """Return the rows that failed under a version, or under any, by the number of runs."""
    failed = ((p, rows) for p, rows in known.items() if p.failures and version in (None, p.version))
    return tuple(sorted((p.failures, rows) for p, rows in failed))


RowsByColumn = tuple[tuple[str, Ranges], ...]
"""Rows of a view on which the UDFs of columns failed; a row may be in several."""


def join_columns(parts: Iterable[RowsByColumn], among: Ranges | None = None) -> RowsByColumn:
    """Join rows by column; with `among`, only these rows."""
    found: dict[str, Ranges] = {}
    for name, rows in (item for part in parts for item in part):
        add_rows(found, [(name, rows if among is None else rows & among)])
    return tuple(sorted((name, rows) for name, rows in found.items() if rows))


@dataclass(frozen=True)
class Failures:
    """Rows that failed in a job, by the number of runs in which they failed, including this job.

    Args:
        columns: of a view, the rows by the columns whose UDFs failed on them in this job.
    """

    job_id: str
    rows: PriorFailures
    columns: RowsByColumn = ()

    @staticmethod
    def next(job_id: str, failed: Ranges, tried: PriorFailures, columns: RowsByColumn = ()) -> Failures:
        """Add the rows that failed in a job to those that failed in the runs before it."""
        found: list[tuple[int, Ranges]] = []
        first = failed
        for runs, rows in tried:
            if again := failed & rows:
                found.append((runs + 1, again))
                first = first - rows
        return Failures(job_id, ((1, first), *found) if first else tuple(found), columns)

    @property
    def all(self) -> Ranges:
        return Ranges.union(rows for _, rows in self.rows)

    def standing(self, job_id: str, tried: PriorFailures) -> Ranges:
        """Return the rows that a job need not run again, because they failed in the same run of the same job."""
        if job_id != self.job_id:
            return Ranges.empty()
        return Ranges.union(Failures.next(job_id, rows, tried).at(runs) for runs, rows in self.rows)

    def at(self, runs: int) -> Ranges:
        """Return the rows that failed in the given number of runs."""
        return Ranges.union(rows for number, rows in self.rows if number == runs)

    def dumps(self) -> str:
        columns = [[name, rows.to_json()] for name, rows in self.columns]
        rows = [[runs, rows.to_json()] for runs, rows in self.rows]
        return json.dumps([self.job_id, rows, columns] if columns else [self.job_id, rows])

    @staticmethod
    def loads(text: str | bytes) -> Failures:
        job_id, rows, *columns = parse(text)
        by_column = tuple((str(name), Ranges.from_json(found)) for name, found in (columns[0] if columns else ()))
        return Failures(job_id, tuple((int(runs), Ranges.from_json(found)) for runs, found in rows), by_column)


NO_FAILURES = Failures("", ())
_Key = TypeVar("_Key")


def add_rows(known: dict[_Key, Ranges], more: Iterable[tuple[_Key, Ranges]]) -> None:
    """Add rows to a mapping, in place."""
    for key, rows in more:
        known[key] = known[key] | rows if key in known else rows


def rows_that(known: Mapping[Provenance, Ranges], holds: Callable[[Provenance], bool]) -> Ranges:
    """Return the rows whose provenance meets a condition."""
    return Ranges.union(rows for provenance, rows in known.items() if holds(provenance))


def failed_rows(known: Mapping[Provenance, Ranges]) -> Ranges:
    """Return the rows on which the UDF failed."""
    return rows_that(known, lambda provenance: provenance.failures > 0)


def newest_failures(known: dict[Provenance, Ranges]) -> dict[Provenance, Ranges]:
    """Keep, for each row that failed in several runs, only the highest number of runs."""
    numbers = sorted({provenance.failures for provenance in known if provenance.failures}, reverse=True)
    if len(numbers) < 2:
        return known
    later: dict[str, Ranges] = {}
    for number in numbers:
        for provenance in [p for p in known if p.failures == number]:
            rows = known[provenance] - later.get(provenance.version, Ranges.empty())
            later[provenance.version] = later.get(provenance.version, Ranges.empty()) | rows
            known[provenance] = rows
    return {provenance: rows for provenance, rows in known.items() if rows}


def by_code_version(known: Mapping[Provenance, Ranges], among: Ranges) -> dict[str, Ranges]:
    """Return the rows that hold a value, by the version whose code computed it."""
    found: dict[str, Ranges] = {}
    for provenance, rows in known.items():
        if not provenance.failures and (there := rows & among):
            add_rows(found, [(provenance.maker, there)])
    return found


def version_label(version: str) -> str:
    """Format the version that made a value for the user; it may name other inputs that the value was computed from."""
    name, _, inputs = version.partition("/")
    return f"{name} with other input columns" if inputs else name
