"""Random Arrow types and arrays of every family that Lance can store, from a seed."""

from __future__ import annotations

import json
import string
import uuid
from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
from lance.arrow import BFloat16Type

from airflow_geneva.engine.lance_io.arrays import convert_array, storage_type

MakeType = Callable[[Random, int], pa.DataType]


def one_of(*types: pa.DataType) -> MakeType:
    return lambda dice, depth: dice.choice(types)


def inner(dice: Random, depth: int) -> pa.Field:
    names = NESTED_LESS if depth <= 1 else tuple(FAMILIES)
    kind = FAMILIES[dice.choice(names)](dice, depth - 1)
    return pa.field("item", kind, nullable=pt.is_null(kind) or dice.random() < 0.8)


def a_struct(dice: Random, depth: int) -> pa.DataType:
    return pa.struct([inner(dice, depth).with_name(name) for name in "abc"[: dice.randint(1, 3)]])


def a_fixed_list(dice: Random, depth: int) -> pa.DataType:
    return pa.list_(inner(dice, depth), dice.randint(1, 3))


def a_map(dice: Random, depth: int) -> pa.DataType:
    return pa.map_(dice.choice([pa.string(), pa.int32(), pa.large_string()]), inner(dice, depth))


def a_dictionary(dice: Random, depth: int) -> pa.DataType:
    index = dice.choice([pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8()])
    return pa.dictionary(index, dice.choice([pa.string(), pa.large_string(), pa.int64(), pa.binary()]))


FAMILIES: dict[str, MakeType] = {
    "null": one_of(pa.null()),
    "boolean": one_of(pa.bool_()),
    "integer": one_of(pa.int8(), pa.int32(), pa.int64(), pa.uint16(), pa.uint64()),
    "float": one_of(pa.float16(), pa.float32(), pa.float64()),
    "decimal": one_of(pa.decimal128(20, 3), pa.decimal256(50, 7), pa.decimal32(7, 2), pa.decimal64(15, 2)),
    "text": one_of(pa.string()),
    "large text": one_of(pa.large_string()),
    "text view": one_of(pa.string_view()),
    "bytes": one_of(pa.binary()),
    "large bytes": one_of(pa.large_binary()),
    "bytes view": one_of(pa.binary_view()),
    "fixed bytes": one_of(pa.binary(3), pa.binary(16)),
    "date": one_of(pa.date32(), pa.date64()),
    "time": one_of(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    "timestamp": one_of(pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns")),
    "timestamp with zone": one_of(pa.timestamp("ms", "UTC"), pa.timestamp("s", "Asia/Tokyo")),
    "duration": one_of(pa.duration("s"), pa.duration("us"), pa.duration("ns")),
    "interval": one_of(pa.month_day_nano_interval()),
    "dictionary": a_dictionary,
    "uuid": one_of(pa.uuid()),
    "json": one_of(pa.json_(pa.string()), pa.json_(pa.large_string())),
    "bfloat16": one_of(BFloat16Type()),
    "bool8": one_of(pa.bool8()),
    "struct": a_struct,
    "list": lambda dice, depth: pa.list_(inner(dice, depth)),
    "large list": lambda dice, depth: pa.large_list(inner(dice, depth)),
    "list view": one_of(pa.list_view(pa.int32()), pa.large_list_view(pa.string())),
    "fixed list": a_fixed_list,
    "map": a_map,
}  # fmt: skip
_NESTED = ("struct", "list", "large list", "list view", "fixed list", "map")
NESTED_LESS = tuple(name for name in FAMILIES if name not in _NESTED)


def make_type(dice: Random, family: str, depth: int = 3) -> pa.DataType:
    return FAMILIES[family](dice, depth)


def make_array(dice: Random, data_type: pa.DataType, rows: int, nullable: bool = True) -> pa.Array:
    """Return values with NULLs on every nullable level; often a slice, sometimes concatenated from two arrays."""
    before, after = (dice.choice([0, 1, 3, 9]) for _ in "ab")
    stored = storage_type(data_type)
    values = [make_value(dice, data_type, nullable) for _ in range(before + rows + after)]
    whole = convert_array(pa.array(values, stored), data_type)
    return whole.slice(before, rows)


def make_value(dice: Random, kind: pa.DataType, nullable: bool = True) -> Any:
    """Return a value in the form of the storage of its type."""
    if pt.is_null(kind) or (nullable and dice.random() < 0.25):
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return make_extension(dice, kind)
    if pt.is_struct(kind):
        return {field.name: make_value(dice, field.type, field.nullable) for field in kind}
    if pt.is_map(kind):
        keys = {make_value(dice, kind.key_type, False) for _ in range(dice.choice([0, 0, 1, 3]))}
        return [(key, make_value(dice, kind.item_type, kind.item_field.nullable)) for key in sorted(keys)]
    if hasattr(kind, "value_field"):
        count = kind.list_size if pt.is_fixed_size_list(kind) else dice.choice([0, 0, 1, 2, 5])
        return [make_value(dice, kind.value_type, kind.value_field.nullable) for _ in range(count)]
    return make_leaf(dice, kind)


def make_extension(dice: Random, kind: pa.BaseExtensionType) -> Any:
    if kind.extension_name == "arrow.json":
        return json.dumps(dice.choice([{"a": dice.randint(0, 9), "b": [None, "ü"]}, [], 1, "x", None, True, 1.5]))
    if kind.extension_name == "arrow.uuid":
        return uuid.UUID(int=dice.getrandbits(128)).bytes
    if kind.extension_name == "arrow.bool8":
        return dice.randint(0, 1)
    return bytes([dice.getrandbits(8), dice.choice([0x3F, 0x40, 0xBF])])


def make_leaf(dice: Random, kind: pa.DataType) -> Any:
    if pt.is_dictionary(kind):
        return make_few(dice, kind.value_type)
    if pt.is_boolean(kind):
        return dice.random() < 0.5
    if pt.is_integer(kind):
        bits = kind.bit_width - (0 if pt.is_unsigned_integer(kind) else 1)
        return dice.choice([0, 1, (1 << bits) - 1, dice.getrandbits(bits)])
    if pt.is_floating(kind):
        return dice.choice([0.0, 0.5, -2.0, float("inf")])
    if pt.is_decimal(kind):
        return Decimal(dice.randint(-(10**6), 10**6)).scaleb(-kind.scale)
    if pt.is_fixed_size_binary(kind):
        return dice.randbytes(kind.byte_width)
    if pt.is_interval(kind):
        return pa.MonthDayNano([dice.randint(0, 9), dice.randint(0, 9), dice.randint(0, 9)])
    if pt.is_temporal(kind):
        # A scalar UDF gets Python's times, which have no nanoseconds.
        scale = 86_400_000 if pt.is_date64(kind) else 1_000 if "[ns" in str(kind) else 1
        return scale * dice.randint(0, 80_000)
    return make_few(dice, kind)


def make_few(dice: Random, kind: pa.DataType) -> Any:
    """Return text or bytes, empty, short or long; for a dictionary, one of a few values."""
    if pt.is_integer(kind):
        return dice.randint(0, 3)
    text = dice.choice(["", "ü", "b" * 40, dice.choice(string.ascii_letters)])
    return text if "string" in str(kind) else text.encode()


def families_of(kind: pa.DataType) -> set[str]:
    """Return the families of a type and of the types nested in it."""
    found = {name for name, fits in _FITS.items() if fits(kind)}
    assert len(found) == 1, (kind, found)
    if pt.is_map(kind):
        return found | families_of(kind.key_type) | families_of(kind.item_type)
    if isinstance(kind, pa.BaseExtensionType) or pt.is_dictionary(kind):
        return found
    return found.union(*(families_of(kind.field(at).type) for at in range(kind.num_fields)))


def _extension(name: str) -> Callable[[pa.DataType], bool]:
    return lambda kind: getattr(kind, "extension_name", "") == name


_FITS: dict[str, Callable[[pa.DataType], bool]] = {
    "null": pt.is_null,
    "boolean": pt.is_boolean,
    "integer": pt.is_integer,
    "float": pt.is_floating,
    "decimal": pt.is_decimal,
    "text": pt.is_string,
    "large text": pt.is_large_string,
    "text view": pt.is_string_view,
    "bytes": pt.is_binary,
    "large bytes": pt.is_large_binary,
    "bytes view": pt.is_binary_view,
    "fixed bytes": lambda kind: pt.is_fixed_size_binary(kind) and not pt.is_decimal(kind),
    "date": pt.is_date,
    "time": pt.is_time,
    "timestamp": lambda kind: pt.is_timestamp(kind) and kind.tz is None,
    "timestamp with zone": lambda kind: pt.is_timestamp(kind) and kind.tz is not None,
    "duration": pt.is_duration,
    "interval": pt.is_interval,
    "dictionary": pt.is_dictionary,
    "uuid": _extension("arrow.uuid"),
    "json": _extension("arrow.json"),
    "bfloat16": _extension("lance.bfloat16"),
    "bool8": _extension("arrow.bool8"),
    "struct": pt.is_struct,
    "list": pt.is_list,
    "large list": pt.is_large_list,
    "list view": lambda kind: pt.is_list_view(kind) or pt.is_large_list_view(kind),
    "fixed list": pt.is_fixed_size_list,
    "map": pt.is_map,
}
