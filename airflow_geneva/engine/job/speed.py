"""The measured speed of a job's UDFs, from which the time of the next job is estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import islice
from typing import Any, TypeAlias

from airflow_geneva.engine.counts import Sums, Usage
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.folder import RECORD, JobFolder
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.results import DONE, BackfillResult
from airflow_geneva.engine.storage.files import Storage

MOST_JOBS = 5
"""The maximum number of earlier jobs on which an estimate is based."""

_MOST_JOBS_READ = 100
_FRAGMENT_SECONDS = 0.004
_SAME = ("kind", "column", "udf", "udf_version")
_SAME_WORK = ("kind", "column", "where")


@dataclass(frozen=True)
class SavedCalls(Sums):
    """Rows whose value came from a call on equal inputs.

    Args:
        deduplicated: rows whose call the same task had made.
        cached: rows whose call another task, or another job of the same code version, had made.
        raced: rows that were called although another task made the same call at the same time.
    """

    deduplicated: int = 0
    cached: int = 0
    raced: int = 0

    def added_to(self, result: BackfillResult) -> BackfillResult:
        """Return a job's result with these counts, and with a note about them."""
        note = (
            f"{counted(self.deduplicated + self.cached, 'row')} needed no call: {self.deduplicated:,} with inputs of "
            f"other rows of their task, and {self.cached:,} with those of other tasks and jobs."
        )
        if self.raced:
            note += f" Another task called the same at the same time for {counted(self.raced, 'row')}."
        return replace(
            result,
            rows_deduplicated=self.deduplicated,
            rows_cached=self.cached,
            rows_raced=self.raced,
            notes=(*result.notes, note) if self != SavedCalls() else result.notes,
        )


def _smaller(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    return {name: min(part[name] for part in (ours, theirs) if name in part) for name in (*ours, *theirs)}


def _sizes(document: Any) -> dict[str, float]:
    return {str(name): float(most) for name, most in dict(document).items()}


@dataclass(frozen=True)
class UdfSpeed(Sums):
    """The rows, time and sizes that were measured for the UDFs of a job.

    Args:
        rows: rows that they ran on.
        seconds: time to read, compute and stage these rows, summed over the threads and tasks that did it.
        first_seconds, first_rows: time and rows of the slowest first call of a fragment, which may load a model.
        bytes: size of the computed values in memory.
        fragments: fragments that were staged.
        called: the part of `seconds` that the UDF itself took.
        saved: rows without a call of their own.
        busy: seconds that the UDF ran and waited between its first and its last call.
        fitting: the largest calls that fit in the device's memory, by UDF and unit, for UDFs with a call that did not.
    """

    rows: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    first_rows: int = 0
    bytes: int = 0
    fragments: int = 0
    called: float = 0.0
    saved: SavedCalls = field(default_factory=SavedCalls, metadata={"read": SavedCalls.from_json})
    busy: Busy = field(default_factory=Busy, metadata={"read": Busy.from_json})
    fitting: Mapping[str, float] = field(default_factory=dict, metadata={"add": _smaller, "read": _sizes})

    def __add__(self, other: UdfSpeed) -> UdfSpeed:
        first = max(self, other, key=lambda speed: speed.first_seconds)
        return replace(super().__add__(other), first_seconds=first.first_seconds, first_rows=first.first_rows)

    def seconds_for(self, rows: int, fragments: int = 0) -> float:
        """Estimate the seconds of one thread for `rows` rows, including the time to load a model."""
        return sum(self.parts_for(rows, fragments))

    def parts_for(self, rows: int, fragments: int = 0) -> tuple[float, float]:
        """Estimate the seconds to load a model, and an upper bound of the seconds for the rows."""
        apart = max(self.seconds - self.called, 0.0) if self.fragments else 0.0  # to read and stage
        each = min(apart / max(self.fragments, 1), _FRAGMENT_SECONDS)
        beside = each * fragments + (apart - each * self.fragments) * rows / max(self.rows, 1)
        if self.rows <= self.first_rows:  # a single call: how much of it was loading is unknown
            part = rows / max(self.first_rows, 1)
            return self.first_seconds * max(1.0 - part, 0.0), self.first_seconds * part + beside
        per_row = max(self.seconds - apart - self.first_seconds, 0.0) / (self.rows - self.first_rows)
        loading = max(self.first_seconds - self.first_rows * per_row, 0.0)
        return loading, rows * per_row + beside

    def bytes_for(self, rows: int) -> float:
        """Estimate the size of `rows` computed values."""
        return rows * self.bytes / max(self.rows, 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PastJob:
    """The measured time and cost of an earlier job.

    Args:
        seconds: from its plan to its end, without waiting.
        start_seconds: from the start of a shard's task to that of its computation, mostly the start of Spark; None if
            it is not known.
        reported: cost that its calls reported.
        shards: number of its shards.
        slots: number of threads or Spark tasks that ran at once; 0 if it is not known.
    """

    speed: UdfSpeed
    seconds: float
    runner: str | None = None
    start_seconds: float | None = None
    reported: float = 0.0
    shards: int = 1
    slots: int = 0

    @property
    def seconds_beside(self) -> float:
        """The seconds per shard in which no slot computed, mostly the start of Spark."""
        return max(self.seconds - self.speed.seconds / min(self.slots, self.speed.rows), 0.0) / self.shards

    def cost_per_row(self, declared: float | None) -> float | None:
        """Return the mean cost of a row: as calls reported it, or as declared for the rows that were called."""
        if self.reported:
            return self.reported / self.speed.rows
        saved = self.speed.saved.deduplicated + self.speed.saved.cached
        return None if declared is None else declared * (1 - min(saved / self.speed.rows, 1.0))


@dataclass(frozen=True)
class EarlierJobs:
    """The newest jobs of a column or view, the newest first.

    Args:
        measured: the jobs with the same UDF versions that computed rows.
        unfinished: table versions that were read by jobs which did not make all of their rows visible; only jobs since
            the newest one that is DONE.
    """

    measured: tuple[PastJob, ...] = ()
    unfinished: tuple[int, ...] = ()


ReadJobs: TypeAlias = Callable[[], EarlierJobs]


def history_once(checkpoints: Storage, described: Mapping[str, Any]) -> ReadJobs:
    """Return a function that reads the earlier jobs on its first call."""
    return cache(partial(read_history, checkpoints, described))


def read_history(checkpoints: Storage, described: Mapping[str, Any], most: int = MOST_JOBS) -> EarlierJobs:
    """Read the newest jobs of a column or view.

    Args:
        described: the fields of the job record that identify such jobs.
        most: the number of measured jobs after which older records are not read.
    """
    found, unfinished, done = list[PastJob](), list[int](), False
    for record in _records(checkpoints, most):
        ended = record.get("ended") or {}
        result = ended.get("result")
        if not done and all(record.get(part) == described.get(part) for part in _SAME_WORK):
            done = isinstance(result, Mapping) and result.get("state") == DONE
            unfinished += [record["version"]] if not done and isinstance(record.get("version"), int) else []
        if all(record.get(part) == described.get(part) for part in _SAME):
            speed = UdfSpeed.from_json(ended.get("speed"))
            if speed.rows:
                steps = _steps_of(result)
                start = ended.get("start_seconds", steps.get("spark"))
                started = float(start) if isinstance(start, (int, float)) else None
                paid = Usage.from_json(result.get("usage") if isinstance(result, Mapping) else None).cost
                runner, shards = ended.get("runner"), max(int(record.get("shards", 1)), 1)
                slots = int(ended.get("slots", 0))
                found.append(PastJob(speed, sum(steps.values()), runner, started, paid, shards, slots))
            if len(found) == most:
                break
    return EarlierJobs(tuple(found), tuple(dict.fromkeys(unfinished)))


def _records(checkpoints: Storage, at_once: int) -> Iterator[dict[str, Any]]:
    """Yield the records of the newest jobs, `at_once` of which are read concurrently."""
    folders = [JobFolder.of(checkpoints, name) for name in islice(job_ids(checkpoints), _MOST_JOBS_READ)]
    for begin in range(0, len(folders), at_once):
        part = folders[begin : begin + at_once]
        found = checkpoints.side_by_side(*(partial(folder.read, RECORD) for folder in part))
        yield from (record or {} for record in found)


def _steps_of(result: object) -> dict[str, float]:
    """Return the seconds by step of a job's result; empty if it is missing or damaged."""
    steps = result.get("seconds") if isinstance(result, Mapping) else None
    try:
        return {step: float(seconds) for step, seconds in steps.items()} if isinstance(steps, Mapping) else {}
    except (TypeError, ValueError):
        return {}
