"""`AddColumnsOperator`: define once, whatever is there already."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.operators import AddColumnsOperator
from tests.airflow.conftest import Desk
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow


def define(desk: Desk, columns: Any) -> Driver:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        AddColumnsOperator(task_id="define", table=desk.table.name, columns=columns)
    return Driver.trigger(dag).go()


@pytest.mark.core
def test_a_column_is_added_once_and_then_left_alone(desk: Desk) -> None:
    desk.append("a")
    columns = {"n": "geneva_dag_udfs:length", "m": ("geneva_dag_udfs:length", ["text"])}
    first = define(desk, columns)
    assert first.state == "success", first.errors
    assert first.xcom("define")["added"] == ["n", "m"]
    version = desk.table.version
    second = define(desk, columns)
    assert second.xcom("define") == {"added": [], "altered": [], "unchanged": ["n", "m"], "version": version}
    assert desk.table.version == version


def test_columns_of_a_view_are_added_and_altered_like_those_of_a_table(desk: Desk) -> None:
    desk.append("a")
    view = desk.table.query().create_materialized_view(name="columns_of_a_view")
    view.refresh(runner="inline")

    def define_in_view(**columns: Any) -> Any:
        with DAG("dag_columns_of_a_view", schedule=None) as dag:
            AddColumnsOperator(task_id="define", table=view.name, columns=columns)
        run = Driver.trigger(dag).go()
        assert run.state == "success", run.errors
        return {name: columns for name, columns in run.xcom("define").items() if name != "version"}

    assert define_in_view(n="geneva_dag_udfs:length") == {"added": ["n"], "altered": [], "unchanged": []}
    assert define_in_view(n="geneva_dag_udfs:length") == {"added": [], "altered": [], "unchanged": ["n"]}
    assert define_in_view(n="geneva_dag_udfs:longer") == {"added": [], "altered": ["n"], "unchanged": []}
    assert view.definition("n").version == "2"
    pair = {"low, high": "geneva_dag_udfs:bounds"}
    assert define_in_view(**pair) == {"added": ["low", "high"], "altered": [], "unchanged": []}
    assert define_in_view(**pair) == {"added": [], "altered": [], "unchanged": ["low", "high"]}


@pytest.mark.parametrize(
    "columns", [{("low", "high"): "geneva_dag_udfs:bounds"}, '{"low, high": "geneva_dag_udfs:bounds"}']
)
def test_columns_that_one_call_fills_are_added_once_and_then_left_alone(desk: Desk, columns: Any) -> None:
    desk.append("a")
    assert define(desk, columns).xcom("define")["added"] == ["low", "high"]
    assert Output.in_schema(desk.table.schema, "low").columns == ("low", "high")
    version = desk.table.version
    again = {"added": [], "altered": [], "unchanged": ["low", "high"], "version": version}
    assert define(desk, columns).xcom("define") == again
    assert define(desk, {"high": "geneva_dag_udfs:bounds"}).xcom("define") == again | {"unchanged": ["high"]}
    altered = define(desk, {"low,high": "geneva_dag_udfs:other_bounds"})
    assert altered.xcom("define")["altered"] == ["low", "high"]
    assert desk.table.definition("high").version == "2"


def test_names_that_one_call_cannot_fill_as_the_table_has_them_are_refused(desk: Desk) -> None:
    desk.append("a")
    define(desk, {("first", "second"): "geneva_dag_udfs:bounds"})
    assert "Name them in that order: ['first', 'second']" in define(
        desk, {"second, first": "geneva_dag_udfs:bounds"}
    ).error("define")
    assert "are named twice" in define(desk, {"first, first": "geneva_dag_udfs:bounds"}).error("define")
    desk.table.drop_columns(["second"])
    assert "but not ['second']" in define(desk, {"first, second": "geneva_dag_udfs:bounds"}).error("define")
    assert define(desk, {"first": "geneva_dag_udfs:bounds"}).xcom("define")["unchanged"] == ["first"]
    desk.table.add_columns({"a, b": "geneva_dag_udfs:length"})
    assert define(desk, {"a, b": "geneva_dag_udfs:length"}).xcom("define")["unchanged"] == ["a, b"]


def test_another_version_of_the_udf_alters_the_column(desk: Desk) -> None:
    define(desk, {"n": "geneva_dag_udfs:length"})
    run = define(desk, {"n": "geneva_dag_udfs:longer"})
    assert run.xcom("define")["altered"] == ["n"]
    assert desk.table.definition("n").version == "2"


def test_a_column_of_another_type_is_an_error_and_nothing_is_changed(desk: Desk) -> None:
    define(desk, {"n": "geneva_dag_udfs:length"})
    run = define(desk, {"n": "geneva_dag_udfs:upper", "new": "geneva_dag_udfs:upper"})
    assert run.state == "failed"
    assert "Type mismatch for column 'n'" in run.error("define")
    assert "new" not in desk.table.schema.names


def test_a_column_that_is_not_computed_is_not_taken_over(desk: Desk) -> None:
    run = define(desk, {"text": "geneva_dag_udfs:upper"})
    assert "Column 'text' of table" in run.error("define")
    assert "has no UDF" in run.error("define")


@pytest.mark.parametrize("given", [("geneva_dag_udfs:length", "text"), ["geneva_dag_udfs:length"], ""])
def test_a_malformed_definition_says_what_to_give(desk: Desk, given: Any) -> None:
    run = define(desk, {"n": given})
    assert "Give" in run.error("define")
