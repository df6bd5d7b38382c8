"""Read the computed rows of one fragment from several files, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.checkpoint.reuse import CheckpointedRows
from airflow_geneva.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.lance_io.task_memory import BatchTooLarge, RowsPerBudget, byte_limit

_NONE = Ranges.empty()

WINDOW_ROWS = 65_536
"""Most rows in a window, however narrow they are."""


Made = TypeVar("Made")


def fit_rows(make: Callable[[int], Made], rows: int) -> tuple[Made, int]:
    """Call `make` with as many rows as fit; return its result and the number of rows.

    Args:
        make: takes a number of rows; raises `BatchTooLarge` if several rows do not fit.
        rows: how many rows fit if they are as wide as the rows before them.
    """
    while True:
        try:
            return make(rows), rows
        except BatchTooLarge:
            if rows == 1:
                raise
            rows //= 2


class FileWidths:
    """Estimates how many rows of several files fit into a byte limit; rows of each file have their own width.

    Args:
        count: number of files.
        limit: most bytes.
    """

    def __init__(self, count: int, limit: int) -> None:
        self.limit = limit
        # Rows of an unread file are assumed to be as wide as the widest rows of the other files.
        self._files: list[RowsPerBudget | None] = [None] * count

    def rows(self, files: npt.NDArray[np.int64], *more: float) -> int:
        """Return how many of the first rows fit, at least one.

        Args:
            files: for each row, the number of its file.
            more: bytes per row of further files, numbered after these.
        """
        widest = max(
            (found.bytes_a_row for found in self._files if found), default=RowsPerBudget(self.limit).bytes_a_row
        )
        widths = np.array([*(found.bytes_a_row if found else widest for found in self._files), *more])
        return max(1, int(np.searchsorted(np.cumsum(widths[files]), self.limit, side="right")))

    def read(self, number: int, read: Callable[[float], pa.Array], byte_limit: float) -> pa.Array:
        """Read rows of a file and record their width.

        Args:
            read: reads the rows if they take no more than the given bytes.
            byte_limit: most bytes.

        Raises:
            TooWide: the rows take more.
        """
        found = self._files[number] = self._files[number] or RowsPerBudget(self.limit)
        try:
            values = read(byte_limit)
        except BatchTooLarge as wide:
            found.record(wide.rows, wide.size)
            raise
        found.record(len(values), values.nbytes)
        return values


class CheckpointedRowsReader:
    """Reads the pieces of one fragment in windows of physical offsets.

    Args:
        pieces: computed rows, no row twice.
        limit: most bytes of a window.
        read: reads the values of a part of a piece, in the order of its offsets, if they take no more than the given
            bytes.
    """

    def __init__(
        self, pieces: Sequence[CheckpointedRows], limit: int, read: Callable[[CheckpointedRows, float], pa.Array]
    ) -> None:
        self._pieces = [piece for piece in pieces if len(piece.offsets)]
        self._firsts = np.array([piece.offsets[0] for piece in self._pieces], np.int64)
        self._lasts = np.array([piece.offsets[-1] for piece in self._pieces], np.int64)
        self._read = read
        self._fitting = FileWidths(len(self._pieces), limit)

    def end_of_window(self, start: int, end: int, others: Ranges = _NONE, width: float = 0.0) -> int:
        """Return the end of a window from ``start`` so that its rows fit.

        Args:
            end: latest end of the window.
            others: further rows of the window, from another source.
            width: bytes of each of these.
        """
        parts = [*self._parts(start, end), (len(self._pieces), others.within(start, end).offsets())]
        if not sum(len(part) for _, part in parts):
            return end
        offsets = np.concatenate([part for _, part in parts])
        files = np.concatenate([np.full(len(part), number, np.int64) for number, part in parts])
        order = np.argsort(offsets, kind="stable")
        fitting = self._fitting.rows(files[order], width)
        return end if fitting == len(order) else int(offsets[order[fitting]])

    def read(self, start: int, count: int) -> list[tuple[CheckpointedRows, pa.Array]]:
        """Read the parts of the pieces that lie in a window, with their values.

        Raises:
            BrokenFile: the file of a piece is damaged or missing.
            TooWide: there are several rows and they do not fit.
        """
        left, found = byte_limit(self._fitting.limit, count), []
        for number, _ in self._parts(start, start + count):
            piece = self._pieces[number]
            low, high = np.searchsorted(piece.offsets, [start, start + count])
            part = replace(
                piece,
                offsets=piece.offsets[low:high],
                positions=piece.positions[low:high],
                row_ids=piece.row_ids[low:high],
            )
            values = self._fitting.read(number, partial(self._read, part), left)
            left -= values.nbytes
            found.append((part, values))
        return found

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, Offsets]]:
        """Yield the number of each piece with rows in a window, and the offsets of these rows."""
        for number in np.flatnonzero((self._firsts < end) & (self._lasts >= start)).tolist():
            offsets = self._pieces[number].offsets
            low, high = np.searchsorted(offsets, [start, end])
            if low < high:
                yield number, offsets[low:high]
