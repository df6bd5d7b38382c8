"""Values of every kind for every Arrow type: stored as they are, or refused; never silently different."""

from __future__ import annotations

import collections
import datetime
import enum
import importlib
import math
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from random import Random
from struct import unpack as struct_of
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.types as pt
import pydantic
import pytest
from lance.arrow import BFloat16Type

from airflow_geneva.engine.lance_io.arrays import storage_type
from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_result, array_from_values
from tests.support.arrow_values import FAMILIES, NESTED_LESS, make_array, make_type

EAST = datetime.timezone(datetime.timedelta(hours=2))
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
ONE = 1_704_067_201  # 2024-01-01 00:00:01
MIDNIGHT = ONE - 1
DAY = MIDNIGHT // 86_400
MILLION = 1_000_000_000


class Plain(enum.Enum):
    A = 1


class Number(enum.IntEnum):
    A = 1


class Text(str, enum.Enum):
    A = "a"


class OnlyInt:
    def __int__(self) -> int:
        return 7


class Index:
    def __index__(self) -> int:
        return 7


class Floats:
    def __float__(self) -> float:
        return 7.5


Meaning = tuple[str, Any]


def number(value: Any) -> Meaning:
    return "number", value if isinstance(value, float) and not math.isfinite(value) else Fraction(value)


# A line for each kind of value: the value, and what it means; () means that it has no Arrow type at all.
VALUES: list[tuple[Any, Meaning | tuple[()]]] = [
    (True, ("truth", True)),
    (1, number(1)),
    (-1, number(-1)),
    (1.0, number(1)),
    (1.5, number(1.5)),
    (float("inf"), number(float("inf"))),
    (2**53 + 1, number(2**53 + 1)),
    (2**63, number(2**63)),
    (2**70, number(2**70)),
    (Decimal(1), number(1)),
    (Decimal("1.5"), number(1.5)),
    (Decimal("1.2345"), number(Decimal("1.2345"))),
    (Decimal("NaN"), ()),
    (Decimal("1e-39"), number(Decimal("1e-39"))),
    (Decimal("1.23e-39"), number(Decimal("1.23e-39"))),
    (Decimal("1e37"), number(10**37)),
    (Decimal("1." + 5_000 * "0"), number(1)),
    (Decimal("1." + 5_000 * "0" + "1"), ()),
    (Decimal("0e-999999999"), number(0)),
    (Decimal("1e-999999999"), ()),
    (Decimal("1e999999999"), ()),
    (Fraction(1, 2), number(Fraction(1, 2))),
    (Fraction(2), number(2)),
    (Number.A, number(1)),
    (Text.A, ("text", "a")),
    (Plain.A, ()),
    (OnlyInt(), ()),
    (Index(), number(7)),
    (Floats(), ()),
    (1j, ()),
    (np.int8(1), number(1)),
    (np.uint64(2**64 - 1), number(2**64 - 1)),
    (np.float16(1.5), number(1.5)),
    (np.float32(1.5), number(1.5)),
    (np.float64(1.5), number(1.5)),
    (np.longdouble("1.1"), ()),
    (np.bool_(True), ("truth", True)),
    (np.str_("a"), ("text", "a")),
    (np.bytes_(b"a"), ("bytes", b"a")),
    (np.array(5), number(5)),
    (np.array(1.5), number(1.5)),
    (np.array("2024-01-01T00:00:01", "M8[s]"), ("moment", ONE * MILLION)),
    (np.datetime64(ONE, "s"), ("moment", ONE * MILLION)),
    (np.datetime64(ONE * 1000 + 1, "ms"), ("moment", ONE * MILLION + 10**6)),
    (np.datetime64(ONE * 10**6 + 1, "us"), ("moment", ONE * MILLION + 1_000)),
    (np.datetime64(ONE * MILLION + 1, "ns"), ("moment", ONE * MILLION + 1)),
    (np.datetime64(1, "ps"), ()),
    (np.datetime64("2024-01-01", "D"), ("moment", MIDNIGHT * MILLION)),
    (np.datetime64("2024-01", "M"), ("moment", MIDNIGHT * MILLION)),
    (np.datetime64("2024", "Y"), ("moment", MIDNIGHT * MILLION)),
    (np.datetime64(MIDNIGHT // 3_600, "h"), ("moment", MIDNIGHT * MILLION)),
    (np.timedelta64(1, "s"), ("duration", MILLION)),
    (np.timedelta64(1, "ms"), ("duration", 10**6)),
    (np.timedelta64(1, "us"), ("duration", 10**3)),
    (np.timedelta64(1, "ns"), ("duration", 1)),
    (np.timedelta64(1, "h"), ("duration", 3_600 * MILLION)),
    (np.timedelta64(1, "M"), ()),
    (np.timedelta64(1), ()),
    (pd.Timestamp(ONE, unit="s"), ("moment", ONE * MILLION)),
    (pd.Timestamp(ONE * MILLION + 1), ("moment", ONE * MILLION + 1)),
    (pd.Timestamp(ONE, unit="s", tz="Asia/Tokyo"), ("zoned", ONE * MILLION)),
    (pd.Timestamp(ONE * MILLION + 1, tz="Asia/Tokyo"), ("zoned", ONE * MILLION + 1)),
    (pd.Timedelta(1, "ns"), ("duration", 1)),
    (pd.Timedelta(1, "s"), ("duration", MILLION)),
    (pd.NA, ()),
    (datetime.datetime(2024, 1, 1, 0, 0, 1), ("moment", ONE * MILLION)),
    (datetime.datetime(2024, 1, 1, 0, 0, 1, 1), ("moment", ONE * MILLION + 1_000)),
    (datetime.datetime(2024, 1, 1), ("moment", MIDNIGHT * MILLION)),
    (datetime.datetime(2024, 1, 1, 2, 0, 1, tzinfo=EAST), ("zoned", ONE * MILLION)),
    (datetime.datetime(9999, 12, 31), ("moment", 253402214400 * MILLION)),
    (datetime.date(2024, 1, 1), ("date", DAY)),
    (datetime.time(1, 2, 3), ("time", 3_723 * MILLION)),
    (datetime.time(1, 2, 3, 4), ("time", 3_723 * MILLION + 4_000)),
    (datetime.time(1, 2, 3, tzinfo=EAST), ()),
    (datetime.timedelta(seconds=1), ("duration", MILLION)),
    (datetime.timedelta(microseconds=1), ("duration", 1_000)),
    (datetime.timedelta.max, ("duration", (86_400 * 10**9 * 10**6 - 1) * 1_000)),
    ("a", ("text", "a")),
    ("1", ("text", "1")),
    ("\ud800", ()),
    (b"a", ("bytes", b"a")),
    (b"\xff", ("bytes", b"\xff")),
    (bytearray(b"a"), ("bytes", b"a")),
    (memoryview(b"abc")[::2], ("bytes", b"ac")),
    (uuid.UUID(int=1), ("bytes", bytes(15) + b"\1")),
    (pa.scalar(1), number(1)),
    (pa.scalar(1.5), number(1.5)),
    (pa.scalar("a"), ("text", "a")),
    (pa.scalar(ONE * MILLION + 1, pa.timestamp("ns")), ("moment", ONE * MILLION + 1)),
    (pa.scalar(ONE, pa.timestamp("s", "Asia/Tokyo")), ("zoned", ONE * MILLION)),
    (pa.scalar(1, pa.time64("ns")), ()),
    (pa.scalar(10**7, pa.date32()), ()),
    (pa.scalar(1, pa.duration("s")), ("duration", MILLION)),
    (object(), ()),
]  # fmt: skip


def tensors() -> Iterator[tuple[Any, Meaning]]:
    for library in ("torch", "jax.numpy"):
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        make = module.tensor if library == "torch" else module.array
        yield make(5), number(5)
        yield make(1.5), number(1.5)


VALUES += tensors()


def leaf_types() -> dict[str, pa.DataType]:
    dice = Random(1)
    found = [make_type(dice, name, 1) for name in NESTED_LESS for _ in range(40)]
    few = [kind for kind in found if not pt.is_interval(kind) and not pt.is_null(kind) and not pt.is_dictionary(kind)]
    few += [pa.dictionary(pa.int8(), kind) for kind in (pa.string(), pa.int64(), pa.binary())]
    return {str(kind): kind for kind in few}


TYPES = leaf_types()


def meaning_of(values: pa.Array) -> Meaning:
    """Return what one stored value means, from its storage."""
    kind = values.type
    if kind == BFloat16Type():
        return number(struct_of("<f", b"\0\0" + values.storage[0].as_py())[0])
    if isinstance(kind, pa.BaseExtensionType):
        return meaning_of(values.storage)
    if pt.is_dictionary(kind):
        return meaning_of(values.dictionary_decode())
    if pt.is_temporal(kind):
        ticks = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())[0].as_py()
        if pt.is_date32(kind):
            return "date", ticks
        if pt.is_date64(kind):
            return "date", Fraction(ticks, 86_400_000)
        what = "time" if pt.is_time(kind) else "duration" if pt.is_duration(kind) else "zoned" if kind.tz else "moment"
        return what, ticks * UNITS[kind.unit]
    value = values[0].as_py()
    if pt.is_boolean(kind):
        return "truth", value
    if isinstance(value, (str, bytes)):
        return "text" if isinstance(value, str) else "bytes", value
    return number(value)


def means(given: Meaning | tuple[()], stored: pa.Array) -> bool:
    """Whether a stored value is the given one."""
    if not given:
        return False
    (what, value), (kind, held) = given, meaning_of(stored)
    if what == kind == "number" and stored.type == BFloat16Type():
        return math.isclose(value, held, rel_tol=0.01)
    if what == kind:
        return bool(value == held) or (pt.is_floating(stored.type) and _rounded(value, stored.type) == held)
    if {what, kind} == {"text", "bytes"}:
        return bool((value.encode() if what == "text" else value) == (held.encode() if kind == "text" else held))
    if (what, kind) == ("truth", "number"):
        # As 1.0 among floats, and in the column of whole numbers that holds booleans of eight bits.
        return bool(held == value)
    if (what, kind) == ("date", "moment"):
        return bool(value * 86_400 * MILLION == held)
    if (what, kind) == ("moment", "date"):
        return bool(value == held * 86_400 * MILLION)
    if what == "number" and kind in ("date", "time", "moment", "zoned", "duration"):
        unit = {pa.date32(): 1, pa.date64(): Fraction(1, 86_400_000)}.get(stored.type) or UNITS[stored.type.unit]
        return bool(value * unit == held)
    return False


def _rounded(value: Any, kind: pa.DataType) -> Any:
    with np.errstate(over="ignore"):
        made = float(np.dtype(kind.to_pandas_dtype()).type(float(value)))
    return made if not math.isfinite(made) else Fraction(made)


class Record(NamedTuple):
    x: Any


@dataclass
class Held:
    x: Any


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    x: Any


def struct(kind: pa.DataType) -> pa.DataType:
    return pa.struct({"x": kind})


# Where a value stands: the type around its type, the value around it, and the array of it in the stored array.
PLACES: dict[str, tuple[Callable[[Any], pa.DataType], Callable[[Any], Any], Callable[[pa.Array], pa.Array]]] = {
    "alone": (lambda kind: kind, lambda value: value, lambda found: found),
    "in a list": (pa.list_, lambda value: [value], lambda found: found.values),
    "in a tuple": (pa.large_list, lambda value: (value,), lambda found: found.values),
    "in a fixed list": (lambda kind: pa.list_(kind, 1), lambda value: [value], lambda found: found.values),
    "in an array of objects": (pa.list_, lambda value: _objects(value), lambda found: found.values),
    "in a deque": (pa.list_, lambda value: collections.deque([value]), lambda found: found.values),
    "in a list of lists": (
        lambda kind: pa.list_(pa.list_(kind)), lambda value: [[value]], lambda found: found.values.values
    ),
    "in a dict": (struct, lambda value: {"x": value}, lambda found: found.field(0)),
    "in a dict in a list": (
        lambda kind: pa.list_(struct(kind)), lambda value: [{"x": value}], lambda found: found.values.field(0)
    ),
    "in a NamedTuple": (struct, Record, lambda found: found.field(0)),
    "in a dataclass": (struct, Held, lambda found: found.field(0)),
    "in a model": (struct, lambda value: Model.model_construct(x=value), lambda found: found.field(0)),
    "in a tuple of fields": (
        lambda kind: pa.struct({"x": kind, "y": pa.int64()}), lambda value: (value, 1), lambda found: found.field(0)
    ),
    "in pairs": (struct, lambda value: [("x", value)], lambda found: found.field(0)),
    "in a map": (lambda kind: pa.map_(pa.string(), kind), lambda value: {"x": value}, lambda found: found.items),
    "in the pairs of a map": (
        lambda kind: pa.map_(pa.string(), kind), lambda value: [("x", value)], lambda found: found.items
    ),
    "as a key": (lambda kind: pa.map_(kind, pa.int64()), lambda value: [(value, 1)], lambda found: found.keys),
}  # fmt: skip


def _objects(value: Any) -> Any:
    found = np.empty(1, object)
    found[0] = value
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TYPES)
def test_a_value_is_stored_as_it_is_or_refused(name: str, place: str) -> None:
    around, put, get = PLACES[place]
    kind = around(TYPES[name])
    for value, given in VALUES:
        try:
            made = array_from_values([put(value)], kind)
        except OutputMismatch:
            continue
        made.validate(full=True)
        found = get(made.storage if isinstance(made, pa.ExtensionArray) and place != "alone" else made)
        assert found[0].is_valid, f"{value!r} becomes NULL {place}"
        assert means(given, found), f"{value!r} becomes {found[0]!r} {place}"


# What each type must take: a value of each kind that it holds, or the table above would pass if all were refused.
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [1, np.uint8(1), Decimal(2), Number.A, Index(), np.array(5), pa.scalar(1)]),
        (pa.float32(), [1, 1.5, True, np.float64(1.5), np.uint64(2), np.int8(1), pa.scalar(1.5)]),
        (pa.decimal128(20, 3), [1, Decimal("1.5"), np.int64(2)]),
        (pa.string(), ["a", b"a", np.str_("a"), Text.A, memoryview(b"a"), pa.scalar("a")]),
        (pa.timestamp("s"), [np.datetime64(1, "s"), np.datetime64("2024", "Y"), datetime.date(2024, 1, 1), 7]),
        (pa.timestamp("ns"), [np.datetime64(1, "ns"), pd.Timestamp(1), pa.scalar(1, pa.timestamp("ns"))]),
        (pa.timestamp("us"), [datetime.datetime(2024, 1, 1), pd.Timestamp(0), np.array("2024", "M8[Y]")]),
        (pa.timestamp("us", "UTC"), [datetime.datetime(2024, 1, 1, tzinfo=EAST), pd.Timestamp(0, tz="UTC")]),
        (pa.duration("s"), [datetime.timedelta(seconds=1), np.timedelta64(1, "h"), pd.Timedelta(1, "s")]),
        (pa.date32(), [datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), np.datetime64("2024-01-01")]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", pa.scalar("a")]),
    ],
    ids=lambda given: str(given) if isinstance(given, pa.DataType) else "values",
)  # fmt: skip
def test_a_type_takes_every_kind_of_value_that_it_holds(kind: pa.DataType, values: list[Any]) -> None:
    for value in values:
        for _, (around, put, _get) in PLACES.items():
            assert array_from_values([put(value)], around(kind)).null_count == 0
    assert array_from_values([None, *values], kind).null_count == 1


# Containers of the same numbers, in this order.
CONTAINERS: dict[str, Any] = {
    "list": [3, 1, 2],
    "tuple": (3, 1, 2),
    "range": range(3, 0, -1),
    "deque": collections.deque([3, 1, 2]),
    "keys": {3: 0, 1: 0, 2: 0}.keys(),
    "array": np.array([3, 1, 2]),
    "array of floats": np.array([3.0, 1.0, 2.0]),
    "array of another byte order": np.array([3, 1, 2], ">i4"),
    "array with steps": np.array([3, 0, 1, 0, 2])[::2],
    "masked array": np.ma.array([3, 1, 2], mask=[False, True, False]),
    "series": pd.Series([3, 1, 2]),
    "sorted series": pd.Series([1, 2, 3], index=[1, 2, 0]).sort_index(),
    "series with a label for each": pd.Series([3, 1, 2], index=list("abc")),
    "series of pandas' integers": pd.Series([3, 1, 2], index=[2, 1, 0], dtype="Int64"),
    "index": pd.Index([3, 1, 2]),
    "polars": pl.Series([3, 1, 2]),
    "arrow": pa.array([3, 1, 2]),
    "chunked": pa.chunked_array([[3], [1, 2]]),
    "scalar": pa.scalar([3, 1, 2]),
}
EXPECTED = {"range": [3, 2, 1], "masked array": [3, None, 2]}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.int64(), 3), pa.large_list(pa.int32())], ids=str)
def test_a_list_holds_the_items_of_every_container_by_position(name: str, kind: pa.DataType) -> None:
    for values in ([CONTAINERS[name]], [CONTAINERS[name], None], [[5, 5, 5], CONTAINERS[name]]):
        assert EXPECTED.get(name, [3, 1, 2]) in array_from_values(values, kind).to_pylist()
    (held,) = array_from_values([{"x": [CONTAINERS[name]]}], struct(pa.list_(kind))).to_pylist()
    assert held == {"x": [EXPECTED.get(name, [3, 1, 2])]}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (pd.Series([3, None], dtype="Int64"), pa.list_(pa.int64())),
        (pd.Series([3, None], dtype="float64[pyarrow]"), pa.list_(pa.float32())),
        (pd.Series(["a", None], dtype="str"), pa.list_(pa.string())),
        (pd.Series(["a", None], dtype="category"), pa.list_(pa.string())),
        (pd.array([True, None], dtype="boolean"), pa.list_(pa.bool_())),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_a_missing_value_of_pandas_in_a_list_is_null(value: Any, kind: pa.DataType) -> None:
    assert array_from_values([value], kind).to_pylist() == [[value[0], None]]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (pa.scalar([("a", 1), ("a", 2)], pa.map_(pa.string(), pa.int64())), [("a", 1), ("a", 2)]),
        (pa.scalar({"a": 1}), {"a": 1}),
        (pa.scalar([1, None]), [1, None]),
    ],
    ids=str,
)
def test_an_arrow_scalar_of_a_nested_type_is_stored(value: pa.Scalar, plain: Any) -> None:
    assert array_from_values([value, None], value.type).to_pylist() == [plain, None]


@pytest.mark.parametrize(
    "value",
    [
        *("abc", {1: 2}, 7, np.array(7), np.ones((2, 2)), pd.DataFrame({"a": [1]})),
        *(iter([1]), (one for one in [1]), map(int, "1")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_items_in_an_order_of_its_own_is_no_list(value: Any) -> None:
    for kind in (pa.list_(pa.int64()), pa.list_(pa.string())):
        with pytest.raises(OutputMismatch):
            array_from_values([value], kind)


def test_a_tuple_is_a_struct_only_with_an_item_for_each_field() -> None:
    kind = pa.struct({"x": pa.int64(), "y": pa.int64()})
    assert array_from_values([(1, 2), {"x": 3}], kind).to_pylist() == [{"x": 1, "y": 2}, {"x": 3, "y": None}]
    for value in ((1,), (1, 2, 3), [1, 2], (("x", 1), ("y", 2))):
        with pytest.raises(OutputMismatch):
            array_from_values([value], kind)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("given", ["D", "h", "s", "ms", "us", "ns"])
def test_an_array_of_numpy_times_keeps_its_times_in_every_unit(unit: str, given: str) -> None:
    moments, spans = (
        np.array(["2024-01-01", "NaT"], f"M8[{given}]"),
        np.array([48, "NaT"], "m8[h]").astype(f"m8[{given}]"),
    )
    expected = [datetime.datetime(2024, 1, 1), None], [datetime.timedelta(hours=48), None]
    for array, kind, plain in (
        (moments, pa.timestamp(unit), expected[0]),
        (spans, pa.duration(unit), expected[1]),
    ):
        assert array_from_values([array], pa.list_(kind)).to_pylist() == [plain]
        assert array_from_values([list(array), None], pa.list_(kind)).to_pylist() == [plain, None]
        assert array_from_values(list(array), kind).to_pylist() == plain
        if given not in ("D", "h"):
            assert array_from_result(array, kind).to_pylist() == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_what_pyarrow_reads_back_is_stored_again_as_it_was(family: str) -> None:
    dice = Random(family)
    for _ in range(20):
        kind = make_type(dice, family)
        if "bfloat16" in str(kind):
            continue  # pyarrow reads them as bytes, or as numbers of an older NumPy
        try:
            values = make_array(dice, kind, 10)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            continue
        made = array_from_values(values.to_pylist(), kind)
        assert made.type == kind
        assert made.to_pylist() == values.to_pylist()
        assert storage_type(made.type) == storage_type(kind)
        assert array_from_result(values, kind).to_pylist() == values.to_pylist()


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (pa.array([1.55]), pa.decimal128(10, 1)),
        (pa.array([Decimal(10**20 + 1)]), pa.float64()),
        (pa.array([2049]), pa.float16()),
        (pa.array([1.5]), pa.int64()),
        (pa.array([2**53 + 1]), pa.float64()),
        (pa.array([1], pa.time64("us")), pa.time32("s")),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([1], pa.timestamp("us", "UTC")), pa.timestamp("us")),
        (pa.array([{"a": 1.55}]), pa.struct({"a": pa.decimal128(10, 1)})),
        (pa.array([[1.55]]), pa.list_(pa.decimal128(10, 1))),
        (pa.array([{"b": 1}]), pa.struct({"a": pa.int64()})),
    ],
    ids=str,
)
def test_an_array_whose_conversion_would_change_it_is_refused(found: pa.Array, kind: pa.DataType) -> None:
    with pytest.raises(OutputMismatch):
        array_from_result(found, kind)
