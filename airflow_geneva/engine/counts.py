"""What a job counts: its rows by outcome, and what its calls used; progress, shards, results and jobs share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import add, sub
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.display import counted

if TYPE_CHECKING:
    from typing_extensions import Self


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


@dataclass(frozen=True)
class Sums:
    """Values that add up field by field; a field that adds up in another way has it as `add` in its metadata."""

    def __add__(self, other: Self) -> Self:
        ours, theirs = vars(self), vars(other)
        return type(self)(**{name: together(ours[name], theirs[name]) for name, together in self._parts()})

    @classmethod
    @cache
    def _parts(cls) -> list[tuple[str, Callable[[Any, Any], Any]]]:
        """Return how each field adds up; looked up once, because several sums are added for each call of a function."""
        return [(one.name, one.metadata.get("add", add)) for one in fields(cls)]

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Parse a document; return zeros if it is missing or damaged.

        A field that is neither an int nor a float has its parser as `read` in its metadata.
        """
        kinds = {"int": int, "float": float}
        try:
            found = document if isinstance(document, Mapping) else {}
            there = (one for one in fields(cls) if one.name in found)
            readers = ((one.name, one.metadata.get("read") or kinds[str(one.type)]) for one in there)
            return cls(**{name: read(found[name]) for name, read in readers})
        except (TypeError, ValueError):
            return cls()


@dataclass(frozen=True)
class StoreRequests(Sums):
    """Number of requests to object stores by kind, as pylance counts them. A local disk has none.

    Args:
        reads: reads of objects, of parts of them, and of their sizes (GET, HEAD).
        writes: writes of objects, or of the parts of a large one (PUT).
        lists: listings (LIST); one counts once, however many pages of objects it returns.
        deletes: deletions of objects.
    """

    reads: int = 0
    writes: int = 0
    lists: int = 0
    deletes: int = 0

    @property
    def total(self) -> int:
        return self.reads + self.writes + self.lists + self.deletes

    def __bool__(self) -> bool:
        return bool(self.total)

    def __str__(self) -> str:
        parts = [counted(count, kind.removesuffix("s")) for kind, count in vars(self).items() if count]
        return f"{counted(self.total, 'request')} to the store: {', '.join(parts)}"


_NO_REQUESTS = StoreRequests()


def _add_requests(one: StoreRequests, other: StoreRequests) -> StoreRequests:
    # The usage of a call has none.
    return one if other is _NO_REQUESTS else other if one is _NO_REQUESTS else one + other


NEW_STATE, OTHER_CODE, LOST_ROWS, UNCLEAR = "new", "code", "lost", "unclear"
"""Why all rows of a group are added: it has no state, one of other code, or lost rows; or its rows are not certain."""


@dataclass(frozen=True)
class Folds(Sums):
    """Number of calls of functions that can be folded, by what they cost.

    Args:
        folded: calls on the rows that were added and removed since the last call on the group.
        new: calls on all rows of a group without a state: a new one, or one on which the last call failed.
        other_code: calls on all rows, because other code, or code with other inputs, made the state.
        lost_rows: calls on all rows, because the group lost rows that the function cannot remove.
        unclear: calls on all rows, because it is not certain which rows the state is of.
    """

    folded: int = 0
    new: int = 0
    other_code: int = 0
    lost_rows: int = 0
    unclear: int = 0

    @staticmethod
    def of(why: str) -> Folds:
        """Count one call, with why it was not folded, or ""."""
        return Folds(*(int(why == reason) for reason in ("", NEW_STATE, OTHER_CODE, LOST_ROWS, UNCLEAR)))

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def __str__(self) -> str:
        whys = {"new": self.new, "other code": self.other_code, "lost rows": self.lost_rows, "unclear": self.unclear}
        listed = ", ".join(f"{why} {count:,}" for why, count in whys.items() if count)
        anew = sum(whys.values())
        return f"{counted(self.folded, 'call')} folded, {anew:,} on all rows of a group" + f" ({listed})" * bool(anew)


_NO_FOLDS = Folds()


def _add_folds(one: Folds, other: Folds) -> Folds:
    return one if other is _NO_FOLDS else other if one is _NO_FOLDS else one + other


@dataclass(frozen=True)
class Usage(Sums):
    """Number of requests of calls, and the tokens and the cost that they reported.

    Args:
        rows: number of rows that functions were called on; a row counts once for each call.
        declared: cost of these rows by `udf(cost=)`.
        folds: the calls of functions that can be folded.
        store_requests: requests to object stores of the processes that made the calls.
    """

    calls: int = 0
    tokens: float = 0
    cost: float = 0.0
    rows: int = 0
    declared: float = 0.0
    folds: Folds = field(default=_NO_FOLDS, metadata={"add": _add_folds, "read": Folds.from_json})
    store_requests: StoreRequests = field(
        default=_NO_REQUESTS, metadata={"add": _add_requests, "read": StoreRequests.from_json}
    )

    def __bool__(self) -> bool:
        """Whether any call reported its usage."""
        return bool(self.calls or self.tokens or self.cost or self.folds)

    @property
    def reported(self) -> Usage:
        """The reported usage alone."""
        return Usage(self.calls, self.tokens, self.cost, folds=self.folds)

    @property
    def paid(self) -> float:
        """The reported cost, or the declared one if no call reported a cost."""
        return self.cost or self.declared

    def __str__(self) -> str:
        cost = f", cost {self.cost:,.6g}" if self.cost else ""
        tokens = f", {self.tokens:,.0f} tokens" if self.tokens else ""
        parts = [str(self.folds)] if self.folds else []
        if self.calls or tokens or cost or not parts:
            parts.insert(0, f"{counted(self.calls, 'call')} of a service{tokens}{cost}")
        return "; ".join(parts)
