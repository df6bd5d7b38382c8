"""Two arrays compared row by row: alike is what a UDF could not tell apart, whatever the type and its encoding."""

from __future__ import annotations

import math
import random
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.plan.value_diff import same_values

_ROWS = 24
_FLOATS = (pa.float16(), pa.float32(), pa.float64())
_INTEGERS = (
    pa.int8(), pa.uint64(), pa.date32(), pa.time64("ns"), pa.duration("us"), pa.timestamp("ns"),
    pa.timestamp("us", "Europe/Paris"),
)  # fmt: skip
_VALUES: dict[pa.DataType, tuple[Any, ...]] = {
    pa.null(): (None,),
    pa.bool_(): (True, False),
    **dict.fromkeys(_INTEGERS, (0, 1)),
    **dict.fromkeys(_FLOATS, (0.0, -0.0, math.nan, -math.nan)),
    **dict.fromkeys((pa.decimal128(5, 2), pa.decimal256(50, 2)), (Decimal("0.10"), Decimal("-0.10"))),
    **dict.fromkeys((pa.string(), pa.large_string()), ("", "a", "ä")),
    **dict.fromkeys((pa.binary(), pa.large_binary()), (b"", b"\0", b"ab")),
    pa.binary(2): (b"ab", b"a\0"),
}
# pyarrow makes no arrays of them inside of others out of Python values.
_EXTENSIONS = {pa.uuid(): (b"a" * 16, b"b" * 16), pa.json_(): ("1", "{}")}


def _kind(dice: random.Random, depth: int) -> pa.DataType:
    if depth == 0 or dice.random() < 0.3:
        return dice.choice(_FLOATS if dice.random() < 0.5 else [*_VALUES])
    inner = _kind(dice, depth - 1)
    fields = [pa.field(f"f{at}", _kind(dice, depth - 1)) for at in range(dice.randint(0, 2))]
    return dice.choice(
        [pa.list_(inner), pa.large_list(inner), pa.list_(inner, 2), pa.map_(pa.string(), inner), pa.struct(fields)]
    )


def _value(dice: random.Random, kind: pa.DataType) -> Any:
    if dice.random() < 0.15:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _value(dice, field.type) for field in kind}
    count = 2 if pa.types.is_fixed_size_list(kind) else dice.randint(0, 2)
    if pa.types.is_map(kind):
        return [(dice.choice("ab"), _value(dice, kind.item_type)) for _ in range(count)]
    if pa.types.is_nested(kind):
        return [_value(dice, kind.value_type) for _ in range(count)]
    return dice.choice({**_VALUES, **_EXTENSIONS}[kind])


def _told_apart_by(value: Any) -> Any:
    """What a plain Python value is, by its bits; all NaN are one."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return tuple((name, _told_apart_by(part)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_told_apart_by, value))
    return value


def _array(dice: random.Random, kind: pa.DataType, values: list[Any]) -> pa.Array:
    if pa.types.is_string(kind) and dice.random() < 0.5:
        # Every value twice, and one that is NULL: what a row's index is says nothing.
        entries = [*dict.fromkeys(values), None]
        indices = [entries.index(value) + dice.choice([0, len(entries)]) for value in values]
        return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(entries * 2, kind))
    return pa.array(values, kind)


@given(seed=st.integers(0, 1 << 32))
def test_rows_are_alike_when_no_udf_could_tell_them_apart(seed: int) -> None:
    dice = random.Random(seed)
    for kind in [_kind(dice, 0), _kind(dice, 1), _kind(dice, 3), dice.choice([*_EXTENSIONS])]:
        ones = [_value(dice, kind) for _ in range(_ROWS)]
        others = [one if dice.random() < 0.3 else _value(dice, kind) for one in ones]
        wanted = [_told_apart_by(one) == _told_apart_by(other) for one, other in zip(ones, others, strict=True)]
        start = dice.randint(0, 3)
        left, right = (_array(dice, kind, values).slice(start) for values in (ones, others))
        assert same_values(left, right).tolist() == wanted[start:], kind


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (pa.string_view(), "a", "b"),
        (pa.list_(pa.binary_view()), [b"a"], [b"b"]),
        (pa.month_day_nano_interval(), (1, 2, 3), (1, 2, 4)),
    ],
)
def test_rows_of_a_type_that_arrow_cannot_compare_count_as_changed(kind: pa.DataType, one: Any, other: Any) -> None:
    assert not same_values(pa.array([one, one], kind), pa.array([one, other], kind))[1]


def test_values_of_a_map_may_be_null_where_their_fields_may_not() -> None:
    fields = [pa.field("f", pa.float32(), nullable=False)]
    # As engines give them: NULL in the field, too.
    values = pa.StructArray.from_arrays(
        [pa.array([None, 1.0], pa.float32())], fields=fields, mask=pa.array([True, False])
    )
    maps = pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "a"]), values)
    assert same_values(maps, maps).tolist() == [True, True]
    assert same_values(maps, maps.take(pa.array([1, 1]))).tolist() == [False, True]
