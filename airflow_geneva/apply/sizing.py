"""How many rows to compute per step, and how many bytes a value takes if its type determines it."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

FIRST_ROWS = 100
_GROWTH = 10


@dataclass
class CheckpointSizer:
    """Adapts the number of rows per step to the measured speed, within bounds.

    Args:
        seconds: target duration of a step.
        least, most: bounds in rows; equal bounds turn adaptation off.
    """

    seconds: float
    least: int = 1
    most: int | None = None
    rows: int = FIRST_ROWS

    def __post_init__(self) -> None:
        self.rows = self._clamp(self.rows)

    def record(self, rows: int, seconds: float) -> None:
        """Adapt to a step of ``rows`` rows that took ``seconds``."""
        if rows <= 0 or self.least == self.most:
            return
        fitting = int(rows * self.seconds / seconds) if seconds > 0 else rows * _GROWTH
        self.rows = self._clamp(min(fitting, max(rows * _GROWTH, self.rows)))

    def _clamp(self, rows: int) -> int:
        rows = max(rows, self.least, 1)
        return rows if self.most is None else min(rows, self.most)


def make_sizer(
    checkpoint_size: int | None, least: int | None, most: int | None, interval: float
) -> tuple[CheckpointSizer, int | None]:
    """Make the sizer of a task; also return the most rows that one checkpoint may cover.

    Args:
        checkpoint_size: most rows of a checkpoint; also caps a larger ``most``.
        least, most: ``min_checkpoint_size`` and ``max_checkpoint_size``.
        interval: seconds between checkpoints.
    """
    caps = [size for size in (checkpoint_size, most) if size is not None]
    cap = min(caps) if caps else None
    floor = least or 1
    if cap is not None:
        floor = min(floor, cap)
    # A step is a fraction of the interval, so that a checkpoint is only a little late.
    return CheckpointSizer(interval / 4, floor, cap), cap


def fixed_width(data_type: pa.DataType) -> float | None:
    """Return the bytes that every value of a type takes in memory; None if values differ."""
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
    """Return the bytes that one value of each type takes in total; None if values differ."""
    widths = [fixed_width(data_type) for data_type in types]
    return None if None in widths else sum(width for width in widths if width is not None)
