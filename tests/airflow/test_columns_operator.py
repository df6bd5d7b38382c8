"""`AddColumnsOperator`: define once, whatever is there already."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_geneva.engine.code_hash import hasher
from airflow_geneva.operators import AddColumnsOperator
from tests.airflow.conftest import Desk
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow


def define(desk: Desk, columns: dict[str, Any]) -> Driver:
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


def test_another_version_of_the_udf_alters_the_column(desk: Desk) -> None:
    define(desk, {"n": "geneva_dag_udfs:length"})
    run = define(desk, {"n": "geneva_dag_udfs:longer"})
    assert run.xcom("define")["altered"] == ["n"]
    assert desk.table.definition("n").version == "2"


def test_a_function_whose_relative_imports_are_hashed_by_full_names_now_is_altered_once(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "relative_udfs").mkdir()
    (tmp_path / "relative_udfs" / "__init__.py").write_text("def clean(text): return text.strip()\n")
    (tmp_path / "relative_udfs" / "lengths.py").write_text(
        "import pyarrow as pa\nfrom airflow_geneva import udf\nfrom . import clean\n"
        "@udf(data_type=pa.int64())\ndef length(text): return len(clean(text))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    columns = {"n": "relative_udfs.lengths:length"}
    with monkeypatch.context() as before:
        before.setattr(hasher, "absolute_name", lambda level, name, package: "." * level + name)
        assert define(desk, columns).xcom("define")["added"] == ["n"]
        monkeypatch.delitem(sys.modules, "relative_udfs.lengths")
    assert define(desk, columns).xcom("define")["altered"] == ["n"]
    assert define(desk, columns).xcom("define")["unchanged"] == ["n"]


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
