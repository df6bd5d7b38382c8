"""Views of groups: one row for all rows with the same key, computed again when one of them changes."""

from __future__ import annotations

import math
import shutil
import time as time_of_day
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine import api
from airflow_geneva.engine.apply import group_calls, group_columns, group_rows
from airflow_geneva.engine.cleanup import clean_up, collect, find_garbage
from airflow_geneva.engine.commit import group_table
from airflow_geneva.engine.plan.freshness import FreshnessCount
from airflow_geneva.engine.run import groups as groups_run
from airflow_geneva.engine.views import group_keys
from airflow_geneva.engine.views.group_tables import SETTLED, GroupsCommit, GroupTables
from airflow_geneva.engine.views.grouping import groups_table, rows_table
from airflow_geneva.engine.views.hidden import hidden_tables
from airflow_geneva.engine.watch.conditions import WaitCondition
from airflow_geneva.engine.watch.watcher import observe
from airflow_geneva.errors import CodeChanged, InvalidInput, JobFailed
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace
from tests.udfs_for_tests import folded, group_histories as udfs

ROWS = [
    {"id": 0, "k": 1.0, "t": "a", "x": 5, "at": 2},
    {"id": 1, "k": 1.0, "t": "a", "x": 7, "at": 1},
    {"id": 2, "k": None, "t": "b", "x": None, "at": 3},
    {"id": 3, "k": 0.5, "t": None, "x": 2, "at": None},
    {"id": 4, "k": None, "t": "b", "x": 1, "at": 0},
]
SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.float64()), ("t", pa.string()), ("x", pa.int64()), ("at", pa.int64())])
TOLD = {"n": "count(*)", "told": (udfs.told, ["k", "t", "id", "x"])}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return connect(tmp_path / "db").create_table("rows", pa.Table.from_pylist(ROWS, SCHEMA))


def view_of(table: Table, columns: Any = None, name: str = "v", **how: Any) -> View:
    query = table.query().group_by("k", "t").agg(TOLD if columns is None else columns, **how)
    return query.create_materialized_view(name=name)


def told(view: View) -> dict[tuple[Any, Any], str]:
    return {(row["k"], row["t"]): row["told"] for row in view.to_arrow().to_pylist()}


def test_a_view_has_one_row_for_all_rows_with_one_key(table: Table, trace: Trace) -> None:
    view = view_of(table)
    assert view.schema.names == ["k", "t", "n", "told"]
    assert view.to_arrow().num_rows == 0
    plan = view.plan_refresh()
    assert (plan.rows_pending, plan.rows_total) == (3, 3)
    result = view.refresh(runner="inline")
    assert (result.state, result.rows_run, result.rows_computed, result.rows_skipped) == ("DONE", 3, 3, 0)
    expected = {(1.0, "a"): "1: 0=5 1=7", (None, "b"): "1: 2=None 4=1", (0.5, None): "1: 3=2"}
    assert told(view) == expected
    query = table.query().group_by("k", "t").agg(TOLD)
    assert query.to_arrow().to_pylist() == view.to_arrow().to_pylist()
    assert "a view of groups of 'rows', refreshed to its version 1" in view.state()


def test_a_refresh_computes_the_touched_groups_only(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    trace.clear()
    table.add(pa.Table.from_pylist([{"id": 5, "k": 2.0, "t": "a", "x": 1, "at": 1}], SCHEMA))
    table.lance.delete("id = 3")
    table.lance.update({"x": "8"}, where="id = 1")
    before = sorted(path.name for path in Path(view.uri).rglob("*"))
    plan = view.plan_refresh()
    assert (plan.rows_pending, plan.rows_total, plan.rows_skipped) == (2, 3, 1)
    assert "touched groups: 1 new group, 1 with other rows, 1 without rows now;" in str(plan)
    assert str(plan).startswith(
        "Refresh of view v to version 4 of its source; its rows are groups by k, t\n  3 rows: 2 pending"
    )
    assert before == sorted(path.name for path in Path(view.uri).rglob("*")), "a plan writes nothing"
    result = view.refresh(runner="inline")
    assert (result.rows_run, result.rows_computed, result.rows_skipped) == (2, 2, 1)
    assert sorted(trace.rows()) == sorted([udfs.number_of(2.0, "a"), udfs.number_of(1.0, "a")])
    assert told(view) == {(1.0, "a"): "1: 0=5 1=8", (None, "b"): "1: 2=None 4=1", (2.0, "a"): "1: 5=1"}
    assert f"refreshed to its version {table.version}" in view.state()


def test_a_key_with_the_name_of_a_hidden_column_is_refused(tmp_path: Path) -> None:
    table = connect(tmp_path / "db").create_table("t", pa.table({"__state_of_m": [1], "x": [1]}))
    with pytest.raises(InvalidInput, match="'__state_of_m' cannot be the name of a column"):
        table.query().group_by("__state_of_m").agg({"m": (folded.Mean, ["x"])}).create_materialized_view(name="v")


def test_a_row_that_moves_touches_the_group_that_it_leaves_and_the_one_that_it_joins(
    table: Table, trace: Trace
) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    trace.clear()
    table.lance.update({"k": "0.5", "t": "NULL"}, where="id = 0")
    assert view.refresh(runner="inline").rows_run == 2
    assert told(view) == {(1.0, "a"): "1: 1=7", (None, "b"): "1: 2=None 4=1", (0.5, None): "1: 0=5 3=2"}


def test_compaction_and_columns_that_are_not_read_touch_no_group(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    trace.clear()
    table.add(pa.Table.from_pylist([], SCHEMA))
    table.lance.update({"at": "9"}, where="id < 3")
    table.lance.optimize.compact_files()
    version = view.version
    assert view.plan_refresh().rows_pending == 0
    result = view.refresh(runner="inline")
    assert (result.state, result.commits, view.version, len(trace)) == ("DONE", (), version, 0)
    assert f"refreshed to its version {table.version}" in view.state()


def test_the_plan_of_a_refresh_that_only_loses_groups_says_so(table: Table) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    table.lance.delete("id = 3")
    plan = view.plan_refresh()
    assert "1 without rows now" in str(plan)
    assert "Nothing to compute, no Spark; rows that are no longer in the query's result leave the view." in str(plan)
    result = view.refresh(runner="inline")
    assert (result.rows_run, len(result.commits), view.to_arrow().num_rows) == (0, 1, 2)


def test_rows_are_in_the_order_that_is_asked_for(table: Table) -> None:
    columns = {"told": (udfs.told, ["k", "t", "id", "x"]), "last": "last(id)"}
    view = view_of(table, columns, order_by=["at"])
    view.refresh(runner="inline")
    assert told(view)[1.0, "a"] == "1: 1=7 0=5"
    other = view_of(table, columns, "other", order_by=["at desc"])
    other.refresh(runner="inline")
    assert told(other)[None, "b"] == "1: 2=None 4=1"
    assert (
        other.to_arrow().to_pylist()
        == table.query().group_by("k", "t").agg(columns, order_by=["at desc"]).to_arrow().to_pylist()
    )


def test_a_function_that_returns_a_list_makes_several_rows_of_a_group(table: Table) -> None:
    query = table.query().where("id > 0").group_by("t").agg({"each": (udfs.each, ["id"])}).explode("each")
    view = query.create_materialized_view(name="v")
    view.refresh(runner="inline")
    rows = [("a", 1), ("b", 2), ("b", 4), (None, 3)]
    assert [(row["t"], row["each"]) for row in view.to_arrow().to_pylist()] == rows
    assert query.to_arrow().to_pylist() == view.to_arrow().to_pylist()
    table.lance.delete("id = 2")
    view.refresh(runner="inline")
    assert sorted(row["each"] for row in view.to_arrow().to_pylist()) == [1, 3, 4]


def test_groups_of_no_columns_are_the_different_keys(table: Table) -> None:
    view = view_of(table, {})
    assert view.refresh(runner="inline").rows_computed == 3
    assert view.to_arrow().num_rows == 3


def test_a_group_that_fails_is_named_by_its_key_and_runs_alone_with_errors_only(table: Table, trace: Trace) -> None:
    columns = {"e": (udfs.refusing, ["id", "x"]), "n": "count(*)"}
    view = table.query().group_by("t").agg(columns).create_materialized_view(name="v")
    table.lance.update({"x": "13", "t": "'c'"}, where="id = 3")
    result = view.refresh(runner="inline")
    assert (result.state, result.rows_failed, result.rows_computed) == ("DONE", 1, 2)
    (error,) = view.get_errors()
    assert error.key == "c"
    assert {row["t"]: row["e"] for row in view.to_arrow().to_pylist()} == {"a": 2, "b": 2, "c": None}
    assert len(view.get_failed_row_addresses()) == 1
    table.add(pa.Table.from_pylist(ROWS[:1], SCHEMA))
    again = view.refresh(runner="inline", errors_only=True)
    assert (again.rows_run, again.rows_failed) == (1, 1)
    assert "refreshed to its version 2" in view.state()
    table.lance.update({"x": "1"}, where="id = 3")
    assert view.refresh(runner="inline").rows_failed == 0
    assert view.get_errors() == []
    table.lance.delete("true")
    view.refresh(runner="inline")
    assert view.get_errors() == []
    assert view.get_failed_row_addresses() == []


def test_failed_groups_do_not_read_the_rows_of_a_source_that_was_created_again(table: Table, trace: Trace) -> None:
    view = table.query().group_by("t").agg({"e": (udfs.refusing, ["id", "x"])}).create_materialized_view(name="v")
    table.lance.update({"x": "13"}, where="id = 1")
    assert view.refresh(runner="inline").rows_failed == 1
    version, database = table.version, connect(table.location.database_uri)
    database.drop_table("rows")
    again = database.create_table("rows", pa.Table.from_pylist(ROWS, SCHEMA))
    while again.version < version:
        again.lance.update({"x": "5"}, where="id = 1")
    before = view.to_arrow()
    with pytest.raises(InvalidInput, match="cleaned up or created again"):
        view.refresh(runner="inline", errors_only=True)
    assert view.to_arrow() == before


def test_a_view_of_groups_can_be_read_by_a_view_and_grouped(table: Table, trace: Trace) -> None:
    view = view_of(table)
    by_text = (
        view.query()
        .group_by("t")
        .agg({"groups": "count(*)", "rows": "sum(n)"})
        .create_materialized_view(name="by_text")
    )
    upper = view.query().where("n > 1").select({"t": "t", "twice": "n * 2"}).create_materialized_view(name="upper")

    def refreshed() -> list[Any]:
        return [one.refresh(runner="inline").rows_computed for one in (view, by_text, upper)]

    def shown() -> tuple[Any, ...]:
        groups = {row["t"]: (row["groups"], row["rows"]) for row in by_text.to_arrow().to_pylist()}
        return groups, sorted((row["t"], row["twice"]) for row in upper.to_arrow().to_pylist())

    assert refreshed() == [3, 3, 2]
    assert shown() == ({"a": (1, 2), "b": (1, 2), None: (1, 1)}, [("a", 4), ("b", 4)])
    table.lance.update({"x": "100"}, where="id = 1")  # which `n` does not depend on
    assert refreshed() == [1, 0, 0]
    table.add(pa.Table.from_pylist([{"id": 9, "k": 7.0, "t": "a", "x": 1, "at": 1}], SCHEMA))
    assert refreshed() == [1, 1, 0]
    assert shown() == ({"a": (2, 3), "b": (1, 2), None: (1, 1)}, [("a", 4), ("b", 4)])


def test_groups_of_an_exploded_view(table: Table) -> None:
    lists = (
        table.query()
        .group_by("t")
        .agg({"each": (udfs.each, ["id"])})
        .explode("each")
        .create_materialized_view(name="l")
    )
    view = lists.query().group_by("t").agg({"n": "count(*)", "most": "max(each)"}).create_materialized_view(name="v")
    for _ in range(2):
        lists.refresh(runner="inline")
        result = view.refresh(runner="inline")
    assert result.rows_run == 0
    assert {row["t"]: (row["n"], row["most"]) for row in view.to_arrow().to_pylist()} == {
        "a": (2, 1), "b": (2, 4), None: (1, 3),
    }  # fmt: skip
    table.lance.delete("id = 4")
    lists.refresh(runner="inline")
    assert view.refresh(runner="inline").rows_computed == 1
    assert {row["t"]: row["n"] for row in view.to_arrow().to_pylist()} == {"a": 2, "b": 1, None: 1}


def test_a_view_can_go_back_to_an_earlier_version_of_its_source(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    first = told(view)
    table.lance.update({"x": "8", "k": "2.0"}, where="id = 1")
    view.refresh(runner="inline")
    assert told(view) != first
    view.refresh(src_version=1, runner="inline")
    assert told(view) == first
    assert "refreshed to its version 1" in view.state()


def test_a_table_that_is_dropped_and_made_again_is_grouped_anew(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    db = connect(table.location.database_uri)
    db.drop_table("rows")
    db.create_table("rows", pa.Table.from_pylist([{**row, "x": 50} for row in ROWS[:2]], SCHEMA))
    view.refresh(runner="inline")
    assert told(view) == {(1.0, "a"): "1: 0=50 1=50"}


def test_what_a_view_of_groups_cannot_do_is_refused(table: Table) -> None:
    query = table.query().group_by("t").agg({"n": "count(*)"})
    for refused, words in (
        (lambda: query.limit(1), "limit cannot follow"),
        (lambda: query.offset(1), "offset cannot follow"),
        (lambda: query.shuffle(), "shuffle cannot follow"),
        (lambda: query.where("n > 1"), "where cannot follow"),
        (lambda: query.select(["n"]), "select cannot follow"),
        (lambda: query.add_columns({"m": "n + 1"}), "add_columns cannot follow"),
        (lambda: query.group_by("t"), "group_by cannot follow"),
        (lambda: table.query().select(["id"]).group_by("id"), "as they are"),
        (lambda: table.query().group_by(), "give the names"),
        (lambda: table.query().group_by("no").agg({}).definition(), "no column 'no'"),
        (lambda: table.query().group_by("t", "t").agg({}).definition(), "twice"),
        (lambda: table.query().group_by("t").agg({"t": "count(*)"}).definition(), "Rename it"),
        (lambda: table.query().group_by("t").agg({}, order_by=["no"]).definition(), "no column 'no'"),
        (lambda: table.query().group_by("t").agg({}, order_by="at"), "in a list"),
        (lambda: table.query().group_by("t").agg({}, max_group_rows=0).definition(), "at least 1"),
    ):
        with pytest.raises(InvalidInput, match=words):
            refused()
    view = query.create_materialized_view(name="v")
    view.refresh(runner="inline")
    for refused, words in (
        (lambda: view.add_columns({"m": "n + 1"}), "aggregate"),
        (lambda: view.drop_columns(["t"]), "column of the key"),
        (lambda: view.plan_refresh(src_version=99), "does not exist"),
        (lambda: connect(table.location.database_uri).copy_table("v", "w"), "view of groups"),
    ):
        with pytest.raises(InvalidInput, match=words):
            refused()


def test_a_group_that_is_too_large_fails_before_anything_is_computed(table: Table, trace: Trace) -> None:
    view = view_of(table, max_group_rows=2)
    view.refresh(runner="inline")
    trace.clear()
    table.add(pa.Table.from_pylist([{**ROWS[0], "id": 7}], SCHEMA))
    with pytest.raises(InvalidInput, match=r"'k': 1\.0, 't': 'a'.*has 3 rows, and max_group_rows allows 2"):
        view.refresh(runner="inline")
    assert len(trace) == 0
    assert told(view)[1.0, "a"] == "1: 0=5 1=7"
    table.lance.delete("id = 7")
    assert view.refresh(runner="inline").rows_run <= 1


def test_a_plan_a_result_and_the_freshness_say_which_groups_are_touched_and_which_is_the_largest(table: Table) -> None:
    view = view_of(table)
    told = (
        "touched groups: 3 new groups, 0 with other rows; the largest of 3 groups, k=1.0, t=a, has 2 of 5 rows (40.0%)"
    )
    assert f"Note: {told}." in str(view.plan_refresh())
    assert view.refresh(runner="inline").notes == (f"{told}.",)
    assert view.refresh(runner="inline").notes == ()
    table.lance.delete("id = 3")
    table.add(pa.Table.from_pylist([{**ROWS[2], "id": 5}, {**ROWS[0], "id": 6, "k": 7.0}], SCHEMA))
    told = (
        "touched groups: 1 new group, 1 with other rows, 1 without rows now; the largest of 3 groups, k=None, t=b, has "
        "3 of 6 rows (50.0%)"
    )
    assert f"Note: {told}." in str(view.plan_refresh())
    assert view.refresh(runner="inline").notes == (f"{told}.",)
    assert FreshnessCount.of_view(view.location).count().touched == told
    table.lance.delete("id = 6")
    (note,) = view.refresh(runner="inline").notes
    assert note.endswith("1 without rows now; the largest of 2 groups, k=None, t=b, has 3 of 5 rows (60.0%).")


def test_a_group_of_any_size_is_counted_and_read_in_batches(table: Table) -> None:
    view = view_of(table, {"n": "count(*)", "batches": (udfs.in_batches, ["id"])}, max_group_rows=1)
    view.refresh(runner="inline")
    assert {row["n"]: row["batches"] for row in view.to_arrow().to_pylist()} == {1: [3], 2: [2, 4]}


def test_rows_are_ordered_by_words_of_a_dictionary_and_by_half_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, halves = ["b", "a", None, "b", "c", "a", "b"], [2.5, 0, 1, -1, None, 4, math.nan]
    data = {
        "word": pa.array(words).dictionary_encode(),
        "half": pa.array(halves, pa.float16()),
        "id": range(7),
        "k": [1] * 7,
    }
    rows = connect(tmp_path / "db").create_table("rows", pa.table(data), max_rows_per_file=4)
    for order, ids in ((["word desc", "half desc"], [4, 0, 3, 6, 5, 1, 2]), (["half"], [3, 1, 2, 0, 5, 6, 4])):
        query = rows.query().group_by("k").agg({"ids": (udfs.in_batches, ["id"]), "first": "first(id)"}, order_by=order)
        found = query.to_arrow().to_pylist()
        with monkeypatch.context() as large:
            for module in (group_calls, group_columns, group_rows):
                large.setattr(module, "LARGE_GROUP", 5)
            assert found == query.to_arrow().to_pylist() == [{"k": 1, "ids": ids, "first": ids[0]}]


@pytest.mark.parametrize("order", [["at"], ["at desc", "x"], []])
def test_an_iterator_sorts_the_rows_of_a_large_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    for module in (group_calls, group_columns, group_rows):
        monkeypatch.setattr(module, "LARGE_GROUP", 40)
    at, x = ([(n * 7919) % top if n % 5 else None for n in range(300)] for top in (31, 5))
    keys = [float(n % 3 == 0 and n) for n in range(300)]
    data = pa.table({"k": keys, "t": ["a"] * 300, "id": range(300), "at": at, "x": x})
    table = connect(tmp_path / "db").create_table("many", data, max_rows_per_file=70)
    columns = {"ids": (udfs.in_batches, ["id"]), "last": "last(id)", "told": (udfs.told, ["k", "t", "id", "x"])}
    view = table.query().group_by("k").agg(columns, order_by=order).create_materialized_view(name="v")
    view.refresh(runner="inline", task_memory_bytes=2_048)
    rows = view.to_arrow().sort_by("k").to_pylist()
    expected = table.query().group_by("k").agg(columns, order_by=order).to_arrow().sort_by("k").to_pylist()
    assert rows == expected
    assert len(rows[0]["ids"]) == 201
    assert rows[0]["told"] == udfs.told_value(1, rows[0]["ids"], [x[id] for id in rows[0]["ids"]])
    only = table.query().group_by("k").agg({"ids": (udfs.in_batches, ["id"])}, order_by=order)
    other = only.create_materialized_view(name="only")
    other.refresh(runner="inline")
    assert [row["ids"] for row in other.to_arrow().sort_by("k").to_pylist()] == [row["ids"] for row in rows]


def test_many_groups_are_looked_up_in_rows_that_were_sorted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_MOST_HELD", 0), ("_LISTED", 1), ("_SCANS_WORTH_SORTING", 2)):
        monkeypatch.setattr(group_rows, name, value)
    scanned, scan = [], group_rows.GroupRows._batches

    def counting(self: group_rows.GroupRows, filter: str) -> Any:
        scanned.append(filter)
        return scan(self, filter)

    monkeypatch.setattr(group_rows.GroupRows, "_batches", counting)
    keys = [float(n * 7919 % 151) for n in range(3_000)]
    data = pa.table({"k": keys, "t": ["a"] * 3_000, "id": range(3_000), "x": range(3_000)})
    view = view_of(connect(tmp_path / "db").create_table("many", data))
    view.refresh(runner="inline", task_memory_bytes=16_384)
    assert len(scanned) == 3
    assert told(view) == {
        (float(key), "a"): udfs.told_value(1, ids, ids)
        for key in range(151)
        if (ids := [n for n in range(3_000) if n * 7919 % 151 == key])
    }


def test_a_table_without_stable_row_ids_cannot_be_grouped(tmp_path: Path) -> None:
    import lance

    db = connect(tmp_path / "db")
    lance.write_dataset(pa.Table.from_pylist(ROWS, SCHEMA), str(tmp_path / "db" / "old.lance"))
    with pytest.raises(InvalidInput, match="no stable row ids"):
        db.open_table("old").query().group_by("t").agg({"n": "count(*)"}).create_materialized_view(name="v")
    assert db.table_names() == ["old"]


def test_the_hidden_tables_follow_the_view(table: Table) -> None:
    db, view = connect(table.location.database_uri), view_of(table)
    view.refresh(runner="inline")
    assert db.table_names() == ["rows", "v"]
    assert sorted(path.name for path in Path(view.uri, "_groups").iterdir()) == ["groups.lance", "rows.lance"]
    assert [job.table for job in db.jobs()] == ["v"]
    db.drop_table("v")
    assert not Path(view.uri).exists()
    assert view_of(table).refresh(runner="inline").rows_computed == 3


def test_freshness_counts_rows_that_groups_lack(table: Table) -> None:
    view = view_of(table)

    def fresh() -> Any:
        return FreshnessCount.of_view(view.location).count()

    assert (fresh().state, fresh().rows, fresh().pending) == ("never computed", 5, 5)
    view.refresh(runner="inline")
    assert (fresh().state, fresh().rows, fresh().pending) == ("up to date", 5, 0)
    table.add(pa.Table.from_pylist(ROWS[:2], SCHEMA))
    table.lance.delete("id = 3")
    assert (fresh().state, fresh().rows, fresh().pending, fresh().gone) == ("stale", 6, 2, 1)


def test_hidden_tables_are_kept_small(table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_table, "_MOST_FRAGMENTS", 2)
    monkeypatch.setattr(group_table, "_INDEXED_ROWS", 6)
    view = view_of(table)
    for number in range(8):
        table.add(pa.Table.from_pylist([{**ROWS[number % 5], "id": 10 + number}], SCHEMA))
        trace.clear()
        result = view.refresh(runner="inline")
        assert (result.state, len(trace)) == ("DONE", 3 if number == 0 else 1)
    hidden = connect(str(Path(view.uri, "_groups")))
    rows, groups = (hidden.open_table(name).lance for name in ("rows", "groups"))
    assert len(rows.get_fragments()) <= 3
    assert len(groups.get_fragments()) <= 4
    assert [index.name for index in rows.describe_indices()] == ["group_idx"]


def test_a_function_of_another_version_runs_on_all_groups_or_on_the_touched_ones(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table, {**TOLD, "largest": (udfs.largest, ["x"])})
    view.refresh(runner="inline")
    trace.clear()
    monkeypatch.setattr(udfs, "told", udfs.told_of(2))
    table.lance.update({"x": "8"}, where="id = 1")
    view.refresh(runner="inline", on_code_change="new_rows")
    assert trace.rows() == [udfs.number_of(1.0, "a")]
    assert told(view) == {(1.0, "a"): "2: 0=5 1=8", (None, "b"): "1: 2=None 4=1", (0.5, None): "1: 3=2"}
    result = view.refresh(runner="inline", on_code_change="recompute")
    assert result.rows_computed == 2
    assert set(told(view).values()) == {"2: 0=5 1=8", "2: 2=None 4=1", "2: 3=2"}


def test_a_function_that_fails_fails_the_refresh_and_leaves_the_view(table: Table, trace: Trace) -> None:
    from tests.udfs_for_tests.grouped import total

    view = table.query().group_by("t").agg({"s": (total, ["x"])}).create_materialized_view(name="v")
    view.refresh(runner="inline")
    shown = view.to_arrow().to_pylist()
    table.lance.update({"x": "3"}, where="id = 1")
    view.refresh(runner="inline")
    assert view.to_arrow().to_pylist() != shown
    failing = view_of(table, {"e": (udfs.failing, ["x"])}, "failing")
    with pytest.raises(JobFailed):
        failing.refresh(runner="inline")
    assert failing.to_arrow().num_rows == 0


KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False]),
    (pa.int8(), [-1, 3]),
    (pa.uint64(), [0, (1 << 64) - 1]),
    (pa.float16(), [0.5, 2.0]),
    (pa.large_string(), ["", "ü"]),
    (pa.binary(3), [b"abc", b"xyz"]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b"]),
    (pa.date32(), [date(1970, 1, 1), date(2026, 11, 29)]),
    (pa.time64("us"), [time(0), time(23, 59, 1)]),
    (pa.timestamp("ns", "UTC"), [datetime(2026, 1, 1, tzinfo=timezone.utc)]),
    (pa.duration("ms"), [timedelta(0), timedelta(days=-1)]),
    (pa.decimal128(10, 2), [Decimal("1.10"), Decimal("-3.00")]),
]


@pytest.mark.parametrize(("kind", "values"), KEYS, ids=lambda one: str(one) if isinstance(one, pa.DataType) else "")
def test_keys_of_every_type_make_groups_that_are_found_again(
    kind: pa.DataType, values: list[Any], tmp_path: Path
) -> None:
    rows = [None, *values, *values, None]
    data = pa.table({"k": pa.array(rows, kind), "x": pa.array(range(len(rows)), pa.int64())})
    table = connect(tmp_path / "db").create_table("rows", data)
    view = table.query().group_by("k").agg({"n": "count(*)", "s": "sum(x)"}).create_materialized_view(name="v")
    assert view.refresh(runner="inline").rows_computed == len(values) + 1
    assert {row["k"]: row["n"] for row in view.to_arrow().to_pylist()} == dict.fromkeys([None, *values], 2)
    table.add(data.slice(0, 2))
    assert view.refresh(runner="inline").rows_computed == 2
    counts = {row["k"]: row["n"] for row in view.to_arrow().to_pylist()}
    assert counts == {**dict.fromkeys([None, *values], 2), None: 3, values[0]: 3}


def test_a_sensor_finds_the_rows_that_the_groups_lack(table: Table) -> None:
    db, view = connect(table.location.database_uri), view_of(table)
    wanted = WaitCondition("rows", since="view:v", changed_rows=True)
    now = datetime(2027, 1, 1, tzinfo=timezone.utc)

    def event() -> dict[str, Any]:
        return observe(db, wanted, None, now).event or {}

    assert event()["new_rows"] == 5
    view.refresh(runner="inline")
    assert event() == {}
    table.add(pa.Table.from_pylist(ROWS[:2], SCHEMA))
    table.lance.update({"x": "9"}, where="id = 4")
    found = event()
    assert (found["new_rows"], found["changed_rows"], found["deleted_rows"]) == (2, 1, 0)
    api.plan_refresh(view.location, view.lance, (), api.RefreshRequest(), to_run=True)
    assert event()["new_rows"] == 2, "the hidden tables have these rows, and the view does not show them"
    view.refresh(runner="inline")
    assert event() == {}
    table.lance.update({"at": "9"}, where="id = 4")  # which is not read
    assert event() == {}


def test_a_sensor_finds_all_rows_of_a_source_that_was_created_again(table: Table) -> None:
    db, view = connect(table.location.database_uri), view_of(table)
    view.refresh(runner="inline")
    db.drop_table("rows")
    db.create_table("rows", pa.Table.from_pylist(ROWS[1:3], SCHEMA))
    now, wanted = datetime(2027, 1, 1, tzinfo=timezone.utc), WaitCondition("rows", since="view:v")
    api.plan_refresh(view.location, view.lance, (), api.RefreshRequest(), to_run=True)
    found = observe(db, wanted, None, now).event
    assert found is not None, "the hidden tables have these rows, and the view shows those of the table before"
    assert found["new_rows"] == 2
    view.refresh(runner="inline")
    assert observe(db, wanted, None, now).event is None


def test_a_cleanup_removes_what_is_old_of_the_hidden_tables(table: Table, trace: Trace) -> None:
    view = view_of(table)
    for number in range(3):
        table.add(pa.Table.from_pylist([{**ROWS[0], "id": 10 + number}], SCHEMA))
        view.refresh(runner="inline")
    hidden = Path(view.uri, "_groups", "rows.lance", "_checkpoints", "jobs")
    assert len(list(hidden.iterdir())) >= 3
    later = time_of_day.time() + 400 * 86_400
    (rows,) = [one for one in hidden_tables(view.location) if one.name == "rows"]
    garbage = find_garbage(rows, "1s", now=later)
    assert garbage.count
    assert all(
        file.name.startswith("_groups/rows.lance/")
        for group in garbage.below("_groups/rows.lance").file_groups
        for file in group.files
    )
    for one in hidden_tables(view.location):
        collect(one, find_garbage(one, "1s", now=later))
    view.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    assert clean_up(view.location, "1s", dry_run=False).table == "v"
    trace.clear()
    assert view.refresh(runner="inline").commits == ()
    table.lance.update({"x": "8"}, where="id = 1")
    assert view.refresh(runner="inline").rows_computed == 1
    assert len(trace) == 1


def test_two_refreshes_at_once_leave_the_view_right(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    table.lance.update({"x": "8"}, where="id = 1")
    first, functions, watch = view._plan_refresh_to_run(api.RefreshRequest(), "inline")
    table.lance.update({"x": "80"}, where="id = 1")
    table.lance.update({"k": "0.5"}, where="id = 2")
    assert view.refresh(runner="inline").state == "DONE"
    result = api.run_new(first, view.location, functions, "inline", watch)
    assert result.state == "PARTIAL", "the other one has swapped the rows"
    expected = {(1.0, "a"): "1: 0=5 1=80", (None, "b"): "1: 4=1", (0.5, None): "1: 3=2", (0.5, "b"): "1: 2=None"}
    assert told(view) == expected
    assert view.refresh(runner="inline").commits == ()


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_refreshes_that_find_groups_at_the_same_time_do_not_make_one_twice(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch, first: bool, newer: bool
) -> None:
    view, replace = view_of(table), groups_run.replace_groups
    if not first:
        view.refresh(runner="inline")
        table.add(pa.Table.from_pylist([{"id": 8, "k": 6.0, "t": "", "x": 1, "at": 1}], SCHEMA))

    def racing(*arguments: Any) -> Any:
        monkeypatch.setattr(groups_run, "replace_groups", replace)
        if newer:
            table.add(pa.Table.from_pylist([{"id": 9, "k": 7.0, "t": "", "x": 1, "at": 1}], SCHEMA))
        view.refresh(runner="inline")
        return replace(*arguments)

    monkeypatch.setattr(groups_run, "replace_groups", racing)
    view.refresh(runner="inline")
    view.refresh(runner="inline")
    expected = {(1.0, "a"): "1: 0=5 1=7", (None, "b"): "1: 2=None 4=1", (0.5, None): "1: 3=2"}
    expected |= ({(7.0, ""): "1: 9=1"} if newer else {}) | ({} if first else {(6.0, ""): "1: 8=1"})
    assert told(view) == expected
    assert view.to_arrow().num_rows == len(expected)


def test_a_first_refresh_goes_on_if_another_drops_the_hidden_table_that_it_has_just_created(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, points = view_of(table), list[str]()

    def drop(point: str) -> None:
        if point == "groups.create" and point not in points:
            shutil.rmtree(rows_table(view.location).uri)
        points.append(point)

    monkeypatch.setattr(groups_run, "fault_point", drop)
    view.refresh(runner="inline")
    assert points.count("groups.create") == 2
    assert told(view) == {(1.0, "a"): "1: 0=5 1=7", (None, "b"): "1: 2=None 4=1", (0.5, None): "1: 3=2"}


def test_keys_with_one_hash_are_different_groups(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_keys, "_mixed", lambda values: values & 0)
    view = view_of(table)
    view.refresh(runner="inline")
    expected = {(1.0, "a"): "1: 0=5 1=7", (None, "b"): "1: 2=None 4=1", (0.5, None): "1: 3=2"}
    assert told(view) == expected
    table.lance.update({"k": "0.5"}, where="id = 1")
    view.refresh(runner="inline")
    assert told(view) == expected | {(1.0, "a"): "1: 0=5", (0.5, "a"): "1: 1=7"}


@pytest.mark.parametrize("follows", [None, "[]", "x", '{"x": "1"}'])
def test_groups_whose_commit_does_not_say_what_it_follows_are_found_anew(
    follows: str | None, table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    hidden = GroupTables.open(view.location)
    right: Any = GroupsCommit.properties
    assert hidden.groups is not None
    assert hidden.commit is not None
    none = hidden.groups.schema.empty_table(), np.empty(0, np.int64)

    def damaged(commit: GroupsCommit) -> dict[str, str]:
        said = right.fget(commit) | {"geneva.groups.follows": follows}
        return {key: value for key, value in said.items() if value is not None}

    with monkeypatch.context() as patch:
        patch.setattr(GroupsCommit, "properties", property(damaged))
        group_table.replace_groups(groups_table(view.location), hidden.groups, {}, *none, hidden.commit)
    table.lance.update({"x": "8"}, where="id = 1")
    assert FreshnessCount.of_view(view.location).count().pending == len(ROWS)
    assert view.refresh(runner="inline").rows_run == 3
    assert told(view) == told_now(table)
    table.lance.update({"x": "9"}, where="id = 1")
    assert view.refresh(runner="inline").rows_run == 1


def test_hidden_tables_that_are_lost_are_made_again(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    table.lance.update({"x": "8"}, where="id = 1")
    view.refresh(runner="inline")
    shown = told(view)
    for lost in ("_groups/rows.lance", "_groups/groups.lance", "_groups"):
        shutil.rmtree(Path(view.uri, lost))
        assert view.refresh(runner="inline").state == "DONE"
        assert told(view) == shown
        assert view.refresh(runner="inline").commits == ()


def test_a_plan_of_the_database_says_that_more_groups_may_come(table: Table) -> None:
    db = connect(table.location.database_uri)
    table.query().where("id >= 0").create_materialized_view(name="all")
    view = db.open_table("all").query().group_by("t").agg({"n": "count(*)"}).create_materialized_view(name="v")
    plans = {one.name: one for one in db.plan().targets}
    assert (plans["v"].rows, plans["v"].least, plans["v"].most) == (0, 0, None)
    db.plan().run(runner="inline")
    assert view.to_arrow().num_rows == 3


def test_a_column_of_groups_can_be_promoted(table: Table, trace: Trace) -> None:
    view = view_of(table, {**TOLD, "largest": (udfs.largest, ["x"]), "other": (udfs.largest, ["at"])})
    view.refresh(runner="inline")
    view.promote_column("other", to="largest", keep_as="before")
    trace.clear()
    assert view.refresh(runner="inline").commits == ()
    table.lance.update({"at": "50"}, where="id = 0")
    assert view.refresh(runner="inline").rows_computed == 1
    rows = {(row["k"], row["t"]): (row["largest"], row["before"]) for row in view.to_arrow().to_pylist()}
    assert rows == {(1.0, "a"): (50, 7), (None, "b"): (3, 1), (0.5, None): (None, 2)}
    assert trace.rows() == [udfs.number_of(1.0, "a")]


def test_another_query_differs_from_a_view_of_groups(table: Table) -> None:
    view, query = view_of(table).view_definition, table.query().where("id > 0")
    assert view.differences(table.query().group_by("k", "t").agg(TOLD).definition()) == []
    (found,) = view.differences(query.group_by("k", "t").agg(TOLD, order_by=["at"]).definition())
    assert found == (
        "the grouping is groups by k, t and would be groups by k, t of the rows where id > 0 ordered by at"
    )
    assert len(view.differences(table.query().group_by("k").agg(TOLD).definition())) == 2
    assert "column 'n' is aggregate count(*) -> int64 and would be aggregate sum(x) -> int64" in view.differences(
        table.query().group_by("k", "t").agg({**TOLD, "n": "sum(x)"}).definition()
    )


def test_a_refresh_that_is_capped_or_stopped_by_changed_code_goes_on_where_it_was(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table)
    assert view.refresh(runner="inline", max_rows=1).state == "PARTIAL"
    assert view.to_arrow().num_rows == 0
    assert view.plan_refresh().rows_to_run == 2
    assert view.refresh_async(runner="inline").result().state == "DONE"
    assert len(trace) == 3
    monkeypatch.setattr(udfs, "told", udfs.told_of(2))
    table.lance.update({"x": "8"}, where="id = 1")
    with pytest.raises(CodeChanged, match="2 rows"):
        view.refresh(runner="inline")
    trace.clear()
    view.refresh(runner="inline", on_code_change="new_rows")
    assert trace.rows() == [udfs.number_of(1.0, "a")]
    assert sorted(told(view).values()) == ["1: 2=None 4=1", "1: 3=2", "2: 0=5 1=8"]


@pytest.mark.parametrize("again", [False, True])
def test_columns_that_a_restore_brings_back_have_the_values_that_their_source_columns_got_meanwhile(
    table: Table, trace: Trace, again: bool
) -> None:
    view = view_of(table, {"n": "count(*)", "s": "sum(x)"})
    view.refresh(runner="inline")
    first = view.version
    view.drop_columns(["s"])
    view.refresh(runner="inline")
    table.lance.update({"x": "1000"}, where="id = 1")
    view.refresh(runner="inline")
    if again:
        view.add_columns({"s": "sum(x)"})
        view.refresh(runner="inline")
    view.location.open(first).restore()
    assert view.plan_refresh().rows_pending == 3
    assert FreshnessCount.of_view(view.location).count().pending == table.lance.count_rows()
    view.refresh(runner="inline")
    assert {row["k"]: row["s"] for row in view.to_arrow().to_pylist()} == {1.0: 1005, None: 1, 0.5: 2}
    assert view.refresh(runner="inline").commits == ()


def test_an_earlier_version_of_the_source_takes_back_values_that_came_with_a_column(table: Table) -> None:
    view = view_of(table, {"n": "count(*)"})
    view.refresh(runner="inline")
    table.lance.update({"x": "1000"}, where="id = 1")
    view.add_columns({"s": "sum(x)"})
    for version, expected in ((None, 1005), (1, 12)):
        view.refresh(runner="inline", src_version=version)
        assert {row["k"]: row["s"] for row in view.to_arrow().to_pylist()} == {1.0: expected, None: 1, 0.5: 2}


def test_a_restore_to_a_later_version_shows_what_columns_got_that_an_earlier_one_lacks(
    table: Table, trace: Trace
) -> None:
    view = view_of(table, {"n": "count(*)"})
    view.refresh(runner="inline")
    first = view.version
    view.add_columns({"bag": (folded.bag, ["id", "x"])})
    view.refresh(runner="inline")
    later = view.version
    view.location.open(first).restore()
    view.refresh(runner="inline")
    table.lance.update({"x": "1000"}, where="id = 1")
    view.refresh(runner="inline")
    view.location.open(later).restore()
    view.refresh(runner="inline")
    shown = {row["k"]: row["bag"] for row in view.to_arrow().to_pylist()}
    assert shown == {1.0: "1: [0, 1] 1005", None: "1: [2, 4] 1", 0.5: "1: [3] 2"}
    # A function that is given other inputs runs on the groups that ask for it, although these were not followed.
    view.alter_columns({"bag": (folded.bag, ["id", "at"])})
    table.lance.update({"x": "1"}, where="id = 3")
    assert view.refresh(runner="inline", on_code_change="new_rows").rows_run == 1


@pytest.mark.parametrize("restored", ["rows", "groups"])
def test_a_hidden_table_that_somebody_restores_is_brought_up_to_date(table: Table, trace: Trace, restored: str) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    (hidden,) = [one for one in hidden_tables(view.location) if one.name == restored]
    before = hidden.open().version
    table.lance.update({"x": "8"}, where="id = 1")
    table.add(pa.Table.from_pylist([{"id": 9, "k": 7.0, "t": "", "x": 1, "at": 1}], SCHEMA))
    view.refresh(runner="inline")
    shown = told(view)
    hidden.open(before).restore()
    assert view.refresh(runner="inline").state == "DONE"
    assert told(view) == shown
    table.lance.delete("id = 9")
    view.refresh(runner="inline")
    assert told(view) == {key: text for key, text in shown.items() if key != (7.0, "")}
    assert view.refresh(runner="inline").commits == ()


def test_a_refresh_that_began_goes_on_although_the_version_that_it_began_with_was_cleaned_up(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    table.lance.update({"x": "8"}, where="id = 1")

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(groups_run, "_refresh_rows", dies)
        with pytest.raises(KeyboardInterrupt):
            view.refresh(runner="inline")
    table.lance.update({"k": "0.5"}, where="id = 2")
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    assert view.refresh(runner="inline").state == "DONE"
    expected = {(1.0, "a"): "1: 0=5 1=8", (None, "b"): "1: 4=1", (0.5, None): "1: 3=2", (0.5, "b"): "1: 2=None"}
    assert told(view) == expected
    assert view.refresh(runner="inline").commits == ()


def test_a_row_keeps_its_row_id_as_long_as_its_key_has_rows(table: Table) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    view.lance.create_scalar_index("told", "BTREE")
    before = row_ids(view)
    # One group changes, one comes before it and one after it; in their place in the file they are mixed.
    table.add(pa.Table.from_pylist([{"id": 9, "k": 7.0, "t": "a", "x": 9, "at": 1}], SCHEMA))
    table.lance.update({"x": "x + 1"}, where="id IN (0, 3)")
    view.refresh(runner="inline")
    after = row_ids(view)
    assert {key: id for key, id in after.items() if key != (7.0, "a")} == before
    assert after[7.0, "a"] not in before.values()
    found = view.lance.to_table(columns=["k"], filter="told = '1: 3=3'", with_row_id=True).to_pylist()
    assert found == [{"k": 0.5, "_rowid": before[0.5, None]}]
    assert view.lance.count_rows(filter="told = '1: 3=2'") == 0
    # All groups are touched at once, so that the view is replaced as a whole.
    view.lance.drop_index("told_idx")
    table.lance.update({"x": "x + 1"})
    view.refresh(runner="inline")
    assert row_ids(view) == after
    table.lance.delete("k = 0.5")
    view.refresh(runner="inline")
    table.add(pa.Table.from_pylist([{"id": 3, "k": 0.5, "t": None, "x": 3, "at": 1}], SCHEMA))
    view.refresh(runner="inline")
    assert row_ids(view)[0.5, None] not in after.values()


def test_new_groups_before_known_ones_leave_these_their_row_ids(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that was restored has not the groups that came since; compaction has put known ones after them."""
    monkeypatch.setattr(group_table, "_MOST_FRAGMENTS", 1)
    view = view_of(table)
    view.refresh(runner="inline")
    before, version = row_ids(view), view.version
    for change in (6.0, None, 7.0):
        if change is None:
            table.lance.update({"x": "x + 1"}, where="id = 0")
        else:
            table.add(pa.Table.from_pylist([{"id": 9, "k": change, "t": "a", "x": 9, "at": 1}], SCHEMA))
        view.refresh(runner="inline")
    view.location.open(version).restore()
    view.refresh(runner="inline")
    assert told(view) == told_now(table)
    assert {key: id for key, id in row_ids(view).items() if key in before} == before
    assert len(row_ids(view)) == len(set(row_ids(view).values())) == 5


def told_now(table: Table) -> dict[tuple[Any, Any], str]:
    found = table.query().group_by("k", "t").agg(TOLD).to_arrow().to_pylist()
    return {(row["k"], row["t"]): row["told"] for row in found}


def row_ids(view: View) -> dict[tuple[Any, Any], int]:
    found = view.lance.to_table(columns=["k", "t"], filter="__is_set", with_row_id=True).to_pylist()
    return {(row["k"], row["t"]): row["_rowid"] for row in found}


def test_a_column_that_is_added_to_a_view_of_groups_is_computed_alone(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    ids = row_ids(view)
    view.add_columns({"last": "max(at)", "largest": (udfs.largest, ["x"]), "bag": (folded.bag, ["id", "x"])})
    assert view.schema.names == ["k", "t", "n", "told", "last", "largest", "bag"]
    trace.clear()
    assert view.plan_refresh().rows_pending == 3
    result = view.refresh(runner="inline")
    assert (result.rows_computed, len(trace), row_ids(view)) == (3, 0, ids)
    columns = {**TOLD, "last": "max(at)", "largest": (udfs.largest, ["x"]), "bag": (folded.bag, ["id", "x"])}
    right = table.query().group_by("k", "t").agg(columns)
    assert view.to_arrow().to_pylist() == right.to_arrow().to_pylist()
    assert view.refresh(runner="inline").commits == ()
    # The view reads a column now that it did not read before.
    table.lance.update({"at": "9"}, where="id = 3")
    assert view.refresh(runner="inline").rows_computed == 1
    view.alter_columns({"told": (udfs.told_of(2), ["k", "t", "id", "at"])})
    trace.clear()
    with pytest.raises(CodeChanged):
        view.refresh(runner="inline")
    view.refresh(runner="inline", on_code_change="recompute")
    assert len(trace) == 3
    shown = {row["k"]: (row["told"], row["last"]) for row in view.to_arrow().to_pylist()}
    assert shown[0.5] == ("2: 3=9", 9)


def test_rows_are_removed_from_states_after_a_column_that_reads_another_column_of_the_source(
    table: Table, trace: Trace
) -> None:
    table.add(pa.Table.from_pylist([{"id": at, "k": 1.0, "t": "a", "x": at} for at in range(5, 15)], SCHEMA))
    table.lance.add_columns({"other": "0"})
    view = view_of(table, {"bag": (folded.losing_bag, ["id", "x"])})
    view.refresh(runner="inline")
    view.add_columns({"last": "max(at)"})
    view.refresh(runner="inline")
    table.lance.update({"other": "9"}, where="id = 0")
    assert view.refresh(runner="inline").commits == ()
    assert GroupTables.open(view.location).state == SETTLED
    assert view.refresh(runner="inline", errors_only=True).rows_run == 0
    trace.clear()
    added, removed = (Trace(Path(f"{trace.path}{kind}")) for kind in (folded.READ, folded.REMOVED))
    added.clear()
    table.lance.delete("id = 0")
    assert view.refresh(runner="inline").rows_run == 1
    assert (added.rows(), removed.rows()) == ([], [0])
    table.lance.cleanup_old_versions(older_than=timedelta(0))
    assert view.refresh(runner="inline").rows_run == 0


def test_columns_of_groups_are_defined_once(table: Table) -> None:
    view = view_of(table, {"n": "count(*)"})
    specs: Any = {("told",): (udfs.told, ["k", "t", "id", "x"]), ("bag",): (folded.bag, ["id", "x"])}
    assert view._edit.define(specs) == (["told", "bag"], [])
    version = view.version
    assert view._edit.define(specs) == ([], [])
    assert view.version == version
    assert view._edit.define({("told",): (udfs.told_of(2), ["k", "t", "id", "x"])}) == ([], ["told"])


def test_columns_that_leave_a_view_of_groups_are_read_no_more(table: Table, trace: Trace) -> None:
    view = view_of(table, {**TOLD, "bag": (folded.bag, ["id", "x"]), "last": "max(at)"})
    view.refresh(runner="inline")
    ids = row_ids(view)
    view.drop_columns(["bag", "last"])
    assert view.lance.schema.names == ["__source_row_id", "__is_set", "k", "t", "n", "told"]
    assert FreshnessCount.of_view(view.location).count().pending == 0
    trace.clear()
    assert view.refresh(runner="inline").rows_run == 0
    table.lance.update({"at": "9"}, where="id = 3")
    assert view.refresh(runner="inline").commits == ()
    table.drop_columns(["at"])
    table.lance.update({"x": "9"}, where="id = 3")
    assert view.refresh(runner="inline").rows_computed == 1
    assert told(view) == told_now(table)
    assert row_ids(view) == ids
    # A column of the name of a dropped one is another one.
    view.add_columns({"bag": (folded.losing_bag, ["id", "x"])})
    assert FreshnessCount.of_view(view.location).count().pending == 3
    trace.clear()
    result = view.refresh(runner="inline")
    assert (result.rows_computed, len(trace), result.usage.folds.new) == (3, 0, 3)


def test_freshness_counts_no_row_twice_after_a_refresh_that_ended_between_the_hidden_tables(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table)

    def die(*arguments: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as broken:
        broken.setattr(groups_run, "_refresh_rows", die)
        with pytest.raises(RuntimeError, match="killed"):
            view.refresh(runner="inline")
    found = FreshnessCount.of_view(view.location).count()
    assert (found.state, found.rows, found.pending) == (found.NEVER, 5, 5)
    view.refresh(runner="inline")
    table.lance.update({"x": "x + 1"}, where="id IN (0, 3)")
    with monkeypatch.context() as broken:
        broken.setattr(groups_run, "_refresh_rows", die)
        with pytest.raises(RuntimeError, match="killed"):
            view.refresh(runner="inline")
    found = FreshnessCount.of_view(view.location).count()
    assert (found.state, found.pending) == (found.STALE, 2)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_view_whose_filter_selects_no_row_says_that_it_was_refreshed(table: Table, grouped: bool) -> None:
    query = table.query().where("x > 100")
    view = (query.group_by("k").agg({"n": "count(*)"}) if grouped else query).create_materialized_view(name="none")
    assert "never refreshed" in view.state()
    assert view.refresh(runner="inline").state == "DONE"
    assert "refreshed to its version 1" in view.state()
    table.lance.update({"x": "101"}, where="id = 0")
    view.refresh(runner="inline")
    assert view.state().startswith("1 row, ")
    assert "refreshed to its version 2" in view.state()


def test_a_plan_with_changed_code_names_the_groups_that_are_at_stake_after_the_touched_ones(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    monkeypatch.setattr(udfs, "told", udfs.told_of(2))
    table.lance.update({"x": "8"}, where="id = 1")
    with pytest.raises(CodeChanged, match="2 rows"):
        view.plan_refresh()
    with pytest.raises(CodeChanged, match="2 rows"):
        view.refresh(runner="inline")
