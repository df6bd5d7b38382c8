"""The data file of one column of one fragment, from a stream of values or from checkpoints and old values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.reader import ReadSize, fixed_width, read_rows, windows
from airflow_geneva.checkpoint.reuse import BrokenFile, CheckpointedRows, read_values
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.lance_io.arrays import convert_array
from airflow_geneva.lance_io.blobs import as_blobs, is_blob, is_blob_type
from airflow_geneva.lance_io.data_file import DataFileWriter, LanceFile
from airflow_geneva.lance_io.fragments import FragmentFiles
from airflow_geneva.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.lance_io.task_memory import BatchTooLarge, RowsPerBudget, byte_limit
from airflow_geneva.write.pieces import WINDOW_ROWS, CheckpointedRowsReader, fit_rows

if TYPE_CHECKING:
    import lance

_OFFSET_BYTES = 8.0


def to_physical_layout(values: pa.Array, offsets: Offsets, start: int, end: int) -> pa.Array:
    """Lay values out physically: one slot per offset of ``[start, end)``, NULL where there is no value.

    Args:
        values: one per offset.
        offsets: ascending physical offsets within ``[start, end)``.
    """
    if len(offsets) == end - start:
        return values
    at = np.full(end - start, -1, np.int64)
    at[offsets - start] = np.arange(len(offsets))
    return values.take(pa.array(at, mask=at < 0))


class ColumnFileWriter:
    """Writes one column's values in physical order to a data file; readers see nothing before :meth:`finish`.

    Args:
        dataset: the table; the file goes into its ``data/`` folder.
        column: the output column.
    """

    def __init__(self, dataset: lance.LanceDataset, column: str) -> None:
        self.schema = pa.schema([dataset.schema.field(column)])
        self.rows = 0
        self._file = DataFileWriter(dataset, self.schema)

    def put(self, values: pa.Array) -> None:
        """Append values in physical layout.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        self.rows += len(values)
        field = self.schema.field(0)
        values = as_blobs(values) if is_blob(field) and values.type != field.type else convert_array(values, field.type)
        self._file.put(pa.record_batch([values], schema=self.schema))

    def put_slots(self, values: pa.Array, offsets: Offsets, start: int, end: int, limit: int) -> None:
        """Append the slots of ``[start, end)``: values at the given offsets, NULL elsewhere.

        Args:
            values, offsets: as in `to_physical_layout`.
            limit: most bytes per batch; NULL slots of some types take memory too.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        most = RowsPerBudget(limit, fixed_width(self.schema.field(0).type) or _OFFSET_BYTES).rows
        for low in range(start, end, most):
            high = min(low + most, end)
            first, last = np.searchsorted(offsets, [low, high])
            self.put(to_physical_layout(values.slice(first, last - first), offsets[first:last], low, high))

    def finish(self) -> str:
        """Publish the file and return its name below ``data/``.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        return self._file.finish()


def assemble(
    dataset: lance.LanceDataset,
    store: CheckpointStore,
    files: FragmentFiles,
    live: Ranges,
    column: str,
    pieces: tuple[CheckpointedRows, ...],
    limit: int,
) -> Iterator[pa.Array]:
    """Yield the values of the whole fragment in physical layout.

    Rows in a piece get its value, other live rows keep their old value, and deleted rows are NULL.

    Args:
        dataset: the table at the version to read old values from.
        files: the fragment.
        live: its live offsets.
        column: the output column.
        pieces: computed rows, no row twice.
        limit: most bytes of values to hold at once.

    Raises:
        BrokenFile: the file of a piece is damaged or missing.
    """
    data_type = dataset.schema.field(column).type
    if is_blob_type(data_type):
        data_type = pa.large_binary()
    size = ReadSize.of(dataset, [column], limit)
    old = RowsPerBudget(limit, size.fitting.width)
    kept = Ranges.empty()
    if files.output:
        kept = live - Ranges.union(Ranges.from_offsets(piece.offsets) for piece in pieces)
    reader = CheckpointedRowsReader(
        pieces,
        limit,
        lambda part, byte_limit: (
            read_staged_rows(dataset, part.source, part.positions, byte_limit)
            if part.staged
            else read_values(store, part, byte_limit)
        ),
    )
    most = min(WINDOW_ROWS, size.fitting.rows) if size.fitting.width is not None else WINDOW_ROWS
    start = 0

    def window(count: int) -> pa.Array:
        end = start + count
        sources: list[pa.Array] = []
        at = np.full(count, -1, np.int64)
        taken = 0
        left = byte_limit(limit, count)
        for part, values in reader.read(start, count):
            at[part.offsets - start] = np.arange(taken, taken + len(values))
            sources.append(values)
            taken += len(values)
            left -= values.nbytes
        for wanted in windows(kept.within(start, end)):
            for rows in read_rows(dataset, files, live, wanted, [column], None, size):
                values = rows.columns.column(0)
                free = at[rows.offsets - start] < 0
                if not free.all():
                    values = values.filter(pa.array(free))
                old.record(len(values), values.nbytes)
                left -= values.nbytes
                if left < 0:
                    raise BatchTooLarge
                at[rows.offsets[free] - start] = np.arange(taken, taken + len(values))
                sources.append(values)
                taken += len(values)
        if not sources:
            return pa.nulls(count, data_type)
        combined = pa.concat_arrays([convert_array(source, data_type) for source in sources])
        return combined.take(pa.array(at, mask=at < 0))

    while start < files.physical_rows:
        end = reader.end_of_window(start, min(start + most, files.physical_rows), kept, old.bytes_a_row)
        values, rows = fit_rows(window, end - start)
        start += rows
        yield values


def read_staged_rows(dataset: lance.LanceDataset, file: str, positions: Offsets, byte_limit: float) -> pa.Array:
    """Read values of a staged data file.

    Args:
        byte_limit: most bytes that the values may take.

    Raises:
        TooWide: the values take more.
        BrokenFile: the file is damaged or missing.
    """
    return (
        LanceFile.of_table(dataset, file, lambda error: BrokenFile(file))
        .read(rows=positions, room=byte_limit)
        .column(0)
    )
