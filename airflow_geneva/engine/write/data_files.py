"""Write the data file of one fragment, for a column or a view: from a stream, or from checkpoints and old values.

Rows are read from several files in windows, so that they fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.apply.reader import ReadSize, fixed_width, read_rows, windows
from airflow_geneva.engine.checkpoint.records import RowRuns, StagedFragment, decode_runs
from airflow_geneva.engine.checkpoint.reuse import BrokenFile, CheckpointedRows, read_values
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at
from airflow_geneva.engine.lance_io.blobs import as_blobs, is_blob, is_blob_type
from airflow_geneva.engine.lance_io.data_file import DataFileWriter, LanceFile
from airflow_geneva.engine.lance_io.fragments import FragmentFiles
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.lance_io.task_memory import BatchTooLarge, RowsPerBudget, byte_limit
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID, explode_rows, own_columns
from airflow_geneva.engine.views.rows import RowIdArray, shuffle_hashes

if TYPE_CHECKING:
    import lance

Made = TypeVar("Made")

WINDOW_ROWS = 65_536
"""The maximum number of rows in a window."""

_OFFSET_BYTES = 8.0
_NONE = Ranges.empty()


class ColumnFileWriter:
    """Writes the columns of one function for a fragment to a data file: a value for each physical offset, or NULL.

    NULLs of some types take memory too, so they are written in batches of at most ``limit`` bytes.
    """

    def __init__(
        self, dataset: lance.LanceDataset, schema: pa.Schema, output: Output, physical_rows: int, limit: int
    ) -> None:
        self.schema = schema
        self.rows = 0
        self._output = output
        self._type = output.type(schema)
        self._physical_rows = physical_rows
        self._most = RowsPerBudget(limit, fixed_width(self._type) or _OFFSET_BYTES).rows
        self.file = DataFileWriter(dataset, self.schema)

    def put(self, values: pa.Array) -> None:
        """Append values of the function, one for each offset."""
        self.rows += len(values)
        parts = zip(self._output.split(values), self.schema, strict=True)
        self.file.write(pa.record_batch([_stored(part, field) for part, field in parts], schema=self.schema))

    def put_step(self, values: pa.Array, runs: RowRuns, ids: RowIds, end: int) -> None:
        """Append the values of these rows, and NULL at the other offsets up to ``end``."""
        if len(values) == end - self.rows:
            self.put(values)
        else:
            self._put_with_gaps(values, decode_runs(runs)[0], end)

    def finish(self) -> str:
        self._put_with_gaps(pa.nulls(0, self._type), np.empty(0, np.int64), self._physical_rows)
        return self.file.finish()

    def _put_with_gaps(self, values: pa.Array, offsets: Offsets, end: int) -> None:
        for low in range(self.rows, end, self._most):
            high = min(low + self._most, end)
            first, last = np.searchsorted(offsets, [low, high])
            part = values.slice(first, last - first)
            if len(part) < high - low:
                at = np.full(high - low, -1, np.int64)
                at[offsets[first:last] - low] = np.arange(len(part))
                part = rows_at(part, pa.array(at, mask=at < 0))
            self.put(part)


def _stored(values: pa.Array, field: pa.Field) -> pa.Array:
    return as_blobs(values) if is_blob(field) and values.type != field.type else convert_array(values, field.type)


def assemble(
    dataset: lance.LanceDataset,
    store: CheckpointStore,
    files: FragmentFiles,
    live: Ranges,
    output: Output,
    pieces: tuple[CheckpointedRows, ...],
    limit: int,
) -> Iterator[pa.Array]:
    """Yield the values of the whole fragment in physical layout, at most ``limit`` bytes at once.

    Rows in a piece get its value, other live rows keep their old value, and deleted rows are NULL. No row is in two
    pieces. `BrokenFile` if the file of a piece is damaged or missing.
    """
    data_type, columns = output.type(dataset.schema), list(output.columns)
    if is_blob_type(data_type):
        data_type = pa.large_binary()
    size = ReadSize.of(dataset, columns, limit)
    old = RowsPerBudget(limit, size.fitting.width)
    kept = Ranges.empty()
    if files.output:
        kept = live - Ranges.union(Ranges.from_offsets(piece.offsets) for piece in pieces)

    def staged(part: CheckpointedRows, max_bytes: float) -> pa.Array:
        return output.joined(staged_file(dataset, part.source).read(rows=part.positions, max_bytes=max_bytes).columns)

    reader = CheckpointedRowsReader(store, pieces, limit, staged)
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
            for rows in read_rows(dataset, files, live, wanted, columns, None, size):
                values = output.joined(rows.columns.columns)
                free = at[rows.offsets - start] < 0
                if not free.all():
                    values = rows_at(values, pa.array(np.flatnonzero(free)))
                old.record(len(values), values.nbytes)
                left -= values.nbytes
                if left < 0:
                    raise BatchTooLarge
                at[rows.offsets[free] - start] = np.arange(taken, taken + len(values))
                sources.append(values)
                taken += len(values)
        if not sources:
            return pa.nulls(count, data_type)
        combined = pa.concat_arrays([convert_array(output.narrowed(source), data_type) for source in sources])
        return rows_at(combined, pa.array(at, mask=at < 0))

    while start < files.physical_rows:
        end = reader.end_of_window(start, min(start + most, files.physical_rows), kept, old.bytes_a_row)
        values, rows = fit_rows(window, end - start)
        start += rows
        yield values


def fit_rows(make: Callable[[int], Made], rows: int) -> tuple[Made, int]:
    """Call `make` with fewer rows until it raises no `BatchTooLarge`; return its result and the number of rows."""
    while True:
        try:
            return make(rows), rows
        except BatchTooLarge:
            if rows == 1:
                raise
            rows //= 2


class FileWidths:
    """Estimates how many rows of several files fit into a byte limit; rows of each file have their own width."""

    def __init__(self, count: int, limit: int) -> None:
        self.limit = limit
        # Rows of an unread file are assumed to be as wide as the widest rows of the other files.
        self.files: list[RowsPerBudget | None] = [None] * count

    def rows(self, files: npt.NDArray[np.int64], *more: float) -> int:
        """Return how many rows fit; `files` has the file of each row, ``more`` the widths of further files."""
        widest = max(
            (found.bytes_a_row for found in self.files if found), default=RowsPerBudget(self.limit).bytes_a_row
        )
        widths = np.array([*(found.bytes_a_row if found else widest for found in self.files), *more])
        return max(1, int(np.searchsorted(np.cumsum(widths[files]), self.limit, side="right")))

    def read(self, number: int, read: Callable[[float], pa.Array], byte_limit: float) -> pa.Array:
        """Read rows of a file and record their width; `BatchTooLarge` if they take more bytes than the limit."""
        found = self.files[number] = self.files[number] or RowsPerBudget(self.limit)
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
        staged: reads the values of a piece from its staged file, in the order of its offsets; `BatchTooLarge` if they
            take more than the given number of bytes.
    """

    def __init__(
        self,
        store: CheckpointStore,
        pieces: Sequence[CheckpointedRows],
        limit: int,
        staged: Callable[[CheckpointedRows, float], pa.Array],
    ) -> None:
        self._store = store
        self._staged = staged
        self._pieces = [piece for piece in pieces if len(piece.offsets)]
        self._firsts = np.array([piece.offsets[0] for piece in self._pieces], np.int64)
        self._lasts = np.array([piece.offsets[-1] for piece in self._pieces], np.int64)
        self._fitting = FileWidths(len(self._pieces), limit)

    def end_of_window(self, start: int, end: int, others: Ranges = _NONE, width: float = 0.0) -> int:
        """Return the end of a window from ``start`` whose rows fit, together with ``others`` of the given width."""
        parts = [*self._parts(start, end), (len(self._pieces), others.within(start, end).offsets())]
        if not sum(len(part) for _, part in parts):
            return end
        offsets = np.concatenate([part for _, part in parts])
        files = np.concatenate([np.full(len(part), number, np.int64) for number, part in parts])
        order = np.argsort(offsets, kind="stable")
        fitting = self._fitting.rows(files[order], width)
        return end if fitting == len(order) else int(offsets[order[fitting]])

    def read(self, start: int, count: int) -> list[tuple[CheckpointedRows, pa.Array]]:
        """Read the parts of the pieces that lie in a window, with their values; `BatchTooLarge` if they do not fit."""
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
            values = self._fitting.read(number, partial(self._read_values, part), left)
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

    def _read_values(self, part: CheckpointedRows, max_bytes: float) -> pa.Array:
        return self._staged(part, max_bytes) if part.staged else read_values(self._store, part, max_bytes)


def staged_file(dataset: lance.LanceDataset, name: str) -> LanceFile:
    """Return a staged data file; reading it raises `BrokenFile` if it is damaged or missing."""
    return LanceFile.of_table(dataset, name, lambda error: BrokenFile(name))


def view_file_schema(view: lance.LanceDataset, plain: bool = False) -> pa.Schema:
    """Return the columns of a view's data files; only blobs that are written as `plain` bytes can be read back."""
    # Users may add columns to a view. They are not part of the query, and new rows hold NULL in them.
    schema = view.schema
    fields = [schema.field(name) for name in own_columns(schema)]
    return pa.schema(pa.field(one.name, pa.large_binary()) if plain and is_blob(one) else one for one in fields)


class ViewFileWriter:
    """Writes rows of a view's query to a data file."""

    def __init__(self, view: lance.LanceDataset, schema: pa.Schema, explode: str | None = None) -> None:
        self.explode = explode
        self.schema = schema
        self.rows = 0
        self.file = DataFileWriter(view, self.schema)
        self.finish = self.file.finish

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
        self.file.write(batch)

    def put_step(self, values: pa.StructArray, runs: RowRuns, ids: RowIds, end: int) -> None:
        """Append rows that were computed up to the offset ``end`` of the source fragment."""
        if len(values):
            self.put(values, ids)


def own_values(rows: pa.RecordBatch) -> pa.StructArray:
    """Return rows of a view's data file without the system columns, one struct per row."""
    return pa.StructArray.from_arrays(rows.columns[2:], fields=list(rows.schema)[2:])


class StagedViewRows:
    """Reads a view's staged files, one row for each row of the source: with `explode`, its rows become a list again."""

    def __init__(self, view: lance.LanceDataset, explode: str | None) -> None:
        self._view = view
        self._explode = explode
        self._runs: dict[str, tuple[RowIdArray, Offsets, Offsets]] = {}

    def read(self, part: CheckpointedRows, max_bytes: float) -> pa.StructArray:
        """Read the rows of a piece; `BatchTooLarge` if they take more than `max_bytes` bytes."""
        if self._explode is None:
            return _read_rows(self._view, part.source, part.positions, max_bytes)
        starts, lengths = self._find(part)
        begins = np.cumsum(lengths) - lengths
        rows = _read_rows(
            self._view, part.source, np.arange(lengths.sum()) + np.repeat(starts - begins, lengths), max_bytes
        )  # fmt: skip
        offsets = pa.array(np.append(begins, len(rows)).astype(np.int32))
        # A source row with an empty list has no row here: what its other columns held is not shown.
        firsts = pa.array(begins, mask=lengths == 0)
        columns = [
            pa.ListArray.from_arrays(offsets, values) if name == self._explode else rows_at(values, firsts)
            for name, values in zip(rows.type.names, rows.flatten(), strict=True)
        ]
        return pa.StructArray.from_arrays(columns, rows.type.names)

    def _find(self, part: CheckpointedRows) -> tuple[Offsets, Offsets]:
        """Return the position of each source row's first row in its file, and the number of its rows there."""
        if part.source not in self._runs:
            ids = staged_file(self._view, part.source).read([SOURCE_ROW_ID]).column(0).to_numpy()
            starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
            order = np.argsort(ids[starts])
            self._runs[part.source] = ids[starts][order], starts[order], np.diff(starts, append=len(ids))[order]
        ids, starts, lengths = self._runs[part.source]
        wanted = part.row_ids.view(np.int64)
        if len(ids) == 0:
            return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
        at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        return starts[at], np.where(ids[at] == wanted, lengths[at], 0)


def reorder_rows(
    view: lance.LanceDataset,
    staged: Sequence[StagedFragment],
    shuffle_seed: int | None,
    most: int | None,
    limit: int,
    last: Callable[[RowIdArray], npt.NDArray[np.bool_]] | None = None,
) -> list[tuple[str, RowIdArray]]:
    """Rewrite staged rows, shuffled and ``most`` per file.

    Args:
        last: says of the ids of source rows whether their rows come after all others.

    Returns:
        The name of each file, and the ids of its source rows.
    """
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
    elif last is not None:
        order = np.argsort(last(every), kind="stable")
    firsts = np.concatenate(([0], np.cumsum(lengths)))
    widths = FileWidths(len(staged), limit)
    files, schema = [], view_file_schema(view)
    size = most or rows
    for start in range(0, rows, size):
        chosen = order[start : start + size]
        writer = ViewFileWriter(view, schema)
        at = 0
        while at < len(chosen):
            window = chosen[at : at + WINDOW_ROWS]
            sources = np.searchsorted(firsts, window, side="right") - 1
            read = partial(_rows, view, staged, firsts, window, widths)
            found, count = fit_rows(read, widths.rows(sources))
            writer.put(found, every[window[:count]].view(np.uint64))
            at += count
        files.append((writer.finish(), every[chosen]))
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


def _read_rows(view: lance.LanceDataset, file: str, positions: Offsets, max_bytes: float) -> pa.StructArray:
    return own_values(staged_file(view, file).read(rows=positions, max_bytes=max_bytes))
