"""Failed rows of views: they run alone, and are listed by address and column."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import UDF, connect
from airflow_geneva.engine.run import view as run
from airflow_geneva.engine.udf import udf
from airflow_geneva.errors import CodeChanged, InvalidInput
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact
from tests.support.marks import slow_after
from tests.support.tables import MakeTable


def of_x(version: str, *broken: int) -> UDF:
    """A function that fails on some values of `x`."""

    def listed(x: int) -> list[int]:
        leave_trace([x])
        if x in broken:
            raise ValueError(f"not {x}")
        return [x, 100 * int(version)]

    return udf(data_type=pa.list_(pa.int64()), name="listed", version=version, on_error="skip")(listed)


def make_view(table: Table, exploded: bool, function: UDF) -> View:
    query = table.query().select({"id": "id", "e": (function, ["x"])})
    query = query.explode("e") if exploded else query
    return query.create_materialized_view(connect(table.location.database_uri), "v")


def refresh(view: View, **arguments: Any) -> Any:
    return view.refresh(runner="inline", **arguments)


def ids(view: View) -> set[int]:
    """The ids of the rows that have a value."""
    return {row["id"] for row in view.to_arrow().to_pylist() if row["e"] is not None}


@pytest.mark.parametrize("exploded", slow_after(1, [False, True]))
@pytest.mark.parametrize("runs", [1, 4])
def test_errors_only_runs_the_rows_that_failed_in_any_number_of_runs_and_no_others(
    make_table: MakeTable, trace: Trace, exploded: bool, runs: int
) -> None:
    table = make_table(30)
    view = make_view(table, exploded, of_x("1", 7, 17))
    for _ in range(runs):
        refresh(view)
    table.add([{"id": 30, "x": 30}])
    table.lance.optimize.compact_files()
    trace.clear()
    plan = view.plan_refresh(errors_only=True)
    assert (plan.rows_pending, plan.reasons["failed before"]) == (2, 2)
    assert "the view stays at version 1 of its source" in str(plan)
    result = refresh(view, errors_only=True)
    assert_exact(trace, [7, 17])
    assert (result.state, result.rows_failed, result.rows_computed) == ("DONE", 2, 0)
    assert ids(view) == {*range(30)} - {7, 17}
    trace.clear()
    refresh(view)
    assert_exact(trace, [7, 17, 30] if runs == 1 else [30])
    assert ids(view) == {*range(31)} - {7, 17}


@pytest.mark.parametrize("exploded", slow_after(1, [False, True]))
def test_errors_only_with_a_repaired_function_leaves_all_other_values(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, exploded: bool
) -> None:
    table = make_table(30)
    view = make_view(table, exploded, of_x("1", 7, 17))
    refresh(view)
    monkeypatch.setattr(run, "load_udfs", lambda definition: {"e": of_x("2", 17)})
    trace.clear()
    assert refresh(view, errors_only=True).rows_failed == 1
    assert_exact(trace, [7, 17])
    values = {
        (row["id"], x) for row in view.to_arrow().to_pylist() for x in ([row["e"]] if exploded else row["e"] or ())
    }
    assert values == {(x, y) for x in range(30) if x != 17 for y in (x, 200 if x == 7 else 100)}
    # The failures of the new code count by themselves, and later refreshes use it without a question.
    for calls in ([17], [17], []):
        trace.clear()
        refresh(view)
        assert_exact(trace, calls)


def test_errors_only_decides_nothing_about_other_code_if_no_row_had_failed(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = make_view(make_table(10), False, of_x("1"))
    refresh(view)
    monkeypatch.setattr(run, "load_udfs", lambda definition: {"e": of_x("2")})
    before = view.lance.version
    trace.clear()
    result = refresh(view, errors_only=True)
    assert (result.state, result.commits, len(trace), view.lance.version) == ("DONE", (), 0, before)
    with pytest.raises(CodeChanged):
        refresh(view)


def clean_up(view: View) -> None:
    view.source().add([{"id": 99, "x": 99}])
    view.source().lance.cleanup_old_versions(timedelta(0), delete_unverified=True)


@pytest.mark.parametrize(
    ("before", "options", "message"),
    [
        (refresh, {"src_version": 1}, r"src_version=1 asks for other rows\. Give one of them"),
        (refresh, {"on_code_change": "recompute"}, r'on_code_change="recompute" asks for other rows'),
        (refresh, {"errors_only": "yes"}, r"errors_only='yes' is not valid: give True or False"),
        (lambda view: None, {}, r"The failed rows of view 'v' are not known: it was never refreshed"),
        (lambda view: (refresh(view), clean_up(view)), {}, r"shows version 1 of 'docs', which was cleaned up"),
    ],
)
def test_errors_only_is_refused_where_failed_rows_are_not_known(
    make_table: MakeTable, before: Callable[[View], Any], options: dict[str, Any], message: str
) -> None:
    view = make_view(make_table(10), False, of_x("1", 7))
    before(view)
    with pytest.raises(InvalidInput, match=message):
        refresh(view, **{"errors_only": True, **options})


def functions(version: str, of_f: int, of_both: int) -> dict[str, UDF]:
    """Two functions that fail on one row each, one with two columns, and a third that reads the first."""

    def f(x: int) -> int:
        leave_trace([x], ".f")
        if x in (of_f, 99):
            raise ValueError(f"not {x}")
        return x

    def low(x: int) -> dict[str, int]:
        leave_trace([x], ".low")
        if x in (of_both, 99):
            raise ValueError(f"not {x}")
        return {"low": x - 1, "high": x + 1}

    def r(f: int | None) -> int:
        leave_trace([f], ".r")
        return -1 if f is None else f

    pair, each = pa.struct([("low", pa.int64()), ("high", pa.int64())]), pa.int64()
    made = ((f, each), (low, pair), (r, each))
    return {one.__name__: udf(data_type=kind, version=version, on_error="skip")(one) for one, kind in made}


def test_a_failed_row_is_listed_for_the_columns_that_failed_and_these_alone_run_again(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, first = make_table(10), functions("1", 7, 3)
    table.add([{"id": 10, "x": 99}])
    query = table.query().select({"id": "id", "f": first["f"], ("low", "high"): first["low"], "r": first["r"]})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    refresh(view)
    listed = {name: view.get_failed_row_addresses(column_name=name) for name in ("f", "low", "high", "r")}
    both = 1 << 32
    assert listed == {"f": [7, both], "low": [3, both], "high": [3, both], "r": []}
    assert view.get_failed_row_addresses() == [3, 7, both]
    # A row has a record for each column that failed on it, and counts as one failed row.
    failed = [(error.column, error.row_address) for error in view.get_errors()]
    assert sorted(failed) == [("f", 7), ("f", both), ("low", 3), ("low", both)]
    monkeypatch.setattr(run, "load_udfs", lambda definition: functions("2", -1, 3))
    traces = {name: Trace(Path(f"{trace.path}.{name}")) for name in first}
    for each in traces.values():
        each.clear()
    result = refresh(view, errors_only=True)
    assert {name: each.rows() for name, each in traces.items()} == {"f": [7, 99], "low": [3, 99], "r": [7, None]}
    assert result.rows_failed == 2
    listed = {name: view.get_failed_row_addresses(column_name=name) for name in ("f", "high")}
    assert listed == {"f": [both], "high": [3, both]}
    failed = [(error.column, error.row_address) for error in view.get_errors()]
    assert sorted(failed) == [("f", both), ("low", 3), ("low", both)]
