"""How many bytes of rows a task slot holds: one budget for reads, UDF calls, windows and checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf

from airflow_geneva.errors import InvalidInput

VARIABLE = "GENEVA_TASK_MEMORY_BYTES"
DEFAULT_TASK_MEMORY = 128 << 20
LEAST_TASK_MEMORY = 1 << 10

_FIRST_FITTING = 4
_NARROWING = 16
_SUDDEN_WIDTH = 16 << 10
# Arrow's offsets of 32 bits end at 2 GB, and what is put together may be twice as much as is aimed at.
_MOST_BYTES = 512 << 20


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
    return min(max(task_memory // 4, 1), _MOST_BYTES)


def checkpoint_bytes(task_memory: int) -> int:
    """Bytes of output that wait for a checkpoint: writing one copies them."""
    return min(max(task_memory // 2, 1), 2 * _MOST_BYTES)


class TooWide(Exception):
    """Rows that are read at once take more bytes than they may: fewer are to be read.

    Args:
        rows, size: of what was read of them, as far as that is known.
    """

    def __init__(self, rows: int = 0, size: int = 0) -> None:
        super().__init__(f"{rows} rows take {size} bytes")
        self.rows = rows
        self.size = size


def room(limit: int, rows: int) -> float:
    """Bytes that rows may take that should fit into some bytes, and whose widths vary; a row alone may take any."""
    return 2 * limit if rows > 1 else inf


def rows_at_once(limit: int) -> int:
    """How many rows of unknown width are decoded at once: pylance tells how wide rows are once they are decoded."""
    return max(1, limit // _SUDDEN_WIDTH)


@dataclass
class FittingRows:
    """How many rows fit into some bytes, where only rows that were seen tell how wide rows are.

    Rows of unknown width are assumed to be wide at first; wider ones than before count at once, narrower ones step by
    step. One row always fits. The next rows may be much wider than those before them.

    Args:
        limit: the bytes.
        width: bytes a row, where the type tells; else None.
    """

    limit: int
    width: float | None = None

    def __post_init__(self) -> None:
        self.bytes_a_row = self.limit / _FIRST_FITTING if self.width is None else max(self.width, 0.125)
        self.settled = self.width is not None

    @property
    def rows(self) -> int:
        """How many fit if the next ones are as wide as the last."""
        return max(1, int(self.limit / self.bytes_a_row))

    @property
    def careful_rows(self) -> int:
        """No more than take little if the next ones are much wider than the last."""
        return self.rows if self.width is not None else min(self.rows, rows_at_once(self.limit))

    @property
    def growing(self) -> bool:
        """Whether more rows fit next time if they are as narrow as the last."""
        return not self.settled and self.careful_rows < rows_at_once(self.limit)

    def record(self, rows: int, size: int) -> None:
        """Learn from rows that take ``size`` bytes in memory."""
        if rows > 0 and self.width is None:
            least = max(self.bytes_a_row / _NARROWING, 0.125)
            self.settled = size / rows >= least
            self.bytes_a_row = max(size / rows, least)

    def halve(self) -> None:
        """Take rows to be so wide that half as many fit as before."""
        self.width = None
        self.bytes_a_row = self.limit / max(1, self.careful_rows // 2)
