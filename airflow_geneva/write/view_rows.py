"""Write new rows of a view, to be swapped in later."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.blobs import as_blobs, is_blob
from airflow_geneva.checkpoint.fragment import RowIds
from airflow_geneva.checkpoint.ranges import Offsets
from airflow_geneva.checkpoint.store import single_batch
from airflow_geneva.errors import StorageError
from airflow_geneva.explode import explode_rows
from airflow_geneva.faults import fault_point
from airflow_geneva.row_order import RowIdArray
from airflow_geneva.storage import is_engine_error, join
from airflow_geneva.view_definition import SOURCE_ROW_ID, own_columns

if TYPE_CHECKING:
    import lance


class ViewRowsWriter:
    """A data file with the columns of a view's query; nothing is published before :meth:`finish`.

    Args:
        view: the view; the file will lie in its ``data/``.
        explode: the column of lists whose elements become rows of their own, or None.
    """

    def __init__(self, view: lance.LanceDataset, explode: str | None = None) -> None:
        self.view = view
        self.explode = explode
        # Columns that others added to the view are not the query's: they are NULL in new rows.
        self.schema = pa.schema([view.schema.field(name) for name in own_columns(view.schema)])
        self.rows = 0
        self._parts: list[pa.RecordBatch] = []
        self._blobs = any(is_blob(field) for field in self.schema)
        self.file = f"{uuid.uuid4().hex}.lance"
        self._writer: Any = None if self._blobs else self._open()

    def _open(self) -> Any:
        from lance.file import LanceFileWriter

        return LanceFileWriter(
            join(self.view.uri, "data", self.file),
            self.schema,
            version=self.view.data_storage_version,
            storage_options=self.view._storage_options,
        )

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
            if is_blob(field):
                column = as_blobs(column)
            columns.append(column if column.type == field.type else column.cast(field.type))
        batch = pa.record_batch(columns, schema=self.schema)
        self.rows += rows.num_rows
        if self._blobs:
            self._parts.append(batch)
            return
        self._guard(lambda: self._writer.write_batch(batch))

    def finish(self) -> str:
        """Publish the file and return its name below ``data/``.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        fault_point("staged.write")
        self._guard(self._write_blobs if self._blobs else lambda: self._writer.close())
        fault_point("staged.written")
        return self.file

    def _write_blobs(self) -> None:
        from lance.fragment import write_fragments

        reader = pa.RecordBatchReader.from_batches(self.schema, iter(self._parts))
        (meta,) = write_fragments(
            reader, self.view, mode="append", max_rows_per_file=1 << 31, max_bytes_per_file=1 << 60
        )  # fmt: skip
        self.file = str(meta.files[0].path)

    def _guard(self, action: Any) -> None:
        try:
            action()
        except BaseException as error:
            if not is_engine_error(error):
                raise
            raise StorageError(
                f"Cannot write a data file of {self.view.uri}: {error}. Check space and permissions, then run again: "
                "checkpoints are kept."
            ) from error


def read_view_rows(view: lance.LanceDataset, file: str, positions: Offsets) -> pa.StructArray:
    """Rows of a staged file, without the system columns.

    Args:
        file: its name below ``data/``.
        positions: which rows, ascending.

    Raises:
        KeyError: it is gone or damaged.
    """
    from lance.file import LanceFileReader

    try:
        reader = LanceFileReader(join(view.uri, "data", file), storage_options=view._storage_options)
        batch = single_batch(reader.take_rows(positions.tolist()).to_table())
    except BaseException as error:
        if not is_engine_error(error):
            raise
        raise KeyError(file) from error
    return pa.StructArray.from_arrays(batch.columns[2:], fields=list(batch.schema)[2:])


def read_source_ids(view: lance.LanceDataset, file: str) -> RowIdArray:
    """Source row ids of all rows of a staged file.

    Raises:
        KeyError: it is gone or damaged.
    """
    from lance.file import LanceFileReader

    try:
        path = join(view.uri, "data", file)
        reader = LanceFileReader(path, storage_options=view._storage_options, columns=[SOURCE_ROW_ID])
        ids: RowIdArray = reader.read_all(batch_size=1 << 16).to_table().column(0).to_numpy()
    except BaseException as error:
        if not is_engine_error(error):
            raise
        raise KeyError(file) from error
    return ids
