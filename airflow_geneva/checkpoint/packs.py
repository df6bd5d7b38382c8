"""Many small documents of a store in one file, read from there as if each still were a file of its own."""

from __future__ import annotations

import functools
import time
import uuid
from bisect import bisect_left
from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa

from airflow_geneva.lance_io.data_file import FileWriter, LanceFile, Positions
from airflow_geneva.lance_io.engine_errors import EngineError
from airflow_geneva.storage import Storage

FOLDER = "packed"
MOST_PACKS = 8
"""So many small ones are put together into one."""
FULL_BYTES = 16_000_000
_FULL = ".full."
_LOOK_SECONDS = 30.0
_KEY, _VALUE = "key", "value"
_SCHEMA = pa.schema([(_KEY, pa.string()), (_VALUE, pa.large_binary())])


class Packs:
    """The packs in a folder, as they were when they were looked at last.

    Args:
        storage: the folder that the packed documents would lie in.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.names: list[str] = []
        self._looked = 0.0
        self.look()

    def look(self) -> None:
        """Look again which packs there are."""
        self._looked = time.monotonic()
        # The newest first: of a document that is in several, the newest counts.
        self.names = [f"{FOLDER}/{name}" for name in reversed(self.storage.list_folder(FOLDER)[1])]

    def look_again(self) -> None:
        """Look again, on an object store, where that costs a round trip, only now and then."""
        if self.storage.local or time.monotonic() - self._looked > _LOOK_SECONDS:
            self.look()

    def small(self) -> list[str]:
        """Names of the packs that others may be put together with."""
        return [name for name in self.names if _FULL not in name]

    def keys(self, prefix: str = "") -> set[str]:
        """Keys that start with a prefix."""
        found: set[str] = set()
        for name in self.names:
            keys = self._keys(name)
            for at in range(bisect_left(keys, prefix), len(keys)):
                if not keys[at].startswith(prefix):
                    break
                found.add(keys[at])
        return found

    def get(self, key: str) -> bytes | None:
        """A packed document, as it lies there; None when there is none that can be read."""
        found = self._get(key)
        if found is None:
            # Packs are put together into one, and new ones come.
            self.look()
            found = self._get(key)
        return found

    def _get(self, key: str) -> bytes | None:
        for name in self.names:
            keys = self._keys(name)
            at = bisect_left(keys, key)
            if at < len(keys) and keys[at] == key:
                for _, value in self._rows(name, np.array([at])):
                    return value
        return None

    def values(self, name: str) -> dict[str, bytes]:
        """All documents of a pack, as they lie in it; none when it cannot be read."""
        return dict(self._rows(name, None))

    def _rows(self, name: str, rows: Positions | None) -> list[tuple[str, bytes]]:
        """Keys and documents of a pack; none when it cannot be read."""
        try:
            batch = _file(self.storage, name).read(rows=rows)
        except EngineError:
            return []
        return list(zip(batch.column(_KEY).to_pylist(), batch.column(_VALUE).to_pylist(), strict=True))

    def _keys(self, name: str) -> list[str]:
        """Keys of a pack in order; none when it cannot be read."""
        return keys_of_pack(self.storage, name)

    def add(self, values: Mapping[str, bytes]) -> bool:
        """Write a pack, and say whether its keys can be read back."""
        full = _FULL if sum(map(len, values.values())) >= FULL_BYTES else "."
        name = f"{FOLDER}/{time.time_ns():020}.{uuid.uuid4().hex[:12]}{full}lance"
        keys = sorted(values)
        place = self.storage.path(name)
        writer = FileWriter(
            f"checkpoints {place}", place, lambda: self.storage.session.open_writer(name, schema=_SCHEMA)
        )
        writer.write(pa.record_batch([keys, [values[key] for key in keys]], schema=_SCHEMA))
        writer.close()
        return keys_of_pack(self.storage, name) == keys

    def drop(self, keys: Collection[str]) -> None:
        """Write packs anew without some of their documents."""
        self.look()
        for name in self.names:
            if not set(self._keys(name)).isdisjoint(keys):
                values = self.values(name)
                rest = {key: value for key, value in values.items() if key not in keys}
                # One that cannot be read now may be readable later.
                if values and (not rest or self.add(rest)):
                    self.storage.delete(name)
        self.look()


def keys_of_pack(checkpoints: Storage, path: str) -> list[str]:
    """Keys of the documents in a file, in order; none when it is not a pack, or cannot be read.

    Args:
        path: of the file, below the folder of the store.
    """
    try:
        return _read_keys(checkpoints, path) if is_pack(path) else []
    except EngineError:
        return []


def is_pack(path: str) -> bool:
    """Whether a file in a store is one."""
    return path.split("/")[-2:-1] == [FOLDER]


@functools.lru_cache(maxsize=64)
def _read_keys(storage: Storage, path: str) -> list[str]:
    keys: list[str] = _file(storage, path).read([_KEY]).column(0).to_pylist()
    return keys


def _file(storage: Storage, path: str) -> LanceFile:
    return LanceFile(lambda columns: storage.session.open_reader(path, columns=columns))


def to_bytes(batch: pa.RecordBatch) -> bytes:
    """A document as it lies in a pack."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_bytes(value: bytes) -> pa.RecordBatch:
    """The document that :func:`to_bytes` was given."""
    with pa.ipc.open_stream(value) as reader:
        return next(iter(reader))
