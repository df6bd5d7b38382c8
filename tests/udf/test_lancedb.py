"""Columns and views that LanceDB defines are listed, described and refused by name, whatever their definition holds."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, Table, connect, udf
from airflow_geneva.engine.udf.lancedb import lancedb_column, lancedb_view
from airflow_geneva.errors import InvalidInput
from airflow_geneva.pages.tables import describe_table
from tests.support.commands import run as run_command

ROOT = Path(__file__).parents[2]
LANCEDB = ROOT / ".venv-lancedb" / "bin" / "python"

COLUMN = {
    "computed_column": "true",
    "computed_column.kind": "sql",
    "computed_column.expression": "id * 2",
    "computed_column.inputs": '["id"]',
    "computed_refresh.source_signature": "{}",
}
"""What LanceDB 0.40 writes for `add_columns(computed={"y": "id * 2"})`."""
VIEW = {
    "mv.incarnation": "d10396c1-f6f2-4444-87f9-f2ccf598fcea",
    "mv.definition": '{"format":1,"kind":"query","query":"SELECT id, x * 2 AS d FROM docs WHERE x % 2 = 0"}',
}
"""What LanceDB 0.40 writes for `create_materialized_view(..., select=..., where=..., with_no_data=True)`."""
LONG = "x" * 650_000


@udf(data_type=pa.int64(), version="1")
def negative(id: int) -> int:
    return -(id or 0)


@udf(data_type=pa.int64(), version="1")
def rows_of(rows: pa.RecordBatch) -> pa.Array:
    return pa.array([1] * rows.num_rows, pa.int64())


@pytest.fixture
def database(tmp_path: Path) -> Database:
    connect(tmp_path).create_table("docs", pa.table({"id": [1, 2, 3], "x": [1, 2, 3]}))
    return connect(tmp_path)


def declare(database: Database, **changes: str) -> Table:
    """Add a column as LanceDB does; `changes` are of the keys after `computed_column.`."""
    metadata = COLUMN | {f"computed_column.{key}": value for key, value in changes.items()}
    table = database.open_table("docs")
    table.lance.add_columns(pa.schema([pa.field("y", pa.int64(), metadata=metadata)]))
    return table


def view(database: Database, definition: str = VIEW["mv.definition"]) -> Table:
    schema = pa.schema([("id", pa.int64()), ("d", pa.int64())], VIEW | {"mv.definition": definition})
    return database.create_table("v", schema=schema)


REFUSED: list[Callable[[Table], Any]] = [
    lambda table: table.backfill("y", runner="inline"),
    lambda table: table.backfill("y", negative, runner="inline"),
    lambda table: table.plan_backfill("y"),
    lambda table: table.alter_columns({"y": negative}),
    lambda table: table.column_function("y"),
    lambda table: table.load_columns([{"id": 1, "y": 5}], on="id"),
    lambda table: table.load_columns([{"id": 1, "y": 5}], on="id", adopt=True),
]


@pytest.mark.parametrize("refused", REFUSED)
def test_what_would_compute_its_columns_is_refused_by_name(database: Database, refused: Callable[[Table], Any]) -> None:
    table = declare(database)
    version = table.version
    with pytest.raises(
        InvalidInput,
        match=r"Column 'y' of table 'docs' is computed by LanceDB \(id \* 2\), and only LanceDB refreshes it: "
        r"refresh_column\('y'\) of its table\. To compute it here, add a column with a UDF: table\.add_columns",
    ):
        refused(table)
    assert table.version == version


def test_its_columns_are_listed_and_may_be_inputs(database: Database) -> None:
    table = declare(database)
    assert "computed by LanceDB: id * 2" in repr(table)
    table.add_columns({"n": (negative, ["y"])})
    table.backfill("n", runner="inline")
    # A function of whole batches gets the columns that nobody computes.
    table.add_columns({"r": rows_of})
    assert table.definition("r").input_columns == ("id", "x")
    described = describe_table(table.location)
    assert {row.name: row.what for row in described.columns if row.what}["y"] == "LanceDB: id * 2"
    assert [row.name for row in described.computed] == ["n", "r"]


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({}, "id * 2"),
        ({"inputs": "["}, "id * 2"),
        ({"inputs": "null"}, "id * 2"),
        (
            {"kind": "function", "expression": "", "function": "embed"},
            'expression=, function=embed, inputs=["id"], kind',
        ),
        ({"kind": "", "expression": "", "inputs": ""}, "expression=, inputs=, kind="),
        ({"expression": LONG}, "x" * 200 + "..."),
        ({"expression": "", "inputs": LONG}, "expression=, inputs=xxx"),
        ({"expression": "ä" * 1_000}, "ä" * 200 + "..."),
        ({"expression": "[" * 100_000}, "[[["),
    ],
)
def test_any_declaration_is_shown_in_short_and_breaks_nothing(
    database: Database, changes: dict[str, str], described: str
) -> None:
    table = declare(database, **changes)
    found = lancedb_column(table.lance.schema.field("y"))
    assert found is not None
    assert found.startswith(described)
    assert len(found) <= 203
    assert found in repr(table)
    assert describe_table(table.location).columns[-1].what == f"LanceDB: {found}"
    table.add_columns({"n": negative})
    assert table.backfill("n", runner="inline").rows_computed == 3
    with pytest.raises(InvalidInput, match="is computed by LanceDB"):
        table.backfill("y", runner="inline")


def test_its_views_are_listed_and_refused_by_name(database: Database) -> None:
    found = view(database)
    query = "SELECT id, x * 2 AS d FROM docs WHERE x % 2 = 0"
    assert f"a view of LanceDB: {query}" in repr(database.open_table("v"))
    assert describe_table(found.location).note == f"A materialized view that LanceDB maintains: {query}"
    with pytest.raises(InvalidInput) as raised:
        database.open_view("v")
    told = (
        f"Table 'v' is a materialized view of LanceDB ({query}), and only LanceDB refreshes it: "
        "open_materialized_view('v').refresh() of its database. To refresh it here, create a view with this query: "
    )
    assert told in str(raised.value)
    assert told in run_command("refresh", found.location.database_uri, "v", code=1)


@pytest.mark.parametrize(
    "definition", ["", "{", "[]", "null", "7", '{"query": null}', LONG, "[" * 100_000, '"\\ud800"']
)
def test_any_definition_of_a_view_is_shown_in_short_and_breaks_nothing(database: Database, definition: str) -> None:
    found = view(database, definition)
    shown = lancedb_view(found.lance.schema.metadata)
    assert shown is not None
    assert len(shown) <= 203
    assert f"a view of LanceDB: {shown}" in repr(database.open_table("v"))
    assert describe_table(found.location).note is not None
    with pytest.raises(InvalidInput, match="only LanceDB refreshes it"):
        database.open_view("v")


@pytest.mark.soak
@pytest.mark.skipif(not LANCEDB.exists(), reason="needs LanceDB: make .venv-lancedb/.installed")
def test_lancedb_writes_what_is_refused(database: Database) -> None:
    subprocess.run([LANCEDB, ROOT / "tests/support/lancedb_side.py", database.uri], check=True)
    table, seen = database.open_table("docs"), database.open_table("v").lance.schema.metadata
    assert table.lance.schema.field("y").metadata == {key.encode(): value.encode() for key, value in COLUMN.items()}
    assert seen[b"mv.definition"].decode() == VIEW["mv.definition"]
    with pytest.raises(InvalidInput, match=r"computed by LanceDB \(id \* 2\)"):
        table.backfill("y", runner="inline")
    with pytest.raises(InvalidInput, match=r"of LanceDB \(SELECT id, x \* 2 AS d FROM docs WHERE x % 2 = 0\)"):
        database.open_view("v")
