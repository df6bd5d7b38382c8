"""Others at a view while it is refreshed: in this process at the worst moment, and in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.fragment import write_fragments

from airflow_geneva.engine.lance_io import table_versions
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace
from tests.support.queries import Asked, Refresh, assert_equals_query, assert_nothing_to_refresh, shown
from tests.support.tables import MakeTable

PLACEHOLDERS = ["__source_row_id", "__is_set"]


def insert(view: View, ids: list[int], is_set: bool) -> None:
    rows = [pa.array(ids, pa.int64()), pa.array([is_set] * len(ids))]
    view.lance.insert(pa.table(rows, names=PLACEHOLDERS), mode="append")


def at_the_worst_moment(monkeypatch: pytest.MonkeyPatch, what: Callable[[], Any]) -> None:
    """Have something done once, after a swap looked at its view and before it is committed."""
    done: list[str] = []

    def interrupt(name: str) -> None:
        if name == "swap.before" and not done:
            done.append(name)
            what()

    monkeypatch.setattr(table_versions, "fault_point", interrupt)


def restore_back_and_forth(view: View) -> None:
    newest = view.lance.version
    view.location.open(1).restore()
    view.lance.optimize.compact_files()
    view.location.open(newest).restore()


# Whatever is done to the view, and whether the swap may still be made on top of it.
MEANWHILE: dict[str, tuple[Callable[[View], Any], set[str]]] = {
    "compaction": (lambda view: view.lance.optimize.compact_files(), {"DONE"}),
    "placeholders": (lambda view: insert(view, [3, 500], False), {"DONE"}),
    "rows of others": (lambda view: insert(view, [3, 500], True), {"DONE", "PARTIAL"}),
    "another column": (lambda view: view.lance.add_columns({"theirs": "id"}), {"DONE"}),
    "restore": (lambda view: view.location.open(1).restore(), {"PARTIAL"}),
    "restore back and forth": (lambda view: restore_back_and_forth(view), {"DONE"}),
    "delete": (lambda view: view.lance.delete("id IN (2, 30, 60)"), {"DONE", "PARTIAL"}),
    "update": (lambda view: view.lance.update({"p": "0"}, where="id IN (2, 30, 60)"), {"DONE", "PARTIAL"}),
    "cleanup": (lambda view: view.lance.cleanup_old_versions(older_than=timedelta(0)), {"DONE"}),
    "configuration": (lambda view: view.lance.update_config({"a": "b"}), {"DONE"}),
    "index": (lambda view: view.lance.create_scalar_index("id", "BTREE"), {"DONE"}),
}


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("name", MEANWHILE)
def test_what_happens_to_a_view_just_before_its_swap_is_seen_by_this_refresh_or_the_next(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, name: str, first: bool
) -> None:
    what, states = MEANWHILE[name]
    table = make_table(100)
    view = Asked().make(table)
    if not first:
        view.refresh(runner="inline", max_rows_per_fragment=20)
        table.lance.update({"x": "x + 1"}, where="id IN (5, 50)")
    taken = Refresh(view).plan().apply()
    before = shown(view)
    at_the_worst_moment(monkeypatch, lambda: what(view))
    result = taken.finish()
    assert result.state in ({"DONE", "PARTIAL"} if first else states)
    if name not in ("rows of others", "delete", "update", "restore"):
        assert sorted(shown(view)) in (sorted(before), sorted(Asked().rows(table)))
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 100
    assert_nothing_to_refresh(view, trace)
    # What is no row stays, whether rows were replaced or the whole version.
    assert view.lance.config().get("a") == ("b" if name == "configuration" else None)
    assert [index.name for index in view.lance.describe_indices()] == ["id_idx"] * (name == "index")
    assert ("theirs" in view.lance.schema.names) == (name == "another column")


@pytest.mark.parametrize("name", ["rows of others", "delete", "update"])
def test_rows_that_others_change_between_two_refreshes_are_put_right_without_running_a_row(
    make_table: MakeTable, trace: Trace, name: str
) -> None:
    table = make_table(100)
    view = Asked().make(table)
    view.refresh(runner="inline")
    MEANWHILE[name][0](view)
    seen = len(trace)
    result = view.refresh(runner="inline")
    assert "other writers changed the view's rows" in str(result.notes)
    assert_equals_query(view, table, Asked())
    assert (len(trace), view.lance.count_rows()) == (seen, 100)
    assert_nothing_to_refresh(view, trace)


def test_placeholders_that_were_compacted_with_rows_leave_with_the_next_refresh(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(100)
    view = Asked().make(table)
    view.refresh(runner="inline")
    insert(view, [3, 500], False)
    view.lance.optimize.compact_files()
    assert (len(view.lance.get_fragments()), view.lance.count_rows()) == (1, 102)
    table.add([{"id": 100, "x": 100}])
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 101
    assert_nothing_to_refresh(view, trace)


def test_a_column_that_others_added_and_filled_is_kept_and_costs_nothing(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    view = Asked().make(table)
    view.refresh(runner="inline")
    view.lance.add_columns(pa.schema([pa.field("theirs", pa.int64())]))
    dataset = view.lance
    fragment = dataset.get_fragments()[0]
    data = pa.table([pa.array(range(fragment.physical_rows), pa.int64())], names=["theirs"])
    (meta,) = write_fragments(data, dataset, mode="append")
    group = lance.LanceOperation.DataReplacementGroup(fragment.fragment_id, meta.files[0])
    filled = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
    lance.LanceDataset.commit(dataset.uri, filled)
    assert_nothing_to_refresh(view, trace)
    table.add([{"id": 100, "x": 100}])
    assert view.refresh(runner="inline").rows_computed == 1
    assert_equals_query(view, table, Asked())
    kept = [row["theirs"] for row in view.to_arrow().to_pylist()]
    assert kept[:25] == list(range(25))
    assert set(kept[25:]) == {None}


RIVALS: dict[str, Callable[[Table], tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "both append": lambda table: (
        lambda: table.add([{"id": 200, "x": 200}]),
        lambda: table.add([{"id": 201, "x": 201}]),
    ),
    "updates in places of their own": lambda table: (
        lambda: table.lance.update({"x": "x + 1"}, where="id = 30"),
        # The first change is taken back, so that the second refresh touches another fragment only.
        lambda: (table.location.open(1).restore(), table.lance.update({"x": "x + 1"}, where="id = 90")),
    ),
}


@pytest.mark.parametrize(
    ("rows", "indexed", "name", "loser"),
    [
        (100, False, "both append", "PARTIAL"),
        (100, False, "updates in places of their own", "PARTIAL"),
        (0, False, "both append", "PARTIAL"),
        (0, True, "both append", "PARTIAL"),
        # The faster one finds no rows, in the source or in the view, and changes nothing that the slower one replaces.
        (0, False, "updates in places of their own", "DONE"),
    ],
)
def test_of_two_refreshes_that_swap_at_once_one_wins(
    make_table: MakeTable,
    trace: Trace,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    indexed: bool,
    name: str,
    loser: str,
) -> None:
    table = make_table(rows)
    view = Asked().make(table)
    if indexed:
        view.lance.create_scalar_index("twice", "BTREE")
    if rows:
        view.refresh(runner="inline")
    else:
        table.add([{"id": number, "x": number} for number in range(5)])
    first, second = RIVALS[name](table)
    first()
    slower = Refresh(view).plan().apply()
    second()
    faster = Refresh(view).plan().apply()
    states: list[str] = []
    at_the_worst_moment(monkeypatch, lambda: states.append(faster.finish().state))
    states.append(slower.finish().state)
    assert states == ["DONE", loser]
    seen = len(trace)
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == table.count_rows()
    assert len(trace) == seen
    assert_nothing_to_refresh(view, trace)


def test_a_view_of_a_view_that_was_restored_and_refreshed_follows_it(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    lower = Asked().make(table)
    new = lower.version
    lower.refresh(runner="inline")
    upper = lower.query().select({"id": "id", "four": "twice * 2"}).create_materialized_view(name="upper")
    upper.refresh(runner="inline")
    lower.location.open(new).restore()
    lower.refresh(runner="inline")
    upper.refresh(runner="inline")
    table.lance.update({"x": "x + 1"}, where="id = 3")
    lower.refresh(runner="inline")
    upper.refresh(runner="inline")
    rows = sorted((row["id"], row["four"]) for row in upper.to_arrow().to_pylist())
    assert rows == sorted((i, 2 * twice) for i, twice, _ in Asked().rows(table))


@pytest.mark.parametrize("columns", [{"y": "y"}, {"one": "1"}], ids=["a column without files", "no column"])
def test_fragments_that_no_file_tells_apart_are_told_apart(
    make_table: MakeTable, trace: Trace, columns: dict[str, str]
) -> None:
    table = make_table(40)
    table.lance.add_columns(pa.schema([pa.field("y", pa.int64())]))
    view = table.query().select(columns).create_materialized_view(name="v")
    view.refresh(runner="inline")
    table.add([{"id": 40, "x": 40}])
    assert view.refresh(runner="inline").rows_computed == 1
    assert view.count_rows() == 41
    table.lance.update({"y": "x"}, where="id < 20")
    view.refresh(runner="inline")
    assert view.count_rows() == view.lance.count_rows() == 41
    if "y" in columns:
        assert sorted(y for y in view.to_arrow()["y"].to_pylist() if y is not None) == list(range(20))
