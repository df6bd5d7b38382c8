"""The keys of groups: equal by value, hashed the same everywhere."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from airflow_geneva.engine.views import group_keys
from airflow_geneva.engine.views.group_keys import CountedKeys, Keys, hash_keys, key_type
from airflow_geneva.errors import InvalidInput

UTC = timezone.utc
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False]),
    (pa.int8(), [-1, 0, 127]),
    (pa.uint16(), [0, 65_535]),
    (pa.int64(), [-(1 << 63), 0, (1 << 63) - 1]),
    (pa.uint64(), [0, (1 << 64) - 1]),
    (pa.float16(), [0.5, 2.0]),
    (pa.float32(), [0.5, -1.5]),
    (pa.float64(), [0.1, -1e300]),
    (pa.string(), ["", "a", "aa", "b" * 5_000, "ü"]),
    (pa.large_string(), ["", "x"]),
    (pa.string_view(), ["", "a text that is longer than twelve bytes"]),
    (pa.binary(), [b"", b"\0", b"\0\0"]),
    (pa.binary(3), [b"abc", b"xyz"]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b"]),
    (pa.date32(), [date(1970, 1, 1), date(2026, 11, 29)]),
    (pa.date64(), [date(1970, 1, 1), date(2026, 11, 29)]),
    (pa.time32("s"), [time(0), time(23, 59)]),
    (pa.time64("us"), [time(0), time(23, 59, 1)]),
    (pa.timestamp("us"), [datetime(2026, 1, 1), datetime(1960, 1, 1)]),
    (pa.timestamp("ns", "UTC"), [datetime(2026, 1, 1, tzinfo=UTC)]),
    (pa.duration("ms"), [timedelta(0), timedelta(days=-1)]),
    (pa.decimal128(10, 2), [Decimal("1.10"), Decimal("-3.00")]),
    (pa.decimal256(50, 3), [Decimal("1.100"), Decimal("-3.000")]),
]


def keys_of(*columns: pa.Array) -> Keys:
    return Keys.of(columns)


@pytest.mark.parametrize(("kind", "values"), TYPES, ids=lambda one: str(one) if isinstance(one, pa.DataType) else "")
def test_keys_of_every_scalar_type_are_counted_by_value(kind: pa.DataType, values: list[Any]) -> None:
    rows = [None, *values, *values, None, None]
    whole = pa.array([values[0], *rows], kind)[1:]  # a part of an array
    found = CountedKeys.of_rows(keys_of(whole), np.arange(len(rows)))
    stored = found.in_order().keys.columns[0]
    assert stored.type == key_type("k", kind)
    assert stored.to_pylist() == [None, *values]
    assert found.in_order().counts.tolist() == [3, *[2] * len(values)]
    assert not found.shared.any()
    assert (
        found.positions(keys_of(whole)).tolist()
        == found.positions(found.keys)[
            np.array([found.keys.columns[0].to_pylist().index(row) for row in rows])
        ].tolist()
    )


def test_every_nan_is_one_key_and_so_is_every_zero() -> None:
    other_nan = np.array([0x7FF8000000000001, 0xFFF8000000000000], np.uint64).view(np.float64)
    values = pa.array([*other_nan.tolist(), math.nan, 0.0, -0.0, None])
    found = CountedKeys.of_rows(keys_of(values), np.arange(6)).in_order()
    assert found.counts.tolist() == [3, 2, 1]
    assert [str(key) for key in found.keys.columns[0].to_pylist()] == ["nan", "0.0", "None"]


def test_null_is_not_what_lies_beneath_it() -> None:
    values = pa.array([1, 2, None], pa.int64())
    null = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x01"), values.buffers()[1]])
    assert null.to_pylist() == [1, None, None]
    found = CountedKeys.of_rows(keys_of(null), np.arange(3))
    assert sorted(found.counts.tolist()) == [1, 2]


def test_hashes_are_the_same_in_every_version() -> None:
    keys = keys_of(pa.array([1, None, 7], pa.int64()), pa.array(["a", "", None]))
    assert hash_keys(keys).tolist() == HASHES


HASHES = [1660375476504504607, -8439850818949988291, -4497872170305541780]


@given(st.lists(st.tuples(st.integers(0, 3) | st.none(), st.sampled_from(["", "a", "b", None])), max_size=30))
@settings(max_examples=60)
def test_keys_that_share_a_hash_are_told_apart(rows: list[tuple[int | None, str | None]]) -> None:
    columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate((pa.int64(), pa.string()))]
    keys, ids = keys_of(*columns), np.arange(len(rows))
    found = CountedKeys.of_rows(keys, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_keys, "hash_keys", lambda keys: np.zeros(len(keys), np.int64))
        same = CountedKeys.of_rows(keys, ids)
        joined = CountedKeys.joined([same, CountedKeys.of_rows(keys.take(ids[:2]), ids[:2])])
        positions = same.positions(keys)
    for counted in (found, same):
        in_order = counted.in_order()
        expected = dict.fromkeys(rows)
        assert list(zip(*(c.to_pylist() for c in in_order.keys.columns), strict=True)) == list(expected)
        assert in_order.counts.tolist() == [rows.count(row) for row in expected]
    assert same.shared.tolist() == [len(same) > 1] * len(same)
    assert int(joined.counts.sum()) == len(rows) + len(rows[:2])
    assert same.keys.take(positions).equals(keys).all()


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.struct({"a": pa.int64()}), pa.null(), pa.month_day_nano_interval(), pa.uuid()]
)
def test_other_types_cannot_be_a_key(kind: pa.DataType) -> None:
    with pytest.raises(InvalidInput, match=r"group_by\('k'\)"):
        key_type("k", kind)
