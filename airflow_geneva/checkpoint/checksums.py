"""Checksums of stored batches: pylance's files have none, and most flipped bits give other values without an error."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_KEY = b"crc32"
_METADATA = ""


def with_checksums(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch with checksums of its metadata and its columns, of types that are read back as they were written."""
    metadata = dict(batch.schema.metadata or {})
    sums = {name: _column(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    return batch.replace_schema_metadata({**metadata, _KEY: json.dumps({**sums, _METADATA: _metadata(metadata)})})


def without_checksums(batch: pa.RecordBatch, whole: bool) -> pa.RecordBatch:
    """A batch as it was before :func:`with_checksums`, some of its columns perhaps.

    Args:
        whole: whether it has all rows, so that its columns can be checked.

    Raises:
        ValueError: something is not what was stored.
    """
    metadata = dict(batch.schema.metadata or {})
    if _KEY not in metadata:  # from before there were any
        return batch
    sums = json.loads(metadata.pop(_KEY))
    if not isinstance(sums, dict) or sums.get(_METADATA) != _metadata(metadata):
        raise ValueError("its metadata is not what was stored")
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in sums or (whole and sums[name] is not None and sums[name] != _column(column)):
            raise ValueError(f"column {name} is not what was stored")
    return batch.replace_schema_metadata(metadata or None)


def _metadata(metadata: Mapping[bytes, bytes]) -> int:
    return zlib.crc32(repr(sorted(metadata.items())).encode())


def _column(array: pa.Array) -> int | None:
    return _array(array, 0) if _is_plain(array.type) else None


def _is_plain(kind: pa.DataType) -> bool:
    """Whether values of a type are read back in the very form in which they were written."""
    tests = pa.types
    if tests.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if tests.is_list(kind) or tests.is_large_list(kind):
        return _is_plain(kind.value_type)
    return bool(tests.is_integer(kind) or tests.is_floating(kind) or tests.is_boolean(kind) or _is_text(kind))


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _array(array: pa.Array, crc: int) -> int:
    """The checksum of values, whatever lies in slots that are NULL, and wherever the array begins in its buffers."""
    crc = zlib.crc32(bytes([array.type.id, *len(array).to_bytes(8, "little")]), crc)
    if array.null_count:
        crc = zlib.crc32(_bits(array.is_valid()), crc)
        array = array.drop_null()
    kind = array.type
    if len(array) == 0:
        return crc
    if pa.types.is_struct(kind):
        for child in array.flatten():
            crc = _array(child, crc)
        return crc
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _array(array.flatten(), _array(pc.list_value_length(array), crc))
    if pa.types.is_boolean(kind):
        return zlib.crc32(_bits(array), crc)
    if _is_text(kind):
        array = array.cast(pa.large_binary())
        _, offsets, data = array.buffers()
        bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        return zlib.crc32(memoryview(data or b"")[bounds[0] : bounds[-1]], zlib.crc32(np.diff(bounds).tobytes(), crc))
    width = kind.bit_width // 8
    first, last = array.offset * width, (array.offset + len(array)) * width
    return zlib.crc32(memoryview(array.buffers()[1])[first:last], crc)


def _bits(array: pa.BooleanArray) -> bytes:
    return np.packbits(array.to_numpy(zero_copy_only=False)).tobytes()
