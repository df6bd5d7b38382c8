"""Pack many small documents of a store into one file; each can still be read by its key."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.lance_io.data_file import FileWriter, LanceFile
from airflow_geneva.engine.lance_io.row_ranges import Offsets
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.runtime import threading, time, uuid
from airflow_geneva.engine.storage.engine_errors import EngineError
from airflow_geneva.engine.storage.files import Storage

FOLDER = "packed"
MOST_PACKS = 8
"""Number of small packs that are merged into one."""
FULL_BYTES = 16_000_000
_FULL = ".full."
_LOOK_SECONDS = 30.0
_FEW_READS = 16
"""The number of documents of a local pack that are read one by one; beyond it, the whole pack is read at once."""
_LOADING = [threading.Lock() for _ in range(16)]
_LOADED: ProcessMemo[tuple[Storage, str], dict[str, bytes]] = ProcessMemo()
"""The documents, by key, of completely read packs: the most recently read ones, up to `FULL_BYTES` in total."""
_KEY, _VALUE = "key", "value"
# Lance compresses the documents of a page together: a third of the bytes, and 25 times faster, than one by one.
_ZSTD = {"lance-encoding:compression": "zstd"}
_SCHEMA = pa.schema([pa.field(_KEY, pa.string()), pa.field(_VALUE, pa.large_binary(), metadata=_ZSTD)])


class Packs:
    """The packs of a folder, as of the last listing."""

    def __init__(self, storage: Storage, listed: Iterable[str] | None = None) -> None:
        self.storage = storage
        self.names: list[str] = []
        self._reads = Counter[str]()
        self._looked = time.monotonic()
        if listed is None:
            self.look()
        else:
            self.names = sorted((name for name in listed if name.startswith(f"{FOLDER}/")), reverse=True)

    def look(self) -> None:
        """List the packs again."""
        self._looked = time.monotonic()
        # Newest first: if several packs hold a document, the newest counts.
        self.names = [f"{FOLDER}/{name}" for name in reversed(self.storage.list_folder(FOLDER)[1])]

    def list_if_old(self) -> None:
        """List the packs again; on an object store, where a listing costs a round trip, at most every 30 seconds."""
        if self.storage.local or time.monotonic() - self._looked > _LOOK_SECONDS:
            self.look()

    def small(self) -> list[str]:
        """Names of the packs that may be merged."""
        return [name for name in self.names if _FULL not in name]

    def keys(self, prefix: str = "") -> set[str]:
        """Return the keys that start with a prefix."""
        found: set[str] = set()
        for keys in self.storage.side_by_side(*(partial(keys_of_pack, self.storage, name) for name in self.names)):
            for at in range(bisect_left(keys, prefix), len(keys)):
                if not keys[at].startswith(prefix):
                    break
                found.add(keys[at])
        return found

    def get(self, key: str) -> bytes | None:
        """Return the bytes of a packed document; None if no readable pack has it."""
        found = self._get(key)
        if found is None:
            # Another process may have merged packs or added new ones since the last listing.
            self.look()
            found = self._get(key)
        return found

    def _get(self, key: str) -> bytes | None:
        for name in self.names:
            keys = keys_of_pack(self.storage, name)
            at = bisect_left(keys, key)
            if at < len(keys) and keys[at] == key:
                self._reads[name] += 1
                if not self.storage.local or self._reads[name] > _FEW_READS:
                    return _documents(self.storage, name).get(key)
                for _, value in _rows(self.storage, name, np.array([at])):
                    return value
        return None

    def values(self, name: str) -> dict[str, bytes]:
        """Return the bytes of all documents of a pack; empty if it cannot be read."""
        return dict(_rows(self.storage, name, None))

    def add(self, values: Mapping[str, bytes]) -> bool:
        """Write a pack; on a local disk, verify that its keys can be read back, and return whether they can."""
        full = _FULL if sum(map(len, values.values())) >= FULL_BYTES else "."
        name = f"{FOLDER}/{time.time_ns():020}.{uuid.uuid4().hex[:12]}{full}lance"
        keys = sorted(values)
        place = self.storage.path(name)
        writer = FileWriter(f"checkpoints {place}", place, lambda: self.storage.open_writer(name, _SCHEMA))
        writer.write(pa.record_batch([keys, [values[key] for key in keys]], schema=_SCHEMA))
        writer.close()
        self.names.insert(0, name)
        return not self.storage.local or keys_of_pack(self.storage, name) == keys

    def drop(self, keys: Collection[str]) -> None:
        """Rewrite packs without some of their documents."""
        self.look()
        for name in list(self.names):
            if not set(keys_of_pack(self.storage, name)).isdisjoint(keys):
                values = self.values(name)
                rest = {key: value for key, value in values.items() if key not in keys}
                # A pack that cannot be read now may be readable later: keep it.
                if values and (not rest or self.add(rest)):
                    self.storage.delete(name)
        self.look()


def keys_of_pack(checkpoints: Storage, path: str) -> list[str]:
    """Return the sorted keys of the documents in a file; empty if it is not a pack or cannot be read."""
    try:
        return _read_keys(checkpoints, path) if path.split("/")[-2:-1] == [FOLDER] else []
    except EngineError:
        return []


@functools.lru_cache(maxsize=64)
def _read_keys(storage: Storage, path: str) -> list[str]:
    if not storage.local and _FULL not in path:
        return sorted(_documents(storage, path))
    keys: list[str] = LanceFile(storage, path).read([_KEY]).column(0).to_pylist()
    return keys


def _documents(storage: Storage, path: str) -> dict[str, bytes]:
    """Return all documents of a pack; on an object store, it is read with one request."""
    pack = storage, path
    with _LOADING[hash(pack) % len(_LOADING)]:
        found = _LOADED.pop(pack, None) or dict(_rows(storage, path, None))
        _LOADED[pack] = found  # as the most recently read one
    rest = FULL_BYTES
    for other, documents in reversed(list(_LOADED.items())):
        rest -= sum(map(len, documents.values()))
        if rest < 0 and other != pack:
            _LOADED.pop(other, None)
    return found


def _rows(storage: Storage, path: str, rows: Offsets | None) -> list[tuple[str, bytes]]:
    """Read keys and documents of a pack; empty if it cannot be read."""
    try:
        batch = LanceFile(storage, path).read(rows=rows)
    except EngineError:
        return []
    return list(zip(batch.column(_KEY).to_pylist(), batch.column(_VALUE).to_pylist(), strict=True))
