"""A view equals its query at the refreshed source version, and a refresh costs what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.run import view as run
from airflow_geneva.engine.udf import udf
from airflow_geneva.errors import CodeChanged, InvalidInput, JobFailed, UnknownValues
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact
from tests.support.queries import NOT_THIRD, Asked, Refresh, assert_equals_query, assert_nothing_to_refresh, shown
from tests.support.tables import MakeTable
from tests.udfs_for_tests import views as udfs


def refresh(view: View, **arguments: Any) -> Any:
    return view.refresh(runner="inline", **arguments)


def test_a_first_refresh_computes_what_the_query_selects_in_one_swap(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    view = Asked(NOT_THIRD).make(table)
    assert shown(view) == []
    result = refresh(view)
    assert_exact(trace, [x for x in range(100) if x % 3])
    assert (result.state, result.rows_computed, result.rows_skipped) == ("DONE", 66, 34)
    assert shown(view) == Asked(NOT_THIRD).rows(table)
    assert view.lance.count_rows() == 66
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        (lambda t: t.add([{"id": 100, "x": 100}, {"id": 101, "x": 99}]), [100]),
        (lambda t: t.lance.update({"x": "x + 1"}, where="id IN (3, 5)"), [4]),
        (lambda t: t.lance.delete("id < 30"), []),
        (lambda t: t.lance.optimize.compact_files(), []),
        (lambda t: t.lance.update({"other": "1"}, where="id < 50"), []),
        (lambda t: t.lance.add_columns({"more": "id"}), []),
        (lambda t: t.lance.checkout_version(1).restore(), []),
    ],
    ids=["append", "update", "delete", "compaction", "unrelated update", "unrelated column", "restore"],
)
def test_a_refresh_runs_what_changed(
    make_table: MakeTable, trace: Trace, change: Callable[[Table], Any], due: list[int]
) -> None:
    table = make_table(100, other=pa.array([0] * 100, pa.int64()))
    view = Asked(NOT_THIRD).make(table)
    refresh(view)
    trace.clear()
    change(table)
    view.lance.optimize.compact_files()
    result = refresh(view)
    assert_exact(trace, due)
    assert result.rows_computed == len(due)
    assert_equals_query(view, table, Asked(NOT_THIRD))
    assert_nothing_to_refresh(view, trace)


def test_a_refresh_of_changes_the_view_does_not_read_writes_no_version(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, other=pa.array([0] * 100, pa.int64()))
    view = Asked().make(table)
    refresh(view)
    version = view.lance.version
    table.lance.optimize.compact_files()
    table.lance.update({"other": "1"}, where="id < 50")
    table.lance.add_columns({"more": "id"})
    refresh(view)
    assert view.lance.version == version
    table.lance.cleanup_old_versions(older_than=timedelta(0))
    assert_nothing_to_refresh(view, trace)
    assert len(trace) == 100


def test_a_plan_after_a_compaction_of_the_source_reads_no_row(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(100)
    view = Asked().make(table)
    table.lance.update({"x": "x + 1"}, where="id % 9 = 1")
    refresh(view)
    table.lance.optimize.compact_files()
    compacted = table.version
    table.lance.delete("id = 5")
    table.lance.update({"x": "x + 1"}, where="id = 7")
    read = list[object]()
    for kind in (lance.LanceDataset, lance.LanceFragment):
        scanner = kind.scanner
        monkeypatch.setattr(kind, "scanner", lambda of, *a, s=scanner, **k: read.append(of) or s(of, *a, **k))
    plan = view.plan_refresh(src_version=compacted)
    assert (plan.rows_pending, plan.swap and plan.swap.gone, read) == (0, Ranges.empty(), [])
    assert view.plan_refresh().rows_pending == 1
    assert read
    monkeypatch.undo()
    refresh(view)
    assert_equals_query(view, table, Asked())


def test_a_view_goes_back_to_an_earlier_source_version(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    view = Asked(NOT_THIRD).make(table)
    then = table.version
    table.add([{"id": 100, "x": 100}])
    table.lance.update({"x": "x + 1"}, where="id = 4")
    refresh(view)
    refresh(view, src_version=then)
    assert_equals_query(view, table, Asked(NOT_THIRD), then)
    refresh(view)
    assert_equals_query(view, table, Asked(NOT_THIRD))


def test_new_rows_are_shuffled_and_cut_into_fragments(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    view = Asked(seed=5).make(table)
    refresh(view, max_rows_per_fragment=30)
    assert shown(view) == Asked(seed=5).rows(table)
    assert [f.count_rows() for f in view.lance.get_fragments()] == [30, 30, 30, 10]
    table.add([{"id": i, "x": i} for i in range(100, 120)])
    refresh(view)
    assert sorted(shown(view)[:100]) == sorted(Asked().rows(table))[:100]
    assert_equals_query(view, table, Asked())


def test_of_two_swaps_that_touch_nothing_in_common_one_gives_up(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    view = Asked().make(table)
    refresh(view)
    table.lance.update({"x": "x + 1"}, where="id = 3")
    first = Refresh(view).plan()
    table.lance.update({"x": "x + 1"}, where="id = 90")
    second = Refresh(view).plan()
    first.apply()
    second.apply()
    assert second.finish().state == "DONE"
    lost = first.finish()
    assert (lost.state, lost.commits) == ("PARTIAL", ())
    assert "another refresh" in str(lost)
    assert_equals_query(view, table, Asked())
    assert_nothing_to_refresh(view, trace)


def test_a_refresh_that_was_broken_off_is_not_seen_and_nothing_of_it_runs_again(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(100)
    view = Asked().make(table)
    refresh(view)
    before = shown(view)
    table.add([{"id": 100 + i, "x": i} for i in range(10)])
    Refresh(view).plan().apply()
    assert shown(view) == before
    seen = len(trace)
    result = refresh(view)
    assert len(trace) == seen
    assert (result.rows_computed, result.rows_reused) == (0, 10)
    assert_equals_query(view, table, Asked())


def test_a_finish_that_is_done_twice_swaps_once(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    view = Asked().make(table)
    taken = Refresh(view).plan().apply()
    first = taken.finish()
    version = view.lance.version
    again = taken.finish()
    assert (again.state, view.lance.version) == ("DONE", version)
    assert again.rows_computed == first.rows_computed == 100
    assert_equals_query(view, table, Asked())


def test_foreign_placeholders_and_a_restored_view_are_set_right(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    view = Asked().make(table)
    refresh(view)
    first = view.lance.version
    table.lance.update({"x": "x + 1"}, where="id < 10")
    refresh(view)
    view.lance.checkout_version(first).restore()
    rows = pa.table({"__source_row_id": pa.array([5], pa.int64()), "__is_set": pa.array([False])})
    view.lance.insert(rows, mode="append")
    refresh(view)
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 100


def lose_snapshot(view: View) -> None:
    for name in view.location.checkpoints.list_files("state"):
        view.location.checkpoints.delete(name)


@pytest.mark.parametrize(("answer", "due"), [("recompute", 96), ("adopt", 1)])
def test_a_view_whose_snapshot_is_lost_asks(make_table: MakeTable, trace: Trace, answer: str, due: int) -> None:
    table, asked = make_table(100), Asked()
    view = asked.make(table)
    refresh(view)
    lose_snapshot(view)
    table.lance.delete("id >= 6 AND id < 10")
    table.lance.update({"x": "1005"}, where="id = 5")
    trace.clear()
    with pytest.raises(UnknownValues, match=r"shows 100 rows.*version 1 of the source.*on_unknown_values"):
        refresh(view)
    assert view.plan_refresh(on_unknown_values=answer).rows_pending == due
    refresh(view, on_unknown_values=answer)
    assert_exact(trace, [1005])  # the others are in checkpoints
    assert_equals_query(view, table, asked)
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("asked", [Asked(NOT_THIRD), Asked(limit=7, offset=3), Asked(limit=7, seed=5)])
def test_an_adopted_view_is_up_to_date(make_table: MakeTable, trace: Trace, asked: Asked) -> None:
    table = make_table(30)
    view = asked.make(table)
    refresh(view)
    lose_snapshot(view)
    trace.clear()
    result = refresh(view, on_unknown_values="adopt")
    assert (trace.rows(), result.commits) == ([], ())
    assert_nothing_to_refresh(view, trace)


def test_rows_that_the_query_does_not_select_are_not_adopted(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(30)
    view = Asked(NOT_THIRD).make(table)
    refresh(view)
    db = connect(table.location.database_uri)
    view.lance.shallow_clone(f"{db.uri}/v2.lance", view.version)
    clone = db.open_view("v2")
    db.drop_table(table.name)
    make_table(40)
    with pytest.raises(UnknownValues, match="it holds other rows than its query selects at version 1"):
        refresh(clone, on_unknown_values="adopt")
    with pytest.raises(InvalidInput, match="is for columns"):
        refresh(clone, on_unknown_values="fill")


@pytest.mark.slow
def test_failed_rows_are_null_listed_and_tried_in_three_runs(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(30)
    view = table.query().select(["id"]).add_columns({"e": (udfs.picky, ["x"])}).create_materialized_view(
        connect(table.location.database_uri), "v"
    )  # fmt: skip
    with pytest.raises(JobFailed, match=r"3 of 30 due rows failed, and max_failed allows 2\. The view is unchanged"):
        refresh(view, max_failed=2)
    assert view.count_rows() == 0
    trace.clear()
    result = refresh(view, max_failed=0.1)
    assert_exact(trace, [7, 17, 27])
    assert (result.state, result.rows_computed, result.rows_reused, result.rows_failed) == ("DONE", 0, 27, 3)
    assert {row["id"] for row in view.to_arrow().to_pylist() if row["e"] is None} == {7, 17, 27}
    assert {(error.column, error.message) for error in view.get_errors()} == {("e", f"not {x}") for x in (7, 17, 27)}
    for _ in range(2):
        trace.clear()
        assert refresh(view).rows_failed == 3
        assert_exact(trace, [7, 17, 27])
    trace.clear()
    assert refresh(view).rows_failed == 0
    assert_exact(trace, [])
    assert view.count_rows() == 30


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 3])
def test_a_repaired_function_runs_again_on_the_rows_that_failed(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    table = make_table(30)
    view = table.query().select(["id"]).add_columns({"e": (udfs.picky, ["x"])}).create_materialized_view(
        connect(table.location.database_uri), "v"
    )  # fmt: skip
    for _ in range(runs):
        refresh(view)

    @udf(data_type=pa.int64(), version="2", name="picky", on_error="skip")
    def repaired(x: int) -> int:
        leave_trace([x])
        if x == 17:
            raise ValueError("still not 17")
        return -x

    monkeypatch.setattr(run, "load_udfs", lambda definition: {"e": repaired})
    for at in range(3):
        trace.clear()
        assert refresh(view, on_code_change="new_rows").rows_failed == 1
        assert_exact(trace, [17] if at else [7, 17, 27])
    trace.clear()
    refresh(view)
    assert_exact(trace, [])
    assert {row["id"]: row["e"] for row in view.to_arrow().to_pylist()} == {
        x: -x if x in (7, 27) else None if x == 17 else x for x in range(30)
    }


@pytest.mark.parametrize(
    ("about", "kept", "told"),
    [
        ("42", 42, "Computing v.f failed at row 42 of fragment 0 of its source"),
        ("61", 30, "Computing v.s failed at row 30 of fragment 0 of its source"),
        ("42,61", 30, "Computing v.s failed at row 30 of fragment 0 of its source"),
        ("42,95", 42, "Computing v.f failed at row 42 of fragment 0 of its source"),
        ("0", 0, "Computing v.f failed at row 0 of fragment 0 of its source"),
    ],
)
def test_rows_before_the_one_that_failed_are_kept_with_all_of_their_columns(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, about: str, kept: int, told: str
) -> None:
    table = make_table(100, per_fragment=100)
    query = table.query().select(["x"]).add_columns({"p": (udfs.plus, ["x"]), "f": (udfs.fussy, ["x"])})
    query = query.add_columns({"s": (udfs.fussy_about_sums, ["p", "f"]), "t": (udfs.ten, ["p"])})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    monkeypatch.setenv("FUSSY_ABOUT", about)
    with pytest.raises(JobFailed, match=told):
        refresh(view)
    traces = [Trace(Path(f"{trace.path}{suffix}")) for suffix in ("", ".fussy", ".sums")]
    for each in traces:
        each.clear()
    monkeypatch.delenv("FUSSY_ABOUT")
    result = refresh(view)
    assert (result.state, result.rows_reused, result.rows_computed) == ("DONE", kept, 100 - kept)
    assert [len(each) for each in traces] == [100 - kept] * 3
    assert view.to_arrow().sort_by("x").to_pydict() == {
        "x": list(range(100)),
        "p": [x + 1 for x in range(100)],
        "f": list(range(100)),
        "s": [2 * x + 1 for x in range(100)],
        "t": [10 * x + 10 for x in range(100)],
    }


def test_failed_rows_are_found_where_they_lie_in_the_source_now(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50, per_fragment=20)
    query = table.query().select(["id"]).add_columns({"e": (udfs.picky, ["x"])})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    assert view.get_failed_row_addresses() == []
    job = refresh(view).job_id

    def where(ids: list[int]) -> list[int]:
        rows = table.lance.to_table(columns=["id"], with_row_address=True).to_pylist()
        return sorted(row["_rowaddr"] for row in rows if row["id"] in ids)

    then = where([7, 17, 27, 37, 47])
    assert view.get_failed_row_addresses() == view.get_failed_row_addresses(job) == then
    assert view.get_failed_row_addresses(job, "e") == then
    table.lance.delete("id IN (5, 17)")
    table.lance.update({"x": "x + 1"}, where="id = 27")
    table.lance.optimize.compact_files()
    assert view.get_failed_row_addresses() == where([7, 37, 47]) != then
    assert view.get_failed_row_addresses(job) == then
    assert view.get_failed_row_addresses(column_name="e") == where([7, 37, 47])
    with pytest.raises(InvalidInput, match=r"Column 'id' of view 'v' has no UDF that could fail\. Those with one: e\."):
        view.get_failed_row_addresses(column_name="id")


def test_code_that_changed_behind_a_view_stops_the_refresh(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(20)
    view = Asked().make(table)
    refresh(view)

    @udf(data_type=pa.int64(), version="2", name="plus")
    def other(x: pa.Int64Array) -> pa.Int64Array:
        leave_trace(x)
        return pa.array([value + 2 for value in x.to_pylist()], pa.int64())

    monkeypatch.setattr(run, "load_udfs", lambda definition: {"p": replace(other, func=other.func)})
    trace.clear()
    with pytest.raises(CodeChanged, match=r"20 rows of the view.* view\.compare\('p'\) shows"):
        refresh(view)
    table.add([{"id": 20, "x": 20}])
    refresh(view, on_code_change="new_rows")
    assert_exact(trace, [20])
    trace.clear()
    refresh(view)
    assert_exact(trace, [])
    assert view.to_arrow().sort_by("id")["p"].to_pylist() == [*range(1, 21), 22]
    assert view.plan_refresh(on_code_change="recompute").reasons["some columns changed"] == 20
    refresh(view, on_code_change="recompute")
    assert_exact(trace, list(range(20)))
    assert view.to_arrow().sort_by("id")["p"].to_pylist() == list(range(2, 23))
    trace.clear()
    refresh(view, on_code_change="recompute")
    assert_exact(trace, [])


@pytest.mark.parametrize("decided", ["error", "recompute", "new_rows"])
def test_code_that_gives_another_type_is_refused_before_it_is_called(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, decided: str
) -> None:
    view = Asked().make(make_table(3))
    refresh(view)
    other = udf(data_type=pa.float64(), version="2", name="plus")(lambda x: x + 0.5)
    monkeypatch.setattr(run, "load_udfs", lambda definition: {"p": other})
    with pytest.raises(InvalidInput, match=f"column 'p' of view '{view.name}': it is int64, .* gives double"):
        view.plan_refresh(on_code_change=decided)


def test_a_view_on_a_view(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(60)
    lower = Asked(NOT_THIRD).make(table)
    database = connect(table.location.database_uri)
    upper = lower.query().where("twice > 20").select({"id": "id", "four": "twice * 2"}).create_materialized_view(
        database, "upper"
    )  # fmt: skip
    assert refresh(upper).rows_computed == 0
    refresh(lower)
    refresh(upper)

    def right() -> Iterable[tuple[int, int]]:
        return sorted((i, 2 * twice) for i, twice, _ in Asked(NOT_THIRD).rows(table) if twice > 20)

    assert sorted((row["id"], row["four"]) for row in upper.to_arrow().to_pylist()) == right()
    table.lance.update({"x": "x + 1"}, where="id = 12")
    refresh(lower)
    assert refresh(upper).rows_computed == 1
    assert sorted((row["id"], row["four"]) for row in upper.to_arrow().to_pylist()) == right()


def test_a_source_without_stable_row_ids_is_refreshed_to_its_version_only(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50, stable=False)
    with pytest.warns(UserWarning, match="stable row"):
        view = Asked().make(table)
    refresh(view)
    assert_equals_query(view, table, Asked())
    table.add([{"id": 50, "x": 50}])
    with pytest.raises(InvalidInput, match=r"Cannot refresh materialized view 'v' to version \d+"):
        refresh(view)


def exploded(table: Table) -> list[tuple[int, int]]:
    rows = table.to_arrow().to_pylist()
    return [(row["id"], 100 * row["x"] + at) for row in rows for at in range(row["x"] % 10) if row["x"] != 13]


def of_many(view: View) -> list[tuple[int, int]]:
    return [(row["id"], row["part"]) for row in view.to_arrow().to_pylist()]


def make_exploded(table: Table, function: Any = udfs.digits, seed: int | None = None) -> View:
    query = table.query().where("x <> 13").select({"id": "id", "part": function}) if function is udfs.digits else (
        table.query().select({"id": "id", "part": function})
    )  # fmt: skip
    query = query.explode("part") if seed is None else query.explode("part").shuffle(seed)
    return query.create_materialized_view(connect(table.location.database_uri), "parts")


def test_one_source_row_gives_any_number_of_rows_in_their_order(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(60)
    view = make_exploded(table)
    result = refresh(view)
    assert (result.rows_computed, result.rows_skipped) == (59, 1)
    assert of_many(view) == exploded(table)
    assert view.schema.field("part").type == pa.int64()
    assert_nothing_to_refresh(view, trace)
    table.lance.update({"x": "x + 1"}, where="id IN (5, 9, 19)")
    table.lance.delete("id = 8")
    table.add([{"id": 60, "x": 64}, {"id": 61, "x": 70}])
    table.lance.optimize.compact_files()
    view.lance.optimize.compact_files()
    trace.clear()
    refresh(view)
    assert_exact(trace, [6, 10, 20, 64, 70])
    assert sorted(of_many(view)) == sorted(exploded(table))
    assert_nothing_to_refresh(view, trace)


def test_rows_of_one_source_row_stay_together_when_shuffled(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(60)
    view = make_exploded(table, seed=3)
    refresh(view, max_rows_per_fragment=50)
    found = of_many(view)
    assert sorted(found) == sorted(exploded(table))
    assert found != exploded(table)
    order = list(dict.fromkeys(i for i, _ in found))
    assert found == sorted(found, key=lambda row: (order.index(row[0]), row[1]))


def test_a_broken_off_refresh_of_many_rows_goes_on(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(60)
    view = make_exploded(table)
    Refresh(view).plan().apply()
    seen = len(trace)
    result = refresh(view)
    assert (len(trace), result.rows_computed, result.rows_reused) == (seen, 0, 59)
    assert of_many(view) == exploded(table)


@pytest.mark.slow
def test_a_source_row_on_which_the_generator_fails_gives_no_rows(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(30)
    view = make_exploded(table, udfs.digits_if_they_can)
    result = refresh(view)
    assert (result.rows_failed, result.rows_computed) == (1, 29)
    assert of_many(view) == exploded(table)
    # A row is deleted beside it, and it is tried again twice.
    table.lance.delete("x = 17")
    for _ in range(2):
        assert {tally.reason: tally.rows for tally in view.plan_refresh().reason_counts}["failed before"] == 1
        result = refresh(view)
        assert (result.state, result.rows_failed, result.rows_left) == ("DONE", 1, 0)
    assert of_many(view) == exploded(table)
    plan = view.plan_refresh()
    assert plan.rows_pending == 0
    assert "given up after 3 runs: 1 row" in str(plan)


def test_only_lists_are_exploded_and_cuts_are_refused(make_table: MakeTable) -> None:
    table = make_table(10)
    with pytest.raises(InvalidInput, match="the column is int64"):
        table.query().select(["id"]).explode("id").output_schema()
    with pytest.raises(InvalidInput, match="no such column"):
        table.query().select(["id"]).explode("x").output_schema()
    with pytest.raises(InvalidInput, match="limit or offset"):
        table.query().select({"part": udfs.digits}).explode("part").limit(3).output_schema()
    parts = table.query().select({"id": "id", "part": udfs.digits}).explode("part").to_arrow()
    assert list(zip(*parts.to_pydict().values(), strict=True)) == exploded(table)


def test_a_view_is_exploded_beside_a_string_view(make_table: MakeTable) -> None:
    query = make_table(4).query().select({"left": "left(CAST(id + 10 AS VARCHAR), 1)", "part": udfs.digits})
    view = query.explode("part").create_materialized_view(name="parts")
    assert query.output_schema().field("left").type == pa.string_view()
    view.refresh(runner="inline")
    assert set(view.to_arrow()["left"].to_pylist()) == {"1"}


@pytest.mark.parametrize("seed", [None, 1])
def test_a_view_with_a_limit_reads_no_row_ids_when_nothing_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    database = connect(tmp_path)
    table = database.create_table("docs", pa.table({"x": pa.array(range(100))}), max_rows_per_file=25)
    query = table.query().select(["x"]).offset(3).limit(10)
    view = (query if seed is None else query.shuffle(seed)).create_materialized_view(database, "few")
    view.refresh(runner="inline")
    shown = view.to_arrow().column("x").to_pylist()
    assert len(shown) == 10
    with monkeypatch.context() as patch:
        for name in ("order_row_ids", "row_ids"):
            patch.setattr(f"airflow_geneva.engine.plan.refresh.{name}", lambda *given: pytest.fail(f"{given} was read"))
        assert view.refresh(runner="inline").rows_computed == 0
    table.lance.delete(f"x = {shown[4]}")
    assert view.refresh(runner="inline").rows_computed == 1
    assert len(set(view.to_arrow().column("x").to_pylist()) - {shown[4]}) == 10


def test_a_view_that_divides_by_zero_fails_with_what_to_write(make_table: MakeTable) -> None:
    view = make_table(3).query().select({"q": "10 / x"}).create_materialized_view(name="quotients")
    with pytest.raises(
        JobFailed, match=r"Divide by zero error\nSQL divides by zero in a row\. Write NULLIF\(column, 0\)"
    ):
        view.refresh(runner="inline")
