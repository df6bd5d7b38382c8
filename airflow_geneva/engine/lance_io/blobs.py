"""Blob columns: the plain bytes that UDFs read and return, and data files that hold blobs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    import lance

BLOB = "lance.blob.v2"
_KEY = b"lance-encoding:blob"

_Batches: TypeAlias = "SimpleQueue[pa.RecordBatch | Exception | None]"


def is_blob_type(data_type: pa.DataType) -> bool:
    return getattr(data_type, "extension_name", "") == BLOB


def is_blob(field: pa.Field) -> bool:
    """Whether a column is stored as blobs; only pylance's ``write_fragments`` can write blobs."""
    return (field.metadata or {}).get(_KEY) == b"true" or is_blob_type(field.type)


def blob_field(name: str) -> pa.Field:
    import lance

    return lance.blob_field(name)


def as_blobs(values: Any) -> pa.Array:
    """Convert bytes to an array of Lance's newer blob type; older blob columns hold plain bytes."""
    import lance

    if not isinstance(values, pa.Array):
        return lance.blob_array(list(values))
    blob = blob_field("").type
    if values.type == blob:
        return values
    # Built from Arrow buffers: going through Python objects would copy each value.
    parts = [pa.nulls(len(values), field.type) for field in blob.storage_type]
    parts[blob.storage_type.get_field_index("data")] = values.cast(pa.large_binary())
    storage = pa.StructArray.from_arrays(parts, fields=list(blob.storage_type), mask=values.is_null())
    return pa.ExtensionArray.from_storage(blob, storage)


def as_bytes(values: pa.Array) -> pa.Array:
    """Return an array that any Lance file can hold: blobs as bytes, other types unchanged."""
    return pc.struct_field(values.storage, "data") if is_blob_type(values.type) else values


class BlobFileWriter:
    """Writes a data file in a background thread; holds at most two batches in memory."""

    def __init__(self, dataset: lance.LanceDataset, schema: pa.Schema) -> None:
        self._batches: _Batches = SimpleQueue()
        self._room = threading.Semaphore()
        self._file: Future[str] = Future()
        # The thread does not reference this writer, so it stops when the writer is garbage collected.
        weakref.finalize(self, self._batches.put, RuntimeError("the writer was dropped before it was closed"))
        arguments = (dataset, schema, self._batches, self._room, self._file)
        threading.Thread(target=_write, args=arguments, name="geneva-blobs", daemon=True).start()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append rows after the thread has taken the earlier ones; raises pylance's exceptions."""
        self._room.acquire()
        if self._file.done():
            self._room.release()
            self._file.result()
        self._batches.put(batch)

    def close(self) -> str:
        """Publish the file and return its name below ``data/``; raises pylance's exceptions."""
        self._batches.put(None)
        return self._file.result()


def _write(
    dataset: lance.LanceDataset, schema: pa.Schema, batches: _Batches, room: threading.Semaphore, file: Future[str]
) -> None:
    from lance.fragment import write_fragments

    def arriving() -> Iterator[pa.RecordBatch]:
        while (batch := batches.get()) is not None:
            if isinstance(batch, Exception):
                raise batch
            room.release()
            yield batch

    try:
        reader = pa.RecordBatchReader.from_batches(schema, arriving())
        (meta,) = write_fragments(
            reader, dataset, mode="append", max_rows_per_file=1 << 31, max_bytes_per_file=1 << 60
        )  # fmt: skip
        file.set_result(str(meta.files[0].path))
    except BaseException as error:  # any exception: the writer raises it in the caller's thread
        file.set_exception(error)
    finally:
        room.release()
