"""Write and read Lance files; all values of checkpoints and staged data files pass through here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.arrays import (
    DATA_STORAGE_VERSION,
    copy_sliced_columns,
    nested_types,
    rows_at,
    single_batch,
    why_not_storable,
)
from airflow_geneva.engine.lance_io.blobs import BlobFileWriter, is_blob
from airflow_geneva.engine.lance_io.pylance_internals import access_of
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.task_memory import BatchTooLarge, rows_at_once
from airflow_geneva.engine.runtime import uuid
from airflow_geneva.engine.storage.catalogs import options_for
from airflow_geneva.engine.storage.engine_errors import (
    EngineError,
    engine_errors,
    is_overflow,
    is_panic,
    is_unavailable,
    to_engine_error,
)
from airflow_geneva.engine.storage.files import Storage, freeze_options
from airflow_geneva.engine.storage.uri import is_local, join
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    import lance
    from lance.file import LanceFileMetadata, LanceFileReader, LanceFileWriter

FOOTER_BYTES = 40
_LAST_BYTES = b"LANC"
_READ_AHEAD = 2
_ROWS_AT_ONCE = 1 << 14
_SMALL_BYTES, _MOST_EXPANDED, _MOST_BYTES = 64 << 20, 64, 1 << 30
"""A file whose rows are all held in memory may expand to 64 MB and 64 times its bytes, and to 1 GB."""
_OF_VALUES = ("LanceError(Schema)", "LanceError(Arrow)")
_JSON = b"lance.json"
_EXTENSION = b"ARROW:extension:name"


class FileWriter:
    """Writes batches to a Lance file, or raises `StorageError`; readers see nothing before :meth:`close`."""

    def __init__(self, what: str, path: str, open_writer: Callable[[], LanceFileWriter | BlobFileWriter]) -> None:
        self.what = what
        self.path = path
        # pylance's context manager would publish the partial file when the body raises.
        with self._explaining(None):
            self._writer = open_writer()

    def write(self, batch: pa.RecordBatch) -> None:
        whole = copy_sliced_columns(batch)
        # The error of a blob writer may be about an earlier batch.
        with self._explaining(None if isinstance(self._writer, BlobFileWriter) else whole):
            self._writer.write_batch(whole)

    def close(self) -> None:
        with self._explaining(None):
            self._publish()
            self._check()

    @property
    def size_bytes(self) -> int:
        """The size of the published file; 0 if its writer does not report it."""
        return getattr(self._writer, "size_bytes", 0) or 0

    def _publish(self) -> None:
        self._writer.close()

    def _check(self) -> None:
        # Another process may have replaced the file, with another size: two jobs that compute the same rows write the
        # same checkpoints.
        check_complete(self.path)

    def _explaining(self, batch: pa.RecordBatch | None) -> AbstractContextManager[None]:
        return engine_errors(lambda error: write_error(self.what, error, batch))


class DataFileWriter(FileWriter):
    """Writes batches to a new data file; the file becomes part of the table when a commit names it.

    It records which rows of blob columns are NULL, because blobs cannot be read before the commit.
    """

    def __init__(self, dataset: lance.LanceDataset, schema: pa.Schema) -> None:
        self.rows = 0
        self._nulls: dict[str, list[Offsets]] = {field.name: [] for field in schema if is_blob(field)}
        self.dataset = dataset
        self.schema = schema
        self.file = f"{uuid.uuid4().hex}.lance"
        super().__init__(f"a data file of {dataset.uri}", join(dataset.uri, "data", self.file), self._open)

    def write(self, batch: pa.RecordBatch) -> None:
        for name, found in self._nulls.items():
            if (column := batch.column(name)).null_count:
                found.append(self.rows + np.flatnonzero(np.asarray(column.is_null())))
        self.rows += batch.num_rows
        super().write(batch)

    @property
    def nulls(self) -> tuple[tuple[str, Ranges], ...]:
        """The positions of NULLs in each blob column."""
        none = np.empty(0, np.int64)
        return tuple((name, Ranges.from_offsets(np.concatenate([none, *found]))) for name, found in self._nulls.items())

    def finish(self) -> str:
        """Publish the file and return its name below ``data/``."""
        fault_point("staged.write")
        self.close()
        fault_point("staged.written")
        return self.file

    def _open(self) -> LanceFileWriter | BlobFileWriter:
        if any(is_blob(field) for field in self.schema):
            return BlobFileWriter(self.dataset, self.schema)
        version = self.dataset.data_storage_version
        return _data_files(self.dataset).session.open_writer(self.file, schema=self.schema, version=version)

    def _publish(self) -> None:
        closed = self._writer.close()
        if isinstance(closed, str):
            self.file, self.path = closed, join(self.dataset.uri, "data", closed)

    def _check(self) -> None:
        check_complete(self.path, self.size_bytes)


def _data_files(dataset: lance.LanceDataset) -> Storage:
    place, (catalog, table, options) = join(dataset.uri, "data"), access_of(dataset)
    if catalog is None or table is None:
        return Storage(place, freeze_options(options))
    return Storage(place, options_for(catalog, table))


def write_error(what: str, error: BaseException, batch: pa.RecordBatch | None) -> StorageError:
    columns = () if batch is None or isinstance(error, OSError) else zip(batch.schema, batch.columns, strict=True)
    bad = [f"{field.name!r} ({field.type})" for field, column in columns if why_not_storable(column)]
    if not (bad or is_panic(error) or isinstance(error, ValueError) or str(error).startswith(_OF_VALUES)):
        return StorageError(
            f"Cannot write {what}: {error}. Check space and permissions, then run again: checkpoints are kept."
        )
    values = f"the values of {', '.join(bad)}" if bad else "these values"
    return StorageError(
        f"Cannot write {what}: pylance cannot store {values}: {error}. A retry will fail in the same way. Give the "
        "column another Arrow type."
    )


def check_complete(path: str, size: int = 0) -> None:
    """Remove a local Lance file that is truncated, or has another size than `size` if that is given; raise `OSError`.

    On a full local disk or an exhausted quota, Lance reports no error for the last bytes. An object store always stores
    a file completely or not at all.
    """
    if not is_local(path):
        return
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        file.seek(max(found - len(_LAST_BYTES), 0))
        whole = file.read() == _LAST_BYTES and size in (0, found)
    if not whole:
        os.unlink(path)
        raise OSError(errno.ENOSPC, "the file is truncated: the disk is full or a quota is reached")


@dataclass(frozen=True)
class LanceFile:
    """Reads a finished Lance file of a folder; values have the types that they have in a table.

    ``broken`` converts pylance's error about a damaged or missing file; an unavailable store raises a `StorageError`.
    """

    folder: Storage
    name: str
    broken: Callable[[BaseException], Exception] = to_engine_error

    @staticmethod
    def of_table(
        dataset: lance.LanceDataset, name: str, broken: Callable[[BaseException], Exception] = to_engine_error
    ) -> LanceFile:
        """Open a committed or staged data file by its name below ``data/``."""
        return LanceFile(_data_files(dataset), name, broken)

    def read(
        self, columns: Sequence[str] | None = None, rows: Offsets | None = None, max_bytes: float = inf
    ) -> pa.RecordBatch:
        """Read all rows, or the rows at the given positions in that order; `BatchTooLarge` above ``max_bytes``."""

        def convert(error: BaseException) -> Exception:
            if rows is not None and len(rows) > 1 and is_overflow(error):
                return BatchTooLarge()
            return _unavailable(error) or self.broken(error)

        with engine_errors(convert):
            if columns is None and rows is None:
                with self.folder.open_whole(self.name, _MOST_BYTES) as whole:
                    return _all_rows(whole, _described(whole), None)
            reader = self.folder.open_reader(self.name, None if columns is None else list(columns))
            described = _described(reader)
            return _all_rows(reader, described, columns) if rows is None else _at_positions(reader, rows, max_bytes)

    def count_rows(self) -> int | None:
        """Count the rows; None if the file is damaged or missing."""
        metadata = self.metadata()
        return None if metadata is None else int(metadata.num_rows)

    def metadata(self) -> LanceFileMetadata | None:
        """Return the metadata at the end of the file; None if the file is damaged or missing."""
        try:
            with engine_errors(lambda error: _unavailable(error) or to_engine_error(error)):
                return self.folder.open_reader(self.name).metadata()
        except EngineError:
            return None

    def footer(self, size: int) -> bytes | None:
        """Read the footer of a file of known size, with one request; None if the file does not exist."""
        try:
            found = self.folder.read_part(self.name, size - FOOTER_BYTES, FOOTER_BYTES)
        except FileNotFoundError:
            return None
        except StorageError as error:
            if is_unavailable(error):
                raise
            return None
        return found if len(found) == FOOTER_BYTES and found.endswith(_LAST_BYTES) else None

    def exists(self) -> bool:
        return self.folder.exists(self.name)


def _unavailable(error: BaseException) -> StorageError | None:
    if not is_unavailable(error):
        return None
    return StorageError(f"{error}. Check the store, permissions and the limits of this process, then run again.")


def _at_positions(reader: LanceFileReader, positions: Offsets, max_bytes: float) -> pa.RecordBatch:
    """Read rows in the order of their positions, without holding the file's other rows in memory."""
    count = len(positions)
    steps = np.diff(positions)
    size = max(1, count if max_bytes == inf else min(count, rows_at_once(int(max_bytes))))
    if count and (steps == 1).all():
        results = reader.read_range(int(positions[0]), count, batch_size=size, batch_readahead=_READ_AHEAD)
    elif (steps > 0).all():
        results = reader.take_rows(positions.tolist(), batch_size=size, batch_readahead=_READ_AHEAD)
    else:
        ascending, back = np.unique(positions, return_inverse=True)
        return rows_at(_at_positions(reader, ascending, max_bytes), pa.array(back))
    return _decoded(reader, _within(results.to_batches(), max_bytes))


def _described(reader: LanceFileReader) -> LanceFileMetadata:
    """Return what a file says about itself, or raise an error if pylance cannot give its schema.

    The same error, such as a column's name with a NUL byte, aborts the process if it occurs while rows are read.
    """
    metadata = reader.metadata()
    _ = metadata.schema
    return metadata


def _all_rows(
    reader: LanceFileReader, metadata: LanceFileMetadata, columns: Sequence[str] | None
) -> pa.RecordBatch:  # fmt: skip
    """Read all rows; ValueError if they take too many bytes: a file may be written to expand without end."""
    most = min(_SMALL_BYTES + _MOST_EXPANDED * int(metadata.num_data_bytes), _MOST_BYTES)
    try:
        size, at_once = _size_of(metadata, columns), 1 << 24
        if size is None:
            at_once = _ROWS_AT_ONCE
        elif size > most:
            raise BatchTooLarge()
        batches = reader.read_all(batch_size=at_once, batch_readahead=_READ_AHEAD).to_batches()
        return _decoded(reader, _within(batches, most))
    except BatchTooLarge as error:
        raise ValueError(f"the file expands to more than {most:,} bytes") from error


def _size_of(metadata: LanceFileMetadata, columns: Sequence[str] | None) -> int | None:
    """Return the bytes that all values take in memory; None if the size of each is its own."""
    types = [field.type for field in metadata.schema if columns is None or field.name in columns]
    if not all(pt.is_primitive(kind) for kind in types):
        return None
    bits = sum(int(kind.bit_width) for kind in types)
    return int(metadata.num_rows) * bits // 8


def _within(batches: pa.RecordBatchReader, max_bytes: float) -> pa.Table:
    found: list[pa.RecordBatch] = []
    for batch in batches:
        found.append(batch)
        size = sum(part.nbytes for part in found)
        if size > max_bytes:
            raise BatchTooLarge(sum(part.num_rows for part in found), size)
    return pa.Table.from_batches(found, schema=batches.schema)


def _decoded(reader: LanceFileReader, table: pa.Table) -> pa.RecordBatch:
    """Convert JSON columns back to text: files hold a binary form that pylance decodes only when it reads a table."""
    batch = single_batch(table)
    if not any(pt.is_large_binary(leaf) for field in batch.schema for leaf in nested_types(field.type)):
        return batch
    written = reader.metadata().schema
    found = [name for name in batch.schema.names if _is_json(written.field(name))]
    if not found:
        return batch
    import lance

    schema = pa.schema([written.field(name) for name in found])
    encoded = pa.record_batch([batch.column(name) for name in found], schema=schema)
    decoded = single_batch(
        lance.write_dataset(encoded, "memory://", data_storage_version=DATA_STORAGE_VERSION).to_table()
    )
    for name in found:
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, decoded.schema.field(name), decoded.column(name))
    return batch


def _is_json(field: pa.Field) -> bool:
    if (field.metadata or {}).get(_EXTENSION) == _JSON:
        return True
    return any(_is_json(field.type.field(at)) for at in range(field.type.num_fields))
