"""Find the rows that a query keeps of each cluster of duplicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.duplicates.clusters import Clusters, HashedRows, Mask
from airflow_geneva.engine.duplicates.signatures import HIGH, LOW, bands_of, names_of, signature_of
from airflow_geneva.engine.duplicates.texts import ShingleSets, normalized
from airflow_geneva.engine.lance_io.arrays import single_batch
from airflow_geneva.engine.lance_io.row_ranges import Offsets
from airflow_geneva.engine.lance_io.rows_by_id import rows_in_batches
from airflow_geneva.engine.views.deduplication import Deduplication
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID
from airflow_geneva.engine.views.rows import RowIdArray

if TYPE_CHECKING:
    import lance

KEEP = "keep"
"""The column with the values that decide which row of a cluster is kept."""

Read: TypeAlias = Callable[[Sequence[str]], pa.Table]
"""Reads columns of all hashed rows, always in the same order."""

_PAIRS, _TEXT_BYTES, _GROUP_BYTES = 2_000, 4 << 20, 32 << 20
"""Pairs of texts that are compared at first, and the bytes of texts that are compared at once: pairs, and a group."""


def find_clusters(read: Read, source: lance.LanceDataset, deduplicate: Deduplication, known: Clusters) -> Clusters:
    """Find the clusters of hashed rows.

    Args:
        source: the version of the source that was hashed.
        known: the clusters at another version.
    """
    columns = read([SOURCE_ROW_ID, HIGH, LOW])
    ids, high, low = (_numbers(column) for column in columns.columns)
    has_value = columns.column(HIGH).is_valid().to_numpy()
    rows = HashedRows(ids, high, low, has_value)
    del columns
    bands = [partial(_band, read, name) for name in names_of(bands_of(deduplicate))]
    return Clusters.find(rows, bands, known, _Texts(source, deduplicate, ids))


def kept_rows(clusters: Clusters, read: Read, deduplicate: Deduplication) -> RowIdArray:
    """Return the ids of the rows that are kept, ascending: all that are alone, and one of each cluster."""
    if deduplicate.keep_column is None:
        alone_or_first: RowIdArray = clusters.ids[clusters.first == clusters.ids]
        return alone_or_first
    several = clusters.several
    members, first = clusters.ids[several], clusters.first[several]
    values = read([SOURCE_ROW_ID, KEEP])
    ids = _numbers(values.column(SOURCE_ROW_ID))
    order = np.argsort(ids, kind="stable")
    found = values.column(KEEP).take(pa.array(order[np.searchsorted(ids[order], members)]))
    found = found.cast(pa.float32()) if pt.is_float16(found.type) else found
    table = pa.table({"cluster": first, "value": found, "id": members})
    direction = "descending" if deduplicate.keeps_largest else "ascending"
    keys = [("cluster", "ascending"), ("value", direction), ("id", "ascending")]
    best = pc.sort_indices(table, sort_keys=keys).to_numpy()
    begins = np.ones(len(best), np.bool_)
    begins[1:] = first[best][1:] != first[best][:-1]
    return np.sort(np.concatenate([clusters.ids[~several], members[best[begins]]]))


def hash_rows(source: lance.LanceDataset, where: str | None, deduplicate: Deduplication) -> Read:
    """Hash the rows of a version that a filter selects, in memory."""
    function, keep = signature_of(deduplicate), deduplicate.keep_column
    batches = []
    for batch in source.scanner(columns=list(deduplicate.reads), filter=where, with_row_id=True).to_batches():
        compared = pa.record_batch([batch.column(name) for name in deduplicate.on], list(deduplicate.on))
        hashed = pa.RecordBatch.from_struct_array(function(compared))
        arrays = [batch.column("_rowid").cast(pa.int64()), *hashed.columns]
        names = [SOURCE_ROW_ID, *hashed.schema.names]
        if keep is not None:
            arrays, names = [*arrays, batch.column(keep)], [*names, KEEP]
        batches.append(pa.record_batch(arrays, names))
    kinds = [(SOURCE_ROW_ID, pa.int64()), *((field.name, field.type) for field in function.data_type)]
    kinds += [(KEEP, source.schema.field(keep).type)] if keep is not None else []
    table = pa.Table.from_batches(batches) if batches else pa.schema(kinds).empty_table()
    return lambda names: table.select(list(names))


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = column.fill_null(0).to_numpy()
    return found


def _band(read: Read, name: str) -> npt.NDArray[np.int64]:
    return _numbers(read([name]).column(0))


@dataclass(frozen=True)
class _Texts:
    """Compares the texts of rows, by their positions among the ids."""

    source: lance.LanceDataset
    deduplicate: Deduplication
    ids: RowIdArray

    def similar(self, left: Offsets, right: Offsets) -> Mask:
        found, size, at = np.zeros(len(left), np.bool_), _PAIRS, 0
        while at < len(left):
            part = slice(at, at + size)
            rows, numbers = np.unique(np.concatenate([left[part], right[part]]), return_inverse=True)
            texts = self._read(rows)
            first, second = np.split(numbers.reshape(-1), 2)
            found[part] = ShingleSets.of(texts).similarity(first, second) >= self._least
            at += size
            size = max(1, min(2 * size, size * _TEXT_BYTES // max(int(texts.nbytes), 1)))
        return found

    def among(self, rows: Offsets) -> Callable[[int, Offsets], Mask]:
        texts = self._read(rows, _GROUP_BYTES)
        if texts is None:
            return lambda one, others: self.similar(np.full(len(others), rows[one]), rows[others])
        sets = ShingleSets.of(texts)
        return lambda one, others: sets.similarity_to(one, others) >= self._least

    @property
    def _least(self) -> float:
        return self.deduplicate.threshold or 0.0

    def _read(self, rows: Offsets, most_bytes: float = inf) -> pa.Array:
        """Read the texts of rows, in this order; None if they have more bytes."""
        (name,), ids = self.deduplicate.on, self.ids[rows]
        batches = list[pa.RecordBatch]()
        for batch in rows_in_batches(self.source, ids, (name,)):
            batches.append(batch)
            if sum(one.nbytes for one in batches) > most_bytes:
                return None
        found = single_batch(pa.Table.from_batches(batches))
        order = np.argsort(found.column("_rowid").to_numpy().view(np.int64), kind="stable")
        back = np.empty(len(ids), np.int64)
        back[np.argsort(ids, kind="stable")] = order
        return normalized(found.column(name).take(pa.array(back)))
