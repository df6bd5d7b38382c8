"""Row counts by outcome, which progress, shards, results and jobs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import add, sub
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Row counts by outcome. Committed rows count as ready, ready ones as checkpointed, failed ones as none of these.

    Args:
        rows_checkpointed: due rows that are computed and checkpointed.
        rows_ready: those of them in finished data files.
        rows_committed: those of them that are visible in the table.
        rows_computed: rows that this job computed; after its end, those of them that are visible.
        rows_reused: rows that earlier, unfinished jobs computed and this job made visible.
        rows_skipped: rows with nothing to do.
        rows_failed: due rows on which the UDF failed.
        rows_left: due rows that are neither visible nor failed.
    """

    rows_checkpointed: int = 0
    rows_ready: int = 0
    rows_committed: int = 0
    rows_computed: int = 0
    rows_reused: int = 0
    rows_skipped: int = 0
    rows_failed: int = 0
    rows_left: int = 0

    def __add__(self, other: Counts) -> Counts:
        return self._with(other, add)

    def __sub__(self, other: Counts) -> Counts:
        return self._with(other, sub)

    def __or__(self, other: Counts) -> Counts:
        """Return the maximum of each count, to combine the counts of two observers."""
        return self._with(other, max)

    def _with(self, other: Counts, both: Callable[[int, int], int]) -> Counts:
        theirs = other.counts()
        return Counts(**{name: both(count, theirs[name]) for name, count in self.counts().items()})

    def counts(self) -> dict[str, Any]:
        """Return the counts alone, by name."""
        return {part.name: getattr(self, part.name) for part in fields(Counts)}

    @property
    def rows_visible(self) -> int:
        """Rows that are visible when the job ends: computed by this job, or reused."""
        return self.rows_computed + self.rows_reused


@dataclass(frozen=True, kw_only=True)
class Outcome(Counts):
    """Counts of work that has ended: computed and reused rows are ready, and committed if `shown`."""

    def __post_init__(self) -> None:
        for name, rows in (("checkpointed", 1), ("ready", 1), ("committed", self.shown)):
            object.__setattr__(self, f"rows_{name}", rows * self.rows_visible)

    @property
    def shown(self) -> bool:
        return True
