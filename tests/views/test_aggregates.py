"""SQL aggregates of groups: what they accept and say, and that they agree with plain Python and with SQL of Lance."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings, strategies as st

from airflow_geneva import Table, connect
from airflow_geneva.engine.views.aggregates import (
    FUNCTIONS,
    Aggregate,
    aggregate_groups,
    parse_aggregate,
    result_type,
)
from airflow_geneva.engine.views.resolve import resolve_columns
from airflow_geneva.errors import InvalidInput, SumTooLarge

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
SMALL = st.integers(-1000, 1000)
FLOATS = st.floats(allow_nan=True, allow_infinity=False, width=32)
DAYS = st.dates(datetime.date(1900, 1, 1), datetime.date(2100, 1, 1))
TIMES = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1))
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int64(): SMALL | INT64,
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.float16(): st.floats(width=16),
    pa.float32(): FLOATS,
    pa.float64(): FLOATS,
    pa.decimal128(9, 2): st.decimals(-(10**6), 10**6, places=2),
    pa.decimal256(50, 3): st.decimals(-(10**30), 10**30, places=3),
    pa.string(): st.text(max_size=3),
    pa.large_string(): st.text(max_size=3),
    pa.string_view(): st.text(max_size=3),
    pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["a", "b", ""]),
    pa.binary(): st.binary(max_size=3),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.date32(): DAYS,
    pa.timestamp("us"): TIMES,
    pa.timestamp("ms", "UTC"): TIMES.map(lambda at: at.replace(microsecond=0, tzinfo=datetime.timezone.utc)),
    pa.time64("us"): st.times(),
    pa.duration("us"): st.timedeltas(datetime.timedelta(-1000), datetime.timedelta(1000)),
}
GROUPS = {kind: st.lists(st.lists(st.none() | values, max_size=5), max_size=5) for kind, values in VALUES.items()}


def aggregate(text: str, groups: Sequence[Sequence[Any]], kind: pa.DataType) -> pa.Array:
    values = pa.array([value for group in groups for value in group], kind)
    lengths = np.array([len(group) for group in groups], np.int64)
    return aggregate_groups(parse_aggregate(text, "n"), values, lengths, "n")


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return found == expected or (math.isnan(found) and math.isnan(expected)) or math.isclose(found, expected)
    return bool(found == expected)


def is_nan(value: Any) -> bool:
    return bool(value != value)


def largest(values: Sequence[Any]) -> Any:
    return next(filter(is_nan, values), None) or max(values)


def smallest(values: Sequence[Any]) -> Any:
    numbers = [value for value in values if not is_nan(value)]
    return min(numbers) if numbers else math.nan


PLAIN: dict[str, Callable[[list[Any]], Any]] = {
    "count(x)": len,
    "count(DISTINCT x)": lambda values: len({"NaN" if is_nan(value) else value for value in values}),
    "min(x)": lambda values: smallest(values) if values else None,
    "max(x)": lambda values: largest(values) if values else None,
    "sum(x)": lambda values: sum(values) if values else None,
    "avg(x)": lambda values: sum(values) / len(values) if values else None,
}


@pytest.mark.parametrize("kind", GROUPS, ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_aggregates_equal_those_of_plain_python(kind: pa.DataType, data: st.DataObject) -> None:
    groups = data.draw(GROUPS[kind])
    stored = [pa.array(group, kind).to_pylist() for group in groups]
    given_values = [[value for value in group if value is not None] for group in stored]
    for text in ("count(x)", "count(DISTINCT x)", "min(x)", "max(x)"):
        found = aggregate(text, groups, kind)
        assert found.type == result_type(parse_aggregate(text, "n"), kind, "n")
        for one, values in zip(found.to_pylist(), given_values, strict=True):
            assert same(one, PLAIN[text](values)), (text, values)
    assert aggregate("count(*)", groups, kind).to_pylist() == [len(group) for group in groups]
    for text, at in (("first(x)", 0), ("last(x)", -1)):
        found = aggregate(text, groups, kind)
        assert found.type == result_type(parse_aggregate(text, "n"), kind, "n")
        assert [*map(repr, found.to_pylist())] == [repr(group[at] if group else None) for group in stored]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint64()], ids=str)
@settings(max_examples=100)
@given(data=st.data())
def test_sums_of_integers_are_exact_or_refused(kind: pa.DataType, data: st.DataObject) -> None:
    groups = data.draw(GROUPS[kind])
    expected = [sum(value for value in group if value is not None) for group in groups]
    wanted = pa.uint64() if kind == pa.uint64() else pa.int64()
    bounds = np.iinfo(wanted.to_pandas_dtype())
    if all(bounds.min <= total <= bounds.max for total in expected):
        is_null = [all(value is None for value in group) for group in groups]
        found = aggregate("sum(x)", groups, kind)
        assert found.type == wanted
        assert found.to_pylist() == [None if null else total for null, total in zip(is_null, expected, strict=True)]
    else:
        with pytest.raises(SumTooLarge, match=r"sum\(x\) of a group, .* does not fit u?int64.*AS DOUBLE"):
            aggregate("sum(x)", groups, kind)


@settings(max_examples=100)
@given(GROUPS[pa.float64()])
@example([[math.nan, 1.0], [1.0, None], [None], []])
def test_sums_and_averages_of_floats(groups: list[list[float | None]]) -> None:
    for text in ("sum(x)", "avg(x)"):
        found = aggregate(text, groups, pa.float64())
        assert found.type == pa.float64()
        for one, group in zip(found.to_pylist(), groups, strict=True):
            values = [value for value in group if value is not None]
            total = math.fsum(values) if values else None
            if total is None or math.isnan(total):
                assert one is None if total is None else math.isnan(one)
            else:
                mean = total / len(values) if text == "avg(x)" else total
                assert one == pytest.approx(mean, rel=1e-9, abs=1e-9 * max(map(abs, values)))


@pytest.mark.parametrize("kind", [pa.decimal128(9, 2), pa.decimal256(50, 3)], ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_sums_and_averages_of_decimals(kind: pa.DataType, data: st.DataObject) -> None:
    groups = data.draw(GROUPS[kind])
    sums, means = (aggregate(text, groups, kind) for text in ("sum(x)", "avg(x)"))
    assert (sums.type.scale, means.type.scale) == (kind.scale, kind.scale + 4)
    unit = Decimal(1).scaleb(-means.type.scale)
    for total, mean, group in zip(sums.to_pylist(), means.to_pylist(), groups, strict=True):
        values = [value for value in group if value is not None]
        with localcontext(prec=100):
            assert total == (sum(values) if values else None)
            if values:
                assert abs(mean - sum(values) / len(values)) <= unit


def test_an_average_of_decimals_is_rounded_half_up() -> None:
    groups = [[Decimal("0.01"), Decimal("0.00"), Decimal("0.00")], [Decimal("-0.05")] * 3 + [Decimal("-0.00")]]
    found = aggregate("avg(x)", groups, pa.decimal128(3, 2)).to_pylist()
    assert found == [Decimal("0.003333"), Decimal("-0.037500")]
    assert found[0] == (Decimal("0.01") / 3).quantize(Decimal("0.000001"), ROUND_HALF_UP)


def test_a_sum_of_decimals_that_does_not_fit_is_refused() -> None:
    largest_value = Decimal("9" * 38)
    with pytest.raises(SumTooLarge, match=r"decimal128\(38, 0\)"):
        aggregate("sum(x)", [[largest_value, Decimal(1)]], pa.decimal128(38, 0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("count(*)", Aggregate("count")),
        (" COUNT ( * ) ", Aggregate("count")),
        ("count(1)", Aggregate("count", "1")),
        ("Count(DISTINCT kind)", Aggregate("count", "kind", True)),
        ("count(distinct (a || b))", Aggregate("count", "(a || b)", True)),
        ("sum(b * CAST(a > 1 AS BIGINT))", Aggregate("sum", "b * CAST(a > 1 AS BIGINT)")),
        ("max(`odd name`) -- the newest", Aggregate("max", "`odd name`")),
        ("first(coalesce(a, b))", Aggregate("first", "coalesce(a, b)")),
        ("avg(m['k'])", Aggregate("avg", "m['k']")),
        ("min(')')", Aggregate("min", "')'")),
        ("last(meta.lang)", Aggregate("last", "meta.lang")),
    ],
)
def test_a_text_is_one_aggregate(text: str, expected: Aggregate) -> None:
    assert parse_aggregate(text, "n") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty. Write one of count"),
        ("kind", "is not an aggregate of a group's rows.*group_by"),
        ("round(avg(x))", r"uses avg\(\) within an expression.*a view of this view"),
        ("1 + sum(x)", r"uses sum\(\) within an expression"),
        ("sum(x) / count(*)", "has '/' after the aggregate.*a column of its own"),
        ("sum(x", "is not an aggregate|uses sum"),
        ("stddev(x)", r"calls stddev\(\). Write one of.*or give a function"),
        ("upper(kind)", r"calls upper\(\)"),
        ("sum(max(x))", "an aggregate within an aggregate.*Make a view"),
        ("row_number() over (order by x)", r"calls row_number\(\)"),
        ("sum(x) OVER (PARTITION BY k)", "is a window.*leave OVER out"),
        ("sum(x) FILTER (WHERE x > 1)", "has FILTER.*nullif"),
        ("first(x) IGNORE NULLS", "has IGNORE after the aggregate"),
        ("first(x ORDER BY y)", r"agg\(..., order_by="),
        ("sum(*)", "names no value: only count"),
        ("count()", "names no value"),
        ("count(DISTINCT *)", "names no value"),
        ("count(a, b)", "several values in one aggregate"),
        ("sum(DISTINCT x)", "DISTINCT, which only count takes"),
    ],
)
def test_other_texts_are_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"(?s)Column 'n' is given .*{message}"):
        parse_aggregate(text, "n")


@given(st.text(alphabet="countsummax()*,'\"` -[]distinct.x1/", max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse_aggregate(text, "n")
    except InvalidInput:
        return
    assert found.function in FUNCTIONS


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("sum(x)", pa.string(), r"values of type string, which cannot be added"),
        ("avg(x)", pa.bool_(), "cannot be added.*CAST"),
        ("sum(x)", pa.timestamp("us"), "cannot be added"),
        ("sum(x)", pa.decimal256(70, 0), "cannot be added"),
        ("max(x)", pa.list_(pa.int64()), "cannot be compared"),
        ("count(DISTINCT x)", pa.struct({"a": pa.int64()}), "cannot be compared"),
    ],
)
def test_types_that_an_aggregate_does_not_take_are_refused(text: str, kind: pa.DataType, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"Column 'n': .*{message}"):
        result_type(parse_aggregate(text, "n"), kind, "n")


def test_lists_and_structs_are_counted_and_kept() -> None:
    kind = pa.list_(pa.int64())
    groups = [[[1], None, [2, 3]], [None], []]
    assert aggregate("count(x)", groups, kind).to_pylist() == [2, 0, 0]
    assert aggregate("first(x)", groups, kind).to_pylist() == [[1], None, None]
    assert aggregate("last(x)", groups, kind).to_pylist() == [[2, 3], None, None]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    rows = pa.table({
        "k": pa.array([1, 1, 2, 2, 2, None], pa.int64()),
        "x": pa.array([1, None, 3, 4, 5, 6], pa.int32()),
        "text": ["a", "b", "c", "d", None, "f"],
        "meta": [{"lang": "en"}] * 6,
    })  # fmt: skip
    return connect(tmp_path / "db").create_table("events", rows)


def test_aggregates_of_a_query_get_the_types_of_their_results(table: Table) -> None:
    specs = {
        "n": "count(*)",
        "total": "sum(x * 2)",
        "left": "min(left(text, 1))",
        "mean": "avg(x)",
        "text": "max(text)",
        "lang": "first(meta.lang)",
    }
    found = resolve_columns(table.lance, "events", tuple(specs.items()), groups=True)
    assert {field.name: field.type for field in found.schema} == {
        "n": pa.int64(),
        "total": pa.int64(),
        "mean": pa.float64(),
        "left": pa.string(),
        "text": pa.string(),
        "lang": pa.string(),
    }
    assert [(column.kind, column.expression) for column in found.columns] == [
        ("aggregate", text) for text in specs.values()
    ]
    assert found.reads == {"x", "text", "meta"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sum(y)", "The expression 'y' of column 'n' is not valid for table 'events'"),
        ("sum(n)", "The expression 'n' of column 'n' is not valid"),
        ("max(random())", "returns another value at every call"),
        ("max(_rowid)", "are Lance's and the views' own"),
        ("max(stddev(x))", r"calls stddev\(\)"),
        ("max(NULL)", "has no type"),
        ("sum(text)", "cannot be added"),
    ],
)
def test_an_argument_is_checked_against_the_table(table: Table, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        resolve_columns(table.lance, "events", (("n", text),), groups=True)


ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.none() | SMALL,
        st.none() | FLOATS.filter(lambda x: not is_nan(x)),
        st.none() | st.text("ab", max_size=2),
    ),
    min_size=1,
    max_size=30,
)
SCHEMA = pa.schema({"k": pa.int64(), "x": pa.int64(), "f": pa.float64(), "s": pa.string()})
OF_LANCE = [
    *("count(*)", "count(x)", "count(DISTINCT x)", "sum(x)", "avg(x)", "min(x)", "max(x + 1)"),
    *("sum(f)", "avg(f)", "min(f)", "max(f)", "count(DISTINCT s)", "min(s)", "max(s)"),
    *(
        "sum(x * CAST(x > 0 AS BIGINT))",
        "count(nullif(x > 0, false))",
        "sum(CAST(x AS DECIMAL(9, 2)))",
        "avg(CAST(x AS DECIMAL(9, 2)))",
    ),
]


@pytest.mark.skipif(not hasattr(lance.LanceDataset, "sql"), reason="this pylance evaluates no SQL statements")
@settings(max_examples=25)
@given(rows=ROWS)
def test_aggregates_equal_those_of_sql(rows: list[tuple[Any, ...]], tmp_path_factory: Any) -> None:
    data = pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA)
    dataset = lance.write_dataset(data, str(tmp_path_factory.mktemp("sql") / "t.lance"))
    keys = data["k"].to_numpy()
    order, lengths = pa.array(np.argsort(keys, kind="stable")), np.unique(keys, return_counts=True)[1]
    for text in OF_LANCE:
        query = dataset.sql(f"SELECT k, {text} AS made FROM dataset GROUP BY k ORDER BY k")
        wanted = pa.Table.from_batches(query.build().to_batch_records())["made"]
        one, values = parse_aggregate(text, "n"), None
        if one.argument is not None:
            scanned = dataset.to_table(columns={"k": "k", "v": f"({one.argument})"})
            values = scanned.take(order)["v"].combine_chunks()
        found = aggregate_groups(one, values, lengths, "n")
        assert found.type == wanted.type, text
        for mine, theirs in zip(found.to_pylist(), wanted.to_pylist(), strict=True):
            if isinstance(theirs, Decimal) and isinstance(mine, Decimal):
                assert abs(mine - theirs) <= Decimal("0.000001"), text
            elif isinstance(theirs, float) and isinstance(mine, float):
                assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-3), text
            else:
                assert mine == theirs, text
