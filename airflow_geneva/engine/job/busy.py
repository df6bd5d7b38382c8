"""The share of time in which a function ran, and the causes of its waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

_TELLING_SECONDS = 10.0


@dataclass(frozen=True)
class Busy:
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

    def __add__(self, other: Busy) -> Busy:
        return Busy(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        """Describe it in one line; "" for runs of less than ten seconds."""
        if self.between < _TELLING_SECONDS:
            return ""
        waits = {"reading": self.reading, "preprocessing": self.preprocessing, "writing": self.writing}
        parts = {what: round(100 * seconds / self.between) for what, seconds in waits.items()}
        waited = "".join(f", waited {percent} % for {what}" for what, percent in parts.items() if percent)
        return f"function busy {min(100 * self.called / self.between, 100):.0f} %{waited}"

    @staticmethod
    def from_json(document: object) -> Busy:
        """Parse a document; return zeros if it is missing or damaged."""
        if not isinstance(document, Mapping):
            return Busy()
        try:
            return Busy(*(float(document[part.name]) for part in fields(Busy)))
        except (LookupError, TypeError, ValueError):
            return Busy()
