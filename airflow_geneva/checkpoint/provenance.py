"""Where the value of a row comes from, and what a job could not compute."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from airflow_geneva.checkpoint.ranges import Ranges

MOST_RUNS = 3
"""Runs in which a row may fail under one version of a UDF before it is only listed."""

Tried = tuple[tuple[int, Ranges], ...]
"""Physical offsets of rows that failed before, by the number of runs they failed in."""


@dataclass(frozen=True, order=True)
class Provenance:
    """How rows came by their value.

    Args:
        version: the UDF version that the value counts as.
        made_by: the version whose code made it, when it was taken over from that one; "" when they are the same.
        failures: runs in which the UDF failed on the row; above 0 its value is NULL.
    """

    version: str
    made_by: str = ""
    failures: int = 0

    @property
    def what(self) -> str:
        """The text that facts carry; versions hold no colon."""
        if self.failures:
            return f"failed:{self.failures}:{self.version}"
        return f"taken:{self.version}:{self.made_by}" if self.made_by else f"computed:{self.version}"

    @staticmethod
    def of(what: str) -> Provenance | None:
        """Read the text of a fact; None when it is about something else."""
        kind, _, rest = what.partition(":")
        if kind == "computed":
            return Provenance(rest)
        first, _, second = rest.partition(":")
        if kind == "taken":
            return Provenance(first, made_by=second)
        return Provenance(second, failures=int(first)) if kind == "failed" else None

    @property
    def maker(self) -> str:
        """The version whose code made the value."""
        return self.made_by or self.version

    def is_value_of(self, version: str) -> bool:
        """Whether the row holds, or counts as holding, a version's value."""
        return not self.failures and version in (self.version, self.made_by)


def runs_failed(known: dict[Provenance, Ranges], version: str) -> Tried:
    """Rows that failed under a version, by the number of runs they failed in."""
    return tuple(sorted((p.failures, rows) for p, rows in known.items() if p.failures and p.version == version))


@dataclass(frozen=True)
class Failures:
    """Rows that a job gave up.

    Args:
        job_id: the job.
        rows: physical offsets, by the number of runs they have failed in, this one included.
    """

    job_id: str
    rows: Tried

    @staticmethod
    def next(job_id: str, failed: Ranges, tried: Tried) -> Failures:
        """What a job's failures make of the number of runs that each row failed in before.

        Args:
            failed: the rows that failed in this run.
            tried: rows that failed before.
        """
        found: list[tuple[int, Ranges]] = []
        first = failed
        for runs, rows in tried:
            if again := failed & rows:
                found.append((runs + 1, again))
                first = first - rows
        return Failures(job_id, ((1, first), *found) if first else tuple(found))

    @property
    def all(self) -> Ranges:
        return Ranges.union(rows for _, rows in self.rows)

    def standing(self, job_id: str, tried: Tried) -> Ranges:
        """The rows that need not run again in a job: it was this very one that gave them up, and in this very run."""
        if job_id != self.job_id:
            return Ranges.empty()
        return Ranges.union(Failures.next(job_id, rows, tried).at(runs) for runs, rows in self.rows)

    def at(self, runs: int) -> Ranges:
        """The rows that have failed in so many runs."""
        return Ranges.union(rows for number, rows in self.rows if number == runs)

    def dumps(self) -> str:
        return json.dumps([self.job_id, [[runs, rows.to_json()] for runs, rows in self.rows]])

    @staticmethod
    def loads(text: str | bytes) -> Failures:
        job_id, rows = json.loads(text)
        return Failures(job_id, tuple((int(runs), Ranges.from_json(found)) for runs, found in rows))


NO_FAILURES = Failures("", ())


def add_rows(known: dict[Provenance, Ranges], more: Iterable[tuple[Provenance, Ranges]]) -> None:
    """Add rows to those already known by provenance."""
    for provenance, rows in more:
        known[provenance] = known[provenance] | rows if provenance in known else rows
