"""Hash the inputs of each row: two keys are equal exactly if all inputs are equal bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import is_binary, is_list, is_string

_BYTES = 16


def row_keys(batch: pa.RecordBatch) -> list[bytes]:
    """Return a 16-byte hash of each row and the schema. NULL, NaN, -0.0 and 0.0 are four different values."""
    start = hashlib.blake2b(str(batch.schema.remove_metadata()).encode(), digest_size=_BYTES)
    keys = []
    for parts in zip(*(_encode(column) for column in batch.columns), strict=True):
        found = start.copy()
        for part in parts:
            found.update(part)
        keys.append(found.digest())
    return keys


def _encode(array: pa.Array) -> Iterator[bytes]:
    """Encode each value so that no value's bytes are a prefix of another value's bytes."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    values = _values(array)
    for valid in array.is_valid().to_pylist():
        yield b"\1" + next(values) if valid else b"\0"


def _values(array: pa.Array) -> Iterator[bytes]:
    """Encode the values that are not NULL."""
    kind = array.type
    array = array.drop_null()
    if is_string(kind) or is_binary(kind):
        for value in array.cast(pa.large_binary()).to_pylist():
            yield len(value).to_bytes(8, "little") + value
    elif is_list(kind):
        items = _encode(array.flatten())
        for length in pc.list_value_length(array).to_pylist():
            yield length.to_bytes(8, "little") + b"".join(next(items) for _ in range(length))
    elif pt.is_struct(kind):
        for parts in zip(*map(_encode, array.flatten()), strict=True) if kind.num_fields else ((),) * len(array):
            yield b"".join(parts)
    elif pt.is_boolean(kind) or not (pt.is_primitive(kind) or pt.is_decimal(kind)):
        for value in array.to_pylist():
            text = repr(value).encode()
            yield len(text).to_bytes(8, "little") + text
    else:
        width = kind.bit_width // 8
        data = memoryview(array.buffers()[1] or b"")[array.offset * width : (array.offset + len(array)) * width]
        for at in range(0, len(data), width):
            yield bytes(data[at : at + width])
