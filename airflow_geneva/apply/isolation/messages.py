"""Messages between a process and its UDF worker process: a JSON header and bytes."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import pyarrow as pa

from airflow_geneva.lance_io.arrays import convert_array, to_storage

_LANCE_TYPE = b"lance."
_SIZES = struct.Struct("<IQ")


def send(pipe: int, header: dict[str, Any], body: Any = b"") -> None:
    """Write one message; `OSError` if the reader is gone."""
    head = json.dumps(header).encode()
    view = memoryview(body)
    _write(pipe, memoryview(_SIZES.pack(len(head), view.nbytes) + head))
    _write(pipe, view)


def receive(pipe: int) -> tuple[dict[str, Any], bytearray]:
    """Read one message; `EOFError` if the writer is gone, even in the middle of a message."""
    head_size, body_size = _SIZES.unpack(_read(pipe, _SIZES.size))
    return json.loads(_read(pipe, head_size)), _read(pipe, body_size)


def batch_to_bytes(batch: pa.RecordBatch) -> pa.Buffer:
    """Serialize a batch in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def batch_from_bytes(data: bytearray) -> pa.RecordBatch:
    """Deserialize a batch from `batch_to_bytes`, without copying."""
    stream = pa.ipc.open_stream(pa.py_buffer(data))
    if _LANCE_TYPE in stream.schema.serialize().to_pybytes():
        # Importing the module registers Lance's extension types with Arrow.
        import lance.arrow  # noqa: F401

        stream = pa.ipc.open_stream(pa.py_buffer(data))
    return stream.read_next_batch()


def values_to_bytes(values: pa.Array) -> pa.Buffer:
    """Serialize an array without extension types, which not every process has registered."""
    return batch_to_bytes(pa.record_batch([to_storage(values)], names=["values"]))


def values_from_bytes(data: bytearray, data_type: pa.DataType) -> pa.Array:
    """Deserialize an array of the given type from `values_to_bytes`."""
    return convert_array(batch_from_bytes(data).column(0), data_type)


def _write(pipe: int, view: memoryview) -> None:
    view = view.cast("B")
    while view.nbytes:
        view = view[os.write(pipe, view) :]


def _read(pipe: int, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view.nbytes:
        count = os.readv(pipe, [view])
        if count == 0:
            raise EOFError
        view = view[count:]
    return data
