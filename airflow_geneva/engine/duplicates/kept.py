"""Find the rows that a query keeps of each cluster of duplicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.duplicates.clusters import Clusters, Comparison, HashedRows
from airflow_geneva.engine.duplicates.compared import Texts, Vectors
from airflow_geneva.engine.duplicates.signatures import HIGH, LOW, Signature
from airflow_geneva.engine.lance_io.arrays import sortable
from airflow_geneva.engine.runtime import Future, ThreadPoolExecutor
from airflow_geneva.engine.views.deduplication import Deduplication
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID
from airflow_geneva.engine.views.rows import RowIdArray

if TYPE_CHECKING:
    import lance

KEEP = "keep"
"""The column with the values that decide which row of a cluster is kept."""

Read: TypeAlias = Callable[[Sequence[str]], pa.Table]
"""Reads columns of all hashed rows, always in the same order."""


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
    signature = Signature.of(deduplicate)
    comparison: Comparison = Texts.of(source, deduplicate, ids)
    if deduplicate.method == "cosine":
        words = [_band(read, name) for name in signature.word_names]
        comparison = Vectors.of(source, deduplicate, ids, np.stack(words, axis=1).view(np.uint64))
    return Clusters.find(rows, _bands(read, signature.band_names), known, comparison)


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
    table = pa.table({"cluster": first, "value": sortable(found), "id": members})
    direction = "descending" if deduplicate.keeps_largest else "ascending"
    keys = [("cluster", "ascending"), ("value", direction), ("id", "ascending")]
    best = pc.sort_indices(table, sort_keys=keys).to_numpy()
    begins = np.ones(len(best), np.bool_)
    begins[1:] = first[best][1:] != first[best][:-1]
    return np.sort(np.concatenate([clusters.ids[~several], members[best[begins]]]))


def hash_rows(source: lance.LanceDataset, where: str | None, deduplicate: Deduplication) -> Read:
    """Hash the rows of a version that a filter selects, in memory."""
    function, keep = Signature.of(deduplicate).function, deduplicate.keep_column
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
    found: npt.NDArray[np.int64] = (column.fill_null(0) if column.null_count else column).to_numpy()
    return found


def _bands(read: Read, names: Sequence[str]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the hashes of each band; those of the next one are read meanwhile."""
    with ThreadPoolExecutor(1) as reader:
        coming: list[Future[npt.NDArray[np.int64]]] = []
        for name in names:
            coming.append(reader.submit(_band, read, name))
            if len(coming) > 1:
                yield coming.pop(0).result()
        for last in coming:
            yield last.result()


def _band(read: Read, name: str) -> npt.NDArray[np.int64]:
    return _numbers(read([name]).column(0))
