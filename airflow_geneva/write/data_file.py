"""A new data file of a table, of which nothing is part of the table before a commit names it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.blobs import is_blob
from airflow_geneva.checkpoint.store import check_finished
from airflow_geneva.errors import StorageError
from airflow_geneva.faults import fault_point
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.uri import join

if TYPE_CHECKING:
    import lance


class DataFileWriter:
    """Takes batches in physical order; nothing is published before :meth:`finish`.

    Args:
        dataset: the table; the file will lie in its ``data/``.
        schema: its columns in the file.

    Raises:
        StorageError: the store is full, read-only or unreachable.
    """

    def __init__(self, dataset: lance.LanceDataset, schema: pa.Schema) -> None:
        self.dataset = dataset
        self.schema = schema
        self._blobs = any(is_blob(field) for field in schema)
        self._parts: list[pa.RecordBatch] = []
        self.file = f"{uuid.uuid4().hex}.lance"
        self._writer: Any = None if self._blobs else self._open()

    def put(self, batch: pa.RecordBatch) -> None:
        """Append rows; raises as the class does."""
        if self._blobs:
            self._parts.append(batch)
            return
        self._guard(lambda: self._writer.write_batch(batch))

    def finish(self) -> str:
        """Publish the file and return its name below ``data/``; raises as the class does."""
        fault_point("staged.write")
        self._guard(self._write_blobs if self._blobs else lambda: self._writer.close())
        self._guard(lambda: check_finished(self._path))
        fault_point("staged.written")
        return self.file

    @property
    def _path(self) -> str:
        return join(self.dataset.uri, "data", self.file)

    def _open(self) -> Any:
        from lance.file import LanceFileWriter

        version, options = self.dataset.data_storage_version, self.dataset._storage_options
        return self._guard(lambda: LanceFileWriter(self._path, self.schema, version=version, storage_options=options))

    def _write_blobs(self) -> None:
        from lance.fragment import write_fragments

        reader = pa.RecordBatchReader.from_batches(self.schema, iter(self._parts))
        (meta,) = write_fragments(
            reader, self.dataset, mode="append", max_rows_per_file=1 << 31, max_bytes_per_file=1 << 60
        )  # fmt: skip
        self.file = str(meta.files[0].path)

    def _guard(self, action: Callable[[], Any]) -> Any:
        def failed(error: BaseException) -> StorageError:
            return StorageError(
                f"Cannot write a data file of {self.dataset.uri}: {error}. Check space and permissions, then run "
                "again: checkpoints are kept."
            )

        with engine_errors(failed):
            return action()
