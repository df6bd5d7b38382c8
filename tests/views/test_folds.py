"""Functions that can be folded: a touched group costs its change, and its value is that of all of its rows."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from airflow_geneva import connect, udaf, udf
from airflow_geneva.engine.apply import group_folds
from airflow_geneva.engine.apply.source_rows import take_rows
from airflow_geneva.engine.commit import group_table
from airflow_geneva.engine.counts import Folds
from airflow_geneva.engine.run.groups import GroupsRefresh
from airflow_geneva.engine.views.grouping import rows_table
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace
from tests.udfs_for_tests import folded

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("x", pa.int64())])


def rows(*ids: int, k: int | None = None) -> pa.Table:
    return pa.Table.from_pylist([{"id": id, "k": id % 3 if k is None else k, "x": id} for id in ids], SCHEMA)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return connect(tmp_path / "db").create_table("rows", rows(*range(12)))


def view_of(table: Table, function: Any = folded.bag, **more: Any) -> View:
    columns = {"n": "count(*)", "bag": (function, ["id", "x"]), **more}
    return table.query().group_by("k").agg(columns).create_materialized_view(name="v")


def refreshed(view: View, trace: Trace, **how: Any) -> tuple[list[Any], list[Any], Folds]:
    """Refresh a view, compare it with plain Python, and return the rows that were added and removed, and the counts."""
    added, removed = traces(trace)
    result = view.refresh(runner="inline", **how)
    assert result.state == "DONE"
    groups: dict[int, list[dict[str, int]]] = {}
    for row in view.source().to_arrow().to_pylist():
        groups.setdefault(row["k"], []).append(row)
    right = {k: (len(of), folded.bag_value([r["id"] for r in of], sum(r["x"] for r in of))) for k, of in groups.items()}
    assert {row["k"]: (row["n"], row["bag"]) for row in view.to_arrow().to_pylist()} == right
    return sorted(added.rows()), sorted(removed.rows()), result.usage.folds


def traces(trace: Trace) -> tuple[Trace, Trace]:
    """Return empty traces of the rows that are added and removed."""
    found = tuple(Trace(Path(f"{trace.path}{end}")) for end in (folded.READ, folded.REMOVED))
    for one in found:
        one.clear()
    return found[0], found[1]


def test_a_group_that_only_gained_rows_costs_these(table: Table, trace: Trace) -> None:
    view = view_of(table)
    assert view.schema.names == ["k", "n", "bag"]
    assert refreshed(view, trace) == ([*range(12)], [], Folds(new=3))
    table.add(rows(12, 15, 13))
    table.add(rows(50, k=7))
    plan = view.plan_refresh()
    assert plan.rows_pending == 3
    added, removed, folds = refreshed(view, trace)
    assert (added, removed, folds) == ([12, 13, 15, 50], [], Folds(folded=2, new=1))
    assert "2 calls folded, 1 on all rows of a group (new 1)" in str(folds)
    assert view.refresh(runner="inline").commits == ()


def test_the_query_and_its_view_agree_and_hide_the_states(table: Table, trace: Trace) -> None:
    view = view_of(table, mean=(folded.Mean, ["x"]))
    view.refresh(runner="inline")
    query = table.query().group_by("k").agg({"n": "count(*)", "bag": (folded.bag, ["id", "x"]), "mean": folded.Mean})
    assert query.to_arrow().to_pylist() == view.to_arrow().to_pylist()
    assert query.output_schema().names == view.schema.names == ["k", "n", "bag", "mean"]
    assert view.query().to_arrow().column_names == ["k", "n", "bag", "mean"]
    assert "__state" not in view.state()


@pytest.mark.parametrize("function", [folded.bag, folded.losing_bag], ids=["without remove", "with remove"])
def test_a_group_that_lost_rows_is_computed_from_all_or_without_them(table: Table, trace: Trace, function: Any) -> None:
    view = view_of(table, function)
    refreshed(view, trace)
    table.lance.delete("id = 3")
    table.lance.update({"x": "100"}, where="id = 4")
    table.lance.update({"k": "1"}, where="id = 5")
    table.add(rows(12))
    added, removed, folds = refreshed(view, trace)
    if function.removes:
        assert (added, removed, folds) == ([4, 5, 12], [3, 4, 5], Folds(folded=3))
    else:
        assert (added, removed, folds) == ([0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12], [], Folds(lost_rows=3))


def test_rows_are_removed_only_if_it_is_certain_which(table: Table, trace: Trace) -> None:
    view = view_of(table, folded.losing_bag)
    refreshed(view, trace)
    table.lance.delete("id = 3")
    view.plan_refresh()
    hidden = rows_table(view.location)
    group_table.compact(hidden)
    added, removed, folds = refreshed(view, trace)
    assert (added, removed, folds) == ([], [3], Folds(folded=1))
    # Most of a group leaves it: what is left is read.
    table.lance.delete("id IN (0, 6)")
    assert refreshed(view, trace) == ([9], [], Folds(lost_rows=1))


@pytest.mark.parametrize("planned", [False, True])
def test_rows_of_a_version_of_the_source_that_was_cleaned_up_are_not_removed(
    table: Table, trace: Trace, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table, folded.losing_bag)
    refreshed(view, trace)
    table.lance.tags.create("kept", table.version)
    table.lance.add_columns({"z": "1"})
    assert refreshed(view, trace) == ([], [], Folds())
    table.lance.delete("id = 3")

    def clean_up(plan: Any = None) -> Any:
        gone = {"older_than": timedelta(0), "delete_unverified": True, "error_if_tagged_old_versions": False}
        table.lance.cleanup_old_versions(**gone)
        return plan

    if planned:
        plan_of = GroupsRefresh._with_rows_before
        monkeypatch.setattr(GroupsRefresh, "_with_rows_before", lambda *given: clean_up(plan_of(*given)))
    else:
        clean_up()
    assert refreshed(view, trace) == ([0, 6, 9], [], Folds(lost_rows=1))


def test_other_code_is_never_given_the_states_of_earlier_code(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(table)
    refreshed(view, trace)
    other = udaf(data_type=pa.string(), state=folded.IDS, version="2", name="bag")(folded._BagThatLoses)
    monkeypatch.setattr(folded, "bag", other)
    table.add(rows(12))
    assert refreshed(view, trace, on_code_change="new_rows") == ([0, 3, 6, 9, 12], [], Folds(other_code=1))
    table.add(rows(15))
    assert refreshed(view, trace, on_code_change="new_rows") == ([15], [], Folds(folded=1))


def test_a_hidden_table_that_is_made_anew_or_restored_gives_no_state_to_other_rows(table: Table, trace: Trace) -> None:
    view = view_of(table)
    refreshed(view, trace)
    hidden = rows_table(view.location)
    version = hidden.open().version
    table.add(rows(12))
    refreshed(view, trace)
    hidden.open(version).restore()
    table.add(rows(15))
    refreshed(view, trace)
    db = connect(view.location.database_uri)
    db.drop_table("rows")
    db.create_table("rows", rows(*range(20, 32)))
    added, _, folds = refreshed(view, trace)
    assert (added, folds.folded) == ([*range(20, 32)], 0)


def test_a_view_that_was_restored_folds_from_the_states_that_it_had(table: Table, trace: Trace) -> None:
    view = view_of(table)
    refreshed(view, trace)
    version = view.version
    table.add(rows(12))
    refreshed(view, trace)
    table.add(rows(15, 16))
    view.location.open(version).restore()
    added, _, folds = refreshed(view, trace)
    assert (set(added) <= {12, 15, 16}, folds) == (True, Folds(folded=2))


def test_a_group_that_fails_has_no_state_and_is_computed_from_all_rows(table: Table, trace: Trace) -> None:
    view = view_of(table, folded.refusing_bag)
    result = view.refresh(runner="inline")
    assert result.rows_failed == 3  # the sums of x are 18, 22 and 26
    table.add(rows(15))
    added, _ = traces(trace)
    result = view.refresh(runner="inline")
    assert (result.rows_failed, result.usage.folds.folded) == (2, 0)
    assert sorted(added.rows()) == [*range(12), 15]
    shown = {row["k"]: row["bag"] for row in view.to_arrow().to_pylist()}
    assert shown == {0: "1: [0, 3, 6, 9, 15] 33", 1: None, 2: None}
    table.add(rows(18))
    added, _ = traces(trace)
    view.refresh(runner="inline", errors_only=True)
    assert sorted(added.rows()) == sorted({*range(12)} - {0, 3, 6, 9})


def test_a_state_that_is_too_large_fails_with_what_to_do(table: Table) -> None:
    view = table.query().group_by("k").agg({"size": (folded.Hoarder, ["id"])}).create_materialized_view(name="v")
    with pytest.raises(JobFailed, match=r"state of UDF 'Hoarder' takes 1\.2 MB for a group, and may take 1\.0 MB"):
        view.refresh(runner="inline")


def test_a_state_of_another_type_fails_with_both(table: Table) -> None:
    class Texts(folded._Bag):
        def add(self, state: Any, id: list[int], x: list[int]) -> Any:
            return {"ids": "none"}

    texts = udaf(data_type=pa.string(), state=folded.IDS, version="1")(Texts)
    with pytest.raises(JobFailed, match=r"state of UDF 'Texts' does not fit its type struct<ids: .*Got: dict"):
        view_of(table, texts).refresh(runner="inline")


def test_what_cannot_be_folded_is_refused(table: Table) -> None:
    class Half:
        def init(self) -> int:
            return 0

    fold = udaf(data_type=pa.int64(), state=pa.int64())
    with pytest.raises(InvalidInput, match="lacks add, merge, finish"):
        fold(Half)
    with pytest.raises(InvalidInput, match="Name one column for each"):
        table.query().group_by("k").agg({"bag": (folded.bag, ["id"])}).create_materialized_view(name="v")
    with pytest.raises(InvalidInput, match="fills one column"):
        table.query().group_by("k").agg({("a", "b"): (folded.bag, ["id", "x"])}).create_materialized_view(name="v")
    with pytest.raises(InvalidInput, match="folds the rows of a group"):
        table.add_columns({"bag": (folded.bag, ["id", "x"])})


class _Total:
    def init(self) -> int:
        return 0

    def add(self, state: int, x: list[int], y: list[int]) -> int:
        return state + sum(x) - sum(y)

    def merge(self, state: int, other: int) -> int:
        return state + other

    def finish(self, state: int) -> int:
        return state


@pytest.mark.parametrize(
    ("method", "function", "message"),
    [
        ("init", lambda self, x: 0, r"Write it as init\(self\)"),
        ("merge", lambda self, state: state, r"Write it as merge\(self, state, other\)"),
        ("finish", lambda self, state, x: state, r"Write it as finish\(self, state\)"),
        ("add", lambda self: 0, r"Write it as add\(self, state, \.\.\.\)"),
        ("remove", lambda self: 0, r"Write it as remove\(self, state, \.\.\.\)"),
        ("remove", lambda self, state, x: state, r"parameters of add after the state, \['x', 'y'\]"),
        ("remove", lambda self, state, y, x: state, r"parameters of add after the state, \['x', 'y'\]"),
    ],
)
def test_a_method_that_does_not_fit_is_refused_before_it_is_called(method: str, function: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        udaf(data_type=pa.int64(), state=pa.int64())(type("Total", (_Total,), {method: function}))


def test_a_method_that_removes_gets_rows_in_the_form_in_which_they_were_added() -> None:
    class Total(_Total):
        def remove(self, state: int, x: pa.Array, y: pa.Array) -> int:
            return state

    with pytest.raises(InvalidInput, match="in the same form"):
        udaf(data_type=pa.int64(), state=pa.int64())(Total)


def test_rows_are_added_as_numpy_arrays_if_the_annotations_say_so(table: Table) -> None:
    class OfArrays(_Total):
        def add(self, state: int, x: NDArray[np.int64], y: np.ndarray | None) -> int:  # type: ignore[override,type-arg]
            return state + int((x * y).sum())  # type: ignore[operator]

    total = udaf(data_type=pa.int64(), state=pa.int64(), version="1")(OfArrays)
    found = table.query().group_by("k").agg({"total": (total, ["id", "x"])}).to_arrow().to_pylist()
    assert {row["k"]: row["total"] for row in found} == {k: sum(n * n for n in range(k, 12, 3)) for k in range(3)}


def test_the_annotations_of_added_rows_are_checked(table: Table) -> None:
    class OfOneRow(_Total):
        def add(self, state: int, x: int, y: int) -> int:
            return state + x - y

    class OfTexts(_Total):
        def add(self, state: int, x: list[int], y: list[str]) -> int:
            return state + sum(x) - len(y)

    for made in (OfOneRow, OfTexts):
        total = udaf(data_type=pa.int64(), state=pa.int64(), version="1")(made)
        with pytest.raises(InvalidInput, match=r"Type mismatch for column .* Annotate the parameter as a list"):
            table.query().group_by("k").agg({"total": (total, ["id", "x"])}).definition()


def test_a_function_that_cannot_be_folded_does_not_take_the_place_of_one_that_can(table: Table, trace: Trace) -> None:
    view = view_of(table)
    view.refresh(runner="inline")

    @udf(data_type=pa.string(), version="1")
    def listed(id: list[int]) -> str:
        return str(id)

    way_out = r"Drop the column and add it again: view\.drop_columns\(\['bag'\]\), then view\.add_columns\(\{'bag'"
    with pytest.raises(InvalidInput, match=way_out):
        view.alter_columns({"bag": (listed, ["id"])})
    view.drop_columns(["bag"])
    view.add_columns({"bag": (listed, ["id"])})
    view.refresh(runner="inline")
    assert view.to_arrow().column("bag").to_pylist() == ["[0, 3, 6, 9]", "[1, 4, 7, 10]", "[2, 5, 8, 11]"]


def test_a_function_with_a_timeout_folds_in_a_process_of_its_own(table: Table, trace: Trace) -> None:
    slow = udaf(data_type=pa.string(), state=folded.IDS, version="1", name="slow", timeout=30.0)(folded._BagThatLoses)
    view = view_of(table, slow)
    refreshed(view, trace)
    table.add(rows(12))
    table.lance.delete("id = 4")
    assert refreshed(view, trace) == ([12], [4], Folds(folded=2))


@pytest.mark.spark
def test_functions_are_folded_on_spark(table: Table, spark: Any) -> None:
    view = view_of(table, folded.losing_bag)
    view.refresh(runner="spark", concurrency=2)
    table.add(rows(12, 13))
    table.lance.delete("id = 5")
    result = view.refresh(runner="spark", concurrency=2, task_size=1)
    assert result.usage.folds == Folds(folded=3)
    query = table.query().group_by("k").agg({"n": "count(*)", "bag": (folded.losing_bag, ["id", "x"])})
    assert sorted(query.to_arrow().to_pylist(), key=str) == sorted(view.to_arrow().to_pylist(), key=str)


def test_the_states_that_are_held_at_once_are_limited_by_their_bytes(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.add(pa.concat_tables(rows(100 + k, k=k) for k in range(40)))
    view = table.query().group_by("k").agg({"n": (folded.Wide, ["id"])}).create_materialized_view(name="v")
    view.refresh(runner="inline")
    table.add(pa.concat_tables(rows(200 + k, k=k) for k in range(40)))
    whole, held = group_folds.GroupFolds, list[int]()
    monkeypatch.setattr(group_folds, "GroupFolds", lambda *given: whole(*given[:-1], 4 * folded.WIDE))

    def take(dataset: Any, row_ids: Any, reads: Any) -> pa.RecordBatch:
        held.append(len(row_ids))
        return take_rows(dataset, row_ids, reads)

    monkeypatch.setattr(group_folds, "take_rows", take)
    result = view.refresh(runner="inline")
    assert result.usage.folds == Folds(folded=40)
    assert sorted(view.to_arrow()["n"].to_pylist()) == [2] * 37 + [6] * 3
    assert sum(held) == 40
    assert max(held) <= 4
