"""What a view records of its rows stays true: code of values, failures, and what its query has read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.run import promotion, view as run_view
from airflow_geneva.errors import CodeChanged
from airflow_geneva.query import Query
from airflow_geneva.view import View
from tests.support.counting import Trace
from tests.support.tables import MakeTable
from tests.udfs_for_tests import columns as udfs
from tests.udfs_for_tests.columns import deploy, value


class Killed(BaseException):
    pass


def kill(*given: object, **named: object) -> None:
    raise Killed


def made(query: Query, name: str = "v") -> View:
    return query.create_materialized_view(connect(query.table.location.database_uri), name)


def refresh(view: View, **arguments: Any) -> Any:
    return view.refresh(runner="inline", **arguments)


def values(view: View, column: str) -> dict[int, Any]:
    return {row["id"]: row[column] for row in view.to_arrow().to_pylist()}


def failing(name: str, bad: Path, **settings: Any) -> Any:
    """Deploy an async function that fails on the rows whose x a file lists, and has one value or a list for others."""

    async def compute(x: int) -> Any:
        if x in json.loads(bad.read_text()):
            raise ValueError("not yet")
        return [f"{x}-a"] if settings else x + 1

    compute.__module__ = udfs.__name__
    kind = {"data_type": pa.int64(), **settings}
    found = udf(version="1", name=name, on_error="skip", max_in_flight=2, **kind)(compute)
    setattr(udfs, name, found)
    return found


def test_rows_that_a_source_view_renumbered_keep_the_code_of_their_values(make_table: MakeTable) -> None:
    table = make_table(20, per_fragment=10)
    lower = made(table.query().select(["id", "x"]).add_columns({"words": deploy("words", 1)}), "lower")
    refresh(lower)
    upper = made(lower.query().select(["id"]).add_columns({"ocr": deploy("ocr", 1, "id")}))
    refresh(upper)
    deploy("words", 2)
    refresh(lower, on_code_change="recompute")
    deploy("ocr", 2, "id")
    assert refresh(upper, on_code_change="new_rows").rows_computed == 0
    assert refresh(upper, on_code_change="recompute").rows_computed == 20
    assert values(upper, "ocr") == {row: value("ocr", 2, row) for row in range(20)}


def test_of_rows_that_a_source_view_renumbered_only_what_failed_or_changed_runs(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(40, per_fragment=20)
    lower = made(table.query().select(["id", "x"]).add_columns({"words": deploy("words", 1)}), "lower")
    refresh(lower)
    columns = {"ocr": deploy("ocr", 1, "id", fails=True), "chars": deploy("chars", 1, "id")}
    upper = made(lower.query().where("id % 4 != 0").select(["id"]).add_columns(columns))
    refresh(upper)

    def run(code: int, **arguments: Any) -> dict[str, int]:
        """Renumber the rows of the lower view, refresh the upper one, and count the calls of its functions."""
        deploy("words", code)
        assert refresh(lower, on_code_change="recompute").rows_computed == 40
        traces = {name: Trace(trace.path.with_name(f"{trace.path.name}.{name}")) for name in columns}
        for one in traces.values():
            one.clear()
        plan = upper.plan_refresh(**arguments)
        planned = {name: calls for name, calls in plan.calls_to_run.items() if calls} if plan.shards else {}
        refresh(upper, **arguments)
        assert planned == {name: len(one) for name, one in traces.items() if len(one)}
        return planned

    assert run(2) == {"ocr": 4}
    deploy("chars", 2, "id")
    with pytest.raises(CodeChanged, match="Values of the old code: 30 rows"):
        refresh(upper)
    assert run(3, on_code_change="recompute") == {"ocr": 4, "chars": 30}
    assert run(4) == {}, "the rows failed in three runs"
    deploy("ocr", 2, "id")
    assert run(5, on_code_change="recompute") == {"ocr": 30}
    assert run(6) == {}
    shown = [row for row in range(40) if row % 4]
    assert values(upper, "ocr") == {row: value("ocr", 2, row) for row in shown}
    assert values(upper, "chars") == {row: value("chars", 2, row) for row in shown}


def test_a_plan_counts_the_rows_whose_values_are_of_earlier_code(make_table: MakeTable) -> None:
    table = make_table(40, per_fragment=20)
    columns = {"words": deploy("words", 1), "ocr": deploy("ocr", 1)}
    view = made(table.query().where("id % 2 = 0").select(["id"]).add_columns(columns))
    refresh(view)
    table.lance.update({"x": "x + 100"}, where="id < 6")
    table.lance.delete("id = 38")
    deploy("words", 2)
    assert view.plan_refresh(on_code_change="new_rows").rows_by_other_version == (("1", 16),)
    refresh(view, on_code_change="new_rows")
    deploy("ocr", 2)
    table.lance.delete("id = 4")
    with pytest.raises(CodeChanged, match="Values of the old code: 18 rows"):
        view.plan_refresh()
    plan = view.plan_refresh(on_code_change="recompute")
    assert (plan.rows_by_other_version, plan.calls_to_run) == ((("1", 18),), {"words": 16, "ocr": 18})
    assert refresh(view, on_code_change="recompute").rows_computed == 18
    assert view.plan_refresh(on_code_change="recompute").rows_by_other_version == ()
    table.lance.update({"x": "x + 1"}, where="id >= 0")
    deploy("words", 3)
    assert refresh(view).rows_computed == 18, "no value of the old code stays, so there is no question"


@pytest.mark.parametrize("how", ["killed", "restored"])
def test_a_column_that_is_not_dropped_after_all_follows_its_input(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    table = make_table(40, per_fragment=20)
    table.lance.add_columns({"y": "x + 5"})
    columns = {"words": (deploy("words", 1), ["x"]), "chars": deploy("chars", 1, "y")}
    view = made(table.query().select(["id"]).add_columns(columns))
    refresh(view)
    before = view.version
    if how == "killed":
        with monkeypatch.context() as patch:
            patch.setattr(promotion, "_commit_schema", kill)
            with pytest.raises(Killed):
                view.drop_columns(["chars"])
    else:
        view.drop_columns(["chars"])
        view.location.open(before).restore()
    table.lance.update({"y": "y + 1000"}, where="id < 5")
    assert refresh(view).rows_computed == 5
    read = {row["id"]: row["y"] for row in table.to_arrow().to_pylist()}
    assert values(view, "chars") == {row: value("chars", 1, y) for row, y in read.items()}


def test_checkpoints_of_a_killed_refresh_bring_no_failed_row_back(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    table = make_table(40, per_fragment=40)
    bad.write_text("[1, 2]")
    columns = {"words": deploy("words", 1), "ocr": failing("ocr", bad)}
    view = made(table.query().select(["id"]).add_columns(columns))
    for _ in range(2):
        refresh(view)
    bad.write_text("[1, 2, 100]")
    table.lance.update({"x": "100"}, where="id = 3")
    for _ in range(2):
        refresh(view)
    deploy("words", 2)
    bad.write_text("[100]")
    with monkeypatch.context() as patch:
        patch.setattr(run_view, "swap_rows", kill)
        with pytest.raises(Killed):
            refresh(view, on_code_change="recompute")
    refresh(view, errors_only=True)
    assert {row: found for row, found in values(view, "ocr").items() if row < 4} == {0: 1, 1: 2, 2: 3, 3: None}
    refresh(view, on_code_change="recompute")
    assert {row: found for row, found in values(view, "ocr").items() if row < 4} == {0: 1, 1: 2, 2: 3, 3: None}


def test_a_row_that_enters_a_limited_view_has_the_code_that_computed_it(make_table: MakeTable) -> None:
    table = make_table(40, per_fragment=20)
    view = made(table.query().select(["id"]).add_columns({"words": deploy("words", 1)}).limit(10))
    refresh(view)
    deploy("words", 2)
    table.lance.delete("id = 0")
    refresh(view, on_code_change="new_rows")
    assert values(view, "words")[10] == value("words", 2, 10)
    deploy("words", 1)
    assert refresh(view, on_code_change="recompute").rows_computed == 1
    assert values(view, "words") == {row: value("words", 1, row) for row in range(1, 11)}


def test_a_row_whose_list_is_computed_at_last_has_the_code_that_computed_it(
    make_table: MakeTable, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("[11]")
    columns = {"parts": failing("parts", bad, data_type=pa.list_(pa.string())), "words": deploy("words", 1)}
    view = made(make_table(40, per_fragment=20).query().select(["id"]).add_columns(columns).explode("parts"))
    refresh(view)
    bad.write_text("[]")
    deploy("words", 2)
    refresh(view, on_code_change="new_rows")
    assert values(view, "words")[11] == value("words", 2, 11)
    deploy("words", 1)
    refresh(view, on_code_change="recompute")
    assert values(view, "words") == {row: value("words", 1, row) for row in range(40)}


def test_a_column_that_another_one_replaced_meanwhile_gets_no_value_of_its_function(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(40, per_fragment=20)
    view = made(table.query().select(["id"]).add_columns({"words": deploy("words", 1), "chars": deploy("chars", 1)}))
    refresh(view)
    table.add([{"id": 100, "x": 100}])
    swap = run_view.swap_rows

    def late(*given: Any, **named: Any) -> Any:
        view.drop_columns(["chars"])
        view.add_columns({"chars": "x * 3"})
        return swap(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(run_view, "swap_rows", late)
        result = refresh(view)
    assert (result.state, "the columns of the view changed meanwhile" in str(result)) == ("PARTIAL", True)
    refresh(view)
    assert values(view, "chars") == {row: 3 * row for row in (*range(40), 100)}


def test_a_failed_column_has_three_runs_again_when_what_it_reads_has_other_code(make_table: MakeTable) -> None:
    columns = {"ocr": deploy("ocr", 1), "language": deploy("language", 1, "ocr", fails=True)}
    view = made(make_table(40, per_fragment=20).query().select(["id"]).add_columns(columns))
    runs = [refresh(view).rows_failed for _ in range(4)]
    assert runs == [4, 4, 4, 0]
    deploy("ocr", 2)
    assert [refresh(view, on_code_change="recompute").rows_failed for _ in range(4)] == runs
