"""Sort more rows than memory holds: sorted runs go to a temporary file in blocks, and are merged block by block."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.lance_io.arrays import rows_at, single_batch, sortable
from airflow_geneva.engine.views.rows import RowIdArray

Order = Sequence[tuple[str, str]]
"""Columns to sort by, each with ``ascending`` or ``descending``."""

_PARTS, _BLOCKS = 8, 256
"""A run takes an eighth of the memory, because sorting copies it, and has this many blocks."""


def sort_batches(batches: Iterable[pa.RecordBatch], by: Order, limit: int) -> Iterator[pa.RecordBatch]:
    """Yield rows in order; NULL comes last.

    Besides the rows in memory, a block of each run is held: together a 256th of all rows.

    Args:
        batches: the rows, in batches of at most an eighth of the limit.
        by: must tell all rows apart, or rows that are equal in it come in any order.
        limit: the bytes to hold at once; rows beyond it go to a temporary file.
    """
    yield from SortedRows.of(batches, by, limit)


class SortedRows:
    """Rows that were sorted, or written in sorted runs; they are yielded once."""

    def __init__(self, rows: Iterator[pa.RecordBatch]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._rows

    @staticmethod
    def of(batches: Iterable[pa.RecordBatch], by: Order, limit: int) -> SortedRows:
        """Take all rows; see `sort_batches`."""
        most = max(limit // _PARTS, 1)
        runs = _cut(batches, most)
        if (first := next(runs, None)) is None:
            return SortedRows(iter(()))
        if (second := next(runs, None)) is None:
            return SortedRows(iter([rows_at(first, pa.array(order_of(first, by)))]))
        file = tempfile.TemporaryFile()  # noqa: SIM115  # which goes with the runs
        written = _Runs(file, by, most)
        written.add(first)
        written.add(second)
        del first, second
        for rows in runs:
            written.add(rows)
        return SortedRows(written.merged())


def _cut(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    held, held_bytes = list[pa.RecordBatch](), 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        held_bytes += batch.nbytes
        if held_bytes >= size:
            yield _joined(held)
            held, held_bytes = [], 0
    if held:
        yield _joined(held)


def order_of(rows: pa.RecordBatch, by: Order) -> RowIdArray:
    """Return the positions of rows in order; NULL comes last."""
    columns = {name: sortable(rows.column(name)) for name, _ in by}
    if len(by) == 1 and by[0][1] == "ascending":
        only = columns[by[0][0]]
        if pa.types.is_integer(only.type) and not only.null_count:
            return np.argsort(only.to_numpy(), kind="stable")
    found: RowIdArray = pc.sort_indices(pa.table(columns), sort_keys=list(by)).to_numpy().astype(np.int64)
    return found


@dataclass
class _Runs:
    """Sorted runs in a file, in blocks.

    Attributes:
        blocks: the place of each block in the file, and its length.
        firsts: the first row of each block, by run.
    """

    file: IO[bytes]
    by: Order
    most: int
    blocks: list[tuple[int, int]] = field(default_factory=list)
    firsts: list[pa.RecordBatch] = field(default_factory=list)
    _end: int = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Sort rows, and write them as a run."""
        size = max(self.most * rows.num_rows // (_BLOCKS * max(rows.nbytes, 1)), 1)
        order = order_of(rows, self.by)
        for at in range(0, rows.num_rows, size):
            block = rows_at(rows, pa.array(order[at : at + size]))
            data = packed(block)
            self.file.write(data)
            self.blocks.append((self._end, len(data)))
            self._end += len(data)
        self.firsts.append(self._keys(rows_at(rows, pa.array(order[::size]))))

    def merged(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all runs.

        Blocks are read in the order of their first rows. What comes before the first row of the next block is complete.
        """
        self.file.flush()
        firsts = _joined(self.firsts)
        order = order_of(firsts, self.by).tolist()
        rest, at = list[pa.RecordBatch](), 0
        while at < len(order) or rest:
            # As much again as is held, so that a row is sorted twice on average.
            size, most = 0, max(self.most // 2, 1, sum(batch.nbytes for batch in rest))
            while at < len(order) and size < most:
                rest.append(self._block(order[at]))
                size += rest[-1].nbytes
                at += 1
            rows = _joined(rest)
            count = rows.num_rows
            keys = self._keys(rows)
            if at < len(order):
                keys = _joined([keys, firsts.slice(order[at], 1)])
            sorted_by = order_of(keys, self.by)
            safe = int(np.flatnonzero(sorted_by == count)[0]) if at < len(order) else count
            rest = []
            if safe < count:
                rest = [rows_at(rows, pa.array(sorted_by[safe + 1 :]))]
            if safe:
                yield rows_at(rows, pa.array(sorted_by[:safe]))

    def _keys(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        names = [name for name, _ in self.by]
        return pa.record_batch([sortable(rows.column(name)) for name in names], names=names)

    def _block(self, number: int) -> pa.RecordBatch:
        start, size = self.blocks[number]
        return unpacked(os.pread(self.file.fileno(), size, start))


def packed(rows: pa.RecordBatch) -> bytes:
    """Return rows as a stream of their own, which has their dictionaries, too."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def unpacked(data: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(data).read_next_batch()


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else single_batch(pa.Table.from_batches(batches))
