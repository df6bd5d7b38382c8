"""Read rows of a query's source by their row ids, also in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io import pylance_internals
from airflow_geneva.engine.lance_io.arrays import column_at, rows_at, single_batch
from airflow_geneva.engine.lance_io.blobs import is_blob, scan_bytes
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.rows import RowIdArray

if TYPE_CHECKING:
    import lance

_BLOB_ROWS = 1_024
_MOST_ROWS = 1 << 16
_READ_PART = 16
_ID = "__geneva_id"


@dataclass(frozen=True)
class SourceRows:
    """The rows of one version of a table, which a process opens when it reads the first of them.

    Args:
        order: the columns by which the rows of a group are sorted, each with ``ascending`` or ``descending``.
    """

    location: TableLocation
    version: int
    order: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _dataset(self) -> lance.LanceDataset:
        return self.location.open(self.version)

    def at(self, version: int) -> SourceRows:
        """Return the rows of another version of the table."""
        return SourceRows(self.location, version)

    def take(self, row_ids: RowIdArray, columns: Sequence[str]) -> pa.RecordBatch:
        """Read columns, or fields of structs such as `chunk.text`, in the order of the row ids, which are distinct."""
        return _named(take_rows(self._dataset, row_ids, _reads(columns)), columns)

    def in_order(self, row_ids: RowIdArray, columns: Sequence[str], limit: int) -> Iterator[pa.RecordBatch]:
        """Yield columns of the rows of a group in their order, without holding all of them.

        Args:
            row_ids: they ascend.
            limit: the bytes to hold at once.
        """
        from airflow_geneva.engine.apply.sorted_rows import sort_batches

        by = [*((f"order_{at}", way) for at, (_, way) in enumerate(self.order)), (_ID, "ascending")]
        reads = _reads(columns) | {f"order_{at}": f"`{name}`" for at, (name, _) in enumerate(self.order)}

        def read() -> Iterator[pa.RecordBatch]:
            fitting, at = RowsPerBudget(limit // _READ_PART), 0
            while at < len(row_ids):
                ids = row_ids[at : at + min(fitting.rows, _MOST_ROWS)]
                found = take_rows(self._dataset, ids, reads)
                yield found.append_column(_ID, pa.array(ids))
                fitting.record(len(ids), found.nbytes)
                at += len(ids)

        for rows in sort_batches(read(), by, limit) if self.order else read():
            yield _named(rows, columns)

    def to_document(self) -> dict[str, Any]:
        """Return the table's location, with its credentials, and the version, for a process that this one starts."""
        return {"table": self.location.to_document(), "version": self.version, "order": self.order}

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> SourceRows:
        place = TableLocation.of_document(document["table"])
        return SourceRows(place, document["version"], tuple((name, way) for name, way in document["order"]))


def _reads(columns: Sequence[str]) -> dict[str, str]:
    roots = dict.fromkeys(name.partition(".")[0] for name in columns)
    return {f"source_{at}": f"`{name}`" for at, name in enumerate(roots)}


def _named(found: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    roots = list(dict.fromkeys(name.partition(".")[0] for name in columns))
    rows = pa.record_batch([found.column(f"source_{at}") for at in range(len(roots))], names=roots)
    return pa.record_batch([column_at(rows, name) for name in columns], names=list(columns))


def take_rows(dataset: lance.LanceDataset, row_ids: RowIdArray, projection: Mapping[str, str]) -> pa.RecordBatch:
    """Read existing rows in the order of their ids, which must be distinct; a projection has SQL or quoted columns."""
    with_id = {**projection, "_rowid": "_rowid"}
    blobs = {f"`{field.name}`" for field in dataset.schema if is_blob(field)}
    if not blobs & set(projection.values()):
        return _one_batch(pylance_internals.take_rows(dataset, pa.array(row_ids.view(np.uint64)), with_id), row_ids)
    parts = []
    for start in range(0, len(row_ids), _BLOB_ROWS):
        # Taking rows returns only the descriptors of blobs, so scan for their bytes.
        listed = ",".join(map(str, row_ids[start : start + _BLOB_ROWS].tolist()))
        scanner = scan_bytes(dataset, projection, filter=f"_rowid IN ({listed})", with_row_id=True)
        parts.append(scanner.to_table())
    return _one_batch(pa.concat_tables(parts), row_ids)


def _one_batch(table: pa.Table, row_ids: RowIdArray) -> pa.RecordBatch:
    found = table.column("_rowid").to_numpy().view(np.int64)
    if len(found) != len(row_ids):
        missing = f"{len(row_ids) - len(found):,} of {counted(len(row_ids), 'row')}"
        raise KeyError(f"{missing} not found in this version of the table")
    if not np.array_equal(found, row_ids):
        order = np.argsort(found, kind="stable")
        table = rows_at(table, pa.array(order[np.searchsorted(found, row_ids, sorter=order)]))
    return single_batch(table)
