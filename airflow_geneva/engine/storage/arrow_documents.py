"""Read Arrow data that others may have written: its messages are measured before any buffer is decompressed.

A message of Arrow's streaming format is a flatbuffer, which says how many rows, arrays and buffers it has, and a body
of buffers. A compressed buffer begins with its expanded size, which is exactly what Arrow allocates.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

MOST_BYTES = 128 << 20
"""The most bytes of a document's buffers, expanded."""

MOST_ROWS = 1 << 24
MOST_ARRAYS = 1 << 14
"""The most arrays of all record batches together, nested ones included."""

_MOST_FIELDS = 4_096
_MOST_TEXT = 16 << 20
_DEEPEST = 64
_FILE = b"ARROW1\0\0"
"""The first bytes of Arrow's file format, after which a stream follows."""

_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_UNSUPPORTED = range(22, 27)
"""Types whose values may share bytes, and so expand when they are read: run-end encoded values, and views."""


def to_bytes(batch: pa.RecordBatch, compression: str | None = None) -> bytes:
    """Serialize a document."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_bytes(data: bytes, columns: Sequence[str] | None = None, most_bytes: int = MOST_BYTES) -> pa.RecordBatch:
    """Deserialize a document of Arrow's streaming or file format, whose values are valid.

    Args:
        columns: names of top-level columns; by default all.

    Raises:
        ValueError: it is damaged, has more than `most_bytes` bytes expanded, or too many rows, columns or arrays.
    """
    stream = pa.py_buffer(data)
    if data[: len(_FILE)] == _FILE:
        stream = stream.slice(len(_FILE))
    try:
        count, options = _measure(stream, most_bytes), None
        if columns is not None:
            with pa.ipc.open_stream(stream) as reader:
                places = [_position(reader.schema, name) for name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=places)
        with pa.ipc.open_stream(stream, options=options) as reader:
            batch = reader.read_next_batch() if count == 1 else _joined(reader.read_all())
        batch = batch if columns is None else batch.select(list(columns))
        batch.validate(full=True)
    except (pa.ArrowException, OSError, LookupError, struct.error) as error:
        raise ValueError(f"it is not Arrow data of this package, or damaged: {error}") from error
    return batch


def read_schema(data: bytes) -> pa.Schema:
    """Deserialize a schema; `ValueError` if it is damaged or too large."""
    stream = pa.py_buffer(data)
    try:
        _measure(stream, 0)
        return pa.ipc.read_schema(stream)
    except (pa.ArrowException, OSError, LookupError, struct.error) as error:
        raise ValueError(f"it is not a schema of Arrow, or damaged: {error}") from error


def _joined(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _position(schema: pa.Schema, name: str) -> int:
    at: int = schema.get_field_index(name)
    if at < 0:
        raise ValueError(f"it has no column {name!r}")
    return at


def _measure(stream: pa.Buffer, most_bytes: int) -> int:
    """Return the number of record batches of a stream; `ValueError` if it has too much of anything.

    Neither its schema nor a buffer has been read then.
    """
    batches = rows = arrays = size = 0
    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(stream)):
        metadata = message.metadata.to_pybytes()
        head = _Flat.root(metadata)
        kind, header = head.byte(1), head.table(2)
        if kind == _SCHEMA and header is not None:
            _measure_schema(header)
            continue
        if kind == _DICTIONARY and header is not None:
            header = header.table(1)
        else:
            batches += 1
        if kind not in (_DICTIONARY, _BATCH) or header is None:
            raise ValueError(f"it has a message of kind {kind}")
        rows += header.long(0)
        arrays += header.count(1)
        size += _expanded(header, message.body)
        for what, found, most in (
            ("rows", rows, MOST_ROWS), ("arrays", arrays, MOST_ARRAYS), ("bytes", size, most_bytes)
        ):  # fmt: skip
            if found > most:
                raise ValueError(f"it has more than {most:,} {what}")
    return batches


def _expanded(header: _Flat, body: pa.Buffer | None) -> int:
    """Return the bytes that Arrow allocates for the buffers of a record batch."""
    there, compressed, total = 0 if body is None else body.size, header.has(3), 0
    for offset, length in header.pairs(2):
        if not 0 <= offset <= offset + length <= there:
            raise ValueError("a buffer lies outside of its message")
        expanded = length
        if compressed and length and body is not None:
            expanded = int.from_bytes(body.slice(offset, min(length, 8)).to_pybytes(), "little", signed=True)
            if expanded < -1:
                raise ValueError("a buffer has a negative size")
            expanded = length if expanded == -1 else expanded  # not compressed, as it would not get smaller
        total += expanded
    return total


def _measure_schema(schema: _Flat) -> None:
    """Count fields, at every depth, and bytes of names and metadata: parts of a flatbuffer may be used many times."""
    waiting, fields, text = [(field, 1) for field in schema.tables(1)], 0, 0
    described = [schema]
    while waiting:
        field, depth = waiting.pop()
        fields += 1
        text += field.count(0)
        if fields + len(waiting) > _MOST_FIELDS or depth > _DEEPEST:
            raise ValueError(f"it has more than {_MOST_FIELDS:,} columns, or columns that are nested too deeply")
        if field.byte(2) in _UNSUPPORTED:
            raise ValueError("it has values that refer to others, such as string views")
        waiting += [(child, depth + 1) for child in field.tables(5)]
        described.append(field)
    pairs = 0
    for at, one in enumerate(described):
        for pair in one.tables(4 if at else 2):
            pairs += 1
            text += pair.count(0) + pair.count(1)
            if text > _MOST_TEXT or pairs > _MOST_FIELDS:
                raise ValueError("it has too much metadata")


class _Flat:
    """A table in a flatbuffer. It raises `struct.error` or IndexError if it leads outside of the bytes."""

    __slots__ = ("_fields", "_size", "at", "data")

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self._fields = at - _int(data, at)[0]
        self._size = _short(data, self._fields)[0]

    @staticmethod
    def root(data: bytes) -> _Flat:
        return _Flat(data, _unsigned(data, 0)[0])

    def _place(self, slot: int) -> int:
        """Return the position of a field; 0 if it has its default value."""
        place = 4 + 2 * slot
        offset: int = _short(self.data, self._fields + place)[0] if place < self._size else 0
        return self.at + offset if offset else 0

    def _vector(self, slot: int) -> tuple[int, int]:
        """Return the number of items of a vector, or of bytes of a text, and where they begin."""
        at = self._place(slot)
        if not at:
            return 0, 0
        at += _unsigned(self.data, at)[0]
        return _unsigned(self.data, at)[0], at + 4

    def byte(self, slot: int) -> int:
        at = self._place(slot)
        return self.data[at] if at else 0

    def long(self, slot: int) -> int:
        at = self._place(slot)
        found: int = _long(self.data, at)[0] if at else 0
        if found < 0:
            raise ValueError("it has a negative number of rows")
        return found

    def has(self, slot: int) -> bool:
        return self._place(slot) > 0

    def table(self, slot: int) -> _Flat | None:
        at = self._place(slot)
        return _Flat(self.data, at + _unsigned(self.data, at)[0]) if at else None

    def count(self, slot: int) -> int:
        return self._vector(slot)[0]

    def tables(self, slot: int) -> list[_Flat]:
        count, start = self._vector(slot)
        if count > _MOST_FIELDS:
            raise ValueError(f"it has more than {_MOST_FIELDS:,} columns, or entries of metadata")
        places = range(start, start + 4 * count, 4)
        return [_Flat(self.data, at + _unsigned(self.data, at)[0]) for at in places]

    def pairs(self, slot: int) -> Iterator[tuple[int, int]]:
        """Return the items of a vector of two 64-bit numbers each."""
        count, start = self._vector(slot)
        if start + 16 * count > len(self.data):
            raise ValueError("a list leads outside of its message")
        return struct.iter_unpack("<qq", self.data[start : start + 16 * count])


_int, _short, _unsigned, _long = (struct.Struct(form).unpack_from for form in ("<i", "<H", "<I", "<q"))
