"""How many rows a step and a checkpoint get, by what earlier ones took."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_geneva.apply.reader import ReadSize
from airflow_geneva.lance_io.task_memory import RowsPerBudget

FIRST_ROWS = 100
_GROWTH = 10


@dataclass
class CheckpointSizer:
    """Adapts the number of rows per step, which shall take so many seconds, to the measured speed.

    Equal bounds turn adaptation off.
    """

    seconds: float
    least: int = 1
    most: int | None = None
    rows: int = FIRST_ROWS

    def __post_init__(self) -> None:
        self.rows = self._clamp(self.rows)

    @staticmethod
    def of(checkpoint_size: int | None, least: int | None, most: int | None, interval: float) -> CheckpointSizer:
        """Make the sizer of a task; ``checkpoint_size`` also caps a larger ``most``."""
        caps = [size for size in (checkpoint_size, most) if size is not None]
        cap = min(caps) if caps else None
        floor = least or 1
        # A step is a fraction of the interval, so that a checkpoint is only a little late.
        return CheckpointSizer(interval / 4, floor if cap is None else min(floor, cap), cap)

    def record(self, rows: int, seconds: float) -> None:
        if rows <= 0 or self.least == self.most:
            return
        fitting = int(rows * self.seconds / seconds) if seconds > 0 else rows * _GROWTH
        self.rows = self._clamp(min(fitting, max(rows * _GROWTH, self.rows)))

    def _clamp(self, rows: int) -> int:
        rows = max(rows, self.least, 1)
        return rows if self.most is None else min(rows, self.most)


@dataclass
class LearnedSizes:
    """What the units of one task learn about row widths and speed, so that not each begins with small steps.

    Args:
        computed: rows of the task so far.
    """

    outputs: RowsPerBudget
    computed: int = 0
    reads: ReadSize | None = None
    sizer: CheckpointSizer | None = None
