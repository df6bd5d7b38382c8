"""Classify Arrow types, convert Arrow arrays without changing values, and check which types pylance can store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.blobs import is_blob, is_blob_type
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors, reason_of
from airflow_geneva.errors import InvalidInput

DATA_STORAGE_VERSION: Final = "2.2"
"""The newest stable storage version, in which views are stored."""
_LEGACY_STORAGE = "0.1"
_WITHOUT_BLOBS = ("2.0", "2.1")
_NOWHERE = -1
_LEVELS_OF_TWO_ITEMS = 6
"""Lists that are nested deeper get one item in a sample, whose size would double with each level."""


def is_string(t: pa.DataType) -> bool:
    """Whether a type is a string of any layout."""
    return bool(pt.is_string(t) or pt.is_large_string(t) or pt.is_string_view(t))


def is_binary(t: pa.DataType) -> bool:
    """Whether a type is binary of any layout."""
    return bool(pt.is_binary(t) or pt.is_large_binary(t) or pt.is_binary_view(t) or pt.is_fixed_size_binary(t))


def sortable(values: pa.Array) -> pa.Array:
    """Return values in a layout that pyarrow sorts: dictionaries and half floats are converted."""
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values.cast(pa.float32()) if pt.is_float16(values.type) else values


def is_list(t: pa.DataType) -> bool:
    """Whether a type is a list, large list or fixed-size list."""
    return bool(pt.is_list(t) or pt.is_large_list(t) or pt.is_fixed_size_list(t))


_FAMILIES: tuple[Callable[[pa.DataType], bool], ...] = (
    lambda t: pt.is_integer(t) or pt.is_floating(t) or pt.is_decimal(t),
    is_string,
    lambda t: pt.is_binary(t) or pt.is_large_binary(t) or pt.is_binary_view(t),
    pt.is_timestamp,
    pt.is_date,
    pt.is_time,
    pt.is_duration,
)


def castable(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast changes only the layout of values; Arrow itself would also parse and print numbers."""
    if found == wanted or pt.is_null(found):
        return True
    if isinstance(wanted, pa.BaseExtensionType):
        return castable(storage_type(found), storage_type(wanted))
    if pt.is_timestamp(found) and pt.is_timestamp(wanted):
        return (found.tz is None) == (wanted.tz is None)
    if pt.is_dictionary(found) or pt.is_dictionary(wanted):
        plain_found = found.value_type if pt.is_dictionary(found) else found
        plain_wanted = wanted.value_type if pt.is_dictionary(wanted) else wanted
        return castable(plain_found, plain_wanted)
    if is_list(found) and is_list(wanted):
        return castable(found.value_type, wanted.value_type)
    if pt.is_map(found) and pt.is_map(wanted):
        return castable(found.key_type, wanted.key_type) and castable(found.item_type, wanted.item_type)
    if pt.is_struct(found) and pt.is_struct(wanted):
        types = {field.name: field.type for field in wanted}
        return all(field.name in types and castable(field.type, types[field.name]) for field in found)
    return any(family(found) and family(wanted) for family in _FAMILIES)


def map_leaves(
    data_type: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType], nullable: bool = False
) -> pa.DataType:
    """Return a type in which every leaf type (one that is not nested) and every extension type is replaced.

    Args:
        nullable: let everything in nested types be NULL.
    """

    def inner(field: pa.Field) -> pa.Field:
        found = field.with_type(map_leaves(field.type, leaf, nullable))
        return found.with_nullable(True) if nullable else found

    if isinstance(data_type, pa.BaseExtensionType):
        return leaf(data_type)
    if pt.is_struct(data_type):
        return pa.struct([inner(field) for field in data_type])
    if pt.is_map(data_type):
        # pyarrow always reads the fields of a map back under these names.
        key = inner(data_type.key_field).with_name("key").with_nullable(False)
        item = inner(data_type.item_field).with_name("value")
        return pa.map_(key, item, data_type.keys_sorted)
    if pt.is_fixed_size_list(data_type):
        # pylance does not keep the NOT NULL flag of fixed-size list items.
        return pa.list_(inner(data_type.value_field).with_nullable(True), data_type.list_size)
    if pt.is_large_list(data_type):
        return pa.large_list(inner(data_type.value_field))
    if pt.is_list(data_type):
        return pa.list_(inner(data_type.value_field))
    return leaf(data_type)


def storage_type(data_type: pa.DataType) -> pa.DataType:
    """Return a type in which every extension type is replaced by its storage type."""
    return map_leaves(
        data_type, lambda found: storage_type(found.storage_type) if isinstance(found, pa.BaseExtensionType) else found
    )


def stored_as(data_type: pa.DataType) -> pa.DataType:
    """Return the type that pylance reads back after writing this type: same values, sometimes another layout."""

    def leaf(found: pa.DataType) -> pa.DataType:
        if pt.is_string_view(found):
            return pa.string()
        if pt.is_binary_view(found):
            return pa.binary()
        if pt.is_dictionary(found) and found.ordered:
            return pa.dictionary(found.index_type, found.value_type)
        return pa.json_() if getattr(found, "extension_name", "") == "arrow.json" else found

    return map_leaves(data_type, leaf)


def field_at(field: pa.Field, path: Sequence[str]) -> pa.Field | None:
    """Return the field at a path of names through nested structs; None if it does not exist."""
    for name in path:
        if not pa.types.is_struct(field.type) or (at := field.type.get_field_index(name)) < 0:
            return None
        field = field.type.field(at)
    return field


def find_field(fields: Mapping[str, pa.Field], path: str) -> pa.Field | None:
    """Return a column, or a struct's field by a path such as `passage.text`; None if it does not exist."""
    root, *names = path.split(".")
    return None if root not in fields else field_at(fields[root], names)


def quoted(path: str) -> str:
    """Quote a column, or a path to a struct's field, for SQL; Lance allows no dot in a name."""
    return ".".join(f"`{name}`" for name in path.split("."))


def column_at(batch: pa.RecordBatch | pa.Table, path: str) -> pa.Array | pa.ChunkedArray:
    """Return the values of a column, or of a struct's field by its path; NULL where the struct is NULL."""
    root, *names = path.split(".")
    values = batch.column(root)
    return pc.struct_field(values, names) if names else values


def nested_types(data_type: pa.DataType) -> Iterator[pa.DataType]:
    """Yield a type and all types inside it, but not the storage type of an extension type."""
    yield data_type
    for at in range(0 if isinstance(data_type, pa.BaseExtensionType) else data_type.num_fields):
        yield from nested_types(data_type.field(at).type)


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """Combine a table into one record batch and keep its schema metadata."""
    combined = table.combine_chunks().to_batches()
    if len(combined) == 1:
        return combined[0]
    if not combined:
        return pa.record_batch([pa.nulls(0, field.type) for field in table.schema], schema=table.schema)
    return pa.concat_batches(combined)


def copy_if_sliced(values: pa.Array) -> pa.Array:
    """Copy a nested array that starts inside its buffers, because pylance cannot write it; return others unchanged."""
    return pa.concat_arrays([values]) if _parts(values) and _is_sliced(values) else values


def copy_sliced_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch([copy_if_sliced(column) for column in batch.columns], schema=batch.schema)


Rows = TypeVar("Rows", pa.Array, pa.RecordBatch, pa.Table)


def rows_at(values: Rows, positions: pa.Array) -> Rows:
    """Return the rows at positions; NULL where a position is NULL.

    Use this function for every take and in place of a filter, which is several times as slow: from a sliced array of
    nested fixed-size lists, pyarrow takes values of the wrong rows (seen with 21 and 26), and it takes no string views,
    which SQL functions such as `left` return.
    """
    if isinstance(values, pa.Array):
        return _cast(_without_slices(_cast(values, _held_as(values.type))).take(positions), values.type)
    if not any(map(_is_view, values.schema.types)):
        return _without_slices(values).take(positions)
    held = [_cast(column, _held_as(column.type)) for column in values.columns]
    taken = _without_slices(type(values).from_arrays(held, names=values.schema.names)).take(positions)
    made = [_cast(column, kind) for column, kind in zip(taken.columns, values.schema.types, strict=True)]
    return type(values).from_arrays(made, schema=values.schema)


def _is_view(data_type: pa.DataType) -> bool:
    return bool(pt.is_string_view(data_type) or pt.is_binary_view(data_type))


def _held_as(data_type: pa.DataType) -> pa.DataType:
    """Return the type of the same values that pyarrow can take."""
    if not _is_view(data_type):
        return data_type
    return pa.large_string() if pt.is_string_view(data_type) else pa.large_binary()


def _cast(values: Any, data_type: pa.DataType) -> Any:
    return values if values.type == data_type else values.cast(data_type)


def _without_slices(values: Rows) -> Rows:
    if isinstance(values, pa.Array):
        return copy_if_sliced(values) if _holds_nested_fixed_lists(values.type) else values
    if not any(_holds_nested_fixed_lists(field.type) for field in values.schema):
        return values
    if isinstance(values, pa.RecordBatch):
        return pa.record_batch([_without_slices(column) for column in values.columns], schema=values.schema)
    batches = [_without_slices(batch) for batch in values.to_batches()]
    return pa.Table.from_batches(batches, schema=values.schema)


def _holds_nested_fixed_lists(data_type: pa.DataType) -> bool:
    lists = (found for found in nested_types(storage_type(data_type)) if pt.is_fixed_size_list(found))
    return any(pt.is_fixed_size_list(found.value_type) for found in lists)


def _is_sliced(values: pa.Array) -> bool:
    # pylance handles values that end before their buffers do.
    if values.offset:
        return True
    if len(values) and hasattr(values, "offsets") and values.offsets[0].as_py():
        return True
    return any(_is_sliced(part) for part in _parts(values))


def _parts(values: pa.Array) -> list[pa.Array]:
    found = values.type
    if isinstance(found, pa.BaseExtensionType):
        return _parts(values.storage)
    if pt.is_struct(found):
        return [values.field(at) for at in range(found.num_fields)]
    if pt.is_map(found):
        return [values.keys, values.items]
    if pt.is_list(found) or pt.is_large_list(found) or pt.is_fixed_size_list(found):
        return [values.values]
    return []


def to_storage(values: pa.Array) -> pa.Array:
    """Remove extension types, which other processes may not have registered, and keep the buffers."""
    return _retyped(values, storage_type(values.type))


def convert_array(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Convert an array to another type with the same values; raise pyarrow's error if that is impossible."""
    if values.type == data_type:
        return _retyped(values, data_type)
    stored, wanted = to_storage(values), storage_type(data_type)
    return _retyped(stored if stored.type == wanted else stored.cast(wanted), data_type)


def convert_exactly(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Convert an array to a type that it is castable to; pyarrow's error if that would round decimals or integers."""
    made = convert_array(values, data_type)
    if _rounds(values.type, data_type) and not convert_array(made, values.type).equals(values):
        raise pa.ArrowInvalid(f"Converting {values.type} to {data_type} would round values")
    return made


def _rounds(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether pyarrow may round values without an error: between decimals and floats, and to floats of 16 bits."""
    kinds = [list(nested_types(storage_type(kind))) for kind in (found, wanted)]
    decimals, floats = ([any(map(is_one, kind)) for kind in kinds] for is_one in (pt.is_decimal, pt.is_floating))
    to_half = any(map(pt.is_integer, kinds[0])) and any(map(pt.is_float16, kinds[1]))
    return (decimals[0] and floats[1]) or (floats[0] and decimals[1]) or to_half


def _retyped(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    # Arrow ignores the names of list and map items when it compares types; pylance does not.
    same = values.type == data_type and str(values.type) == str(data_type)
    return values if same else pa.array(_Retyped(values, data_type))


class _Retyped:
    """Give :func:`pyarrow.array` the buffers of an array with another type of the same storage."""

    def __init__(self, values: pa.Array, data_type: pa.DataType) -> None:
        self.values = values
        self.data_type = data_type

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self.data_type.__arrow_c_schema__(), self.values.__arrow_c_array__()[1]


def check_storable(fields: Iterable[pa.Field], version: str, what: str) -> None:
    """Refuse columns whose types pylance cannot write and read back, with NULL on every level.

    Args:
        version: the storage version of the table.
    """
    for field in fields:
        if not (reason := _reason_against(field, version)):
            continue
        advice = "Choose another type."
        if version != DATA_STORAGE_VERSION and not _reason_against(field, DATA_STORAGE_VERSION):
            advice = (
                f"Storage version {DATA_STORAGE_VERSION} can: copy the table with "
                "db.copy_table(..., rewrite=True), which gives it that version."
            )
        raise InvalidInput(
            f"Column {field.name!r} of {what} cannot be {field.type}: pylance cannot store it ({reason}). {advice}"
        )


def _reason_against(field: pa.Field, version: str) -> str | None:
    """Return why a new column of this type cannot be added to a table of a storage version; None if it can."""
    if version == _LEGACY_STORAGE:
        return f"Lance cannot add empty columns to tables of the legacy storage version {version}"
    if is_blob(field):
        if is_blob_type(field.type) and version in _WITHOUT_BLOBS:
            return f"blobs need storage version {DATA_STORAGE_VERSION} or later, and the table has {version}"
        return None
    # Lance's extension types are not hashable, so the cache key is the serialized schema.
    schema = pa.schema([field.remove_metadata()]).serialize().to_pybytes()
    return _reason_against_type(schema, version)


@functools.lru_cache(maxsize=256)
def _reason_against_type(schema: bytes, version: str) -> str | None:
    values = _sample(pa.ipc.read_schema(pa.py_buffer(schema)).field(0).type)
    try:
        back = _stored(values, version)
    except EngineError as error:
        return reason_of(error)
    return None if back.to_pylist() == values.to_pylist() else f"storage version {version} returns other values"


def why_not_storable(values: pa.Array) -> str | None:
    """Return pylance's reason for refusing to store values; None if it can store them."""
    try:
        _stored(values, DATA_STORAGE_VERSION)
    except EngineError as error:
        return reason_of(error)
    return None


def _stored(values: pa.Array, version: Any) -> pa.ChunkedArray:
    import lance

    rows = pa.table({"row": pa.array(range(len(values))), "values": values})
    with engine_errors():
        return lance.write_dataset(rows, "memory://", data_storage_version=version).to_table().column("values")


def _sample(data_type: pa.DataType) -> pa.Array:
    """Make non-empty values, and for each level of nesting a value with NULL and a value with an empty list there."""
    # In the storage type, items of a fixed-size list may be NULL: Arrow keeps such items below a NULL list.
    stored = storage_type(data_type)
    top = pa.field("", stored)
    filled = _value(top, _NOWHERE, None)
    holes: tuple[list[Any] | None, ...] = (None, [])
    rows = [_value(top, level, hole) for level in range(_levels(stored)) for hole in holes]
    try:
        return convert_array(pa.array([filled, *rows, filled], stored), data_type)
    except pa.ArrowException:
        return pa.nulls(len(rows) + 2, data_type)


def _levels(data_type: pa.DataType) -> int:
    return 1 + max((_levels(data_type.field(at).type) for at in range(data_type.num_fields)), default=0)


def _value(field: pa.Field, level: int, hole: list[Any] | None) -> Any:
    """Make a value whose parts at one level of nesting, counted from 0, are NULL or empty lists (`hole`)."""
    data_type = field.type
    if pt.is_null(data_type) or (level == 0 and hole is None and field.nullable):
        return None
    if pt.is_struct(data_type):
        return {part.name: _value(part, level - 1, hole) for part in data_type}
    if pt.is_fixed_size_list(data_type):
        items = [_value(data_type.value_field, _NOWHERE, hole)] * data_type.list_size
        return [_value(data_type.value_field, level - 1, hole), *items[1:]] if items else []
    if level == 0 and hole is not None and data_type.num_fields:
        return hole
    if pt.is_map(data_type):
        return [(_value(data_type.key_field, _NOWHERE, hole), _value(data_type.item_field, level - 1, hole))]
    if hasattr(data_type, "value_field"):
        more = [_NOWHERE] if _levels(data_type) <= _LEVELS_OF_TWO_ITEMS else []
        return [_value(data_type.value_field, at, hole) for at in (level - 1, *more)]
    return _leaf(data_type)


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
