"""The current step and progress of a job in this process, for a progress bar in another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from airflow_geneva.engine.display import counted, step_in_words
from airflow_geneva.engine.job.progress import ProgressReporter, rows_per_second
from airflow_geneva.engine.job.shard_status import STARTING, ShardStatus
from airflow_geneva.engine.job.time_left import estimate_time_left
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.requests import take_requests

_SHARD_STEPS = {"spark": STARTING, "apply": "applying"}


@dataclass
class JobMeter:
    """The step of a job, its rows to compute, its expected pace, the reporters of its shards, and how to cancel it."""

    target: str
    step: str = "plan"
    rows: int = 0
    expected: Mapping[str, Any] = field(default_factory=dict)
    reporters: dict[int, ProgressReporter] = field(default_factory=dict)
    cancel: Callable[[], None] | None = None
    _began: float = field(default_factory=time.time)
    _since: float = 0.0

    @staticmethod
    def current() -> JobMeter:
        """Return the meter of the job on which the calling thread works; an unused one if there is none."""
        return _current.get() or JobMeter("")

    def enter(self, step: str) -> None:
        self.step, self._since = step, time.time()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the job in the block; the step is `done` or `failed` afterwards."""
        token = _current.set(self)
        try:
            yield
        except BaseException:
            self.enter("failed")
            raise
        else:
            self.enter("done")
        finally:
            _current.reset(token)

    @property
    def seconds(self) -> float:
        return time.time() - self._began

    @property
    def rows_done(self) -> int:
        return min(sum(reporter.rows_done for reporter in list(self.reporters.values())), self.rows)

    def __str__(self) -> str:
        told = [reporter.now() for reporter in list(self.reporters.values())]
        parts = [step_in_words(self.step), f"{self.seconds:,.0f} s"]
        if told:
            parts.append(f"{self.rows_done:,} of {counted(self.rows, 'row')}")
            if failed := sum(progress.rows_failed for progress in told):
                parts.append(f"{failed:,} failed")
        samples = told[-1].samples if told else ()  # those of the running shard; shards run one after another
        if self.step == "apply" and (speed := rows_per_second(samples)):
            parts.append(f"{speed:,.0f} rows/s")
        if self.step in _SHARD_STEPS and self.rows:
            done: dict[str, Any] = {"rows_checkpointed": self.rows_done, "rows_computed": self.rows_done}
            whole = ShardStatus(
                0, _SHARD_STEPS[self.step], self.rows, samples=samples, since=self._since, **done
            )  # fmt: skip
            parts.append(estimate_time_left([whole], self.expected, self.step == "spark", time.time()).rest)
        return ", ".join(parts)


_current: ContextVar[JobMeter | None] = ContextVar("geneva_meter", default=None)


class Stopwatch:
    """Measures seconds by step; the first step began some seconds before."""

    def __init__(self, before: float = 0.0) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic() - before

    @staticmethod
    def of_new_job() -> Stopwatch:
        """Begin to measure a job: the requests that this process made before are not its own."""
        take_requests()
        return Stopwatch()

    @contextmanager
    def timing(self, step: str) -> Iterator[None]:
        """Add the time since the last lap to a step when the block ends, also if it fails."""
        try:
            yield
        finally:
            self.lap(step)

    def lap(self, step: str) -> None:
        now = time.monotonic()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._since
        self._since = now
