"""Progress of a shard, which its stages write as log lines and as a part of its status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from airflow_geneva.errors import StorageError

logger = logging.getLogger("airflow_geneva.progress")

EVERY_SECONDS = 5.0
LONGEST_SECONDS = 600.0
_GROWTH = 0.1
_LEAST_SECONDS = 1.0
_MOST_SAMPLES = 60


@dataclass(frozen=True)
class Progress:
    """The progress of one shard: `ready` is staged, and `held` was in checkpoints when the shard was planned.

    `first_rows` were there after `first_seconds`.

    Rows on which the UDF failed are `done`, and neither ready nor committed.
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
    first_rows: int = 0
    first_seconds: float = 0.0

    @property
    def rows_checkpointed(self) -> int:
        """Rows that are computed and kept, except what running tasks computed since their last checkpoint."""
        return max(self.rows_held + self.rows_done - self.rows_failed, self.rows_ready, self.rows_committed)

    @property
    def rows_per_second(self) -> float:
        """The speed since the first rows were there, because they may have waited for a model."""
        rows, seconds = self.rows_done - self.first_rows, self.seconds - self.first_seconds
        if rows <= 0 or seconds < _LEAST_SECONDS:
            rows, seconds = self.rows_done, self.seconds
        return rows / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate, or None while there is nothing to go by."""
        speed = self.rows_per_second
        if self.ready >= self.fragments:
            return 0.0
        return max(self.rows - self.rows_done, 0) / speed if speed > 0 else None

    def __str__(self) -> str:
        left = self.seconds_left
        share = 100 * self.rows_done / self.rows if self.rows else 100.0
        failed = f"{self.rows_failed:,} of them failed, " if self.rows_failed else ""
        return (
            f"{self.rows_done:,} of {self.rows:,} rows computed ({share:.0f} %), {failed}{self.ready} of "
            f"{self.fragments} fragments ready ({self.rows_ready:,} rows), {self.rows_per_second:,.0f} rows/s, "
            + (f"about {left:,.0f} s left" if left is not None else "no row computed yet")
        )


@dataclass
class ProgressReporter:
    """Logs progress, and keeps the newest in a document every few seconds, if it can `write` one.

    The pauses between two lines grow with the time that has passed, up to `longest` seconds, so that the log of a shard
    of hours stays short.
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
    first_rows: int = 0
    first_seconds: float = 0.0
    skipped: Callable[[], Mapping[int, int]] = dict
    failed: Callable[[], int] = int
    spark_ui: str | None = None
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _last_line: float = 0.0
    _already_warned: bool = False
    _samples: list[tuple[float, int]] = field(default_factory=list)
    _sample_pause: float = 1.0

    def now(self) -> Progress:
        if self.rows_done and not self.first_rows:
            self.first_rows, self.first_seconds = self.rows_done, time.monotonic() - self._began
        counts = {part.name: getattr(self, part.name) for part in fields(Progress) if part.name != "seconds"}
        counts["rows_failed"] = max(self.rows_failed, self.failed())
        return Progress(seconds=time.monotonic() - self._began, **counts)

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
        """Log and write the document if it is time."""
        moment = time.monotonic()
        if self.rows_done and not self.first_rows:
            self.keep()  # the first rows say how fast it is
        if not force and moment - max(self._last, self._began) < self.every:
            return
        self._last = moment
        pause = min(max(self.every, _GROWTH * (moment - self._began)), self.longest)
        if force or moment - self._last_line >= pause:
            self._last_line = moment
            self.emit(str(self.now()))
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
        progress = self.now()
        speed = progress.rows_per_second
        shown = {} if self.spark_ui is None else {"spark_ui": self.spark_ui}
        self._sample(progress)
        kept = {"at": time.time(), "skipped": self.skipped(), "samples": list(self._samples)}
        return {**asdict(progress), "rows_per_second": speed, **kept, **shown}

    def _sample(self, progress: Progress) -> None:
        """Keep how many rows were done when: at most 60 samples, over all of the time that has passed."""
        if not self._samples or progress.seconds - self._samples[-1][0] >= self._sample_pause:
            self._samples.append((round(progress.seconds, 1), progress.rows_done))
        if len(self._samples) > _MOST_SAMPLES:
            self._samples = self._samples[1::2]
            self._sample_pause = progress.seconds * 2 / _MOST_SAMPLES


def read_progress(document: Mapping[str, Any]) -> Progress:
    """Parse a progress document, also of an older version of this package; KeyError, TypeError if it is none."""
    known = {part.name: document[part.name] for part in fields(Progress) if part.name in document}
    return Progress(**{**known, "versions": tuple(document.get("versions", ()))})
