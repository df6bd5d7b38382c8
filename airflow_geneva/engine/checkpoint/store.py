"""A store of record batches in Lance files with checksums."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.checkpoint.keys import key_to_path, path_to_key
from airflow_geneva.engine.checkpoint.packs import FULL_BYTES, MOST_PACKS, Packs
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.data_file import FileWriter, LanceFile
from airflow_geneva.engine.lance_io.row_ranges import Offsets
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.arrow_documents import from_bytes, to_bytes
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import join
from airflow_geneva.errors import InvalidInput

_KEY = b"crc32"
_CRC = struct.Struct("<I")
_METADATA = ""
_STRUCT, _BOOL = pa.struct([]).id, pa.bool_().id
_LISTS = {pa.list_(pa.null()).id, pa.large_list(pa.null()).id}
_TEXTS = {pa.string().id, pa.binary().id, pa.large_string().id, pa.large_binary().id}
_LARGE = {pa.large_list(pa.null()).id, pa.large_string().id, pa.large_binary().id}
_LENGTHS = {4: pa.int32().id, 8: pa.int64().id}
"""The types of the lengths of lists, by their width in bytes."""
_NUMBERS = {getattr(pa, f"{kind}int{bits}")().id for kind in ("", "u") for bits in (8, 16, 32, 64)}
_NUMBERS |= {pa.float16().id, pa.float32().id, pa.float64().id}


class CheckpointStore:
    """Maps keys to record batches, one Lance file per key in a folder; damaged and incomplete files count as absent."""

    def __init__(self, root: str | Storage) -> None:
        self.storage = root if isinstance(root, Storage) else Storage.at(root)
        self._packs: dict[str, Packs] = {}
        self._only_packed = set[str]()

    def __repr__(self) -> str:
        return f"CheckpointStore({self.storage.root!r})"

    def _path(self, key: str) -> str:
        if "/" in key or "\\" in key or not key or key.startswith("."):
            raise InvalidInput(f"{key!r} cannot be a checkpoint key: it would leave its folder.")
        return key_to_path(key)

    def __setitem__(self, key: str, value: pa.RecordBatch) -> None:
        path = self._path(key)
        self._only_packed.discard(key)
        place = join(self.storage.root, path)
        value = with_checksums(value)
        fault_point("checkpoint.write")
        writer = FileWriter(f"checkpoint {place}", place, lambda: self.storage.open_writer(path, value.schema))
        writer.write(value)
        writer.close()
        fault_point("checkpoint.written")

    def __getitem__(self, key: str) -> pa.RecordBatch:
        if key in self._only_packed:
            with suppress(KeyError):
                return self._packed(key)
        try:
            return self._checked(key, self._file(key).read(), True)
        except KeyError:
            return self._packed(key)

    def read(self, key: str, columns: Sequence[str], rows: Offsets | None = None, room: float = inf) -> pa.RecordBatch:
        """Read some columns of a batch, all rows or some.

        Raises:
            KeyError: the key has no usable batch, or the batch has no such rows.
            BatchTooLarge: the rows take more bytes; not raised for a packed batch, which is in memory anyway.
        """
        if key in self._only_packed:
            with suppress(KeyError):
                return _select_rows(key, self._packed(key), columns, rows)
        try:
            batch = self._checked(key, self._file(key).read(columns, rows, room), rows is None)
            if not set(columns) <= set(batch.schema.names):
                raise KeyError(key)
            return batch
        except KeyError:
            return _select_rows(key, self._packed(key), columns, rows)

    def _packed(self, key: str) -> pa.RecordBatch:
        found = self._packs_at(self._path(key)).get(key)
        if found is None:
            raise KeyError(key)
        try:
            return _unpacked(found)
        except ValueError as error:
            raise KeyError(key) from error

    def _checked(self, key: str, batch: pa.RecordBatch, whole: bool) -> pa.RecordBatch:
        try:
            return without_checksums(batch, whole)
        except ValueError as error:
            raise KeyError(key) from error

    def __delitem__(self, key: str) -> None:
        self.storage.delete(self._path(key))
        self._packs_at(self._path(key)).drop({key})

    def remove(self, keys: Iterable[str]) -> None:
        """Remove many keys that are not packed; ignore keys that do not exist."""
        self.storage.delete_all([self._path(key) for key in keys])

    def _file(self, key: str) -> LanceFile:
        return LanceFile(self.storage, self._path(key), lambda error: KeyError(key))

    def __contains__(self, key: str) -> bool:
        return self._file(key).count_rows() is not None or key in self._packs_at(self._path(key)).keys(key)

    def list_keys(self, prefix: str | None = None, many: bool = False) -> list[str]:
        """Return the sorted keys that start with a prefix; list only the folders that can hold them.

        Args:
            many: whether most keys of the top folder are wanted; then it and its packs are listed at once.
        """
        text = prefix or ""
        if many and not self.storage.local:
            top = _top(key_to_path(text))
            names = self.storage.list_files(top)
            self._packs[top] = Packs(self.storage.folder(top), [name.removeprefix(f"{top}/") for name in names])
            listed = {path_to_key(name) for name in names if name.endswith(".lance")}
            packed = self._packs[top].keys(text) - listed
            # A file takes precedence over a pack; a key that was just listed in packs only needs no check for a file.
            self._only_packed |= packed
            return sorted({key for key in listed if key.startswith(text)} | packed)
        folder = key_to_path(text).removesuffix(".lance").rpartition("/")[0] if text else ""
        found = (path_to_key(name) for name in self.storage.list_files(folder) if name.endswith(".lance"))
        keys = {key for key in found if key.startswith(text)}
        if folder:
            # List packs after files: a document that is packed in between is in at least one of the two listings.
            packs = self._packs_at(folder)
            packs.list_if_old()
            keys |= packs.keys(text)
        return sorted(keys)

    def add(self, batches: Mapping[str, pa.RecordBatch]) -> None:
        """Write batches of one folder under new keys; several batches become one file."""
        if len(batches) > 1:
            documents = {key: _to_packed(batch) for key, batch in batches.items()}
            fault_point("checkpoint.write")
            added = self._packs_at(self._path(next(iter(batches)))).add(documents)
            fault_point("checkpoint.written")
            if added:
                return
        for key, batch in batches.items():
            self[key] = batch

    def look_again(self) -> None:
        """List packs again at the next read, because other processes have written some."""
        self._packs.clear()
        self._only_packed.clear()

    def pack(self, keys: Iterable[str], folder: str = "") -> None:
        """Pack documents of one top folder into few files; merge its earlier packs once there are many small ones."""
        paths = {key: self._path(key) for key in sorted(keys)}
        top = folder or _top(next(iter(paths.values()), ""))
        packs = Packs(self.storage.folder(top) if top else self.storage)
        values: dict[str, bytes] = {}
        replaced: list[str] = []

        def write() -> None:
            if packs.add(values):
                fault_point("pack.written")
                self.storage.delete_all(replaced)
            values.clear()
            replaced.clear()

        small = packs.small()
        for name in reversed(small if len(small) >= MOST_PACKS else ()):
            if found := packs.values(name):
                values |= found
                replaced.append(f"{top}/{name}".lstrip("/"))
        size = sum(map(len, values.values()))
        for key, path in paths.items():
            with suppress(KeyError):
                values[key] = _to_packed(self[key])
                replaced.append(path)
                size += len(values[key])
            if size >= FULL_BYTES:
                write()
                size = 0
        if values:
            write()

    def _packs_at(self, path: str) -> Packs:
        top = _top(path)
        if top not in self._packs:
            self._packs[top] = Packs(self.storage.folder(top) if top else self.storage)
        return self._packs[top]


class DelayedCheckpoints:
    """Buffers checkpoints of fragments that a task finished, and writes them to one file after a checkpoint interval.

    A kill loses buffered checkpoints. So they are written `seconds` after the computation of their first row began.
    """

    def __init__(self, store: CheckpointStore, seconds: float) -> None:
        self.store = store
        self.seconds = seconds
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._waiting: dict[str, pa.RecordBatch] = {}
        self._since, self._rows, self._newest, self._bytes = inf, 0, 0, 0

    def add(self, key: str, value: pa.RecordBatch, rows: int, since: float) -> None:
        """Buffer a checkpoint with a new key; the computation of its rows began at the time `since`."""
        with self._lock:
            self._waiting[key] = value
            self._since = min(self._since, since)
            self._rows, self._newest = self._rows + rows, rows
            self._bytes += value.nbytes

    def write_if_due(self, most: int | None = None) -> None:
        """Write the buffered checkpoints if the interval has passed, or if one more would exceed `most` rows."""
        waited = time.monotonic() - self._since >= self.seconds
        if waited or self._bytes >= FULL_BYTES or (most is not None and self._rows + self._newest > most):
            self.write()

    def write(self) -> None:
        with self._lock:
            if self._waiting:
                self.store.add(self._waiting)
            self._clear()


def _top(path: str) -> str:
    """Return the first folder of a path, or ""."""
    return path.split("/")[0] if "/" in path or not path.endswith(".lance") else ""


def _select_rows(key: str, batch: pa.RecordBatch, columns: Sequence[str], rows: Offsets | None) -> pa.RecordBatch:
    """Select columns of a batch, all rows or some; `KeyError` if it has no such rows."""
    batch = batch.select(list(columns))
    if rows is None:
        return batch
    if len(rows) and rows.max() >= batch.num_rows:
        raise KeyError(key)
    return rows_at(batch, pa.array(rows))


def _to_packed(batch: pa.RecordBatch) -> bytes:
    """Return a document of a pack: a checksum of the bytes of Arrow's stream, and these bytes."""
    data = to_bytes(batch)
    return _CRC.pack(zlib.crc32(data)) + data


def _unpacked(document: bytes) -> pa.RecordBatch:
    """Return the batch of a document of a pack; ValueError if it is damaged."""
    data = document[_CRC.size :]
    if document[: _CRC.size] != _CRC.pack(zlib.crc32(data)):
        raise ValueError("the checksum does not match")
    return from_bytes(data)


def with_checksums(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add checksums of a batch's metadata, and of columns whose layout Lance preserves."""
    metadata = dict(batch.schema.metadata or {})
    sums = {name: _column(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    return batch.replace_schema_metadata({**metadata, _KEY: json.dumps({**sums, _METADATA: _metadata(metadata)})})


def without_checksums(batch: pa.RecordBatch, whole: bool) -> pa.RecordBatch:
    """Verify and remove the checksums; ValueError at a mismatch. Columns are verified if the batch is `whole`."""
    metadata = dict(batch.schema.metadata or {})
    sums = parse(metadata.pop(_KEY, b"null"))
    if not isinstance(sums, dict) or sums.get(_METADATA) != _metadata(metadata):
        raise ValueError("the checksum of its metadata does not match")
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in sums or (whole and sums[name] is not None and sums[name] != _column(column)):
            raise ValueError(f"the checksum of column {name} does not match")
    return batch.replace_schema_metadata(metadata or None)


def _metadata(metadata: Mapping[bytes, bytes]) -> int:
    return zlib.crc32(repr(sorted(metadata.items())).encode())


def _column(array: pa.Array) -> int | None:
    return _array(array, 0) if _is_plain(array.type) else None


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Lance preserves the layout of values of a type."""
    if kind.id == _STRUCT:
        return all(_is_plain(field.type) for field in kind)
    if kind.id in _LISTS:
        return _is_plain(kind.value_type)
    return kind.id in _NUMBERS or kind.id in _TEXTS or kind.id == _BOOL


def _array(array: pa.Array, crc: int) -> int:
    """Compute a checksum that ignores the content of NULL slots and the array's offset in its buffers."""
    kind = array.type
    crc = _head(kind.id, len(array), crc)
    if array.null_count:
        crc = zlib.crc32(_bits(array.is_valid()), crc)
        array = array.drop_null()
    if len(array) == 0:
        return crc
    if kind.id == _STRUCT:
        for child in array.flatten():
            crc = _array(child, crc)
        return crc
    if kind.id in _LISTS:
        bounds = _bounds(array)
        lengths = bounds[1:] - bounds[:-1]
        crc = zlib.crc32(lengths.tobytes(), _head(_LENGTHS[lengths.itemsize], len(array), crc))
        return _array(array.flatten(), crc)
    if kind.id == _BOOL:
        return zlib.crc32(_bits(array), crc)
    if kind.id in _TEXTS:
        data, bounds = array.buffers()[2], _bounds(array).astype(np.int64)
        lengths = bounds[1:] - bounds[:-1]
        return zlib.crc32(memoryview(data or b"")[bounds[0] : bounds[-1]], zlib.crc32(lengths.tobytes(), crc))
    width = kind.bit_width // 8
    first, last = array.offset * width, (array.offset + len(array)) * width
    return zlib.crc32(memoryview(array.buffers()[1])[first:last], crc)


def _head(kind: int, length: int, crc: int) -> int:
    return zlib.crc32(bytes([kind, *length.to_bytes(8, "little")]), crc)


def _bounds(array: pa.Array) -> npt.NDArray[np.signedinteger[Any]]:
    """Return where each text or list of an array begins, and where the last one ends."""
    kind: Any = np.int64 if array.type.id in _LARGE else np.int32
    return np.frombuffer(array.buffers()[1], kind)[array.offset : array.offset + len(array) + 1]


def _bits(array: pa.BooleanArray) -> bytes:
    return np.packbits(array.to_numpy(zero_copy_only=False)).tobytes()
