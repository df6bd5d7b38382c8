"""A key-value store of record batches."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.checkpoint.keys import key_to_path, path_to_key
from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.faults import fault_point
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.storage import Storage
from airflow_geneva.uri import is_local, join

if TYPE_CHECKING:
    from lance.file import LanceFileReader

Positions = npt.NDArray[np.int64]

_LAST_BYTES = b"LANC"


class CheckpointStore(ABC):
    """Keys to record batches; a value is there whole or not at all."""

    @abstractmethod
    def __setitem__(self, key: str, value: pa.RecordBatch) -> None: ...

    @abstractmethod
    def __getitem__(self, key: str) -> pa.RecordBatch: ...

    @abstractmethod
    def __contains__(self, key: str) -> bool: ...

    @abstractmethod
    def list_keys(self, prefix: str | None = None) -> list[str]: ...

    @abstractmethod
    def __delitem__(self, key: str) -> None: ...

    def read(self, key: str, columns: Sequence[str], rows: Positions | None = None) -> pa.RecordBatch:
        """Some columns of a batch, whole or at some rows.

        Raises:
            KeyError: nothing usable is stored under the key, or it has no such rows.
        """
        batch = self[key].select(list(columns))
        if rows is None:
            return batch
        if len(rows) and rows.max() >= batch.num_rows:
            raise KeyError(key)
        return batch.take(pa.array(rows))


class InMemoryCheckpointStore(CheckpointStore):
    """A store that lives as long as its process."""

    def __init__(self) -> None:
        self._batches: dict[str, pa.RecordBatch] = {}

    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        self._batches[key] = value

    def __getitem__(self, key: str) -> pa.RecordBatch:
        return self._batches[key]

    def __delitem__(self, key: str) -> None:
        del self._batches[key]

    def __contains__(self, key: str) -> bool:
        return key in self._batches

    def list_keys(self, prefix: str | None = None) -> list[str]:
        return sorted(key for key in self._batches if key.startswith(prefix or ""))


class LanceCheckpointStore(CheckpointStore):
    """One Lance file per key below a folder; damaged and half-written files count as absent.

    Args:
        root: folder of the checkpoints, a path or an object-store URI.
        storage_options: credentials and settings for pylance's object stores.
    """

    def __init__(self, root: str | Storage, storage_options: Mapping[str, str] | None = None) -> None:
        self.storage = root if isinstance(root, Storage) else Storage.at(root, storage_options)

    def __repr__(self) -> str:
        return f"LanceCheckpointStore({self.storage.root!r})"

    def _path(self, key: str) -> str:
        if "/" in key or "\\" in key or not key or key.startswith("."):
            raise InvalidInput(f"{key!r} cannot be a checkpoint key: it would leave its folder.")
        return key_to_path(key)

    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        """Store a batch.

        Raises:
            StorageError: the store is full, read-only or unreachable.
        """
        path = self._path(key)
        place = join(self.storage.root, path)

        def failed(error: BaseException) -> StorageError:
            return StorageError(f"Cannot write checkpoint {place}: {error}. Check space and permissions.")

        fault_point("checkpoint.write")
        with engine_errors(failed):
            # Not as a context manager: that would publish the partial file when the body raises.
            writer = self.storage.session.open_writer(path, schema=value.schema)
            writer.write_batch(value)
            writer.close()
            check_finished(place)
        fault_point("checkpoint.written")

    def __getitem__(self, key: str) -> pa.RecordBatch:
        return self._read(key, None, None)

    def read(self, key: str, columns: Sequence[str], rows: Positions | None = None) -> pa.RecordBatch:
        return self._read(key, list(columns), rows)

    def __delitem__(self, key: str) -> None:
        self.storage.delete(self._path(key))

    def _read(self, key: str, columns: list[str] | None, rows: Positions | None) -> pa.RecordBatch:
        path, session = self._path(key), self.storage.session
        with engine_errors(lambda error: KeyError(key)):
            reader = session.open_reader(path, columns=columns)
            if rows is not None:
                return read_positions(reader, rows)
            return single_batch(reader.read_all(batch_size=1 << 24).to_table())

    def __contains__(self, key: str) -> bool:
        path, session = self._path(key), self.storage.session
        try:
            with engine_errors():
                session.open_reader(path)
        except EngineError:
            return False
        return True

    def list_keys(self, prefix: str | None = None) -> list[str]:
        """Keys that start with a prefix, sorted; only the folders that can hold them are listed."""
        text = prefix or ""
        folder = key_to_path(text).removesuffix(".lance").rpartition("/")[0] if text else ""
        found = (path_to_key(name) for name in self.storage.list_files(folder) if name.endswith(".lance"))
        return sorted(key for key in found if key.startswith(text))


def check_finished(path: str) -> None:
    """Make sure that a Lance file is there to its last byte, and remove it if it is not.

    On a local disk Lance reports no error when the last bytes did not fit: the disk is full, or a quota is used up.
    Object stores take a file whole or not at all.

    Raises:
        OSError: the file was cut short.
    """
    if not is_local(path):
        return
    with open(path, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - len(_LAST_BYTES), 0))
        whole = file.read() == _LAST_BYTES
    if not whole:
        os.unlink(path)
        raise OSError(errno.ENOSPC, "the file was cut short, the disk is full or a limit is reached")


def read_positions(reader: LanceFileReader, positions: Positions) -> pa.RecordBatch:
    """Rows of a Lance file, in the order of their positions, which may be any; nothing else of the file is kept.

    Raises:
        BaseException: the engine's, for example where the file has no such rows.
    """
    count = len(positions)
    steps = np.diff(positions)
    if count and (steps == 1).all():
        return single_batch(reader.read_range(int(positions[0]), count, batch_size=count).to_table())
    if (steps > 0).all():
        return single_batch(reader.take_rows(positions.tolist(), batch_size=max(count, 1)).to_table())
    ascending, back = np.unique(positions, return_inverse=True)
    return read_positions(reader, ascending).take(pa.array(back))


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """The rows of a table as one record batch, schema metadata kept."""
    combined = table.combine_chunks().to_batches()
    if len(combined) == 1:
        return combined[0]
    if not combined:
        return pa.RecordBatch.from_pylist([], schema=table.schema)
    return pa.concat_batches(combined)
