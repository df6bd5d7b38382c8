"""A column that feeds a view that feeds a view: what a change of one link makes the next one run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import UDF, Table, View, connect, udf
from airflow_geneva.engine.run import view as run
from airflow_geneva.errors import CodeChanged, JobFailed
from tests.support.counting import Trace
from tests.support.invariants import assert_exact
from tests.support.tables import MakeTable
from tests.udfs_for_tests import views as udfs

ROWS = 40


def other_code(*changed: int) -> UDF:
    """Code of another version that gives what `plus` gives, but for some inputs."""

    @udf(data_type=pa.int64(), name="plus", version="2")
    def plus(x: int) -> int:
        return x + 1 + (100 if x in changed else 0)

    return plus


def of_view(made_of: View) -> View:
    """A view on a view, which leaves a trace of the values of `p` that it sees."""
    query = made_of.query().where("p IS NOT NULL").select({"id": "id", "q": (udfs.plus, ["p"])})
    return query.create_materialized_view(name="upper")


def both(view: View) -> list[tuple[int, int]]:
    return sorted((row["id"], row["q"]) for row in view.to_arrow().to_pylist())


@pytest.fixture
def lower(make_table: MakeTable) -> View:
    query = make_table(ROWS).query().select({"id": "id", "x": "x", "p": "x % 100"})
    return query.create_materialized_view(name="lower")


def refresh(*views: View) -> list[Any]:
    return [view.refresh(runner="inline") for view in views]


def test_a_row_that_changed_in_a_view_is_run_by_the_view_on_it_if_a_column_that_it_reads_changed(
    lower: View, trace: Trace
) -> None:
    table, upper = lower.source(), of_view(lower)
    refresh(lower, upper)
    trace.clear()
    table.lance.update({"x": "x + 1000"}, where="id = 7")
    refresh(lower, upper)
    assert_exact(trace, [])
    table.lance.update({"x": "x + 1"}, where="id = 7")
    refresh(lower, upper)
    assert_exact(trace, [8])
    assert both(upper) == [(i, i + 1 + (i == 7)) for i in range(ROWS)]


def test_a_view_that_is_computed_anew_costs_the_view_on_it_only_the_values_that_changed(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(ROWS)
    lower = table.query().select({"id": "id", "p": (udfs.plus, ["x"])}).create_materialized_view(name="lower")
    upper = lower.query().select({"id": "id", "q": "p + 1"}).create_materialized_view(name="upper")
    refresh(lower, upper)
    with monkeypatch.context() as code:
        code.setattr(run, "load_udfs", lambda made: {"p": other_code(3, 30)} if made.source_table == "docs" else {})
        with pytest.raises(CodeChanged):
            lower.refresh(runner="inline")
        assert upper.refresh(runner="inline").rows_computed == 0, "the first stopped, so there is nothing for the next"
        assert lower.refresh(runner="inline", on_code_change="recompute").rows_computed == ROWS
        assert upper.refresh(runner="inline").rows_computed == 2
    assert both(upper) == [(i, i + 2 + (100 if i in (3, 30) else 0)) for i in range(ROWS)]


def of_table(table: Table) -> View:
    """A view of the values that a column has, refreshed before and after they are computed."""
    query = table.query().where("p IS NOT NULL").select({"id": "id", "q": (udfs.plus, ["p"])})
    upper = query.create_materialized_view(name="upper")
    assert upper.refresh(runner="inline").rows_computed == 0
    table.backfill("p", runner="inline")
    assert upper.refresh(runner="inline").rows_computed == ROWS
    return upper


def test_a_column_that_is_computed_anew_costs_the_view_on_it_only_the_values_that_changed(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(ROWS)
    table.add_columns({"p": udfs.plus})
    upper = of_table(table)
    trace.clear()
    again = other_code(3, 30)
    assert table.backfill("p", udf=again, runner="inline", on_code_change="recompute").rows_computed == ROWS
    refresh(upper)
    assert_exact(trace, [104, 131])
    assert both(upper) == [(i, i + 2 + (100 if i in (3, 30) else 0)) for i in range(ROWS)]


def test_rows_that_came_before_their_column_was_computed_enter_with_its_value(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(ROWS)
    table.add_columns({"p": udfs.plus})
    upper = of_table(table)
    table.add([{"id": ROWS, "x": ROWS}])
    assert upper.refresh(runner="inline").rows_computed == 0
    table.backfill("p", runner="inline")
    assert upper.refresh(runner="inline").rows_computed == 1
    assert both(upper) == [(i, i + 2) for i in range(ROWS + 1)]


def test_a_view_on_a_view_that_was_dropped_and_made_anew_follows_the_new_one(lower: View, trace: Trace) -> None:
    table, upper = lower.source(), of_view(lower)
    refresh(lower, upper)
    database = connect(table.location.database_uri)
    database.drop_table("lower")
    made = table.query().where("id >= 30").select({"id": "id", "x": "x", "p": "x % 100"})
    lower = made.create_materialized_view(name="lower")
    refresh(lower, upper)
    assert both(upper) == [(i, i + 1) for i in range(30, ROWS)]


def test_a_failure_in_the_middle_leaves_what_is_above_as_it_was(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(ROWS)
    lower = table.query().select({"id": "id", "p": (udfs.plus, ["x"])}).create_materialized_view(name="lower")
    upper = lower.query().select({"id": "id", "q": "p + 1"}).create_materialized_view(name="upper")
    refresh(lower, upper)
    table.add([{"id": ROWS, "x": ROWS}])

    def broken(x: pa.Int64Array) -> pa.Int64Array:
        raise RuntimeError("no service")

    with monkeypatch.context() as code:
        code.setattr(run, "load_udfs", lambda definition: {"p": replace(udfs.plus, func=broken)})
        with pytest.raises(JobFailed, match="no service"):
            lower.refresh(runner="inline")
    before = upper.version
    assert upper.refresh(runner="inline").rows_computed == 0
    assert upper.version == before
    assert [result.rows_computed for result in refresh(lower, upper)] == [1, 1]
    assert both(upper) == [(i, i + 2) for i in range(ROWS + 1)]


READ_NO_FILE: dict[str, dict[str, str]] = {"a constant": {"one": "1"}, "a column that is not filled yet": {"n": "n"}}


def source_rows(view: View) -> list[int]:
    rows = view.lance.to_table(columns=["__source_row_id"], filter="__is_set")
    return sorted(rows["__source_row_id"].to_pylist())


def row_ids(table: Table) -> list[int]:
    return sorted(table.lance.to_table(columns=[], with_row_id=True)["_rowid"].to_pylist())


@pytest.mark.parametrize("columns", READ_NO_FILE.values(), ids=READ_NO_FILE)
def test_a_view_that_reads_no_data_file_shows_the_rows_of_its_source_and_runs_what_came(
    make_table: MakeTable, columns: dict[str, str]
) -> None:
    table = make_table(20, per_fragment=5)
    table.add_columns({"n": (udfs.plus, ["x"]), "other": (udfs.ten, ["x"])})
    view = table.query().select(columns).create_materialized_view(name="v")
    marked = table.version
    steps = [
        (lambda: None, 20),
        (lambda: table.backfill("other", runner="inline"), 0),
        (lambda: table.lance.update({"x": "x + 1"}, where="id < 3"), 0),
        (lambda: table.lance.delete("id IN (1, 7)"), 0),
        (lambda: table.lance.optimize.compact_files(target_rows_per_fragment=8), 0),
        (lambda: table.add([{"id": 100, "x": 1}]), 1),
        (lambda: table.lance.checkout_version(marked).restore(), 0),
    ]
    for number, (change, due) in enumerate(steps):
        change()
        assert view.refresh(runner="inline").rows_computed == due, f"step {number}"
        assert source_rows(view) == row_ids(table), f"step {number}"
        assert view.refresh(runner="inline").rows_computed == 0, f"step {number}"


def made_with_another_number_of_rows(make_table: MakeTable) -> Table:
    return make_table(3)


def made_with_as_many_rows_and_other_ids(make_table: MakeTable) -> Table:
    """Its last fragment holds a row that was updated, and that of the first table one that was appended."""
    table = make_table(10)
    table.lance.update({"x": "7"}, where="id = 4")
    return table


@pytest.mark.parametrize("remake", [made_with_another_number_of_rows, made_with_as_many_rows_and_other_ids])
@pytest.mark.parametrize(("columns", "stopped"), [({"one": "1"}, False), ({"n": "n"}, False), ({"n": "n"}, True)])
def test_a_view_that_reads_no_data_file_notices_that_its_source_was_made_again(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, columns: dict[str, str], remake: Any, stopped: bool
) -> None:
    table = make_table(10)
    table.add([{"id": 10, "x": 7}])
    table.add_columns({"n": (udfs.plus, ["x"])})
    view = table.query().select(columns).create_materialized_view(name="v")
    if stopped:
        with monkeypatch.context() as broken:
            broken.setattr("airflow_geneva.engine.run.view.swap_rows", _stop)
            with pytest.raises(JobFailed, match="stopped"):
                view.refresh(runner="inline")
    else:
        view.refresh(runner="inline")
        assert source_rows(view) == row_ids(table)
    version = table.version
    connect(table.location.database_uri).drop_table("docs")
    table = remake(make_table)
    table.add_columns({"n": (udfs.plus, ["x"])})
    while table.version < version:
        table.lance.update_config({"again": str(table.version)})
    assert view.refresh(runner="inline").state == "DONE"
    assert source_rows(view) == row_ids(table)


def _stop(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("stopped")
