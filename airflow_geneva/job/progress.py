"""Progress of a shard, which its stages write as log lines and as a part of its status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from airflow_geneva.display import counted
from airflow_geneva.errors import StorageError
from airflow_geneva.job.trend import rest_of, seconds_per_row
from airflow_geneva.limits.rate_limit import Usage

logger = logging.getLogger("airflow_geneva.progress")

NO_EXECUTOR = "no_executor"
"""Field of a progress document: Spark has no executor that could compute."""

EVERY_SECONDS = 5.0
LONGEST_SECONDS = 600.0
_GROWTH = 0.1
_MOST_SAMPLES = 60
_FIRST_PAUSE = 1.0


class Sample(NamedTuple):
    """How many rows were done when; `slot_seconds` is the time of all Spark tasks together, or the same."""

    seconds: float
    rows: int
    slot_seconds: float


@dataclass(frozen=True)
class Progress:
    """The progress of one shard: `ready` is staged, and `held` was in checkpoints when the shard was planned.

    Rows on which the UDF failed are `done`, and neither ready nor committed.

    Args:
        rows_ahead: rows that the Spark task slot with most still has before it; None: all rows are in one line.
        samples: how many rows were done when, up to the newest.
    """

    rows: int
    rows_done: int
    fragments: int
    ready: int
    committed: int
    seconds: float
    rows_held: int = 0
    rows_ready: int = 0
    rows_committed: int = 0
    rows_failed: int = 0
    versions: tuple[int, ...] = ()
    rows_ahead: int | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def rows_checkpointed(self) -> int:
        """Rows that are computed and kept, except what running tasks computed since their last checkpoint."""
        return max(self.rows_held + self.rows_done - self.rows_failed, self.rows_ready, self.rows_committed)

    @property
    def _timed(self) -> list[Sample]:
        """The samples from the first rows on, each with more rows than the one before."""
        timed: list[Sample] = []
        for sample in self.samples:
            if sample.rows > (timed[-1].rows if timed else 0):
                timed.append(sample)
        return timed

    @property
    def rows_per_second(self) -> float:
        """The speed since the first rows were there, because they may have waited for a model; 0 until more are."""
        timed = self._timed
        seconds = timed[-1].seconds - timed[0].seconds if timed else 0.0
        return (timed[-1].rows - timed[0].rows) / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate, or None while there is nothing to go by."""
        if self.ready >= self.fragments:
            return 0.0
        timed, left = self._timed, max(self.rows - self.rows_done, 0)
        each = seconds_per_row([(sample.slot_seconds, sample.rows) for sample in timed], left)
        if each is None:
            return None
        ahead = left if self.rows_ahead is None else self.rows_ahead
        return rest_of(ahead * each, max(self.seconds - timed[-1].seconds, 0.0))

    def __str__(self) -> str:
        left = self.seconds_left
        share = 100 * self.rows_done / self.rows if self.rows else 100.0
        failed = f"{self.rows_failed:,} of them failed, " if self.rows_failed else ""
        return (
            f"{self.rows_done:,} of {counted(self.rows, 'row')} computed ({share:.0f} %), {failed}{self.ready} of "
            f"{counted(self.fragments, 'fragment')} ready ({counted(self.rows_ready, 'row')}), "
            f"{self.rows_per_second:,.0f} rows/s, "
            + (f"about {left:,.0f} s left" if left is not None else "time left not known yet")
        )


@dataclass
class ProgressReporter:
    """Logs progress, and keeps the newest in a document every few seconds, if it can `write` one.

    The pauses between two lines grow with the time that has passed, up to `longest` seconds, so that the log of a shard
    of hours stays short. What calls use adds up with what those of earlier tries `used_before`.
    """

    rows: int
    fragments: int
    write: Callable[[Mapping[str, Any]], None] | None = None
    emit: Callable[[str], Any] = logger.info
    every: float = EVERY_SECONDS
    longest: float = LONGEST_SECONDS
    rows_held: int = 0
    rows_done: int = 0
    ready: int = 0
    rows_ready: int = 0
    committed: int = 0
    rows_committed: int = 0
    rows_failed: int = 0
    versions: tuple[int, ...] = ()
    rows_ahead: int | None = None
    slot_seconds: float | None = None
    skipped: Callable[[], Mapping[int, int]] = dict
    failed: Callable[[], int] = int
    usage: Callable[[], Usage] = Usage
    used_before: Usage = field(default_factory=Usage)
    spark_ui: str | None = None
    has_executor: bool = True
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _last_line: float = 0.0
    _already_warned: bool = False
    _samples: list[Sample] = field(default_factory=list)
    _sample_pause: float = 1.0

    def now(self) -> Progress:
        own = {part.name for part in fields(Progress)} - {"seconds", "samples"}
        counts = {name: getattr(self, name) for name in own}
        counts["rows_failed"] = max(self.rows_failed, self.failed())
        return Progress(seconds=time.monotonic() - self._began, samples=tuple(self._samples), **counts)

    def add_rows(self, rows: int) -> None:
        self.rows_done += rows
        self.tick()

    def add_ready(self, rows: int) -> None:
        """Count a fragment that was staged, with its due rows that did not fail."""
        self.ready += 1
        self.rows_ready += rows

    def set_committed(self, fragments: int, rows: int, versions: tuple[int, ...]) -> None:
        """Record what is visible now; writes the document at once, because commits are few."""
        self.committed, self.rows_committed, self.versions = fragments, rows, versions
        self.keep()

    def tick(self, force: bool = False) -> None:
        """Log and write the document if it is time; a young shard writes it more often."""
        moment = time.monotonic()
        passed = moment - self._began
        if self._sample(passed):
            self.keep()
        line = moment - max(self._last_line, self._began) >= min(max(self.every, _GROWTH * passed), self.longest)
        if force or line:
            self._last_line = moment
            self.emit(str(self.now()))
        pause = min(max(_FIRST_PAUSE, _GROWTH * passed), self.every)
        if force or line or moment - max(self._last, self._began) >= pause:
            self._last = moment
            self.keep()

    def keep(self) -> None:
        """Write the document; a failed write does not fail the work."""
        if self.write is None:
            return
        try:
            self.write(self.document())
        except StorageError as error:
            if not self._already_warned:
                self._already_warned = True
                logger.warning("Cannot write the progress; the work goes on: %s", error)

    def document(self) -> dict[str, Any]:
        self._sample(time.monotonic() - self._began)
        progress = self.now()
        shown = {} if self.spark_ui is None else {"spark_ui": self.spark_ui}
        kept = {"at": time.time(), "skipped": self.skipped(), "rows_per_second": progress.rows_per_second}
        if not self.has_executor:
            kept[NO_EXECUTOR] = True
        kept["usage"] = asdict(self.used_before + self.usage())
        return {**asdict(progress), **kept, **shown}

    def _sample(self, seconds: float) -> bool:
        """Keep how many rows are done, in at most 60 samples over all of the time; whether they are the first."""
        samples, slot_seconds = self._samples, seconds if self.slot_seconds is None else self.slot_seconds
        sample = Sample(round(seconds, 2), self.rows_done, round(slot_seconds, 2))
        if not samples:
            samples.append(sample)
            return self.rows_done > 0
        if self.rows_done <= samples[-1].rows:
            return False
        first = samples[-1].rows == 0
        if len(samples) > 1 and samples[-2].rows and samples[-1].seconds - samples[-2].seconds < self._sample_pause:
            samples.pop()
        samples.append(sample)
        if len(samples) == _MOST_SAMPLES:
            del samples[::2]
            self._sample_pause = seconds * 2 / _MOST_SAMPLES
        return first


def read_progress(document: Mapping[str, Any]) -> Progress:
    """Parse a progress document, also of an older version of this package; KeyError, TypeError if it is none."""
    known = {part.name: document[part.name] for part in fields(Progress) if part.name in document}
    samples = (Sample(*(sample if len(sample) > 2 else (*sample, sample[0]))) for sample in document.get("samples", ()))
    return Progress(**{**known, "versions": tuple(document.get("versions", ())), "samples": tuple(samples)})
