"""Results of a job and of its shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from airflow_geneva.engine.counts import Counts, Outcome, StoreRequests, Usage
from airflow_geneva.engine.display import Described, Listed, counted, duration

CARRIED = "carried"
"""Field of a job's record: results of shards that plans of earlier attempts committed."""
ROWS_RUN = "rows_run"
"""Field of a job's record: rows on which functions were called by plans of earlier attempts."""
STORE_REQUESTS = "store_requests"
"""Field of a job's record: requests of its plan until the record was written, and of earlier attempts."""
SENT = "sent"
"""Field of a job's record: its state and counts when its metrics were sent."""
MOST_EXAMPLES = 5
"""The maximum number of wrong rows that a check keeps as examples."""


class State(str, Enum):
    """The state of a job; it equals its text."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    PARTIAL = "PARTIAL"
    FAILED = "FAILED"

    __str__ = str.__str__
    __repr__ = str.__repr__


PENDING, RUNNING, DONE, PARTIAL, FAILED = State
_STEPS = ("plan", "spark", "apply", "commit", "finish")


def in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the times of steps in the order of the steps."""
    return {**{step: seconds[step] for step in _STEPS if step in seconds}, **seconds}


@dataclass(frozen=True)
class Checked:
    """The result of checking an expectation on a column.

    Args:
        rows: number of checked rows.
        wrong: number of rows that are not as expected.
        examples: row id and value, as text, of some wrong rows.
        why: the error of the expectation's function, or "".
        keys: the table's key in the rows of the examples; "" without a key.
    """

    column: str
    expectation: str
    level: str
    passed: bool
    rows: int
    wrong: int
    examples: tuple[tuple[int, str], ...] = ()
    why: str = ""
    keys: tuple[str, ...] = ()

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Checked:
        fields = dict(document)
        fields["examples"] = tuple((int(row), str(value)) for row, value in fields["examples"])
        fields["keys"] = tuple(map(str, fields.get("keys", ())))
        return Checked(**fields)

    def __add__(self, other: Checked) -> Checked:
        """Combine the result with that of other values."""
        return replace(
            self,
            passed=self.passed and other.passed,
            rows=self.rows + other.rows,
            wrong=self.wrong + other.wrong,
            examples=(*self.examples, *other.examples)[:MOST_EXAMPLES],
            why=self.why or other.why,
            keys=(*self.keys, *other.keys)[:MOST_EXAMPLES],
        )

    @property
    def shown(self) -> list[str]:
        """The examples as texts."""
        keys = (f" (key {key})" if key else "" for key in (*self.keys, *("",) * len(self.examples)))
        return [f"row {row}{key}: {value}" for (row, value), key in zip(self.examples, keys, strict=False)]

    def __str__(self) -> str:
        shown = ", ".join(self.shown)
        part = f"{self.wrong:,} of {counted(self.rows, 'row')}" + (f", for example {shown}" if shown else "")
        found = "met" if self.passed else f"({self.level}) not met"
        about = f": {part}{f'; {self.why}' if self.why else ''}" if self.wrong or not self.passed else ""
        return f"expectation {self.expectation} of column {self.column!r} {found}{about}"

    def without_values(self) -> Checked:
        """Return the result without anything that shows values of rows."""
        return replace(self, examples=(), keys=(), why="")


@dataclass(frozen=True)
class ShardResult(Outcome):
    """The result of committing one shard.

    Args:
        rows_taken: reused rows whose value another UDF version computed.
        rows_deleted: due rows that other writers deleted meanwhile; the job's result counts them as skipped.
        left_reasons: why rows were left, by fragment.
        visible: whether the rows are visible; a view's become visible in its swap at the end.
        rows_missing: of a load, the rows whose key its source lacks.
        store_requests: requests to object stores by the process that committed it.
    """

    shard: int
    fingerprint: str
    rows_taken: int = 0
    rows_deleted: int = 0
    fragments: int = 0
    versions: tuple[int, ...] = ()
    left_reasons: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0
    visible: bool = True
    rows_missing: int = 0
    store_requests: StoreRequests = field(default_factory=StoreRequests)

    @property
    def shown(self) -> bool:
        return self.visible

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ShardResult:
        fields = dict(document)
        fields["versions"] = tuple(fields["versions"])
        fields["left_reasons"] = tuple((int(a), str(b)) for a, b in fields["left_reasons"])
        fields["store_requests"] = StoreRequests.from_json(fields.get("store_requests"))
        return ShardResult(**fields)


@dataclass(frozen=True, repr=False)
class BackfillResult(Listed, Outcome):
    """The result of a backfill or refresh, with :class:`~airflow_geneva.engine.counts.Counts` of its rows.

    Args:
        job_id: the job.
        state: DONE, PARTIAL (rows were left: other writers changed them meanwhile, or the job reached a cap) or FAILED.
        version: the newest table version that the job knows.
        from_version: the planned version.
        commits: table versions that this job wrote.
        seconds: time by step; ``spark`` is the time to get a session.
        notes: notes for the user.
        checked: results of checking the expectations of the columns.
        usage: calls, tokens and cost that calls of a service reported, except in the last seconds before a kill.
        unindexed_rows: the most rows that one index over changed columns does not cover; 0 also without an index.
        rows_deduplicated: rows that took the value of equal inputs in their task, by `@udf(dedup=True)`.
        rows_cached: rows that took the value that another task or job had computed for equal inputs.
        rows_raced: rows that were called although another task called equal inputs at the same time.
        rows_missing: of a load, the selected rows whose key its source lacks.
        rows_run: rows on which functions were called in this job, whether or not their values became visible. A row
            counts once for each call, also in failed attempts, except in the last seconds before a kill.
        store_requests: requests to object stores; the documentation of metrics says which are counted.
    """

    job_id: str
    state: str
    version: int = 0
    from_version: int = 0
    commits: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checked: tuple[Checked, ...] = ()
    usage: Usage = field(default_factory=Usage)
    unindexed_rows: int = 0
    rows_deduplicated: int = 0
    rows_cached: int = 0
    rows_raced: int = 0
    rows_run: int = 0
    rows_missing: int = 0
    store_requests: StoreRequests = field(default_factory=StoreRequests)

    @property
    def rows_loaded(self) -> int:
        """Of a load, the rows whose values it changed."""
        return self.rows_visible

    @property
    def changed(self) -> bool:
        """Whether a table version was written."""
        return bool(self.commits)

    def with_carried(self, record: Mapping[str, Any]) -> BackfillResult:
        """Add the commits of the job's earlier plans; rows that failed in them were due again and count already."""
        carried = [ShardResult.from_json(document) for document in record.get(CARRIED, ())]
        before = sum(carried, Counts())
        return replace(
            self,
            rows_computed=self.rows_computed + before.rows_computed,
            rows_reused=self.rows_reused + before.rows_reused,
            rows_run=self.rows_run + int(record.get(ROWS_RUN, 0)),
            rows_skipped=max(self.rows_skipped - before.rows_visible, 0),
            commits=tuple(sorted({*self.commits, *(version for one in carried for version in one.versions)})),
        )

    def with_failures(self, rows: int) -> BackfillResult:
        """Set the failed rows to `rows` if the committed shards have fewer; the difference reduces the rows left."""
        more = min(max(rows - self.rows_failed, 0), self.rows_left)
        return replace(self, rows_failed=self.rows_failed + more, rows_left=self.rows_left - more)

    def with_seconds(self, **seconds: float) -> BackfillResult:
        return replace(self, seconds=in_order({**self.seconds, **{k: round(v, 3) for k, v in seconds.items()}}))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> BackfillResult:
        fields = dict(document)
        fields["commits"] = tuple(fields["commits"])
        fields["notes"] = tuple(fields["notes"])
        fields["checked"] = tuple(map(Checked.from_json, fields["checked"]))
        fields["usage"] = Usage.from_json(fields["usage"])
        fields["store_requests"] = StoreRequests.from_json(fields.get("store_requests"))
        return BackfillResult(**fields)

    def __str__(self) -> str:
        took = ", ".join(f"{step} {duration(seconds)}" for step, seconds in self.seconds.items())
        lines = [
            f"{self.state}: {counted(self.rows_computed, 'row')} computed, {self.rows_reused:,} taken from "
            f"checkpoints, {self.rows_skipped:,} skipped, {self.rows_failed:,} failed, {self.rows_left:,} left",
            f"  {counted(self.rows_run, 'row')} run, table version {self.from_version} -> {self.version}, "
            f"{counted(len(self.commits), 'commit')}, "
            f"job {self.job_id}" + (f" ({took})" if took else ""),
        ]
        if self.rows_missing:
            lines.append(f"  the source lacks the keys of {counted(self.rows_missing, 'row')}")
        if self.usage:
            lines.append(f"  {self.usage}")
        if self.store_requests:
            lines.append(f"  {self.store_requests}")
        lines.extend(f"  {checked}" for checked in self.checked)
        if self.unindexed_rows:
            lines.append(f"  not in an index yet: {counted(self.unindexed_rows, 'row')}")
        lines.extend(f"  Note: {note}" for note in self.notes)
        return "\n".join(lines)


class BackfillResults(Described, list[BackfillResult]):
    """The results of the backfills of several columns, in the order of the columns."""

    def __init__(self, results: Mapping[str, BackfillResult]) -> None:
        super().__init__(results.values())
        self.columns = tuple(results)

    def __str__(self) -> str:
        parts = (f"{column}: {result}" for column, result in zip(self.columns, self, strict=True))
        return "\n".join([f"Backfills of {counted(len(self), 'column')}", *parts])
