"""Families of Arrow types, and which types hold the same values in different layouts."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


def is_string(t: pa.DataType) -> bool:
    """Whether a type is a string of any layout."""
    return bool(pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t))


def is_binary(t: pa.DataType) -> bool:
    """Whether a type is binary of any layout."""
    return bool(
        pa.types.is_binary(t)
        or pa.types.is_large_binary(t)
        or pa.types.is_binary_view(t)
        or pa.types.is_fixed_size_binary(t)
    )


def is_list(t: pa.DataType) -> bool:
    """Whether a type is a list, large list or fixed-size list."""
    return bool(pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t))


_FAMILIES: tuple[Callable[[pa.DataType], bool], ...] = (
    lambda t: pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t),
    is_string,
    lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_binary_view(t),
    pa.types.is_timestamp,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
)


def castable(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast changes only the layout of values; Arrow itself would also parse and print numbers."""
    if found == wanted or pa.types.is_null(found):
        return True
    if isinstance(wanted, pa.BaseExtensionType):
        return castable(storage_type(found), storage_type(wanted))
    if pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted):
        return (found.tz is None) == (wanted.tz is None)
    if pa.types.is_dictionary(found) or pa.types.is_dictionary(wanted):
        plain_found = found.value_type if pa.types.is_dictionary(found) else found
        plain_wanted = wanted.value_type if pa.types.is_dictionary(wanted) else wanted
        return castable(plain_found, plain_wanted)
    if is_list(found) and is_list(wanted):
        return castable(found.value_type, wanted.value_type)
    if pa.types.is_map(found) and pa.types.is_map(wanted):
        return castable(found.key_type, wanted.key_type) and castable(found.item_type, wanted.item_type)
    if pa.types.is_struct(found) and pa.types.is_struct(wanted):
        types = {field.name: field.type for field in wanted}
        return all(field.name in types and castable(field.type, types[field.name]) for field in found)
    return any(family(found) and family(wanted) for family in _FAMILIES)


def map_leaves(data_type: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type in which every leaf type (one that is not nested) and every extension type is replaced."""

    def inner(field: pa.Field) -> pa.Field:
        return field.with_type(map_leaves(field.type, leaf))

    if isinstance(data_type, pa.BaseExtensionType):
        return leaf(data_type)
    if pa.types.is_struct(data_type):
        return pa.struct([inner(field) for field in data_type])
    if pa.types.is_map(data_type):
        # pyarrow always reads the fields of a map back under these names.
        key, item = inner(data_type.key_field).with_name("key"), inner(data_type.item_field).with_name("value")
        return pa.map_(key, item, data_type.keys_sorted)
    if pa.types.is_fixed_size_list(data_type):
        # pylance does not keep the NOT NULL flag of fixed-size list items.
        return pa.list_(inner(data_type.value_field).with_nullable(True), data_type.list_size)
    if pa.types.is_large_list(data_type):
        return pa.large_list(inner(data_type.value_field))
    if pa.types.is_list(data_type):
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
        if pa.types.is_string_view(found):
            return pa.string()
        if pa.types.is_binary_view(found):
            return pa.binary()
        if pa.types.is_dictionary(found) and found.ordered:
            return pa.dictionary(found.index_type, found.value_type)
        return pa.json_() if getattr(found, "extension_name", "") == "arrow.json" else found

    return map_leaves(data_type, leaf)


def leaf_types(data_type: pa.DataType) -> list[pa.DataType]:
    """Return all leaf types and extension types inside a type."""
    found: list[pa.DataType] = []

    def note(leaf: pa.DataType) -> pa.DataType:
        found.append(leaf)
        return leaf

    map_leaves(data_type, note)
    return found
