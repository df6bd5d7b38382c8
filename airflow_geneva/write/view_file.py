"""Write new rows of a view to a data file; a later swap adds them to the view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_geneva.checkpoint.reuse import BrokenFile
from airflow_geneva.lance_io.arrays import convert_array
from airflow_geneva.lance_io.blobs import as_blobs, is_blob
from airflow_geneva.lance_io.data_file import DataFileWriter, LanceFile
from airflow_geneva.lance_io.row_ranges import Offsets, RowIds
from airflow_geneva.views.columns import SOURCE_ROW_ID
from airflow_geneva.views.definition import own_columns
from airflow_geneva.views.explode import explode_rows
from airflow_geneva.views.row_order import RowIdArray

if TYPE_CHECKING:
    import lance


class ViewFileWriter:
    """Writes rows of a view's query to a data file; readers see nothing before :meth:`finish`.

    Args:
        view: the view; the file goes into its ``data/`` folder.
        explode: the list column whose elements become separate rows, or None.
        plain: write blobs as plain bytes, so that they can be read back: in a blob column, a data file holds only
            references.
    """

    def __init__(self, view: lance.LanceDataset, explode: str | None = None, plain: bool = False) -> None:
        self.explode = explode
        # Users may add columns to a view. They are not part of the query, and new rows hold NULL in them.
        self.schema = pa.schema([view.schema.field(name) for name in own_columns(view.schema)])
        if plain:
            fields = (pa.field(field.name, pa.large_binary()) if is_blob(field) else field for field in self.schema)
            self.schema = pa.schema(fields)
        self.rows = 0
        self._file = DataFileWriter(view, self.schema)

    def put(self, values: pa.StructArray, ids: RowIds) -> None:
        """Append rows.

        Args:
            values: the view's own columns, one struct per row.
            ids: row ids of the source rows.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        rows = pa.record_batch([pa.array(ids.view("int64")), *values.flatten()], names=["", *values.type.names])
        if self.explode is not None:
            rows = explode_rows(rows, self.explode)
        columns = [rows.column(0), pa.repeat(True, rows.num_rows)]
        for field, column in zip(list(self.schema)[2:], rows.columns[1:], strict=True):
            columns.append(as_blobs(column) if is_blob(field) else convert_array(column, field.type))
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
    """Read rows of a staged file, without the system columns.

    Args:
        file: its name below ``data/``.
        positions: positions of the rows, in any order.
        room: most bytes that the rows may take.

    Raises:
        TooWide: the rows take more.
        BrokenFile: the file is damaged or missing.
    """
    batch = LanceFile.of_table(view, file, lambda error: BrokenFile(file)).read(rows=positions, room=room)
    return pa.StructArray.from_arrays(batch.columns[2:], fields=list(batch.schema)[2:])


def read_source_ids(view: lance.LanceDataset, file: str) -> RowIdArray:
    """Read the source row ids of all rows of a staged file.

    Raises:
        BrokenFile: the file is damaged or missing.
    """
    staged = LanceFile.of_table(view, file, lambda error: BrokenFile(file))
    ids: RowIdArray = staged.read([SOURCE_ROW_ID]).column(0).to_numpy()
    return ids
