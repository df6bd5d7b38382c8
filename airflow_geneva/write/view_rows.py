"""Write new rows of a view, to be swapped in later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_geneva.blobs import as_blobs, is_blob
from airflow_geneva.checkpoint.fragment import RowIds
from airflow_geneva.checkpoint.held import BrokenFile
from airflow_geneva.checkpoint.ranges import Offsets
from airflow_geneva.explode import explode_rows
from airflow_geneva.lance_io.arrays import fitted
from airflow_geneva.lance_io.data_file import DataFileWriter, LanceFile
from airflow_geneva.row_order import RowIdArray
from airflow_geneva.view_columns import SOURCE_ROW_ID
from airflow_geneva.view_definition import own_columns

if TYPE_CHECKING:
    import lance


class ViewRowsWriter:
    """A data file with the columns of a view's query; nothing is published before :meth:`finish`.

    Args:
        view: the view; the file will lie in its ``data/``.
        explode: the column of lists whose elements become rows of their own, or None.
        plain: blobs are written as bytes, to be read back: of blobs a file by itself only says where they lie.
    """

    def __init__(self, view: lance.LanceDataset, explode: str | None = None, plain: bool = False) -> None:
        self.explode = explode
        # Columns that others added to the view are not the query's: they are NULL in new rows.
        self.schema = pa.schema([view.schema.field(name) for name in own_columns(view.schema)])
        if plain:
            fields = (pa.field(field.name, pa.large_binary()) if is_blob(field) else field for field in self.schema)
            self.schema = pa.schema(fields)
        self.rows = 0
        self._file = DataFileWriter(view, self.schema)

    def put(self, values: pa.StructArray, ids: RowIds) -> None:
        """Append rows.

        Args:
            values: the view's own columns, one struct a row.
            ids: row ids of the source rows.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        rows = pa.record_batch([pa.array(ids.view("int64")), *values.flatten()], names=["", *values.type.names])
        if self.explode is not None:
            rows = explode_rows(rows, self.explode)
        columns = [rows.column(0), pa.repeat(True, rows.num_rows)]
        for field, column in zip(list(self.schema)[2:], rows.columns[1:], strict=True):
            columns.append(as_blobs(column) if is_blob(field) else fitted(column, field.type))
        batch = pa.record_batch(columns, schema=self.schema)
        self.rows += rows.num_rows
        self._file.put(batch)

    def finish(self) -> str:
        """Publish the file and return its name below ``data/``.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        return self._file.finish()


def read_view_rows(view: lance.LanceDataset, file: str, positions: Offsets, room: float) -> pa.StructArray:
    """Rows of a staged file, without the system columns.

    Args:
        file: its name below ``data/``.
        positions: which rows, in any order.
        room: bytes that they may take.

    Raises:
        TooWide: they take more.
        BrokenFile: it is damaged or gone.
    """
    batch = LanceFile.of_table(view, file, lambda error: BrokenFile(file)).read(rows=positions, room=room)
    return pa.StructArray.from_arrays(batch.columns[2:], fields=list(batch.schema)[2:])


def read_source_ids(view: lance.LanceDataset, file: str) -> RowIdArray:
    """Source row ids of all rows of a staged file.

    Raises:
        BrokenFile: it is damaged or gone.
    """
    staged = LanceFile.of_table(view, file, lambda error: BrokenFile(file))
    ids: RowIdArray = staged.read([SOURCE_ROW_ID]).column(0).to_numpy()
    return ids
