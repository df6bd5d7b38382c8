"""Values of other code beside the stored ones, before anything is computed again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import lance
import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.udf import UDF
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


@pytest.mark.parametrize(("given", "column"), [("error", "y"), ("x", "error")])
def test_a_column_may_be_called_error(make_table: MakeTable, given: str, column: str) -> None:
    table = make_table(40)
    table.lance.alter_columns({"path": "x", "name": given})
    table.add_columns({column: (triple, [given])})
    (row, *_) = table.plan_backfill(column).estimate(sample=20).sample.to_pylist()
    assert row[column] == 3 * row[given] + 1
    assert row["error.raised"] is None
    table.backfill(column, runner="inline")
    found = table.compare(column, NEW, sample=40)
    assert (found.rows, found.failed, len(found.differing)) == (40, 1, 10)
    assert "error.raised=" in repr(found)


def test_rows_without_a_value_that_would_get_one_differ(make_table: MakeTable) -> None:
    @udf(data_type=pa.int64(), version="1", name="sparse")
    def sparse(x: int) -> int | None:
        return x if x % 2 else None

    @udf(data_type=pa.int64(), version="2", name="sparse")
    def dense(x: int) -> int:
        return x

    table = make_table(40)
    table.add_columns({"y": sparse})
    table.backfill("y", udf=sparse, runner="inline")
    table.add([{"id": 40, "x": 40}])
    found = table.compare("y", dense, sample=100)
    assert (found.rows, found.filled, len(found.differing)) == (41, 21, 21)
    assert "21 of 41 rows differ, 21 of these have no value today" in repr(found)


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


def test_a_column_of_a_view_is_compared_on_what_the_view_was_computed_from(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    columns = {"y": triple, "z": (triple, ["y"])}
    query = table.query().select({"key": "id", "twice": "x * 2"}).where("x > 1").add_columns(columns)
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    assert view.compare("y", NEW).rows == 0
    view.refresh(runner="inline")
    table.lance.update({"x": "x + 100"}, where="x < 5")
    table.add([{"id": 1_000, "x": 1_000}])
    version = view.version
    trace.clear()
    found = view.compare("y", NEW, sample=50)
    assert found.to_arrow().column_names == ["x", "y.old", "y.new", "error"]
    rows = found.to_arrow().to_pylist()
    assert sorted((row["x"], row["y.old"]) for row in rows) == [(x, 3 * x + 1) for x in range(2, 40)]
    assert (found.failed, {row["x"] for row in rows if row["y.new"] != row["y.old"]}) == (1, set(range(2, 10)))
    assert "Comparison of v.y with UDF version 2: 8 of 38 rows differ, 1 of these fail" in repr(found)
    assert (view.version, trace.rows()) == (version, [])
    # A column is computed with those before it that it needs.
    by_y = view.compare("z", NEW, sample=50).to_arrow()
    assert by_y.column_names == ["x", "y", "z.old", "z.new", "error"]
    assert sorted(by_y.column("z.old").to_pylist()) == [9 * x + 4 for x in range(2, 40)]
    assert view.compare("y").rows == 0
    with pytest.raises(
        InvalidInput, match=r"No UDF computes a column 'twice' of view 'v'\. Its computed columns: 'y', 'z'"
    ):
        view.compare("twice", NEW)
    with pytest.raises(InvalidInput, match="udf=3 is not a UDF"):
        view.compare("y", 3)
    with pytest.raises(InvalidInput, match="Type mismatch for column 'y'"):
        view.compare("y", udf(data_type=pa.string(), name="triple")(lambda x: str(x)))


def test_lists_of_an_exploded_view_are_compared_whole(make_table: MakeTable) -> None:
    @udf(data_type=pa.list_(pa.int64()), name="upto")
    def upto(x: int) -> list[int]:
        return list(range(x))

    @udf(data_type=pa.list_(pa.int64()), name="upto")
    def shorter(x: int) -> list[int]:
        return list(range(min(x, 2)))

    table = make_table(4)
    query = table.query().select({"id": "id", "n": (upto, ["x"])}).explode("n")
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    view.refresh(runner="inline")
    found = view.compare("n", shorter).to_arrow()
    assert found.select(["x", "n.old", "n.new"]).to_pylist() == [
        {"x": x, "n.old": [*range(x)], "n.new": [*range(min(x, 2))]} for x in range(4)
    ]
    table.add([{"id": 4, "x": 4}])
    table.lance.cleanup_old_versions(older_than=timedelta(0))
    with pytest.raises(InvalidInput, match="View 'v' shows version 1 of 'docs', which was cleaned up"):
        view.compare("n", shorter)


def test_blobs_are_compared_by_their_bytes(make_table: MakeTable) -> None:
    def made(version: str, more: int) -> UDF:
        name = {"name": "drawn", "version": version, "data_type": lance.blob_field("b").type}
        return udf(**name)(lambda x: b"a" * (x + more * (x == 2)))

    table = make_table(4)
    table.add_columns({"b": made("1", 0)})
    table.backfill("b", runner="inline")
    found = table.compare("b", made("2", 1))
    assert found.to_arrow()["b.new"].to_pylist() == [b"", b"a", b"aaa", b"aaa"]
    assert found.differing == (2,)
