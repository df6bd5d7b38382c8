"""Find the rows of a view's source, itself a view, that have new row ids but the same values as before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.provenance import add_rows
from airflow_geneva.engine.checkpoint.view_snapshot import Origin, Snapshot
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.fragments import OFFSET_BITS, columns_of, row_ids
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

    @cached_property
    def back(self) -> RenumberedRows:
        """The same rows, with old and new ids interchanged."""
        order = np.argsort(self.new)
        return RenumberedRows(self.new[order], self.old[order])

    def among(self, old: Ranges) -> RenumberedRows:
        """Return the rows among them with some old ids."""
        kept = old.mask(self.old)
        return RenumberedRows(self.old[kept], self.new[kept])

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
    ids: Ranges,
) -> tuple[RenumberedRows, dict[Origin, Ranges]]:
    """Find the new rows whose values, in all columns that a view reads, equal those of a row that is gone.

    Return also the ids of the gone rows by their origin.

    A refresh gives new ids to the rows that it computes; in an exploded view, these are all rows of a changed document.
    If there are many new rows, only those that share a document with a gone row are compared.

    Args:
        gone, ids: the ids of the rows that are gone, and of the new rows.
    """
    none = RenumberedRows(), dict[Origin, Ranges]()
    then = _Shown.at(dataset, names, base) if gone and ids else None
    origins = {} if then is None else then.ids_by_origin(base, gone)
    if then is None or not origins:
        return none
    gone_ids, new_ids = Ranges.union(origins.values()).offsets(), ids.offsets()
    if len(new_ids) > max(_FEW_ROWS, 2 * len(gone_ids)):
        documents = [rows.column(SOURCE_ROW_ID).to_numpy() for rows in then.rows(gone_ids, (SOURCE_ROW_ID,))]
        of_documents = [
            _ids(rows)[np.isin(rows.column(SOURCE_ROW_ID).to_numpy(), np.concatenate(documents))]
            for rows in rows_in_batches(dataset, new_ids, (SOURCE_ROW_ID,))
            if documents
        ]
        new_ids = np.concatenate([_NONE, *of_documents])
    places: dict[bytes, list[int]] = {}
    for key, row in _keys(then.rows(gone_ids[::-1], names), names):
        places.setdefault(key, []).append(row)
    pairs = [
        (places[key].pop(), row)
        for key, row in _keys(rows_in_batches(dataset, new_ids, names), names)
        if places.get(key)
    ]
    ordered = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return RenumberedRows(ordered[:, 0], ordered[:, 1]), origins


@dataclass(frozen=True)
class _Shown:
    """The source version that a view reflects, and the ids, by signature, of its fragments in the view's snapshot."""

    dataset: lance.LanceDataset
    fragments: Mapping[str, int]

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
        return _Shown(then, {f.signature: f.id for f in read_manifest(then, columns).values() if f.signature in known})

    def ids_by_origin(self, base: Snapshot, among: Ranges) -> dict[Origin, Ranges]:
        found: dict[Origin, Ranges] = {}
        for fragment in base.fragments:
            if fragment.signature not in self.fragments or not (held := fragment.ids & among):
                continue
            if len(fragment.origins) == 1:
                add_rows(found, [(fragment.origins[0][0], held)])
                continue
            offsets, ids = row_ids(self.dataset, self.fragments[fragment.signature])
            for origin, rows in fragment.origins:
                add_rows(found, [(origin, Ranges.from_offsets(ids[rows.mask(offsets)]) & held)])
        return {origin: ids for origin, ids in found.items() if ids}

    def rows(self, ids: RowIdArray, names: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        for rows in rows_in_batches(self.dataset, ids, (*names, "_rowaddr")):
            places = rows.column("_rowaddr").to_numpy().astype(np.int64) >> OFFSET_BITS.bit_length()
            shown = np.isin(places, [*self.fragments.values()])
            yield rows if shown.all() else rows_at(rows, pa.array(np.flatnonzero(shown)))


def _keys(batches: Iterable[pa.RecordBatch], names: tuple[str, ...]) -> Iterator[tuple[bytes, int]]:
    """Yield a hash of each row's values, and its id."""
    for rows in batches:
        yield from zip(row_keys(rows.select(list(names))), _ids(rows).tolist(), strict=True)


def _ids(rows: pa.RecordBatch) -> RowIdArray:
    ids: RowIdArray = rows.column("_rowid").to_numpy().astype(np.int64)
    return ids
