"""Estimate the cost of a job, as intervals, from earlier jobs of the same UDF versions or a timed sample of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.display import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_geneva.engine.job.speed import PastJob

SPARK_START = 6.0, 20.0
"""Seconds to start Spark for one shard, if no earlier job has measured them."""

FEW_ROWS = 1_000
"""Starting Spark for fewer rows than this is worth a warning."""

_SPARK_STAGES = 0.5, 4.0
_A_START = 1.0

_ONE_JOB, _SEVERAL_JOBS = 1.7, 1.5
_BESIDE_A_JOB = 0.05, 0.22
_BESIDE_A_FRAGMENT = 0.002, 0.008
_CALL_SECONDS = 0.0001
_MORE_IN_A_JOB = 1.25


class Interval(NamedTuple):
    """The lower and the upper end of an expected value."""

    low: float
    high: float

    def __add__(self, other: Interval) -> Interval:  # type: ignore[override]
        return Interval(self.low + other.low, self.high + other.high)

    def times(self, low: float, high: float | None = None) -> Interval:
        return Interval(self.low * low, self.high * (low if high is None else high))

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        low, high = (f"{end:,.0f}" if end >= 100 else f"{end:.2g}" for end in self)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Call:
    """A timed call of a sample."""

    rows: int
    seconds: float


@dataclass(frozen=True)
class Size:
    """The work of a job, where it runs, and at which prices.

    Args:
        rows, fragments: what must be computed.
        runner: ``inline`` or ``spark``.
        slots: the number of threads or Spark tasks that run at once.
        shards: the number of shards, each of which starts Spark.
        price_per_slot_hour: price of one slot, or None.
        cost_per_row: cost that the UDFs declare, or None.
        session_is_up: whether this process has a Spark session, which need not be started.
    """

    rows: int
    fragments: int
    runner: str = "inline"
    slots: int = 1
    shards: int = 1
    price_per_slot_hour: float | None = None
    cost_per_row: float | None = None
    session_is_up: bool = False

    @property
    def starts_spark(self) -> bool:
        return self.runner == RunnerName.SPARK and not self.session_is_up


@dataclass(frozen=True)
class Estimate:
    """What a job will take, as intervals that should hold for nine of ten jobs.

    Args:
        rows: rows on which the UDFs will run.
        seconds: from the plan to the end, or None if nothing is known.
        slot_seconds: seconds of all threads or Spark tasks together, or None.
        cost: money, in the unit of the given prices; None without a price.
        runner: where the job would be computed, ``inline`` or ``spark``.
        basis: on what the estimate is based.
        sample: a table of the sampled rows with inputs, values and errors, or None.
        start_seconds: seconds until a shard computes; None if no earlier job has measured them.
        rows_per_second: speed of one shard; None if nothing is known.
        why: the reason for the runner, or "".
        fitting: the largest calls that fit into the device's memory, as earlier jobs found out.
    """

    LIMITS: ClassVar[tuple[str, ...]] = ("rows", "seconds", "slot_seconds", "cost")

    rows: int
    seconds: Interval | None
    slot_seconds: Interval | None
    cost: Interval | None
    runner: str
    basis: str
    sample: pa.Table | None = None
    start_seconds: float | None = None
    rows_per_second: float | None = None
    why: str = ""
    fitting: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of_nothing() -> Estimate:
        return Estimate(0, Interval(0, 0), Interval(0, 0), Interval(0, 0), "inline", "there is nothing to compute")

    @staticmethod
    def unknown(size: Size) -> Estimate:
        """Return what is known without a history: the declared cost of the UDFs."""
        cost = None if size.cost_per_row is None or size.price_per_slot_hour else _cost(size, Interval(0, 0))
        basis = "no earlier job ran this version; plan.estimate(sample=20) times some rows"
        return Estimate(size.rows, None, None, cost, size.runner, basis)

    @staticmethod
    def by_history(size: Size, jobs: Sequence[PastJob]) -> Estimate:
        """Estimate from one or more earlier jobs, newest first."""
        guesses = sorted(job.speed.seconds_for(size.rows, size.fragments) for job in jobs)
        margin = _ONE_JOB if len(jobs) == 1 else _SEVERAL_JOBS
        # Leave out a quarter of the jobs at each end: a single outlier would make the interval useless.
        odd = len(guesses) // 4
        slot_seconds = Interval(guesses[odd], guesses[-1 - odd]).times(1 / margin, margin)
        alike = [job for job in jobs if job.runner == size.runner]
        apart, start = _apart(size), None
        if known := [job for job in alike if job.slots and job.seconds]:
            # Only jobs that started Spark show how long that takes.
            starts = [began for job in known if (began := job.start_seconds or 0.0) >= _A_START]
            beside = [max(job.seconds_beside - (job.start_seconds or 0.0), 0.0) for job in known]
            if any(job.start_seconds is None for job in known):  # these measured the start together with the rest
                starts, beside = [0.0], [job.seconds_beside for job in known if job.start_seconds is None]
            apart = Interval(min(beside), max(beside)) + Interval(*_BESIDE_A_JOB)
            if size.starts_spark:
                apart += Interval(min(starts), max(starts)) if starts else Interval(*SPARK_START)
            apart = apart.times(size.shards).times(1 / margin, margin)
            start = 0.0 if not size.starts_spark else sum(starts) / len(starts) if starts else None
        many = f"{len(jobs)} earlier jobs" if len(jobs) > 1 else "an earlier job"
        paid = [cost for job in jobs if (cost := job.cost_per_row(size.cost_per_row)) is not None]
        per_row = Interval(min(paid), max(paid)) if paid else None
        found = _estimate(size, slot_seconds, apart, f"by {many} of this version", per_row)
        fitting = {name: most for job in reversed(jobs) for name, most in job.speed.fitting.items()}
        return replace(found, start_seconds=start, fitting=fitting)

    @staticmethod
    def by_sample(size: Size, calls: Sequence[Call], table: pa.Table, reported: float = 0.0) -> Estimate:
        """Estimate from timed calls that `reported` a cost; the first call may load a model, which counts once."""
        rest = calls[1:] or calls
        speeds = sorted(call.seconds / call.rows for call in rest)
        mean = sum(call.seconds for call in rest) / sum(call.rows for call in rest)
        spread = max((speeds[-1] - speeds[0]) / max(len(speeds), 2) ** 0.5 / mean if mean else 0.0, 0.35)
        per_row = Interval(mean / (1 + spread), mean * (1 + spread) * _MORE_IN_A_JOB)
        # Each call has a fixed overhead, which more rows share in a job.
        unseen = _CALL_SECONDS * len(rest) / sum(call.rows for call in rest)
        per_row = Interval(max(per_row.low - unseen, 0.0), per_row.high)
        loading = max(calls[0].seconds - mean * calls[0].rows, 0.0)
        slot_seconds = per_row.times(size.rows) + Interval(loading, loading).times(0.7, 1.4)
        slot_seconds += Interval(*_BESIDE_A_FRAGMENT).times(size.fragments)
        paid = reported / sum(call.rows for call in calls)
        cost = Interval(paid, paid).times(1 / _SEVERAL_JOBS, _SEVERAL_JOBS) if paid else None
        found = _estimate(size, slot_seconds, _apart(size), f"by a sample of {counted(table.num_rows, 'row')}", cost)
        return replace(found, sample=table)

    def pace(self) -> dict[str, Any]:
        """Return what a job's record keeps: values to estimate the time left of the running job, and the cost."""
        known = {"start_seconds": self.start_seconds, "rows_per_second": self.rows_per_second}
        kept: dict[str, Any] = {name: round(value, 6) for name, value in known.items() if value is not None}
        return kept if self.cost is None else {**kept, "cost": [round(end, 6) for end in self.cost]}

    def above(self, limits: Mapping[str, float]) -> str:
        """Describe the upper ends that are above their limits, or unknown; "" if there is none.

        Args:
            limits: limits by name: ``rows``, ``seconds``, ``slot_seconds`` or ``cost``.
        """
        why = []
        for name, limit in limits.items():
            end = Interval(self.rows, self.rows) if name == "rows" else getattr(self, name)
            if end is None or end.high > limit:
                why.append(f"{name} {'unknown' if end is None else end} is above {limit:g}")
        return ", ".join(why)

    def __repr__(self) -> str:
        return f"Estimate({self.summary()})"

    def __str__(self) -> str:
        if self.sample is None:
            return self.summary()
        rows = [f"    {_short(row)}" for row in self.sample.to_pylist()]
        return "\n".join([f"{self.summary()}; the sample:", *rows])

    def summary(self) -> str:
        """Describe the estimate in one line."""
        known = self.seconds is not None and self.slot_seconds is not None
        time = f"{self.seconds} s, {self.slot_seconds} slot-seconds" if known else "time unknown"
        money = f", cost {self.cost}" if self.cost is not None and self.rows else ""
        where = "in this process" if self.runner == RunnerName.INLINE else "on Spark"
        return f"{counted(self.rows, 'row')} {where}: {time}{money}; {self.basis}"

    def to_json(self) -> dict[str, Any]:
        """Return the estimate without the sample, whose values do not belong in an XCom."""
        ends = {name: getattr(self, name) for name in ("seconds", "slot_seconds", "cost")}
        plain = {name: None if end is None else [round(end.low, 4), round(end.high, 4)] for name, end in ends.items()}
        return {"rows": self.rows, **plain, "runner": self.runner, "basis": self.basis}


def starting_spark(rows: int) -> str:
    """Return a note that Spark is started for a few rows."""
    low, high = SPARK_START
    return f"Spark is started for {counted(rows, 'row')}, which takes about {low:g} to {high:g} s."


def _estimate(
    size: Size, slot_seconds: Interval, apart: Interval, basis: str, per_row: Interval | None = None
) -> Estimate:
    computing = slot_seconds.times(1 / max(min(size.slots, size.rows), 1))
    middle = sum(computing) / 2
    speed = size.rows / middle if middle else None
    cost = _cost(size, slot_seconds, per_row)
    return Estimate(size.rows, computing + apart, slot_seconds, cost, size.runner, basis, rows_per_second=speed)


def _apart(size: Size) -> Interval:
    """Return the seconds of a job in which no slot computes."""
    start = Interval(0, 0)
    if size.runner == RunnerName.SPARK:
        start = Interval(*(SPARK_START if size.starts_spark else _SPARK_STAGES)).times(size.shards)
    return start + Interval(*_BESIDE_A_JOB)


def _cost(size: Size, slot_seconds: Interval, per_row: Interval | None = None) -> Interval | None:
    """Return the cost of slots and rows; `per_row` is the measured cost of a row, in earlier jobs or the sample."""
    if size.price_per_slot_hour is None and size.cost_per_row is None and per_row is None:
        return None
    declared = size.cost_per_row or 0.0
    own = (per_row or Interval(declared, declared)).times(size.rows)
    return slot_seconds.times((size.price_per_slot_hour or 0.0) / 3600) + own


def _short(row: dict[str, Any]) -> str:
    *shown, error = row.items()
    return ", ".join(f"{name}={value!r:.60}" for name, value in (*shown, *([error] if error[1] else [])))
