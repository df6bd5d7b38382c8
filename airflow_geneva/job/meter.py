"""What a job of this process does right now, for a bar that looks at it from another thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from airflow_geneva.job.progress import ProgressReporter

_WORDS = {
    "plan": "planning",
    "spark": "starting Spark…",
    "apply": "computing",
    "commit": "committing",
    "finish": "finishing",
}


@dataclass
class Meter:
    """The stage of a job, its rows to compute, and the reporters of its shards."""

    target: str
    stage: str = "plan"
    rows: int = 0
    reporters: dict[int, ProgressReporter] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def rows_done(self) -> int:
        return min(sum(reporter.rows_done for reporter in list(self.reporters.values())), self.rows)

    def __str__(self) -> str:
        told = [reporter.now() for reporter in list(self.reporters.values())]
        words = f"{_WORDS.get(self.stage, self.stage)}, {self.seconds:,.0f} s"
        if not told:
            return words
        done, spent = self.rows_done, told[-1].seconds
        failed, speed = sum(progress.rows_failed for progress in told), told[-1].rows_per_second
        parts = [f"{done:,} of {self.rows:,} rows"]
        if failed:
            parts.append(f"{failed:,} failed")
        if self.stage == "apply" and speed and spent:
            parts += [f"{speed:,.0f} rows/s", f"about {(self.rows - done) / speed:,.0f} s left"]
        return ", ".join([words, *parts])


_current: ContextVar[Meter | None] = ContextVar("geneva_meter", default=None)


def measured() -> Meter:
    """Return the meter of the job that the calling thread works on; one that nothing looks at if there is none."""
    return _current.get() or Meter("")


@contextmanager
def measuring(target: str) -> Iterator[Meter]:
    """Give the job that the body runs a meter."""
    meter = Meter(target)
    token = _current.set(meter)
    try:
        yield meter
    finally:
        _current.reset(token)
