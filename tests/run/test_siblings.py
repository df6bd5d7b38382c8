"""One function fills several columns: one call a row, one data file a fragment, and each a column like any other."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import connect, expect, udf
from airflow_geneva.engine.cleanup import find_garbage
from airflow_geneva.engine.cleanup.garbage import FileKind
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import CodeChanged, InvalidInput, JobFailed
from airflow_geneva.table import Table
from tests.support.tables import MakeTable


class Size(NamedTuple):
    width: int
    height: str


@dataclasses.dataclass
class Described:
    size: Size
    tags: list[str]


SIZE = pa.struct({"width": pa.int64(), "height": pa.string()})
calls: list[int] = []


@udf(version="1")
def size_of(x: int) -> Size:
    calls.append(x)
    return Size(2 * x, f"{x}!")


@udf(version="2")
def larger(x: int) -> Size:
    calls.append(x)
    return Size(3 * x, f"{x}?")


@udf(data_type=SIZE, version="1")
def sizes(x: pa.Int64Array) -> pa.StructArray:
    calls.extend(x.to_pylist())
    return pa.StructArray.from_arrays([pc.multiply(x, 2), pc.cast(x, pa.string())], ["width", "height"])


@udf(version="1", on_error="skip")
def picky(x: int) -> Size:
    if x % 10 == 3:
        raise ValueError(f"cannot do {x}")
    return size_of(x)


@udf(data_type=SIZE, version="1", expect=[expect.not_null()])
def sometimes(x: int) -> dict[str, Any] | None:
    return {"width": x, "height": "h"} if x < 5 else None


@udf(version="1")
def area(width: int) -> int:
    return width * width


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    calls.clear()
    return make_table(40)


def rows(table: Table, *columns: str) -> list[dict[str, Any]]:
    return table.lance.to_table(columns=["x", *columns]).sort_by("x").to_pylist()


def test_one_call_a_row_fills_all_columns_and_one_data_file_holds_them(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    assert [table.schema.field(name).type for name in ("width", "height")] == [pa.int64(), pa.string()]
    result = table.backfill("height", runner="inline")
    assert (result.rows_computed, sorted(calls)) == (40, list(range(40)))
    assert rows(table, "width", "height") == [{"x": x, "width": 2 * x, "height": f"{x}!"} for x in range(40)]
    ids = [field.id() for field in table.lance.lance_schema.fields() if field.name() in ("width", "height")]
    for fragment in table.lance.get_fragments():
        assert [list(file.fields) for file in fragment.metadata.files].count(ids) == 1
    for name in ("width", "height"):
        again = table.backfill(name, runner="inline")
        assert (again.rows_computed, again.commits) == (0, ())


@pytest.mark.parametrize("names", [("height", "width"), ("h", "w")])
def test_columns_are_filled_by_name_or_else_in_order(table: Table, names: tuple[str, str]) -> None:
    table.add_columns({names: size_of})
    table.backfill(names[0], runner="inline")
    first, second = ("height", "width") if names == ("height", "width") else ("width", "height")
    made = {"width": 2, "height": "1!"}
    assert rows(table, *names)[1] == {"x": 1, names[0]: made[first], names[1]: made[second]}


def test_several_names_of_one_function_are_computed_once(table: Table) -> None:
    table.add_columns({("width", "height"): size_of, "area": area})
    results = table.backfill(["width", "area", "height"], runner="inline")
    assert results.columns == ("width", "area", "height")
    assert results[0] is results[2]
    assert len(calls) == 40
    assert rows(table, "area")[3]["area"] == 36


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        (("a", "b", "c"), size_of, "need a function that returns a struct with 3 fields"),
        (("a", "b"), area, "returns int64"),
        (("a", "a"), size_of, "named twice"),
        (("x", "b"), size_of, r"already has columns \['x'\]"),
        (("_rowid", "b"), size_of, "cannot be the name of a column"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    table: Table, key: tuple[str, ...], given: Any, message: str
) -> None:  # fmt: skip
    before = table.version
    with pytest.raises(InvalidInput, match=message):
        table.add_columns({key: (given, ["x"])})
    assert table.version == before


def test_rows_that_changed_moved_or_came_are_computed_and_no_others(table: Table) -> None:
    table.add_columns({("width", "height"): sizes})
    table.backfill("width", runner="inline")
    calls.clear()
    table.add(pa.table({"x": pa.array([100, 101], pa.int64())}))
    table.lance.update({"x": "200"}, where="x = 7")
    table.lance.optimize.compact_files()
    table.backfill("height", runner="inline")
    assert sorted(calls) == [100, 101, 200]
    calls.clear()
    table.lance.update({"height": "'other'"}, where="x = 9")
    table.backfill("width", runner="inline")
    assert calls == [9]
    assert {row["height"] for row in rows(table, "height") if row["x"] == 9} == {"9"}


@pytest.mark.slow
def test_a_row_that_fails_is_null_in_all_columns_and_runs_again(table: Table) -> None:
    table.add_columns({("width", "height"): picky})
    result = table.backfill("width", runner="inline")
    assert (result.rows_computed, result.rows_failed) == (36, 4)
    failed = [row for row in rows(table, "width", "height") if row["width"] is None]
    assert [(row["x"], row["height"]) for row in failed] == [(3, None), (13, None), (23, None), (33, None)]
    assert len(table.get_errors(column_name="width")) == 4
    assert len(table.get_failed_row_addresses(column_name="height")) == 4
    assert table.backfill("height", runner="inline").rows_failed == 4


def test_where_computes_only_what_it_selects(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    assert table.backfill("width", where="x < 10", runner="inline").rows_computed == 10
    assert table.backfill("height", runner="inline").rows_computed == 30
    assert len(calls) == 40


def test_new_code_is_noticed_and_given_to_all_columns_by_one_name(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    table.backfill("width", runner="inline")
    with pytest.raises(CodeChanged):
        table.backfill("height", larger, runner="inline")
    table.alter_columns({"height": larger})
    table.backfill("width", runner="inline", on_code_change="recompute")
    assert rows(table, "width", "height")[5] == {"x": 5, "width": 15, "height": "5?"}
    with pytest.raises(InvalidInput, match="Type mismatch"):
        table.alter_columns({("width", "height"): (area, ["x"])})
    table.add_columns({"area": area})
    with pytest.raises(InvalidInput, match="not filled by one function"):
        table.alter_columns({("width", "area"): size_of})


@pytest.mark.parametrize("dropped", ["width", "height"])
def test_a_column_can_be_dropped_and_the_other_goes_on_without_a_call(table: Table, dropped: str) -> None:
    table.add_columns({("width", "height"): size_of})
    table.backfill("width", runner="inline")
    calls.clear()
    table.drop_columns([dropped])
    left = ({"width", "height"} - {dropped}).pop()
    assert table.backfill(left, runner="inline").rows_computed == 0
    table.lance.update({"x": "300"}, where="x = 3")
    table.backfill(left, runner="inline")
    assert calls == [300]
    assert rows(table, left)[-1] == {"x": 300, left: {"width": 600, "height": "300!"}[left]}
    assert len({row[left] for row in rows(table, left)}) == 40


def test_what_a_killed_run_staged_is_not_read_with_a_column_less(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    plan = table.plan_backfill("width")
    record_plan(plan, table.location)
    for shard in plan.shards:
        apply_inline(table.location, plan.spec, shard, Udfs({"width": size_of}))
    table.drop_columns(["width"])
    table.lance.update({"x": "x"}, where="x = 3")  # so that rows of its file would be taken one by one
    result = table.backfill("height", runner="inline")
    assert result.state == "DONE"
    assert [row["height"] for row in rows(table, "height")] == [f"{x}!" for x in range(40)]


def test_what_an_open_job_has_computed_is_no_garbage(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    plan = table.plan_backfill("width")
    record_plan(plan, table.location)
    for shard in plan.shards:
        apply_inline(table.location, plan.spec, shard, Udfs({"width": size_of}))
    garbage = find_garbage(table.location, "1s", now=time.time() + 600)
    kinds = FileKind.CHECKPOINTS, FileKind.STAGED
    assert [file.name for kind in kinds for file in garbage.file_group(kind).files] == []


def test_renamed_columns_keep_their_values_and_their_fields(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    table.backfill("width", runner="inline")
    table.rename_column("width", "height_2")
    table.rename_column("height", "width")
    table.rename_column("height_2", "height")
    assert table.backfill("height", runner="inline").rows_computed == 0
    table.add(pa.table({"x": pa.array([50], pa.int64())}))
    table.backfill("width", runner="inline")
    assert rows(table, "width", "height")[-1] == {"x": 50, "width": "50!", "height": 100}
    assert len(calls) == 41


def test_one_of_them_can_be_promoted_and_reverted(table: Table) -> None:
    table.add_columns({("width", "height"): size_of, ("w2", "h2"): larger})
    table.backfill(["width", "w2"], runner="inline")
    table.promote_column("w2", to="width", keep_as="w1")
    assert rows(table, "width", "w1", "h2")[4] == {"x": 4, "width": 12, "w1": 8, "h2": "4?"}
    table.add(pa.table({"x": pa.array([60], pa.int64())}))
    table.backfill("width", runner="inline")
    table.backfill("height", runner="inline")
    assert rows(table, "width", "w1", "h2", "height")[-1] == {
        "x": 60, "width": 180, "w1": 120, "h2": "60?", "height": "60!"
    }  # fmt: skip
    assert len(calls) == 82
    table.promote_column("w1", to="width", keep_as="w2")
    assert table.backfill("width", runner="inline").rows_computed == 0


def test_an_expectation_is_about_the_struct(table: Table) -> None:
    table.add_columns({("width", "height"): sometimes})
    with pytest.raises(JobFailed, match="not_null"):
        table.backfill("width", runner="inline")
    assert {row["width"] for row in rows(table, "width")} == {None}
    table.lance.delete("x >= 5")
    table.backfill("width", runner="inline")
    assert [row["height"] for row in rows(table, "height")] == ["h"] * 5


def test_compare_and_the_function_are_about_the_column_that_is_named(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    table.backfill("width", runner="inline")
    found = table.compare("height", larger, sample=3)
    assert found.to_arrow().select(["height.old", "height.new"]).to_pylist()[0].items() <= {
        "height.old": f"{found.table['x'][0]}!", "height.new": f"{found.table['x'][0]}?"
    }.items()  # fmt: skip
    assert (table.column_function("width")(7), table.column_function("height")(7)) == (14, "7!")


def test_jobs_and_plans_name_all_columns(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    assert "t.width and height with size_of" in str(table.plan_backfill("height")).replace(table.name, "t")
    result = table.backfill("height", runner="inline")
    job = connect(table.location.database_uri).job(result.job_id)
    assert (job.column, job.columns) == ("width", ("width", "height"))


def test_a_dataclass_with_a_list_and_a_tuple_inside_becomes_columns(table: Table) -> None:
    @udf(version="1")
    def describe(x: int) -> Described:
        return Described(Size(x, "h"), [str(x)])

    assert describe.data_type == pa.struct({"size": SIZE, "tags": pa.list_(pa.string())})
    table.add_columns({("size", "tags"): describe})
    table.backfill("tags", runner="inline")
    assert rows(table, "size", "tags")[2] == {"x": 2, "size": {"width": 2, "height": "h"}, "tags": ["2"]}


def test_a_copied_table_computes_its_columns_anew(table: Table) -> None:
    table.add_columns({("width", "height"): size_of})
    table.backfill("width", runner="inline")
    db = connect(table.location.database_uri)
    copy = db.create_table("copy", table.lance.to_table())
    copy.add(pa.table({"x": pa.array([70], pa.int64())}))
    copy.backfill("width", runner="inline", on_unknown_values="recompute")
    assert rows(copy, "width", "height")[-1] == {"x": 70, "width": 140, "height": "70!"}


@pytest.mark.spark
def test_the_same_on_spark(table: Table) -> None:
    table.add_columns({("width", "height"): sizes})
    table.backfill("width", runner="spark", task_size=10)
    assert rows(table, "width", "height") == [{"x": x, "width": 2 * x, "height": f"{x}"} for x in range(40)]


def shown(view: Any, *columns: str) -> list[dict[str, Any]]:
    return view.to_arrow().select(["x", *columns]).sort_by("x").to_pylist()


def test_a_view_has_such_columns_too(table: Table) -> None:
    query = table.query().select({"x": "x", ("width", "h"): size_of, "area": area})
    assert query.to_arrow().slice(3, 1).to_pylist() == [{"x": 3, "width": 6, "h": "3!", "area": 36}]
    calls.clear()
    view = query.create_materialized_view(name="sizes")
    view.refresh(runner="inline")
    assert shown(view, "width", "h", "area") == [
        {"x": x, "width": 2 * x, "h": f"{x}!", "area": 4 * x * x} for x in range(40)
    ]
    assert len(calls) == 40
    table.lance.update({"x": "90"}, where="x = 9")
    view.refresh(runner="inline")
    assert (len(calls), shown(view, "h")[-1]) == (41, {"x": 90, "h": "90!"})
    view.promote_column("h", to="width", keep_as="w1")
    assert shown(view, "width", "w1")[2] == {"x": 2, "width": "2!", "w1": 4}
    table.add(pa.table({"x": pa.array([95], pa.int64())}))
    view.refresh(runner="inline")
    assert shown(view, "width", "w1", "area")[-1] == {"x": 95, "width": "95!", "w1": 190, "area": 190 * 190}
    assert len(calls) == 42


@pytest.mark.slow
def test_a_row_that_fails_in_a_view_is_null_in_all_such_columns(table: Table) -> None:
    view = table.query().select({"x": "x", ("width", "h"): picky}).create_materialized_view(name="sizes")
    assert view.refresh(runner="inline").rows_failed == 4
    assert [row for row in shown(view, "width", "h") if row["width"] is None or row["h"] is None] == [
        {"x": x, "width": None, "h": None} for x in (3, 13, 23, 33)
    ]
    with pytest.raises(InvalidInput, match="need a UDF that returns a struct"):
        table.query().select({("a", "b"): "x"}).output_schema()
