"""The data files of a view's new rows, and their order; a later swap adds them to the view."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.checkpoint.records import RowRuns, StagedFragment, decode_runs
from airflow_geneva.lance_io.arrays import convert_array, rows_at
from airflow_geneva.lance_io.blobs import as_blobs, is_blob
from airflow_geneva.lance_io.data_file import DataFileWriter
from airflow_geneva.lance_io.row_ranges import Offsets, RowIds
from airflow_geneva.lance_io.task_memory import byte_limit
from airflow_geneva.views.definition import SOURCE_ROW_ID, explode_rows, own_columns
from airflow_geneva.views.rows import RowIdArray, shuffle_hashes
from airflow_geneva.write.column_file import WINDOW_ROWS, FileWidths, fit_rows, staged_file

if TYPE_CHECKING:
    import lance


def reorder_rows(
    view: lance.LanceDataset,
    staged: Sequence[StagedFragment],
    shuffle_seed: int | None,
    most: int | None,
    limit: int,
) -> list[tuple[str, int]]:
    """Rewrite staged rows, shuffled and ``most`` per file; return the name and the row count of each file."""
    # Read the ids from the files, not from the checkpoint: explode may have made several rows of one source row.
    ids = [staged_file(view, fragment.file).read([SOURCE_ROW_ID]).column(0).to_numpy() for fragment in staged]
    lengths = [len(part) for part in ids]
    rows = sum(lengths)
    if rows == 0:
        return []
    order: Offsets = np.arange(rows)
    every: RowIdArray = np.concatenate(ids)
    if shuffle_seed is not None:
        # lexsort is stable, so rows of one source row keep their order.
        order = np.lexsort((every, shuffle_hashes(shuffle_seed, every)))
    firsts = np.concatenate(([0], np.cumsum(lengths)))
    widths = FileWidths(len(staged), limit)
    files = []
    size = most or rows
    for start in range(0, rows, size):
        chosen = order[start : start + size]
        writer = ViewFileWriter(view)
        at = 0
        while at < len(chosen):
            window = chosen[at : at + WINDOW_ROWS]
            sources = np.searchsorted(firsts, window, side="right") - 1
            read = partial(_rows, view, staged, firsts, window, widths)
            found, count = fit_rows(read, widths.rows(sources))
            writer.put(found, every[window[:count]].view(np.uint64))
            at += count
        files.append((writer.finish(), len(chosen)))
    return files


def _rows(
    view: lance.LanceDataset,
    staged: Sequence[StagedFragment],
    firsts: Offsets,
    window: Offsets,
    widths: FileWidths,
    count: int,
) -> pa.StructArray:
    """Read the first rows of a window; ``firsts`` are the positions of each file's first row among all staged rows."""
    window = window[:count]
    left = byte_limit(widths.limit, count)
    sorting = np.argsort(window, kind="stable")
    places = window[sorting]
    cuts = np.searchsorted(places, firsts)
    parts = []
    for number, (fragment, low, high) in enumerate(zip(staged, cuts[:-1], cuts[1:], strict=True)):
        if low < high:
            read = partial(_read_rows, view, fragment.file, places[low:high] - firsts[number])
            parts.append(widths.read(number, read, left))
            left -= parts[-1].nbytes
    back = np.empty(len(window), np.int64)
    back[sorting] = np.arange(len(window))
    return rows_at(pa.concat_arrays(parts), pa.array(back))


def _read_rows(view: lance.LanceDataset, file: str, positions: Offsets, room: float) -> pa.StructArray:
    return own_values(staged_file(view, file).read(rows=positions, room=room))


class ViewFileWriter:
    """Writes rows of a view's query to a data file; only `plain` blobs can be read back from it."""

    def __init__(self, view: lance.LanceDataset, explode: str | None = None, plain: bool = False) -> None:
        self.explode = explode
        # Users may add columns to a view. They are not part of the query, and new rows hold NULL in them.
        self.schema = pa.schema([view.schema.field(name) for name in own_columns(view.schema)])
        if plain:
            fields = (pa.field(field.name, pa.large_binary()) if is_blob(field) else field for field in self.schema)
            self.schema = pa.schema(fields)
        self.rows = 0
        self._file = DataFileWriter(view, self.schema)
        self.finish = self._file.finish

    def put(self, values: pa.StructArray, ids: RowIds) -> None:
        """Append rows: the view's own columns as one struct per row, and the row ids of the source rows."""
        rows = pa.record_batch([pa.array(ids.view("int64")), *values.flatten()], names=["", *values.type.names])
        if self.explode is not None:
            rows = explode_rows(rows, self.explode)
        columns = [rows.column(0), pa.repeat(True, rows.num_rows)]
        for field, column in zip(list(self.schema)[2:], rows.columns[1:], strict=True):
            columns.append(as_blobs(column) if is_blob(field) else convert_array(column, field.type))
        batch = pa.record_batch(columns, schema=self.schema)
        self.rows += rows.num_rows
        self._file.write(batch)

    def put_step(self, values: pa.StructArray, runs: RowRuns, end: int) -> None:
        """Append rows that were computed up to the offset ``end`` of the source fragment."""
        if len(values):
            self.put(values, decode_runs(runs)[1])


def own_values(rows: pa.RecordBatch) -> pa.StructArray:
    """Return rows of a view's data file without the system columns, one struct per row."""
    return pa.StructArray.from_arrays(rows.columns[2:], fields=list(rows.schema)[2:])
