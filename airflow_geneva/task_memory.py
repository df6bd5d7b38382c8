"""How many bytes of rows a task slot holds: one budget for reads, UDF calls, windows and checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass

from airflow_geneva.errors import InvalidInput

VARIABLE = "GENEVA_TASK_MEMORY_BYTES"
DEFAULT_TASK_MEMORY = 128 << 20
LEAST_TASK_MEMORY = 1 << 10

_FIRST_FITTING = 4
_NARROWING = 16


def task_memory_bytes(default: int = DEFAULT_TASK_MEMORY) -> int:
    """The budget of new plans: as ``GENEVA_TASK_MEMORY_BYTES`` says, else the given default.

    Raises:
        InvalidInput: the variable does not hold a number of bytes.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < LEAST_TASK_MEMORY:
        raise InvalidInput(
            f"{VARIABLE}={text!r} is not a number of bytes: set it to a whole number of {LEAST_TASK_MEMORY} or more, "
            f"such as {DEFAULT_TASK_MEMORY} for 128 MB, or unset it."
        )
    return int(text)


def batch_bytes(task_memory: int) -> int:
    """Bytes of rows that are read, computed or put together at once: inputs, outputs and copies are there together."""
    return max(task_memory // 4, 1)


def checkpoint_bytes(task_memory: int) -> int:
    """Bytes of output that wait for a checkpoint: writing one copies them."""
    return max(task_memory // 2, 1)


@dataclass
class FittingRows:
    """How many rows fit into some bytes, where only rows that were seen tell how wide rows are.

    Rows of unknown width are assumed to be wide at first; wider ones than before count at once, narrower ones step by
    step. One row always fits.

    Args:
        limit: the bytes.
        width: bytes a row, where the type tells; else None.
    """

    limit: int
    width: float | None = None

    def __post_init__(self) -> None:
        self.bytes_a_row = self.limit / _FIRST_FITTING if self.width is None else max(self.width, 0.125)

    @property
    def rows(self) -> int:
        return max(1, int(self.limit / self.bytes_a_row))

    def record(self, rows: int, size: int) -> None:
        """Learn from rows that take ``size`` bytes in memory."""
        if rows > 0 and self.width is None:
            self.bytes_a_row = max(size / rows, self.bytes_a_row / _NARROWING, 0.125)
