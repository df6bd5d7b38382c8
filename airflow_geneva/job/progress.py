"""Progress of a shard: lines in the log, and a small file that commands and pages read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from airflow_geneva.errors import StorageError
from airflow_geneva.storage.files import Storage

logger = logging.getLogger("airflow_geneva.progress")

EVERY_SECONDS = 5.0
LONGEST_SECONDS = 600.0
_GROWTH = 0.1


@dataclass(frozen=True)
class Progress:
    """The progress of one shard at one time.

    Args:
        rows: rows to compute.
        rows_done: rows that the UDF has run on in this try.
        fragments: fragments of the shard.
        ready: fragments whose data file is staged.
        committed: fragments visible in the table.
        seconds: seconds since the try began.
        rows_held: rows that were in checkpoints when the shard was planned.
        rows_ready: rows of the staged fragments.
        rows_committed: rows of the visible fragments.
        versions: table versions written.
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
    versions: tuple[int, ...] = ()

    @property
    def rows_checkpointed(self) -> int:
        """Rows that are computed and kept.

        A running task keeps what it has computed when its checkpoint interval is over, so at most that much of it is
        not on disk yet. A try that goes on where another one was killed counts what that one left in a fragment when it
        has finished the fragment.
        """
        return max(self.rows_held + self.rows_done, self.rows_ready, self.rows_committed)

    @property
    def rows_per_second(self) -> float:
        return self.rows_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate, or None while there is nothing to go by."""
        speed = self.rows_per_second
        return max(self.rows - self.rows_done, 0) / speed if speed > 0 else None

    def __str__(self) -> str:
        left = self.seconds_left
        share = 100 * self.rows_done / self.rows if self.rows else 100.0
        return (
            f"{self.rows_done:,} of {self.rows:,} rows computed ({share:.0f} %), {self.ready} of {self.fragments} "
            f"fragments ready ({self.rows_ready:,} rows), {self.rows_per_second:,.0f} rows/s, "
            + (f"about {left:,.0f} s left" if left is not None else "time left unknown")
        )


@dataclass
class ProgressReporter:
    """Logs progress, and keeps the newest in a file every few seconds.

    The pauses between two lines grow with the time that has passed, so that the log of a shard of hours stays short.

    Args:
        rows, fragments: size of the shard.
        storage: the job's folder, or None to keep no file.
        name: name of the file.
        emit: called with each line.
        every: seconds between two reports in the file, and the shortest pause between two lines.
        longest: the longest pause between two lines.
        rows_held: rows that were in checkpoints when the shard was planned.
        skipped: returns the number of skipped rows, by rule.
    """

    rows: int
    fragments: int
    storage: Storage | None = None
    name: str = "progress.json"
    emit: Callable[[str], Any] = logger.info
    every: float = EVERY_SECONDS
    longest: float = LONGEST_SECONDS
    rows_held: int = 0
    rows_done: int = 0
    ready: int = 0
    rows_ready: int = 0
    committed: int = 0
    rows_committed: int = 0
    versions: tuple[int, ...] = ()
    skipped: Callable[[], Mapping[int, int]] = dict
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _last_line: float = 0.0
    _already_warned: bool = False

    def now(self) -> Progress:
        return Progress(
            self.rows,
            self.rows_done,
            self.fragments,
            self.ready,
            self.committed,
            time.monotonic() - self._began,
            self.rows_held,
            self.rows_ready,
            self.rows_committed,
            self.versions,
        )

    def add_rows(self, rows: int) -> None:
        self.rows_done += rows
        self.tick()

    def add_ready(self, rows: int) -> None:
        """Count a fragment that was staged.

        Args:
            rows: its due rows.
        """
        self.ready += 1
        self.rows_ready += rows

    def set_committed(self, fragments: int, rows: int, versions: tuple[int, ...]) -> None:
        """Record what is visible now; writes the file at once, because commits are few."""
        self.committed, self.rows_committed, self.versions = fragments, rows, versions
        self.keep()

    def tick(self, force: bool = False) -> None:
        """Log and write the file if it is time."""
        moment = time.monotonic()
        if not force and moment - max(self._last, self._began) < self.every:
            return
        self._last = moment
        pause = min(max(self.every, _GROWTH * (moment - self._began)), self.longest)
        if force or moment - self._last_line >= pause:
            self._last_line = moment
            self.emit(str(self.now()))
        self.keep()

    def keep(self) -> None:
        """Write the file; a failed write does not fail the work."""
        if self.storage is None:
            return
        progress = self.now()
        document = {
            **asdict(progress),
            "rows_per_second": progress.rows_per_second,
            "at": time.time(),
            "skipped": self.skipped(),
        }
        try:
            self.storage.write_json(self.name, document)
        except StorageError as error:
            if not self._already_warned:
                self._already_warned = True
                logger.warning("Cannot write the progress; the work goes on: %s", error)


def read_progress(document: Mapping[str, Any]) -> Progress:
    """Parse a progress file, also one of an older version of this package.

    Raises:
        KeyError, TypeError: it is not a progress file.
    """
    known = {part.name: document[part.name] for part in fields(Progress) if part.name in document}
    return Progress(**{**known, "versions": tuple(document.get("versions", ()))})
