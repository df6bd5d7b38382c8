"""How far a shard is: lines for the log, and a small file for whoever looks from outside."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_geneva.storage import Storage

logger = logging.getLogger("airflow_geneva.progress")

EVERY_SECONDS = 5.0


@dataclass(frozen=True)
class Progress:
    """The state of one shard at a moment.

    Args:
        rows: rows to compute.
        rows_done: rows the UDF has run on in this try.
        fragments: fragments of the shard.
        ready: fragments whose data file is staged.
        committed: fragments visible in the table.
        seconds: since the try began.
    """

    rows: int
    rows_done: int
    fragments: int
    ready: int
    committed: int
    seconds: float

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
            f"fragments ready, {self.committed} committed, {self.rows_per_second:,.0f} rows/s, "
            + (f"about {left:,.0f} s left" if left is not None else "time left unknown")
        )


@dataclass
class Reporter:
    """Logs progress every few seconds and keeps the newest in a file.

    Args:
        rows, fragments: size of the shard.
        storage: the job's folder, or None to keep no file.
        name: name of the file.
        emit: told the line.
        every: seconds between two reports.
    """

    rows: int
    fragments: int
    storage: Storage | None = None
    name: str = "progress.json"
    emit: Callable[[str], Any] = logger.info
    every: float = EVERY_SECONDS
    rows_done: int = 0
    ready: int = 0
    committed: int = 0
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0

    def now(self) -> Progress:
        seconds = time.monotonic() - self._began
        return Progress(self.rows, self.rows_done, self.fragments, self.ready, self.committed, seconds)

    def add_rows(self, rows: int) -> None:
        self.rows_done += rows
        self.tick()

    def tick(self, force: bool = False) -> None:
        """Report if it is time to."""
        moment = time.monotonic()
        if not force and moment - max(self._last, self._began) < self.every:
            return
        self._last = moment
        progress = self.now()
        self.emit(str(progress))
        if self.storage is not None:
            document = {**asdict(progress), "rows_per_second": progress.rows_per_second, "at": time.time()}
            self.storage.write_json(self.name, document)
