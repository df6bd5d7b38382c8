"""Read the inputs of physical row ranges of one fragment, in order and in bounded batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.checkpoint.fragment import RowIds
from airflow_geneva.checkpoint.ranges import Offsets, Ranges
from airflow_geneva.plan.manifest import FragmentFiles, open_fragment

if TYPE_CHECKING:
    import lance

SELECTED = "__geneva_backfill_selected"
_READ_BYTES = 32 << 20
_READ_ROWS = 16_384
_SMALL_GAP = 1_024


@dataclass(frozen=True, eq=False)
class Rows:
    """Live rows that were read, with where they lie.

    Args:
        start, end: the physical offsets this batch accounts for; rows missing between them are deleted.
        offsets: physical offsets of the rows.
        row_ids: their row ids.
        columns: the columns asked for.
        selected: the filter's verdict by row, or None without a filter.
    """

    start: int
    end: int
    offsets: Offsets
    row_ids: RowIds
    columns: pa.RecordBatch
    selected: npt.NDArray[np.bool_] | None

    @property
    def first(self) -> int:
        """Physical offset of the first row."""
        return int(self.offsets[0])

    @property
    def last(self) -> int:
        """Physical offset of the last row."""
        return int(self.offsets[-1])

    @property
    def gapless(self) -> bool:
        """Whether no row between the first and the last is missing."""
        return self.last - self.first == len(self.offsets) - 1


def rows_per_read(files: FragmentFiles, batch_size: int | None) -> int:
    """Rows per read, so that a batch holds some megabytes whatever the width of a row."""
    width = max(files.bytes // max(files.physical_rows, 1), 1)
    return max(1, min(_READ_ROWS if batch_size is None else max(batch_size, 1_024), _READ_BYTES // width))


def windows(wanted: Ranges) -> list[tuple[int, int]]:
    """The ranges to read so that every wanted row is in one; small gaps are read over, large ones skipped."""
    if not wanted:
        return []
    cuts = np.flatnonzero(wanted.starts[1:] - wanted.ends[:-1] > _SMALL_GAP)
    starts = wanted.starts[np.concatenate(([0], cuts + 1))]
    ends = wanted.ends[np.concatenate((cuts, [len(wanted.ends) - 1]))]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def read_rows(
    dataset: lance.LanceDataset,
    files: FragmentFiles,
    live: Ranges,
    window: tuple[int, int],
    columns: Sequence[str] | Mapping[str, str],
    where: str | None,
    batch_rows: int,
) -> Iterator[Rows]:
    """Read the live rows of one window.

    Args:
        live: live offsets of the fragment at the dataset's version.
        window: physical ``[start, end)``.
        columns: top-level columns to read, each given once however often it is named; may be empty. Or, by the name
            to give it, an SQL expression or a quoted column.
        where: filter to be evaluated by row, not applied.
        batch_rows: most rows per batch.
    """
    start, end = window
    before = len(live.within(0, start))
    count = len(live.within(start, end))
    if count == 0:
        return
    names = list(dict.fromkeys(columns))
    wanted: Any = dict(columns) if isinstance(columns, Mapping) else names
    if where is not None:
        # An expression needs a real column beside it.
        some = names or [dataset.schema.names[0]]
        wanted = wanted if isinstance(columns, Mapping) else {name: f"`{name}`" for name in some}
        wanted = {**wanted, SELECTED: f"({where})"}
    scanner = open_fragment(dataset, files.id).scanner(
        columns=wanted,
        offset=before,
        limit=count,
        batch_size=batch_rows,
        batch_readahead=4,
        with_row_id=True,
        with_row_address=True,
        blob_handling="all_binary",
    )
    position = start
    left = count
    for batch in scanner.to_batches():
        if batch.num_rows == 0:
            continue
        left -= batch.num_rows
        offsets = batch.column("_rowaddr").to_numpy().view(np.int64) & 0xFFFFFFFF
        until = end if left == 0 else int(offsets[-1]) + 1
        selected = None
        if where is not None:
            selected = batch.column(SELECTED).fill_null(False).to_numpy(zero_copy_only=False)
        kept = batch.select(names)
        yield Rows(position, until, offsets, batch.column("_rowid").to_numpy(), kept, selected)
        position = until
