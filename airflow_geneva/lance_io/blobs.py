"""Conversion between Lance's blob columns and the plain bytes that UDFs read and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

BLOB = "lance.blob.v2"
_KEY = b"lance-encoding:blob"


def is_blob_type(data_type: pa.DataType) -> bool:
    return getattr(data_type, "extension_name", "") == BLOB


def is_blob(field: pa.Field) -> bool:
    """Whether a column is stored as blobs; only pylance's ``write_fragments`` can write blobs."""
    return (field.metadata or {}).get(_KEY) == b"true" or is_blob_type(field.type)


def blob_field(name: str) -> pa.Field:
    """Return a nullable blob field."""
    import lance

    return lance.blob_field(name)


def as_blobs(values: Any) -> pa.Array:
    """Convert bytes to an array of Lance's blob type; the older kind of blob column holds plain bytes.

    Args:
        values: an Arrow array or a sequence of bytes and None.
    """
    import lance
    import pyarrow as pa

    if not isinstance(values, pa.Array):
        return lance.blob_array(list(values))
    blob = blob_field("").type
    if values.type == blob:
        return values
    # Built from Arrow buffers: going through Python objects would copy each value.
    parts = [pa.nulls(len(values), field.type) for field in blob.storage_type]
    parts[blob.storage_type.get_field_index("data")] = values.cast(pa.large_binary())
    storage = pa.StructArray.from_arrays(parts, fields=list(blob.storage_type), mask=values.is_null())
    return pa.ExtensionArray.from_storage(blob, storage)


def as_bytes(values: pa.Array) -> pa.Array:
    """Return an array that any Lance file can hold: blobs as bytes, other types unchanged."""
    import pyarrow.compute as pc

    return pc.struct_field(values.storage, "data") if is_blob_type(values.type) else values
