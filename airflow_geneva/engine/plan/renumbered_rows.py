"""Find the rows of a view's source, itself a view, that have new row ids but the same values as before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.fragments import OFFSET_BITS, columns_of
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.row_keys import row_keys
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.rows_by_id import rows_in_batches
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID
from airflow_geneva.engine.views.rows import RowIdArray
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot
    from airflow_geneva.engine.plan.refresh import ChangedFragment

_FEW_ROWS = 10_000
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class RenumberedRows:
    """Rows of a source: their old ids, ascending, and their new ids."""

    old: RowIdArray = field(default_factory=lambda: _NONE)
    new: RowIdArray = field(default_factory=lambda: _NONE)

    def __len__(self) -> int:
        return len(self.old)

    def follow(self, ids: RowIdArray) -> RowIdArray:
        """Replace the old ids of renumbered rows with their new ids; other ids stay."""
        at = np.minimum(np.searchsorted(self.old, ids), max(len(self) - 1, 0))
        return np.where(self.old[at] == ids, self.new[at], ids) if len(self) else ids

    def back(self, ids: RowIdArray) -> RowIdArray:
        """Return the old ids of rows, given by their new ids."""
        order = np.argsort(self.new)
        return self.old[order][np.searchsorted(self.new[order], ids)]

    def to_json(self) -> list[list[int]]:
        """Return runs of consecutive ids: the first old id, the first new id, and the number of rows."""
        cuts = np.flatnonzero((np.diff(self.old) != 1) | (np.diff(self.new) != 1)) + 1
        starts = [0, *cuts.tolist(), len(self)] if len(self) else [0]
        return [[int(self.old[a]), int(self.new[a]), b - a] for a, b in pairwise(starts)]

    @staticmethod
    def from_json(runs: Sequence[Sequence[int]]) -> RenumberedRows:
        parts = [(np.arange(old, old + rows), np.arange(new, new + rows)) for old, new, rows in runs]
        return RenumberedRows(*map(np.concatenate, zip(*parts, strict=True))) if parts else RenumberedRows()


def find_renumbered(
    dataset: lance.LanceDataset,
    names: tuple[str, ...],
    base: Snapshot,
    gone: Ranges,
    changed: Sequence[ChangedFragment],
) -> RenumberedRows:
    """Find the due rows whose values, in all columns that a view reads, equal those of a row that is gone.

    A refresh gives new ids to the rows that it computes; in an exploded view, these are all rows of a changed document.
    If there are many new rows, only those that share a document with a gone row are compared.
    """
    if SOURCE_ROW_ID not in dataset.schema.names:
        return RenumberedRows()
    gone_ids = gone.offsets()
    ids = Ranges.union(item.ids_of(item.rows) for item in changed).offsets()
    then = _Shown.at(dataset, names, base) if len(gone_ids) and len(ids) else None
    if then is None:
        return RenumberedRows()
    if len(ids) > max(_FEW_ROWS, 2 * len(gone_ids)):
        documents = [rows.column(SOURCE_ROW_ID).to_numpy() for rows in then.rows(gone_ids, (SOURCE_ROW_ID,))]
        of_documents = [
            _ids(rows)[np.isin(rows.column(SOURCE_ROW_ID).to_numpy(), np.concatenate(documents))]
            for rows in rows_in_batches(dataset, ids, (SOURCE_ROW_ID,))
            if documents
        ]
        ids = np.concatenate([_NONE, *of_documents])
    places: dict[bytes, list[int]] = {}
    for key, row in _keys(then.rows(gone_ids[::-1], names), names):
        places.setdefault(key, []).append(row)
    pairs = [
        (places[key].pop(), row) for key, row in _keys(rows_in_batches(dataset, ids, names), names) if places.get(key)
    ]
    ordered = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return RenumberedRows(ordered[:, 0], ordered[:, 1])


@dataclass(frozen=True)
class _Shown:
    """The source version that a view reflects, and the ids of its fragments that are in the view's snapshot."""

    dataset: lance.LanceDataset
    fragments: tuple[int, ...]

    @staticmethod
    def at(dataset: lance.LanceDataset, names: tuple[str, ...], base: Snapshot) -> _Shown | None:
        """Open that version; None if it was cleaned up, or its values cannot be compared with the current ones."""
        if not names or not all(names) or any(is_blob(dataset.schema.field(name)) for name in names):
            return None
        then = open_version_or_none(dataset, base.source_version)
        try:
            columns = None if then is None else columns_of(then, names, (), None)
        except InvalidInput:  # it lacks one of the columns
            return None
        if then is None or columns is None or columns != columns_of(dataset, names, (), None):
            return None
        # The source may have been created again, with other rows under the same version and the same ids.
        known = {fragment.signature for fragment in base.fragments}
        return _Shown(then, tuple(f.id for f in read_manifest(then, columns).values() if f.signature in known))

    def rows(self, ids: RowIdArray, names: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        for rows in rows_in_batches(self.dataset, ids, (*names, "_rowaddr")):
            shown = np.isin(
                rows.column("_rowaddr").to_numpy().astype(np.int64) >> OFFSET_BITS.bit_length(), self.fragments
            )
            yield rows if shown.all() else rows_at(rows, pa.array(np.flatnonzero(shown)))


def _keys(batches: Iterable[pa.RecordBatch], names: tuple[str, ...]) -> Iterator[tuple[bytes, int]]:
    """Yield a hash of each row's values, and its id."""
    for rows in batches:
        yield from zip(row_keys(rows.select(list(names))), _ids(rows).tolist(), strict=True)


def _ids(rows: pa.RecordBatch) -> RowIdArray:
    ids: RowIdArray = rows.column("_rowid").to_numpy().astype(np.int64)
    return ids
