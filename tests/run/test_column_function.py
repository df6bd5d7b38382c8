"""The function that a version's values come from, called on other values."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from airflow_geneva import udf
from airflow_geneva.errors import CodeChanged, InvalidInput, UdfError
from tests.support.counting import triple
from tests.support.tables import MakeTable


@udf(data_type=pa.int64(), version="2")
def four_times(x: int) -> int:
    return 4 * x


@udf(data_type=pa.int64(), on_error="skip")
def inverse(x: int) -> int:
    return 12 // x


@udf(data_type=pa.int64())
async def slowly(x: int) -> int:
    await asyncio.sleep(0)
    return 5 * x


@udf(data_type=pa.int64())
def together(x: pa.Array, id: pa.Array) -> pa.Array:
    return pa.array([a + b for a, b in zip(x.to_pylist(), id.to_pylist(), strict=True)], pa.int64())


@udf(data_type=pa.int64())
class Loaded:
    def __init__(self) -> None:
        self.factor = 7

    def __call__(self, x: int) -> int:
        return self.factor * x


def test_functions_of_every_form_compute_one_value(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"a": triple, "b": slowly, "c": together, "d": Loaded, "e": inverse})
    values = {name: table.column_function(name) for name in "abcde"}
    assert [values[name](3) for name in "abde"] == [10, 15, 21, 4]
    assert values["c"](3, 4) == 7
    with pytest.raises(UdfError, match="ZeroDivisionError"):
        values["e"](0)


def halved(x: int) -> float:
    return x / 2


@udf(data_type=pa.float64(), preprocess=halved, preprocess_workers=2, setup_timeout=60.0)
def of_halves(half: pa.Array) -> pa.Array:
    return pa.array([value + 1 for value in half.to_pylist()], pa.float64())


@pytest.mark.slow
def test_values_pass_the_stage_before_the_function(make_table: MakeTable) -> None:
    table = make_table(4)
    table.add_columns({"y": (of_halves, ["x"])})
    table.backfill("y", runner="inline")
    assert table.to_arrow(["y"])["y"].to_pylist() == [1.0, 1.5, 2.0, 2.5]
    assert table.column_function("y")(5) == 3.5


@udf(data_type=pa.int64(), input_columns=["pair.a", "pair.in.b", "x"])
def added(a: int, b: int, x: int) -> int:
    return a + b + x


def test_fields_of_structs_are_inputs_like_others(make_table: MakeTable) -> None:
    pairs = pa.array([{"a": n, "in": {"b": 10 * n}} for n in range(5)])
    table = make_table(5, pair=pairs)
    table.add_columns({"y": added})
    table.backfill("y", runner="inline")
    assert table.to_arrow(["y"])["y"].to_pylist() == [12 * n for n in range(5)]
    assert table.column_function("y")(1, 2, 3) == 6


def test_a_version_has_its_own_function(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    before = table.version
    table.alter_columns({"y": four_times})
    table.backfill("y", runner="inline", on_code_change="recompute")
    assert table.column_function("y", before)(10) == 31
    now = table.column_function("y")
    assert now(10) == 40
    assert now.versions == {"2": 10}
    assert str(now).endswith(f"(x) of column 'y' at version {table.version}: 10 rows of version 2")


def test_code_that_computed_none_of_the_values_is_refused(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.alter_columns({"y": four_times})
    # The definition names other code than the values come from.
    with pytest.raises(CodeChanged, match="the code here is version 2"):
        table.column_function("y")


def test_values_of_two_versions_say_so(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.alter_columns({"y": four_times})
    table.add([{"id": 10, "x": 10}])
    table.backfill("y", runner="inline", on_code_change="new_rows")
    assert table.column_function("y").versions == {triple.code_version: 10, "2": 1}


def test_bad_input_is_refused(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    with pytest.raises(InvalidInput, match="has no UDF"):
        table.column_function("x")
    with pytest.raises(InvalidInput, match="not defined"):
        table.column_function("z")
    with pytest.raises(InvalidInput, match="Version 99 of the table does not exist"):
        table.column_function("y", 99)
    function = table.column_function("y")
    with pytest.raises(InvalidInput, match=r"takes 1 value, for .*, and got 2"):
        function(1, 2)
    with pytest.raises(InvalidInput, match="no values for"):
        function("many")
