"""Values of other code beside the stored ones, before anything is computed again."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from airflow_geneva import udf
from airflow_geneva.errors import CodeChanged, InvalidInput
from airflow_geneva.table import Table
from tests.support.counting import Trace, triple

MakeTable = Callable[..., Table]


def changed(x: int) -> int:
    if x == 7:
        raise ValueError("seven")
    return 3 * x + (2 if x < 10 else 1)


NEW = udf(data_type=pa.int64(), version="2", name="triple")(changed)


def computed(make_table: MakeTable, rows: int = 40) -> Table:
    table = make_table(rows)
    table.add_columns({"y": triple})
    table.backfill("y", udf=triple, runner="inline")
    return table


def test_old_and_new_values_stand_side_by_side_and_nothing_is_kept(make_table: MakeTable) -> None:
    table = computed(make_table)
    table.add([{"x": 1_000}])  # without a value of the old code
    version = table.version
    found = table.compare("y", NEW, sample=40)
    rows = found.to_arrow().to_pylist()
    assert found.to_arrow().column_names == ["x", "y.old", "y.new", "error"]
    assert sorted(row["x"] for row in rows) == list(range(40))
    assert all(row["y.old"] == 3 * row["x"] + 1 for row in rows)
    assert {row["x"] for row in rows if row["y.new"] != row["y.old"]} == set(range(10))
    assert (found.rows, found.failed, len(found.differing)) == (40, 1, 10)
    assert "10 of 40 rows differ, 1 of these fail" in repr(found)
    assert "x=0, y.old=1, y.new=2" in repr(found)
    assert "and 2 more" in repr(found)
    assert table.version == version
    with pytest.raises(CodeChanged, match=r"table\.compare\('y', udf\) shows"):
        table.backfill("y", udf=NEW)


def test_a_sample_is_taken_from_several_fragments(make_table: MakeTable) -> None:
    found = computed(make_table, rows=100).compare("y", NEW, sample=8).to_arrow()
    assert found.num_rows == 8
    assert {x // 25 for x in found.column("x").to_pylist()} == {0, 1, 2, 3}


def test_with_the_code_that_the_column_has_nothing_is_compared(make_table: MakeTable, trace: Trace) -> None:
    table = computed(make_table)
    trace.clear()
    found = table.compare("y", triple)
    assert found.rows == len(trace) == 0
    assert "no row holds a value of other code" in repr(found)
    with pytest.raises(InvalidInput, match="sample=0"):
        table.compare("y", NEW, sample=0)
