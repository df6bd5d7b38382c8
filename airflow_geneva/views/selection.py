"""Select the rows of a query from its source, in the query's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from airflow_geneva.views.row_order import RowIdArray, order_row_ids

if TYPE_CHECKING:
    import lance

_BATCH_ROWS = 1 << 16


def select_row_ids(
    dataset: lance.LanceDataset,
    where: str | None,
    shuffle_seed: int | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> Iterator[RowIdArray]:
    """Yield the row ids of a query in batches: filtered, ordered by row id or shuffled, then offset and limited.

    Row ids that are already in ascending order, as they are until rows are updated, are streamed. Otherwise all
    matching row ids are held in memory, 8 bytes each.

    Args:
        dataset: one version of the source; without stable row ids, row ids are row addresses.
        where: SQL filter, or None.
        shuffle_seed: seed of the order; None: order by row id.
        limit: most rows, or None.
        offset: number of rows to skip first.
    """
    if limit == 0:
        return
    if shuffle_seed is None and _ascending(dataset):
        yield from _cut(_scan(dataset, where), limit, offset)
        return
    held = np.empty(dataset.count_rows(), np.int64)
    count = 0
    for part in _scan(dataset, where):
        held[count : count + len(part)] = part
        count += len(part)
    chosen = order_row_ids(held[:count], shuffle_seed, limit, offset)
    for start in range(0, len(chosen), _BATCH_ROWS):
        yield chosen[start : start + _BATCH_ROWS]


def _scan(dataset: lance.LanceDataset, where: str | None) -> Iterator[RowIdArray]:
    """Yield row ids in the table's order; without a filter, no column is read."""
    scanner = dataset.scanner(
        columns=[], filter=where, with_row_id=True, batch_size=_BATCH_ROWS, scan_in_order=True, batch_readahead=4
    )
    for batch in scanner.to_batches():
        if batch.num_rows:
            yield batch.column("_rowid").to_numpy().view(np.int64)


def _ascending(dataset: lance.LanceDataset) -> bool:
    last = -1
    for part in _scan(dataset, None):
        if part[0] <= last or not bool(np.all(part[1:] > part[:-1])):
            return False
        last = int(part[-1])
    return True


def _cut(parts: Iterator[RowIdArray], limit: int | None, offset: int) -> Iterator[RowIdArray]:
    skip, left = offset, limit
    for part in parts:
        kept = part[skip:] if left is None else part[skip : skip + left]
        skip = max(0, skip - len(part))
        if len(kept):
            yield kept
        if left is not None:
            left -= len(kept)
            if left == 0:
                return
