"""Blob columns: the plain bytes that UDFs read and return, and data files that hold blobs.

A blob may lie outside of its table: its descriptor in the data file names a URI, which pylance opens when the bytes are
read. So all reads of bytes go through `scan_bytes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.runtime import Future, SimpleQueue, threading
from airflow_geneva.engine.storage.places import is_absolute, name_of, places_of
from airflow_geneva.engine.storage.uri import join

if TYPE_CHECKING:
    import lance
    from lance.dataset import LanceScanner

BLOB = "lance.blob.v2"
_KEY = b"lance-encoding:blob"

_DESCRIPTOR = ["kind", "position", "size", "blob_id", "blob_uri"]
_EXTERNAL = 3
"""The kind of a blob with a URI of its own, or one relative to the base path that `blob_id` numbers."""

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


def scan_bytes(
    dataset: lance.LanceDataset,
    columns: Sequence[str] | Mapping[str, str],
    fragment: lance.LanceFragment | None = None,
    filter: str | None = None,
    offset: int | None = None,
    limit: int | None = None,
    **options: Any,
) -> LanceScanner:
    """Return a scanner that reads blobs as bytes; first the descriptors of the same rows are checked.

    Args:
        columns: columns to read, or a mapping from names to SQL expressions or quoted columns.
        filter: a condition on columns that hold no blobs.
        options: other arguments of pylance's scanner.

    Raises:
        InvalidInput: a blob names a file outside of the table's places. Nothing was fetched.
    """
    whole: Any = dataset if fragment is None else fragment
    rows = {"filter": filter, "offset": offset, "limit": limit}
    texts = [text.lower() for text in (columns.values() if isinstance(columns, Mapping) else columns)]
    # SQL may name a column in any way: every blob column whose name occurs in the text counts.
    read = [field.name for field in dataset.schema if _has_blob(field)]
    if read := [name for name in read if "`" in name or any(name.lower() in text for text in texts)]:
        described = scan_descriptors(whole, read, **rows)
        if any(map(_has_uri, described.projected_schema)):
            for batch in described.to_batches():
                _check_descriptors(dataset, batch)
    scanner: LanceScanner = whole.scanner(columns=columns, blob_handling="all_binary", **rows, **options)
    return scanner


def scan_descriptors(whole: Any, columns: Sequence[str], **options: Any) -> LanceScanner:
    """Return a scanner of a table or a fragment that reads a descriptor in place of each blob, and fetches none."""
    scanner: LanceScanner = whole.scanner(columns=columns, blob_handling="blobs_descriptions", **options)
    return scanner


def _has_blob(field: pa.Field) -> bool:
    return is_blob(field) or any(map(_has_blob, _children(field.type)))


def _has_uri(field: pa.Field) -> bool:
    return field.name == _DESCRIPTOR[-1] or any(map(_has_uri, _children(field.type)))


def _children(kind: pa.DataType) -> list[pa.Field]:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return [kind.field(at) for at in range(kind.num_fields)] if pt.is_nested(kind) else []


def _check_descriptors(dataset: lance.LanceDataset, batch: pa.RecordBatch) -> None:
    places, bases = places_of(dataset), dataset.base_paths()
    for column in batch.schema.names:
        document = f"A blob in column {column!r} of table {name_of(dataset)!r}"
        for found in _descriptors(batch.column(column)):
            named = found.filter(pc.not_equal(found.field(_DESCRIPTOR.index("blob_uri")), ""))
            if not len(named):
                continue
            distinct = pa.Table.from_struct_array(named).group_by(["kind", "blob_id", "blob_uri"]).aggregate([])
            for kind, base, uri in zip(
                *(distinct.column(name).to_pylist() for name in distinct.schema.names), strict=True
            ):
                if (kind == _EXTERNAL and not base) or is_absolute(uri):
                    places.check(uri, document)
                else:
                    places.check(join(bases[base].path if base in bases else dataset.uri, uri), document)


def _descriptors(values: pa.Array) -> Iterator[pa.StructArray]:
    """Yield the descriptors in a column, also nested ones, without NULLs."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _descriptors(values.storage)
    elif pt.is_struct(kind) and [field.name for field in kind] == _DESCRIPTOR:
        yield values.drop_null()
    elif pt.is_struct(kind):
        for child in values.flatten():
            yield from _descriptors(child)
    elif pt.is_map(kind):
        yield from _descriptors(values.keys)
        yield from _descriptors(values.items)
    elif pt.is_nested(kind):
        yield from _descriptors(values.flatten())


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
