"""Write the data file of one column of one fragment; a later commit adds it to the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.sizing import fixed_width
from airflow_geneva.lance_io.arrays import convert_array
from airflow_geneva.lance_io.blobs import as_blobs, is_blob
from airflow_geneva.lance_io.data_file import DataFileWriter
from airflow_geneva.lance_io.row_ranges import Offsets
from airflow_geneva.lance_io.task_memory import RowsPerBudget

if TYPE_CHECKING:
    import lance

_OFFSET_BYTES = 8.0


def to_physical_layout(values: pa.Array, offsets: Offsets, start: int, end: int) -> pa.Array:
    """Lay values out physically: one slot per offset of ``[start, end)``, NULL where there is no value.

    Args:
        values: one per offset.
        offsets: ascending physical offsets within ``[start, end)``.
    """
    if len(offsets) == end - start:
        return values
    at = np.full(end - start, -1, np.int64)
    at[offsets - start] = np.arange(len(offsets))
    return values.take(pa.array(at, mask=at < 0))


class ColumnFileWriter:
    """Writes one column's values in physical order to a data file; readers see nothing before :meth:`finish`.

    Args:
        dataset: the table; the file goes into its ``data/`` folder.
        column: the output column.
    """

    def __init__(self, dataset: lance.LanceDataset, column: str) -> None:
        self.schema = pa.schema([dataset.schema.field(column)])
        self.rows = 0
        self._file = DataFileWriter(dataset, self.schema)

    def put(self, values: pa.Array) -> None:
        """Append values in physical layout.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        self.rows += len(values)
        field = self.schema.field(0)
        values = as_blobs(values) if is_blob(field) and values.type != field.type else convert_array(values, field.type)
        self._file.put(pa.record_batch([values], schema=self.schema))

    def put_slots(self, values: pa.Array, offsets: Offsets, start: int, end: int, limit: int) -> None:
        """Append the slots of ``[start, end)``: values at the given offsets, NULL elsewhere.

        Args:
            values, offsets: as in `to_physical_layout`.
            limit: most bytes per batch; NULL slots of some types take memory too.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        most = RowsPerBudget(limit, fixed_width(self.schema.field(0).type) or _OFFSET_BYTES).rows
        for low in range(start, end, most):
            high = min(low + most, end)
            first, last = np.searchsorted(offsets, [low, high])
            self.put(to_physical_layout(values.slice(first, last - first), offsets[first:last], low, high))

    def finish(self) -> str:
        """Publish the file and return its name below ``data/``.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        return self._file.finish()
