"""Cache the results of a deterministic UDF by input, for other tasks and for later jobs with its code version."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.keys import key_part
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at, to_storage
from airflow_geneva.engine.runtime import time, uuid
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.errors import StorageError

FOLDER = "values"
"""The folder beside the checkpoints, with a folder for each code version of a UDF."""

MOST_BYTES = 1 << 30
MOST_AGE = 30 * 24 * 3600.0

_KEY, _VALUE = "key", "value"
_DIGEST = "S16"
logger = logging.getLogger("airflow_geneva.apply")


class ValueCache:
    """The files of one version of a function, one per flush of a task; the oldest are deleted beyond a limit.

    `identity` distinguishes functions with equal name and version, because a user-given version= does not depend on the
    code. A damaged or removed file counts as absent. A failed write is only logged.
    """

    def __init__(self, checkpoints: Storage, udf: str, version: str, kind: pa.DataType, identity: str) -> None:
        code = md5(f"{kind}\0{identity}")[:16]
        folder = f"{key_part(udf)}_ver-{key_part(version)}_code-{code}"
        self.store = CheckpointStore(checkpoints.folder(FOLDER, folder))
        self.kind = kind
        self._files: dict[str, int] = {}
        self._keys = np.empty(0, _DIGEST)
        self._places = np.empty((0, 2), np.int64)
        self._names: list[str] = []

    def look(self) -> None:
        """Find the files that other tasks have written since the last call."""
        try:
            listed = self.store.list_keys()
        except StorageError as error:
            logger.warning("Cannot list the values that other jobs computed: %s", error)
            return
        young = (time.time() - MOST_AGE) * 1_000
        for name in listed:
            made, size = _made_and_size(name)
            if name not in self._files and made > young:
                self._files[name] = size
                try:
                    keys = self.store.read(name, [_KEY]).column(_KEY)
                except KeyError:
                    continue
                if keys.type == pa.binary() and not keys.null_count:
                    self._add(name, np.array(keys.to_pylist(), _DIGEST))

    def _add(self, name: str, keys: np.ndarray) -> None:
        self._names.append(name)
        places = np.stack([np.full(len(keys), len(self._names) - 1), np.arange(len(keys))], axis=1)
        keys = np.concatenate([self._keys, keys])
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = keys[order], np.concatenate([self._places, places])[order]

    def find(self, keys: Sequence[bytes]) -> list[tuple[pa.Array, int] | None]:
        """Return for each key an array of values and the position in it, or None."""
        found: list[tuple[pa.Array, int] | None] = [None] * len(keys)
        if not len(self._keys):
            return found
        wanted = np.array(keys, _DIGEST)
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        there = np.flatnonzero(self._keys[at] == wanted)
        files, rows = self._places[at[there]].T
        for file in np.unique(files).tolist():
            mine = np.flatnonzero(files == file)
            try:
                values = self.store.read(self._names[file], [_VALUE], rows[mine]).column(_VALUE)
                values = convert_array(values, self.kind)
            except (KeyError, pa.ArrowException):
                kept = self._places[:, 0] != file
                self._keys, self._places = self._keys[kept], self._places[kept]
                continue
            for number, place in enumerate(there[mine].tolist()):
                found[place] = (values, number)
        return found

    def write(self, keys: Sequence[bytes], values: pa.Array) -> int:
        """Write the values that other tasks have not written yet; return the number of values that they have."""
        self.look()
        new = np.flatnonzero(~np.isin(np.array(keys, _DIGEST), self._keys)).tolist()
        if new:
            stored = to_storage(rows_at(values, pa.array(new)))
            name = f"{int(time.time() * 1_000):013}.{stored.nbytes}.{uuid.uuid4().hex}"
            columns = [pa.array([keys[at] for at in new], pa.binary()), stored]
            try:
                fault_point("cache.write")
                self.store[name] = pa.record_batch(columns, names=[_KEY, _VALUE])
                self._files[name] = stored.nbytes
                self._add(name, np.array([keys[at] for at in new], _DIGEST))
                self._trim()
            except StorageError as error:
                logger.warning("Cannot keep %d values for other jobs: %s", len(new), error)
        return len(keys) - len(new)

    def _trim(self) -> None:
        size, going = sum(self._files.values()), list[str]()
        for name in sorted(self._files):
            if size <= MOST_BYTES:
                break
            size -= self._files.pop(name)
            going.append(name)
        if going:
            fault_point("cache.evict")
            self.store.remove(going)
            fault_point("cache.evicted")


def _made_and_size(name: str) -> tuple[int, int]:
    """Return a file's creation time in milliseconds and its size, from its name; zeros for an unknown name."""
    made, _, rest = name.partition(".")
    size = rest.partition(".")[0]
    return (int(made), int(size)) if made.isdecimal() and size.isdecimal() else (0, 0)
