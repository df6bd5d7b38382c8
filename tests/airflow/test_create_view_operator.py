"""`CreateMaterializedViewOperator`: make once, whatever is there already, and say what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_geneva import View, connect, expect
from airflow_geneva.operators import CreateMaterializedViewOperator
from tests.airflow.conftest import Desk
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow

LENGTH = {"udf": "geneva_dag_udfs:length", "inputs": ["text"]}


def make(desk: Desk, conf: dict[str, Any] | None = None, **parameters: Any) -> Driver:
    given = {"view": "v", "table": desk.table.name, "select": {"text": "text", "n": LENGTH}, **parameters}
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        CreateMaterializedViewOperator(task_id="make", **given)
    return Driver.trigger(dag, conf).go()


@pytest.mark.core
def test_a_view_is_made_once_and_then_left_alone_and_no_udf_runs(desk: Desk) -> None:
    desk.append("ab")
    first = make(desk, where="text < 'b'", shuffle_seed=1, limit="5", offset="")
    assert first.state == "success", first.errors
    assert first.xcom("make") == {"view": "v", "created": True, "differences": []}
    view = desk.database.open_table("v")
    assert isinstance(view, View)
    assert view.view_definition.limit == 5
    assert view.lance.count_rows() == 5
    desk.append("c")
    second = make(desk, where="text < 'b'", shuffle_seed=1, limit="5", offset="")
    assert second.xcom("make") == {"view": "v", "created": False, "differences": []}
    assert view.version == 1
    expected = {"n": [expect.not_null()]}
    make(desk, where="text < 'b'", shuffle_seed=1, limit="5", expect=expected)
    assert [(name, str(one)) for name, one in view.view_definition.expectations] == [("n", "not_null()")]
    make(desk, where="text < 'b'", shuffle_seed=1, limit="5", expect=expected)
    make(desk, where="text < 'b'", shuffle_seed=1, limit="5")
    assert (view.version, view.key) == (2, ())
    make(desk, where="text < 'b'", shuffle_seed=1, limit="5", key="text")
    make(
        desk,
        conf={"key": ["text"]},
        where="text < 'b'",
        shuffle_seed=1,
        limit="5",
        key="{{ dag_run.conf.key | tojson }}",
    )
    assert (view.version, view.key) == (3, ("text",))
    assert desk.calls() == []


def test_a_changed_definition_is_an_error_that_says_what_changed(desk: Desk) -> None:
    make(desk, where="text < 'b'")
    changed = make(desk, where="text < 'c'", select={"text": "text", "n": {"udf": "geneva_dag_udfs:longer"}})
    assert changed.state == "failed"
    assert "the filter is \"text < 'b'\" and would be \"text < 'c'\"" in changed.error("make")
    assert "column 'n' is UDF geneva_dag_udfs:length of (text) -> int64 and would be" in changed.error("make")
    assert desk.database.open_table("v").version == 1


def test_a_changed_definition_is_made_anew_when_told(desk: Desk) -> None:
    desk.append("a")
    make(desk)
    anew = "{{ dag_run.conf['anew'] }}"
    run = make(desk, conf={"anew": "true"}, where="text < 'a05'", recreate=anew, key=["text"])
    assert run.state == "success", run.errors
    assert run.xcom("make")["created"] is True
    view = desk.database.open_table("v")
    assert isinstance(view, View)
    assert (view.view_definition.where, view.lance.count_rows(), view.key) == ("text < 'a05'", 5, ("text",))
    for wrong in ({"max_rows_per_fragment": "0"}, {"expect": {"nope": []}}, {"key": "n"}):
        assert make(desk, where="text < 'a09'", recreate=True, **wrong).state == "failed"
    assert view.lance.count_rows() == 5, "what is wrong is found before the view is dropped"
    unchanged = make(desk, where="text < 'a05'", recreate=True)
    assert unchanged.xcom("make")["created"] is False


def test_a_column_that_the_source_gained_is_no_reason_to_fail(desk: Desk) -> None:
    make(desk, select=None)
    desk.define(n="length")
    run = make(desk, select=None)
    assert run.xcom("make")["created"] is False


def test_a_view_can_lie_in_another_database_than_its_table(desk: Desk, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    run = make(desk, database=str(elsewhere), source_database=desk.database.uri, select=["text"])
    assert run.state == "success", run.errors
    view = connect(elsewhere).open_table("v")
    assert isinstance(view, View)
    assert view.source().location.uri == desk.table.location.uri


def test_a_table_of_that_name_is_left_alone(desk: Desk) -> None:
    run = make(desk, view=desk.table.name, recreate=True)
    assert "is a table and not a view" in run.error("make")


@pytest.mark.parametrize("given", [3, {"udf": ""}, {"udf": "geneva_dag_udfs:length", "inputs": "text"}, {"sql": "1"}])
def test_a_malformed_column_says_what_to_give(desk: Desk, given: Any) -> None:
    assert "Give" in make(desk, select=None, add_columns={"n": given}).error("make")


@pytest.mark.parametrize("more", [{"group_by": ["text"]}, {"order_by": ["text"]}, {"max_group_rows": 3}])
def test_a_whole_query_stands_alone(desk: Desk, more: dict[str, Any]) -> None:
    whole = {"table": None, "select": None, "source_query": "{}"}
    assert f"source_query is the whole query, and {next(iter(more))} is" in make(desk, **whole, **more).error("make")


def test_lists_become_rows_of_their_own(desk: Desk) -> None:
    desk.append("a", rows=2)
    letters = {"text": "text", "letter": "make_array(text, upper(text))"}
    run = make(desk, select=letters, explode="{{ 'letter' }}")
    assert run.state == "success", run.errors
    view = desk.database.open_table("v")
    assert isinstance(view, View)
    assert view.view_definition.explode == "letter"
    view.refresh(runner="inline")
    assert view.to_arrow()["letter"].to_pylist() == ["a00", "A00", "a01", "A01"]
