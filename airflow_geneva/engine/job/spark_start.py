"""The seconds from the start of a shard's task to the first call of its function on Spark, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING

from airflow_geneva.engine.counts import Sums

if TYPE_CHECKING:
    from typing_extensions import Self

_NAMES = {"jvm": "JVM", "worker": "Python worker"}


@dataclass(frozen=True)
class SparkStart(Sums):
    """Seconds by part, in the order of time; 0 for a part that is not known or did not take place.

    Args:
        code: the submitting process zipped the code, or sent it to a running session.
        jvm: spark-submit and its JVM started.
        session: the driver imported PySpark and opened the session.
        driver: the driver imported this package, read the plan and opened the table.
        worker: Spark scheduled the first task, whose Python worker started and imported this package.
        function: this worker imported the function's module and read the first rows.
    """

    code: float = 0.0
    jvm: float = 0.0
    session: float = 0.0
    driver: float = 0.0
    worker: float = 0.0
    function: float = 0.0

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Parse a document of seconds; return zeros if it is missing or damaged."""
        found = super().from_json(document)
        return found if all(isfinite(seconds) and seconds >= 0 for seconds in vars(found).values()) else cls()

    @staticmethod
    def mean(starts: Sequence[SparkStart]) -> SparkStart:
        total = sum(starts, SparkStart())
        return SparkStart(**{name: seconds / max(len(starts), 1) for name, seconds in vars(total).items()})

    @property
    def seconds(self) -> float:
        return float(sum(vars(self).values()))

    def __bool__(self) -> bool:
        """Whether a part is known."""
        return self.seconds > 0

    def __str__(self) -> str:
        parts = ((part.name, getattr(self, part.name)) for part in fields(self))
        return ", ".join(f"{_NAMES.get(name, name)} {seconds:.1f}" for name, seconds in parts if round(seconds, 1))
