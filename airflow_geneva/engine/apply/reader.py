"""Read the inputs of row ranges of one fragment, in bounded batches; adapt the rows per step to the speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.lance_io.arrays import quoted, single_batch
from airflow_geneva.engine.lance_io.blobs import scan_bytes
from airflow_geneva.engine.lance_io.fragments import FragmentFiles, damaged_file, offsets_of, open_fragment
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.task_memory import BatchTooLarge, RowsPerBudget
from airflow_geneva.engine.storage.engine_errors import is_overflow
from airflow_geneva.engine.storage.places import name_of
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    import lance


SELECTED = "__geneva_backfill_selected"
_READ_ROWS = 16_384
_NARROW_ROWS, _NARROW_BYTES = 65_536, 64
"""Rows to read at once if a row has at most these bytes: for narrow rows, a batch costs more than its rows."""
_SMALL_GAP = 1_024
_READ_AHEAD = 1
FIRST_ROWS = 100
_GROWTH = 10


class UnreadableFragment(StorageError):
    """A data file of a fragment is damaged; the message names both. Other fragments can be computed."""


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The live rows of the physical offsets ``[start, end)``; `selected` is None without a filter."""

    start: int
    end: int
    offsets: Offsets
    row_ids: RowIds
    columns: pa.RecordBatch
    selected: npt.NDArray[np.bool_] | None

    @property
    def nbytes(self) -> int:
        return int(self.columns.nbytes + self.offsets.nbytes + self.row_ids.nbytes)

    def mask(self, run: Ranges) -> npt.NDArray[np.bool_] | None:
        """Return for each row whether it is in these ranges; None if all are, and their offsets have no gaps."""
        first, end = int(self.offsets[0]), int(self.offsets[-1]) + 1
        if end - first > len(self.offsets):
            return run.within(first, end).mask(self.offsets)
        return None if run.covers(first, end) else run.within(first, end).bitmap(first, end)

    def chosen(self, run: Ranges) -> npt.NDArray[np.bool_] | None:
        """Return for each row whether it is in these ranges and selected by the filter; None if all are."""
        due = self.mask(run)
        return due if self.selected is None else self.selected if due is None else due & self.selected

    def part(self, at: int, until: int) -> RowBatch:
        """Return the rows at the positions ``[at, until)``."""
        rows = slice(at, until)
        start = int(self.offsets[at]) if at else self.start
        end = int(self.offsets[until]) if until < len(self.offsets) else self.end
        selected = None if self.selected is None else self.selected[rows]
        return RowBatch(start, end, self.offsets[rows], self.row_ids[rows], self.columns[rows], selected)

    @staticmethod
    def joined(parts: Sequence[RowBatch]) -> RowBatch:
        """Join batches of consecutive rows."""
        selected = [part.selected for part in parts if part.selected is not None]
        return RowBatch(
            parts[0].start,
            parts[-1].end,
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.row_ids for part in parts]),
            pa.concat_batches([part.columns for part in parts]),
            np.concatenate(selected) if selected else None,
        )


@dataclass
class ReadSize:
    """The number of rows to read at once: those that fit, estimated from the rows read so far, but at most `most`."""

    fitting: RowsPerBudget
    most: int = _READ_ROWS

    @staticmethod
    def of(
        dataset: lance.LanceDataset,
        columns: Sequence[str] | Mapping[str, str],
        limit: int,
        batch_size: int | None = None,
    ) -> ReadSize:
        """Estimate from the types of the columns; file sizes say little, because files are compressed."""
        names = [text.strip("`") for text in columns.values()] if isinstance(columns, Mapping) else columns
        known = all(name in dataset.schema.names for name in names)
        width = joint_width([dataset.schema.field(name).type for name in names]) if known else None
        most = _READ_ROWS if width is None or width > _NARROW_BYTES else _NARROW_ROWS
        return ReadSize(RowsPerBudget(limit, width), most if batch_size is None else max(batch_size, 1_024))

    @property
    def rows(self) -> int:
        return min(self.fitting.careful_rows, self.most)


def windows(wanted: Ranges) -> list[tuple[int, int]]:
    """Return ranges to read that cover every wanted row; they include small gaps and skip large ones."""
    if not wanted:
        return []
    cuts = np.flatnonzero(wanted.starts[1:] - wanted.ends[:-1] > _SMALL_GAP)
    starts = wanted.starts[np.concatenate(([0], cuts + 1))]
    ends = wanted.ends[np.concatenate((cuts, [len(wanted.ends) - 1]))]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def read_fragment(
    dataset: lance.LanceDataset,
    files: FragmentFiles,
    live: Ranges,
    parts: Iterable[tuple[int, int]],
    columns: Sequence[str] | Mapping[str, str],
    where: str | None,
    size: ReadSize,
    inputs: Sequence[str],
) -> Iterator[RowBatch]:
    """Read the live rows of several windows of a fragment, as `read_rows` does.

    Args:
        inputs: the columns of the table that `columns` and `where` read.

    Raises:
        UnreadableFragment: a data file of an input is damaged.
    """
    try:
        for window in parts:
            yield from read_rows(dataset, files, live, window, columns, where, size)
    except BaseException as error:  # a panic of pylance is no Exception
        damaged = damaged_file(dataset, files.id, inputs, error, size.rows, size.fitting.limit)
        if damaged is not None:
            raise UnreadableFragment(
                f"Fragment {files.id} of table {name_of(dataset)!r} cannot be read: {damaged}. Put the file back from "
                "a backup, or restore a version of the table that does not have it, then run again. The rows of other "
                "fragments are computed."
            ) from error
        raise


def read_rows(
    dataset: lance.LanceDataset,
    files: FragmentFiles,
    live: Ranges,
    window: tuple[int, int],
    columns: Sequence[str] | Mapping[str, str],
    where: str | None,
    size: ReadSize,
) -> Iterator[RowBatch]:
    """Read the live rows of one window, in physical offsets.

    Args:
        columns: columns to read, or a mapping from names to SQL expressions or quoted columns.
        where: filter to evaluate for each row; it does not remove rows.
    """
    start, end = window
    before = len(live.within(0, start))
    count = len(live.within(start, end))
    if count == 0:
        return
    names = list(dict.fromkeys(columns))
    wanted: Any = dict(columns) if isinstance(columns, Mapping) else names
    if where is not None:
        wanted = wanted if isinstance(columns, Mapping) else {name: quoted(name) for name in names}
        wanted = {**wanted, SELECTED: f"({where})"}
    fragment = open_fragment(dataset, files.id)
    position, left = start, count
    joined = _BatchCombiner(size.fitting.limit, size.most)
    while left:
        rows, missing = size.rows, left
        part = (before + count - left, min(rows, left) if size.fitting.growing else left)
        try:
            for batch in _batches(dataset, fragment, wanted, part, rows, size.fitting.limit):
                left -= batch.num_rows
                size.fitting.record(batch.num_rows, batch.nbytes)
                for full in joined.add(batch):
                    found = _rows(full, position, None, names)
                    position = found.end
                    yield found
                if not rows <= 2 * size.rows <= 4 * rows:
                    break
        except BatchTooLarge:
            size.fitting.halve()
        else:
            if left == missing:
                raise UnreadableFragment(
                    f"Fragment {files.id} holds {count - left} live rows at offsets {start} to {end}, but its metadata "
                    f"says {count}. A file of the table is damaged: restore a version before it."
                )
    yield _rows(joined.take(), position, end, names)


def _batches(
    dataset: lance.LanceDataset,
    fragment: lance.LanceFragment,
    wanted: Any,
    part: tuple[int, int],
    rows: int,
    limit: int,
) -> Iterator[pa.RecordBatch]:
    try:
        # pylance's `batch_size_bytes` cuts batches only after decoding; only the number of rows bounds its memory.
        scanner = scan_bytes(
            dataset,
            wanted,
            fragment,
            offset=part[0],
            limit=part[1],
            batch_size=rows,
            batch_readahead=_READ_AHEAD,
            io_buffer_size=limit,
            with_row_id=True,
            with_row_address=True,
        )
        yield from (batch for batch in scanner.to_batches() if batch.num_rows)
    except BaseException as error:
        if rows > 1 and is_overflow(error):
            raise BatchTooLarge from error
        raise


class _BatchCombiner:
    """Combines decoded batches into larger ones, of at most ``limit`` bytes and ``most`` rows."""

    def __init__(self, limit: int, most: int) -> None:
        self.limit = limit
        self.most = most
        self._parts: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Append rows; yield the combined batch first if they do not fit into it."""
        if batch.num_rows > 1 and batch.nbytes > self.limit:
            half = batch.num_rows // 2
            yield from self.add(batch[:half])
            yield from self.add(batch[half:])
            return
        if self._parts and (self._rows + batch.num_rows > self.most or self._bytes + batch.nbytes > self.limit):
            yield self.take()
        self._parts.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes

    def take(self) -> pa.RecordBatch:
        parts, self._parts, self._rows, self._bytes = self._parts, [], 0, 0
        return parts[0] if len(parts) == 1 else single_batch(pa.Table.from_batches(parts))


def _rows(batch: pa.RecordBatch, start: int, end: int | None, names: list[str]) -> RowBatch:
    offsets = offsets_of(batch)
    selected = None
    if SELECTED in batch.schema.names:
        selected = batch.column(SELECTED).fill_null(False).to_numpy(zero_copy_only=False)
    until = int(offsets[-1]) + 1 if end is None else end
    return RowBatch(start, until, offsets, batch.column("_rowid").to_numpy(), batch.select(names), selected)


def fixed_width(data_type: pa.DataType) -> float | None:
    """Return the bytes that every value of a type takes in memory; None if the values' sizes differ."""
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
    """Return the bytes that one value of each type takes in total; None if the values' sizes differ."""
    widths = [fixed_width(data_type) for data_type in types]
    return None if None in widths else sum(width for width in widths if width is not None)


@dataclass
class CheckpointSizer:
    """Adapts the number of rows per step to the measured speed, so that a step takes about `seconds`.

    Equal bounds turn adaptation off.
    """

    seconds: float
    least: int = 1
    most: int | None = None
    rows: int = FIRST_ROWS

    def __post_init__(self) -> None:
        self.rows = self._clamp(self.rows)

    @staticmethod
    def of(checkpoint_size: int | None, least: int | None, most: int | None, interval: float) -> CheckpointSizer:
        """Make the sizer of a task; ``checkpoint_size`` also caps a larger ``most``."""
        caps = [size for size in (checkpoint_size, most) if size is not None]
        cap = min(caps) if caps else None
        floor = least or 1
        # A step is a fraction of the interval, so that a checkpoint is only a little late.
        return CheckpointSizer(interval / 4, floor if cap is None else min(floor, cap), cap)

    def record(self, rows: int, seconds: float) -> None:
        if rows <= 0 or self.least == self.most:
            return
        fitting = int(rows * self.seconds / seconds) if seconds > 0 else rows * _GROWTH
        self.rows = self._clamp(min(fitting, max(rows * _GROWTH, self.rows)))

    def _clamp(self, rows: int) -> int:
        rows = max(rows, self.least, 1)
        return rows if self.most is None else min(rows, self.most)
