"""The memory budget of a Spark task slot in bytes: for reads, UDF calls, windows of rows and checkpoints."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from dataclasses import dataclass
from math import inf

from airflow_geneva.errors import InvalidInput

VARIABLE = "GENEVA_TASK_MEMORY_BYTES"
DEFAULT_TASK_MEMORY = 128 << 20
LEAST_TASK_MEMORY = 1 << 10

_FIRST_FITTING = 4
_M_MMAP_THRESHOLD = -3
_LARGE_BUFFER = 4 << 20
_NARROWING = 16
_SUDDEN_WIDTH = 16 << 10
# Arrow's 32-bit offsets end at 2 GB, and assembled data may be twice as large as its target.
_MOST_BYTES = 512 << 20


def task_memory_bytes(default: int = DEFAULT_TASK_MEMORY) -> int:
    """Return the budget for new plans: ``GENEVA_TASK_MEMORY_BYTES`` if set, else the given default."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < LEAST_TASK_MEMORY:
        raise InvalidInput(
            f"{VARIABLE}={text!r} is not a number of bytes: set it to a whole number of {LEAST_TASK_MEMORY} or more, "
            f"such as {DEFAULT_TASK_MEMORY} for 128 MB, or unset it."
        )
    return int(text)


@functools.cache
def return_large_buffers() -> None:
    """Have glibc return every large buffer to the system as soon as it is freed; with another C library, do nothing.

    By default, glibc raises the size from which it does so with each buffer that it returns, up to 32 MB. A process
    that reads rows of 1 MB then keeps 300 MB of free memory between used buffers.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _LARGE_BUFFER)


def batch_bytes(task_memory: int) -> int:
    """Return the bytes of rows to read, compute or assemble at once: inputs, outputs and copies share the budget."""
    return min(max(task_memory // 4, 1), _MOST_BYTES)


def checkpoint_bytes(task_memory: int) -> int:
    """Return the bytes of output to buffer for a checkpoint: writing a checkpoint copies them."""
    return min(max(task_memory // 2, 1), 2 * _MOST_BYTES)


class BatchTooLarge(Exception):
    """A batch of rows takes more bytes than allowed; the reader must read fewer rows at once."""

    def __init__(self, rows: int = 0, size: int = 0) -> None:
        super().__init__(f"{rows} rows take {size} bytes")
        self.rows = rows
        self.size = size


def byte_limit(limit: int, rows: int) -> float:
    """Return the maximum size of a batch planned for ``limit`` bytes: widths vary, and a single row has no limit."""
    return 2 * limit if rows > 1 else inf


def rows_at_once(limit: int) -> int:
    """Return how many rows of unknown width to decode at once: the width is known only after decoding."""
    return max(1, limit // _SUDDEN_WIDTH)


@dataclass
class RowsPerBudget:
    """Estimates how many rows fit into a byte limit, from the widths of earlier rows.

    The estimate starts with wide rows. Wider rows change it at once, narrower rows step by step. One row always fits.
    `width`: bytes per row if the type fixes it.
    """

    limit: int
    width: float | None = None

    def __post_init__(self) -> None:
        self.bytes_a_row = self.limit / _FIRST_FITTING if self.width is None else max(self.width, 0.125)
        self.settled = self.width is not None

    @property
    def rows(self) -> int:
        """Number of rows that fit if the next rows are as wide as the last ones."""
        return max(1, int(self.limit / self.bytes_a_row))

    @property
    def careful_rows(self) -> int:
        """Like `rows`, but limited so that the batch stays small even if the next rows are much wider."""
        return self.rows if self.width is not None else min(self.rows, rows_at_once(self.limit))

    @property
    def growing(self) -> bool:
        """Whether the estimate may still grow with narrow rows."""
        return not self.settled and self.careful_rows < rows_at_once(self.limit)

    def record(self, rows: int, size: int) -> None:
        """Update the estimate from rows that take ``size`` bytes in memory."""
        if rows > 0 and self.width is None:
            least = max(self.bytes_a_row / _NARROWING, 0.125)
            self.settled = size / rows >= least
            self.bytes_a_row = max(size / rows, least)

    def halve(self) -> None:
        self.width = None
        self.bytes_a_row = self.limit / max(1, self.careful_rows // 2)
