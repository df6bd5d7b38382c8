"""The databases that a view's definition may lead to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, View, connect
from airflow_geneva.errors import InvalidInput
from tests.support.commands import run
from tests.support.hostile import edit_definition
from tests.support.processes import as_another_process


@pytest.fixture
def payroll(tmp_path: Path) -> Database:
    """A database that is none of the view's."""
    made = connect(tmp_path / "payroll")
    made.create_table("docs", pa.table({"x": [123456]}))
    return made


@pytest.fixture
def view(tmp_path: Path, payroll: Database) -> View:
    """A view whose definition was changed in its folder, so that it names another database."""
    table = connect(tmp_path / "db").create_table("docs", pa.table({"x": [1, 2]}))
    made = table.query().create_materialized_view(name="v")
    made.refresh(runner="inline")
    edit_definition(made, source_database=payroll.uri, where="x = 123456")
    return connect(tmp_path / "db").open_view("v")


@pytest.mark.parametrize(
    "call",
    [
        lambda view: view.source(),
        lambda view: view.plan_refresh(),
        lambda view: view.refresh(runner="inline"),
        lambda view: view.compare("x"),
        lambda view: view.get_failed_row_addresses(),
    ],
)
def test_a_definition_opens_no_other_database(view: View, payroll: Database, call: Callable[[View], Any]) -> None:
    with pytest.raises(InvalidInput, match=r"names a source in another database, .*payroll.*sources="):
        call(view)
    assert view.to_arrow()["x"].to_pylist() == [1, 2]


def test_a_database_that_the_caller_names_is_opened(view: View, payroll: Database, tmp_path: Path) -> None:
    db = connect(tmp_path / "db")
    for place in (payroll.uri, tmp_path / "payroll", f"{payroll.uri}/"):
        assert db.open_view("v", sources=[place]).source().uri == payroll.open_table("docs").uri
    with pytest.raises(InvalidInput, match="names a source in another database"):
        db.open_view("v", sources=[db.uri]).source()
    with pytest.raises(InvalidInput, match="is one database"):
        db.open_view("v", sources=payroll.uri)
    with pytest.raises(InvalidInput, match="is a table and not a view"):
        db.open_view("docs")


def test_the_process_that_created_a_view_may_open_the_source_that_it_gave(tmp_path: Path, payroll: Database) -> None:
    db = connect(tmp_path / "db")
    payroll.open_table("docs").query().create_materialized_view(db, "v")
    connect(tmp_path / "other").create_table("docs", pa.table({"x": [5]}))
    assert db.open_view("v").refresh(runner="inline").rows_computed == 1
    edit_definition(db.open_table("v"), source_database=str(tmp_path / "other"))
    with pytest.raises(InvalidInput, match=r"another database, '.*other'"):
        db.open_view("v").source()
    edit_definition(db.open_table("v"), source_database=payroll.uri)
    as_another_process()
    with pytest.raises(InvalidInput, match=r"another database, '.*payroll'"):
        db.open_view("v").source()


@pytest.mark.parametrize("table", ["../payroll/docs", "/etc", "..", "", 5, None, ["docs"]])
def test_a_source_is_a_table_of_its_database(view: View, tmp_path: Path, table: Any) -> None:
    edit_definition(view, source_database=str(tmp_path / "db"), source_table=table)
    with pytest.raises(InvalidInput):
        view.source()


def test_the_command_opens_the_databases_that_it_is_given(view: View, payroll: Database, tmp_path: Path) -> None:
    db = str(tmp_path / "db")
    for command in (["refresh", db, "v"], ["plan", db, "--view", "v"]):
        assert "names a source in another database" in run(*command, code=1)
        run(*command, "--source", payroll.uri)
