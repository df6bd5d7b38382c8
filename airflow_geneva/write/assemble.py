"""Put a fragment's column together from checkpoints and old values, window by window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.reader import read_rows, rows_per_read
from airflow_geneva.blobs import is_blob_type
from airflow_geneva.checkpoint.held import BrokenFile, HeldPiece, read_values
from airflow_geneva.checkpoint.ranges import Offsets, Ranges
from airflow_geneva.checkpoint.store import CheckpointStore, single_batch
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.plan.manifest import FragmentFiles
from airflow_geneva.uri import join

if TYPE_CHECKING:
    import lance

_WINDOW_ROWS = 65_536


def assemble(
    dataset: lance.LanceDataset,
    store: CheckpointStore,
    files: FragmentFiles,
    live: Ranges,
    column: str,
    pieces: tuple[HeldPiece, ...],
) -> Iterator[pa.Array]:
    """Values of the whole fragment in physical layout, in order.

    Rows that a piece holds get its value, other live rows keep their old one, deleted rows are NULL.

    Args:
        dataset: the table at the version to read old values from.
        files: the fragment.
        live: its live offsets.
        column: the output column.
        pieces: computed rows, no row twice.

    Raises:
        BrokenFile: the file behind a piece is damaged or gone.
    """
    data_type = dataset.schema.field(column).type
    if is_blob_type(data_type):
        data_type = pa.large_binary()
    width = min(_WINDOW_ROWS, max(rows_per_read(files, None), 1_024))
    cache = _PieceCache(dataset, store)
    for start in range(0, files.physical_rows, width):
        end = min(start + width, files.physical_rows)
        yield _window(dataset, files, live, column, data_type, pieces, cache, start, end)
        cache.forget(pieces, end)


def _window(
    dataset: lance.LanceDataset,
    files: FragmentFiles,
    live: Ranges,
    column: str,
    data_type: pa.DataType,
    pieces: tuple[HeldPiece, ...],
    cache: _PieceCache,
    start: int,
    end: int,
) -> pa.Array:
    span = Ranges.of(start, end)
    sources: list[pa.Array] = []
    at = np.full(end - start, -1, np.int64)
    taken = 0
    for piece in pieces:
        low, high = np.searchsorted(piece.offsets, [start, end])
        if low == high:
            continue
        sources.append(cache.values(piece, int(low), int(high)))
        at[piece.offsets[low:high] - start] = np.arange(taken, taken + high - low)
        taken += high - low
    open_rows = (live & span) - Ranges.from_offsets(np.flatnonzero(at >= 0) + start)
    if files.output and open_rows:
        for rows in read_rows(dataset, files, live, (start, end), [column], None, end - start):
            old = rows.columns.column(0)
            free = at[rows.offsets - start] < 0
            positions = np.arange(taken, taken + len(old))[free]
            at[rows.offsets[free] - start] = positions
            sources.append(old)
            taken += len(old)
    if not sources:
        return pa.nulls(end - start, data_type)
    combined = pa.concat_arrays([source.cast(data_type) for source in sources])
    return combined.take(pa.array(at, mask=at < 0))


class _PieceCache:
    """Values of the pieces that the current window touches."""

    def __init__(self, dataset: lance.LanceDataset, store: CheckpointStore) -> None:
        self._dataset = dataset
        self._store = store
        self._values: dict[int, pa.Array] = {}

    def values(self, piece: HeldPiece, low: int, high: int) -> pa.Array:
        """Values of the piece's rows ``[low, high)``."""
        if piece.staged:
            return read_staged_rows(self._dataset, piece.source, piece.positions[low:high])
        if id(piece) not in self._values:
            self._values[id(piece)] = read_values(self._store, piece)
        return self._values[id(piece)].slice(low, high - low)

    def forget(self, pieces: tuple[HeldPiece, ...], end: int) -> None:
        for piece in pieces:
            if len(piece.offsets) and piece.offsets[-1] < end:
                self._values.pop(id(piece), None)


def read_staged_rows(dataset: lance.LanceDataset, file: str, positions: Offsets) -> pa.Array:
    """Some values of a staged data file.

    Raises:
        BrokenFile: it is damaged or gone.
    """
    from lance.file import LanceFileReader

    path, options = join(dataset.uri, "data", file), dataset._storage_options
    with engine_errors(lambda error: BrokenFile(file)):
        reader = LanceFileReader(path, storage_options=options)
        return single_batch(reader.take_rows(positions.tolist()).to_table()).column(0)
