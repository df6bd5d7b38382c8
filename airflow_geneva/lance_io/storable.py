"""Find out which Arrow types pylance can store, by storing a sample in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.errors import InvalidInput
from airflow_geneva.lance_io.arrays import convert_array
from airflow_geneva.lance_io.arrow_types import storage_type
from airflow_geneva.lance_io.blobs import is_blob
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors

_NOWHERE = -1


def check_storable(fields: Iterable[pa.Field], version: str, what: str) -> None:
    """Refuse columns whose types pylance cannot write and read back, with NULL on every level.

    Args:
        version: the data storage version of their table.
        what: description of the table or view, for error messages.

    Raises:
        InvalidInput: names the column, its type, and pylance's reason.
    """
    for field in fields:
        # Lance's extension types are not hashable, so the cache key is the serialized schema.
        schema = pa.schema([field.remove_metadata()]).serialize().to_pybytes()
        reason = None if is_blob(field) else _reason_against_type(schema, version)
        if reason:
            raise InvalidInput(
                f"Column {field.name!r} of {what} cannot be {field.type}: pylance cannot store it ({reason}). Choose "
                "another type."
            )


@functools.lru_cache(maxsize=256)
def _reason_against_type(schema: bytes, version: str) -> str | None:
    values = _sample(pa.ipc.read_schema(pa.py_buffer(schema)).field(0).type)
    try:
        back = _stored(values, version)
    except EngineError as error:
        return _pylance_reason(error)
    return None if back.to_pylist() == values.to_pylist() else f"storage version {version} returns other values"


def why_not_storable(values: pa.Array) -> str | None:
    """Return pylance's reason for not storing values; None if it can store them."""
    try:
        _stored(values, "2.2")
    except EngineError as error:
        return _pylance_reason(error)
    return None


def _stored(values: pa.Array, version: Any) -> pa.ChunkedArray:
    import lance

    rows = pa.table({"row": pa.array(range(len(values))), "values": values})
    with engine_errors():
        return lance.write_dataset(rows, "memory://", data_storage_version=version).to_table().column("values")


def _pylance_reason(error: EngineError) -> str:
    return str(error).split(", /")[0].strip()


def _sample(data_type: pa.DataType) -> pa.Array:
    """Make filled values, and for each level of nesting values that are NULL there and values that are empty there."""
    # In the storage type, items of a fixed-size list may be NULL: Arrow keeps such items below a NULL list.
    stored = storage_type(data_type)
    filled = _value(stored, _NOWHERE, None)
    holes: tuple[list[Any] | None, ...] = (None, [])
    rows = [_value(stored, level, hole) for level in range(_levels(stored)) for hole in holes]
    try:
        return convert_array(pa.array([filled, *rows, filled], stored), data_type)
    except pa.ArrowException:
        return pa.nulls(len(rows) + 2, data_type)


def _levels(data_type: pa.DataType) -> int:
    return 1 + max((_levels(data_type.field(at).type) for at in range(data_type.num_fields)), default=0)


def _value(data_type: pa.DataType, level: int, hole: list[Any] | None) -> Any:
    """Make a value that is filled but for its parts at one level, counted from 0; they are NULL or empty lists."""
    if pt.is_null(data_type) or (level == 0 and hole is None):
        return None
    if pt.is_struct(data_type):
        return {field.name: _part(field, level, hole) for field in data_type}
    if pt.is_fixed_size_list(data_type):
        items = [_value(data_type.value_type, _NOWHERE, hole)] * data_type.list_size
        return [_part(data_type.value_field, level, hole), *items[1:]] if items else []
    if pt.is_map(data_type):
        key = _value(data_type.key_type, _NOWHERE, hole)
        return [] if level == 0 else [(key, _part(data_type.item_field, level, hole))]
    if hasattr(data_type, "value_field"):
        filled = _value(data_type.value_type, _NOWHERE, hole)
        return [] if level == 0 else [_part(data_type.value_field, level, hole), filled]
    return _leaf(data_type)


def _part(field: pa.Field, level: int, hole: list[Any] | None) -> Any:
    skipped = level == 1 and hole is None and not field.nullable
    return _value(field.type, _NOWHERE if skipped else level - 1, hole)


def _leaf(data_type: pa.DataType) -> Any:
    if pt.is_dictionary(data_type):
        return _leaf(data_type.value_type)
    if pt.is_fixed_size_binary(data_type):
        return b"1" * data_type.byte_width
    if pt.is_binary(data_type) or pt.is_large_binary(data_type) or pt.is_binary_view(data_type):
        return b"1"
    if pt.is_string(data_type) or pt.is_large_string(data_type) or pt.is_string_view(data_type):
        return "1"
    if pt.is_decimal(data_type):
        return Decimal(1).scaleb(-data_type.scale)
    if pt.is_boolean(data_type):
        return True
    return 0 if pt.is_temporal(data_type) else 1
