"""Progress of a shard, which its steps write as log lines and as a part of its status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from airflow_geneva.engine.counts import Counts, StoreRequests, Usage
from airflow_geneva.engine.display import counted, duration
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.folder import APPLYING
from airflow_geneva.engine.job.spark_start import SparkStart
from airflow_geneva.engine.runtime import time
from airflow_geneva.errors import StorageError

logger = logging.getLogger("airflow_geneva.progress")

NO_EXECUTOR = "no_executor"
"""Field of a progress document: Spark has no executor that could compute."""
START = "spark_start"
"""Field of a progress document, and of the result of apply: the seconds of Spark's start by part."""

EVERY_SECONDS = 5.0
LONGEST_SECONDS = 600.0
_GROWTH = 0.1
CHECK_SECONDS = 3.0
_MOST_SAMPLES = 60
_FIRST_PAUSE = 1.0


class Sample(NamedTuple):
    """The number of rows that were done after some seconds."""

    seconds: float
    rows: int


def rows_per_second(samples: Sequence[tuple[float, int]]) -> float:
    """Return the speed over the newer half of the rows; 0 until there are two samples with rows.

    The time of the first rows does not count, because they may have waited for a model.
    """
    timed = [sample for sample in samples if sample[1]]
    if len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return 0.0
    import numpy as np  # the dag processor imports this module

    seconds, rows = np.array(timed, dtype=float).T
    middle = (rows[0] + rows[-1]) / 2
    return float((rows[-1] - middle) / max(seconds[-1] - np.interp(middle, rows, seconds), 1e-9))


@dataclass(frozen=True)
class Progress(Counts):
    """The progress of one shard with `rows` to run: `ready` fragments are staged, and `committed` ones visible.

    Args:
        samples: the number of rows that were done over time, up to the newest.
        busy: seconds that the function ran and waited.
    """

    rows: int
    fragments: int
    ready: int = 0
    committed: int = 0
    seconds: float = 0.0
    versions: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()
    busy: Busy = field(default_factory=Busy)

    @property
    def rows_done(self) -> int:
        """Rows that were computed or failed."""
        return self.rows_computed + self.rows_failed

    @property
    def rows_per_second(self) -> float:
        return rows_per_second(self.samples)

    def __str__(self) -> str:
        speed, left = self.rows_per_second, max(self.rows - self.rows_done, 0)
        if self.rows and not (self.rows_done or self.ready or self.committed):
            return f"loading the function ({duration(self.seconds)} so far), 0 of {counted(self.rows, 'row')} computed"
        share = 100 * self.rows_done / self.rows if self.rows else 100.0
        failed = f"{self.rows_failed:,} of them failed, " if self.rows_failed else ""
        known = speed or self.ready >= self.fragments
        return (
            f"{self.rows_done:,} of {counted(self.rows, 'row')} computed ({share:.0f} %), {failed}{self.ready} of "
            f"{counted(self.fragments, 'fragment')} ready ({counted(self.rows_ready, 'row')}), {speed:,.0f} rows/s, "
            + (f"about {left / (speed or 1.0):,.0f} s left" if known else "time left not known yet")
            + f", {self.busy}".removesuffix(", ")
        )


@dataclass
class ProgressReporter:
    """Logs progress, and every few seconds writes the newest to a document, if `write` is given.

    The pauses between two lines grow with the time that has passed, up to `longest` seconds, so that the log of a shard
    of hours stays short. The usage of earlier attempts, `used_before`, is added to that of this attempt's calls, and so
    are the requests of this process.
    `check` is called every few seconds, and may raise an error that ends the work.
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
    skipped: Callable[[], Mapping[int, int]] = dict
    failed: Callable[[], int] = int
    usage: Callable[[], Usage] = Usage
    store_requests: Callable[[], StoreRequests] = StoreRequests
    busy: Callable[[], Busy] = Busy
    start: Callable[[], SparkStart] = SparkStart
    used_before: Usage = field(default_factory=Usage)
    spark_ui: str | None = None
    has_executor: bool = True
    check: Callable[[], None] = lambda: None
    _checked: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _last_line: float = 0.0
    _already_warned: bool = False
    _samples: list[Sample] = field(default_factory=list)
    _sample_pause: float = 1.0

    def now(self) -> Progress:
        failed = max(self.rows_failed, self.failed())
        computed = max(self.rows_done - failed, 0)
        return Progress(
            rows=self.rows,
            fragments=self.fragments,
            ready=self.ready,
            committed=self.committed,
            seconds=time.monotonic() - self._began,
            versions=self.versions,
            samples=tuple(self._samples),
            busy=self.busy(),
            # Rows that running tasks have computed since their last checkpoint already count.
            rows_checkpointed=max(self.rows_held + computed, self.rows_ready, self.rows_committed),
            rows_ready=self.rows_ready,
            rows_committed=self.rows_committed,
            rows_computed=computed,
            rows_failed=failed,
        )

    def add_ready(self, rows: int) -> None:
        """Count a fragment that was staged, with its due rows that did not fail."""
        self.ready += 1
        self.rows_ready += rows

    def complete_start(self, of_tasks: Sequence[SparkStart]) -> None:
        """Add the parts of Spark's start that a task measured: of the first ones, the task that was fastest."""
        start = self.start()
        if of_tasks and not start.function:
            start += min(of_tasks, key=lambda one: one.seconds)
            self.start = lambda: start

    def set_committed(self, fragments: int, rows: int, versions: tuple[int, ...]) -> None:
        """Record the visible fragments, rows and versions; write the document at once, because commits are few."""
        self.committed, self.rows_committed, self.versions = fragments, rows, versions
        self.keep()

    def tick(self, force: bool = False) -> None:
        """Log and write the document if they are due; a shard writes it more often at its start."""
        moment = time.monotonic()
        passed = moment - self._began
        self.look()
        if self._sample(passed):
            self.keep()
        growth = _GROWTH if self.rows_done else 0.5
        line = moment - max(self._last_line, self._began) >= min(max(self.every, growth * passed), self.longest)
        if force or line:
            self._last_line = moment
            self.emit(str(self.now()))
        pause = min(max(_FIRST_PAUSE, _GROWTH * passed), self.every)
        if force or line or moment - max(self._last, self._began) >= pause:
            self._last = moment
            self.keep()

    def look(self) -> None:
        """Call `check` if that is due."""
        if (moment := time.monotonic()) - self._checked >= CHECK_SECONDS:
            self._checked = moment
            self.check()

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
        usage = self.used_before + self.usage() + Usage(store_requests=self.store_requests())
        kept = {"at": time.time(), "skipped": self.skipped(), "usage": asdict(usage)}
        kept |= {} if self.has_executor else {NO_EXECUTOR: True}
        kept |= {} if self.spark_ui is None else {"spark_ui": self.spark_ui}
        kept |= {START: asdict(start)} if (start := self.start()) else {}
        return {**asdict(self.now()), **kept}

    def _sample(self, seconds: float) -> bool:
        """Add a sample, and keep at most 60 over the whole time; return whether it has the first rows."""
        samples, sample = self._samples, Sample(round(seconds, 2), self.rows_done)
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


def usage_of(statuses: Iterable[Mapping[str, Any]]) -> Usage:
    """Return the usage of all attempts at computing shards, from their status documents."""
    return sum((Usage.from_json((found.get(APPLYING) or {}).get("usage")) for found in statuses), Usage())


def read_progress(document: Mapping[str, Any]) -> Progress:
    """Parse a progress document; KeyError or TypeError if it is not one."""
    document = {"busy": None, **document}
    known = {part.name: document[part.name] for part in fields(Progress)}
    samples = tuple(Sample(*sample) for sample in document["samples"])
    versions, busy = tuple(document["versions"]), Busy.from_json(document["busy"])
    return Progress(**{**known, "versions": versions, "samples": samples, "busy": busy})
