"""The share of time in which a function ran, and the causes of its waits."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_geneva.engine.counts import Sums

_TELLING_SECONDS = 10.0


@dataclass(frozen=True)
class Busy(Sums):
    """Seconds that the function of a task ran and waited; the values of several tasks are added.

    Args:
        between: from the start of the first call to the end of the newest one.
        called: seconds in which the function ran.
        reading, preprocessing, writing: seconds in which it waited for rows, for its stage, and for its results to be
            written.
    """

    between: float = 0.0
    called: float = 0.0
    reading: float = 0.0
    preprocessing: float = 0.0
    writing: float = 0.0

    @property
    def share(self) -> float | None:
        """The fraction of the time from the first call to the last in which the function ran; None without a call."""
        return min(self.called / self.between, 1.0) if self.between else None

    def __str__(self) -> str:
        """Describe it in one line; "" for runs of less than ten seconds."""
        if self.between < _TELLING_SECONDS:
            return ""
        waits = {"reading": self.reading, "preprocessing": self.preprocessing, "writing": self.writing}
        parts = {what: round(100 * seconds / self.between) for what, seconds in waits.items()}
        waited = "".join(f", waited {percent} % for {what}" for what, percent in parts.items() if percent)
        return f"function busy {100 * (self.share or 0.0):.0f} %{waited}"
