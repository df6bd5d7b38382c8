"""Write the data file of one column of one fragment, to be committed later."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.blobs import as_blobs, is_blob
from airflow_geneva.checkpoint.ranges import Offsets
from airflow_geneva.checkpoint.store import check_finished
from airflow_geneva.errors import StorageError
from airflow_geneva.faults import fault_point
from airflow_geneva.storage import is_engine_error, join

if TYPE_CHECKING:
    import lance


def lay_out(values: pa.Array, offsets: Offsets, start: int, end: int) -> pa.Array:
    """Values in physical layout: one slot per offset of ``[start, end)``, NULL where there is no value.

    Args:
        values: one per offset.
        offsets: ascending physical offsets within ``[start, end)``.
    """
    if len(offsets) == end - start:
        return values
    at = np.full(end - start, -1, np.int64)
    at[offsets - start] = np.arange(len(offsets))
    return values.take(pa.array(at, mask=at < 0))


class StagedWriter:
    """A data file that takes one column's values in physical order; nothing is published before :meth:`finish`.

    Args:
        dataset: the table; the file will lie in its ``data/``.
        column: the output column.
    """

    def __init__(self, dataset: lance.LanceDataset, column: str) -> None:
        self.dataset = dataset
        self.schema = pa.schema([dataset.schema.field(column)])
        self.rows = 0
        self._blob = is_blob(self.schema.field(0))
        self._parts: list[pa.RecordBatch] = []
        self.file = f"{uuid.uuid4().hex}.lance"
        self._writer: Any = None if self._blob else self._open()

    def _open(self) -> Any:
        from lance.file import LanceFileWriter

        version, options = self.dataset.data_storage_version, self.dataset._storage_options
        return self._guard(lambda: LanceFileWriter(self._path, self.schema, version=version, storage_options=options))

    @property
    def _path(self) -> str:
        return join(self.dataset.uri, "data", self.file)

    def put(self, values: pa.Array) -> None:
        """Append values in physical layout.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        self.rows += len(values)
        wanted = self.schema.field(0).type
        if values.type != wanted:
            values = as_blobs(values) if self._blob else values.cast(wanted)
        batch = pa.record_batch([values], schema=self.schema)
        if self._blob:
            self._parts.append(batch)
            return
        self._guard(lambda: self._writer.write_batch(batch))

    def finish(self) -> str:
        """Publish the file and return its name below ``data/``.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        fault_point("staged.write")
        if self._blob:
            self._guard(self._write_blobs)
        else:
            self._guard(lambda: self._writer.close())
        self._guard(lambda: check_finished(self._path))
        fault_point("staged.written")
        return self.file

    def _write_blobs(self) -> None:
        from lance.fragment import write_fragments

        reader = pa.RecordBatchReader.from_batches(self.schema, iter(self._parts))
        (meta,) = write_fragments(
            reader, self.dataset, mode="append", max_rows_per_file=1 << 31, max_bytes_per_file=1 << 60
        )  # fmt: skip
        self.file = str(meta.files[0].path)

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:
            if not is_engine_error(error):
                raise
            raise StorageError(
                f"Cannot write a data file of {self.dataset.uri}: {error}. Check space and permissions, then run "
                "again: checkpoints are kept."
            ) from error
