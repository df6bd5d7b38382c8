"""Add and verify checksums of stored batches: Lance files have none, and most flipped bits read as other values."""

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
    """Add checksums of a batch's metadata, and of columns that Lance reads back in the form that was written."""
    metadata = dict(batch.schema.metadata or {})
    sums = {name: _column(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    return batch.replace_schema_metadata({**metadata, _KEY: json.dumps({**sums, _METADATA: _metadata(metadata)})})


def without_checksums(batch: pa.RecordBatch, whole: bool) -> pa.RecordBatch:
    """Verify and remove the checksums; the batch may hold only some columns.

    Args:
        whole: whether the batch has all rows, so that its columns can be verified.

    Raises:
        ValueError: a checksum does not match.
    """
    metadata = dict(batch.schema.metadata or {})
    if _KEY not in metadata:  # written by a version without checksums
        return batch
    sums = json.loads(metadata.pop(_KEY))
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
    """Whether Lance reads values of a type back in the form in which they were written."""
    tests = pa.types
    if tests.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if tests.is_list(kind) or tests.is_large_list(kind):
        return _is_plain(kind.value_type)
    return bool(tests.is_integer(kind) or tests.is_floating(kind) or tests.is_boolean(kind) or _is_text(kind))


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _array(array: pa.Array, crc: int) -> int:
    """Compute a checksum that ignores the content of NULL slots and the array's offset in its buffers."""
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
