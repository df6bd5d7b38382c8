"""Lance's blobs: bytes to whoever computes or reads them, a type of their own to the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

BLOB = "lance.blob.v2"
_KEY = b"lance-encoding:blob"


def is_blob_type(data_type: pa.DataType) -> bool:
    return getattr(data_type, "extension_name", "") == BLOB


def is_blob(field: pa.Field) -> bool:
    """Whether a column is stored as blobs, which only ``write_fragments`` can write."""
    return (field.metadata or {}).get(_KEY) == b"true" or is_blob_type(field.type)


def blob_field(name: str) -> pa.Field:
    """A column of blobs that may be NULL."""
    import lance

    return lance.blob_field(name)


def as_blobs(values: Any) -> pa.Array:
    """Bytes as an array of Lance's blob type; the older kind of blob column holds plain bytes.

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
    # Not through Python objects, of which each would be a copy.
    parts = [pa.nulls(len(values), field.type) for field in blob.storage_type]
    parts[blob.storage_type.get_field_index("data")] = values.cast(pa.large_binary())
    storage = pa.StructArray.from_arrays(parts, fields=list(blob.storage_type), mask=values.is_null())
    return pa.ExtensionArray.from_storage(blob, storage)


def as_bytes(values: pa.Array) -> pa.Array:
    """An array in a form that any Lance file can hold: blobs as bytes, all others as they are."""
    import pyarrow.compute as pc

    return pc.struct_field(values.storage, "data") if is_blob_type(values.type) else values
