"""How many rows to compute before looking at the clock, and how many fit into some bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

FIRST_ROWS = 100
_GROWTH = 10
_FIRST_FITTING = 4
_NARROWING = 16


@dataclass
class CheckpointSizer:
    """Starts small, grows with the measured speed, and stays within its bounds.

    Args:
        seconds: how long one step should take.
        least, most: bounds in rows; equal bounds switch adaptation off.
    """

    seconds: float
    least: int = 1
    most: int | None = None
    rows: int = FIRST_ROWS

    def __post_init__(self) -> None:
        self.rows = self._clamp(self.rows)

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a step of ``rows`` rows that took ``seconds``."""
        if rows <= 0 or self.least == self.most:
            return
        fitting = int(rows * self.seconds / seconds) if seconds > 0 else rows * _GROWTH
        self.rows = self._clamp(min(fitting, max(rows * _GROWTH, self.rows)))

    def _clamp(self, rows: int) -> int:
        rows = max(rows, self.least, 1)
        return rows if self.most is None else min(rows, self.most)


def bounds(
    checkpoint_size: int | None, least: int | None, most: int | None, interval: float
) -> tuple[CheckpointSizer, int | None]:
    """The sizer of a task, and the most rows one checkpoint may cover.

    Args:
        checkpoint_size: most rows of a checkpoint; also caps ``most`` when that is larger.
        least, most: ``min_checkpoint_size`` and ``max_checkpoint_size``.
        interval: seconds between checkpoints.
    """
    caps = [size for size in (checkpoint_size, most) if size is not None]
    cap = min(caps) if caps else None
    floor = least or 1
    if cap is not None:
        floor = min(floor, cap)
    # A step is a part of the interval, so that a checkpoint is late by little.
    return CheckpointSizer(interval / 4, floor, cap), cap


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


def fixed_width(data_type: pa.DataType) -> float | None:
    """Bytes that every value of a type takes in memory, or None where values differ."""
    if isinstance(data_type, pa.BaseExtensionType):
        return fixed_width(data_type.storage_type)
    if pa.types.is_null(data_type):
        return 0.0
    if pa.types.is_struct(data_type):
        return joint_width([field.type for field in data_type])
    if pa.types.is_fixed_size_list(data_type):
        item = fixed_width(data_type.value_type)
        return None if item is None else item * data_type.list_size
    plain = pa.types.is_primitive(data_type) or pa.types.is_decimal(data_type)
    if plain or pa.types.is_fixed_size_binary(data_type):
        return float(data_type.bit_width / 8)
    return None


def joint_width(types: list[pa.DataType]) -> float | None:
    """Bytes that a value of each type take together, or None where values differ."""
    widths = [fixed_width(data_type) for data_type in types]
    return None if None in widths else sum(width for width in widths if width is not None)
