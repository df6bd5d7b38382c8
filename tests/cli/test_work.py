"""The commands that define and compute, without Airflow."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from airflow_geneva import connect
from airflow_geneva.cli import work
from airflow_geneva.cli.app import app
from tests.support.commands import run
from tests.support.tables import MakeTable

UDFS = """
from airflow_geneva import udf

@udf
def double(x: int) -> int:
    return 2 * x

@udf(on_error="skip")
def picky(x: int) -> int:
    return 10 // (x % 2)
"""

COMMANDS = [
    "define", "plan", "backfill", "refresh", "copy", "tables", "duplicates", "jobs", "status", "cancel", "errors",
    "checkpoints list", "checkpoints gc", "doctor", "spark-server",
]  # fmt: skip


@pytest.fixture
def db(make_table: MakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database, and in the current folder a module with UDFs."""
    make_table(10)
    (tmp_path / "own_udfs.py").write_text(UDFS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_udfs", raising=False)
    return str(tmp_path / "db")


def test_a_column_is_defined_filled_and_defined_again(db: str) -> None:
    said = run("define", db, "docs", "n", "own_udfs:double", "--input", "x")
    assert said.startswith("docs.n is computed by own_udfs:double(x), version ")
    assert run("backfill", db, "docs", "n", "--where", "x < 3", "--runner", "inline").startswith(
        "DONE: 3 rows computed"
    )
    assert json.loads(run("backfill", db, "docs", "n", "--json"))["rows_computed"] == 7
    assert connect(db).open_table("docs").to_arrow()["n"].to_pylist() == [2 * x for x in range(10)]
    assert "own_udfs:picky(id)" in run("define", db, "docs", "n", "own_udfs:picky", "--input", "id")
    told = run("backfill", db, "docs", "n", "--on-code-change", "recompute", "--max-failed", "0.1", code=1)
    assert "max_failed" in told


def test_all_is_run_outside_of_the_main_thread(db: str) -> None:
    run("define", db, "docs", "n", "own_udfs:double", "--input", "x")
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(run, "plan", db, "--all", "--run", "--runner", "inline").result()
    assert "docs.n: DONE: 10 rows computed" in said


def test_values_of_unknown_origin_are_adopted_if_asked(db: str) -> None:
    filled = connect(db).create_table("filled", {"x": [1, 2], "n": [7, 8]})
    run("define", db, "filled", "n", "own_udfs:double")
    for command in ("plan", "backfill"):
        assert "2 rows" in run(command, db, "filled", "n", code=1)
    assert "adopted" in run("plan", db, "filled", "n", "--on-unknown-values", "adopt")
    assert run("backfill", db, "filled", "n", "--on-unknown-values", "adopt").startswith("DONE: 0 rows computed")
    assert filled.to_arrow()["n"].to_pylist() == [7, 8]
    filled.query().select(["x"]).create_materialized_view(name="v")
    assert run("refresh", db, "v", "--on-unknown-values", "adopt", "--runner", "inline").startswith("DONE: 2 rows")
    assert "is for columns" in run("plan", db, "--view", "v", "--on-unknown-values", "fill", code=1)


def test_a_table_is_copied_with_what_is_known_of_its_values(db: str, tmp_path: Path) -> None:
    run("define", db, "docs", "n", "own_udfs:double", "--input", "x")
    run("backfill", db, "docs", "n", "--runner", "inline")
    other = tmp_path / "other"
    assert run("copy", db, "docs", "docs", "--into", str(other)).startswith(
        f"docs is copied to {other}/docs.lance: 10 rows, "
    )
    assert "10 with nothing to do" in run("plan", str(other), "docs", "n")
    assert "'docs' already exists" in run("copy", db, "docs", "docs", code=1)


def test_a_table_of_another_database_is_read_in_an_allowed_place_only(db: str, tmp_path: Path) -> None:
    other = connect(tmp_path / "other").create_table("people", {"x": [1, 2]}).lance
    other.shallow_clone(f"{db}/clone.lance", other.version)
    define = ("define", db, "clone", "n", "own_udfs:double")
    assert f"names '{other.uri}', which lies in no place that may be opened" in run(*define, code=1)
    allowed = ("--allowed-place", str(tmp_path / "other"))
    assert run(*define, *allowed).startswith("clone.n is computed by")
    assert run("backfill", db, "clone", "n", "--runner", "inline", *allowed).startswith("DONE: 2 rows computed")
    assert "--allowed-place" in run("plan", db, "clone", "n", code=1)


def test_a_view_is_refreshed_and_a_table_is_not(db: str) -> None:
    connect(db).open_table("docs").query().select(["x"]).create_materialized_view(name="v")
    assert run("refresh", db, "v", "--runner", "inline").startswith("DONE: 10 rows computed")
    assert json.loads(run("refresh", db, "v", "--json"))["rows_computed"] == 0
    refused = run("refresh", db, "docs", code=1)
    assert "'docs' is a table and not a view" in refused
    assert "airflow-geneva plan or backfill, with DB docs COLUMN" in refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("backfill", "docs"), "Expected DB TABLE COLUMN, got 2 arguments"),
        (("backfill", "docs", "n"), "Column 'n' is not defined"),
        (("backfill", "docs", "n", "--max-failed", "few"), "--max-failed few is no number"),
        (("define", "docs", "n", "own_udfs.double"), "malformed"),
        (("define", "docs", "x", "own_udfs:double"), "computed from itself"),
    ],
)
def test_mistakes_are_said(db: str, arguments: tuple[str, ...], says: str) -> None:
    command, *rest = arguments
    assert says in run(command, db, *rest, code=1)


@pytest.mark.parametrize(
    ("command", "usage"), [("backfill", "DB TABLE COLUMN [OPTIONS]"), ("plan", "DB [TABLE COLUMN] [OPTIONS]")]
)
def test_a_usage_line_names_the_arguments_as_they_are_given(command: str, usage: str) -> None:
    [line] = [line.strip() for line in run(command, "--help").splitlines() if "Usage:" in line]
    assert line.endswith(f" {command} {usage}")


@pytest.mark.parametrize("command", ["", "checkpoints", *COMMANDS])
def test_help_is_plain(command: str) -> None:
    """No type of Python, no ellipsis instead of words, no frame that breaks where a log wraps."""
    text = run(*command.split(), "--help")
    assert not re.search(r"<|list\[|TEXT|INTEGER|RANGE|\w\.\.\.$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


def test_tables_says_what_is_stale_worst_first_and_what_is_computed_from_it(db: str) -> None:
    docs = connect(db).open_table("docs")
    run("define", db, "docs", "n", "own_udfs:double", "--input", "x")
    run("backfill", db, "docs", "n", "--runner", "inline")
    docs.query().select(["n"]).create_materialized_view(name="a_view").refresh(runner="inline")
    assert {row["state"] for row in json.loads(run("tables", db, "--json"))} == {"up to date"}
    docs.add({"id": [10], "x": [1]})
    run("define", db, "docs", "p", "own_udfs:picky", "--input", "x")
    rows = {row["name"]: row for row in json.loads(run("tables", db, "--json"))}
    assert {name: (row["state"], row["due"]) for name, row in rows.items()} == {
        "docs.n": ("stale", 1), "docs.p": ("never computed", 11), "a_view": ("stale", 1),
    }  # fmt: skip
    connect(db).open_view("a_view").refresh(runner="inline")
    text = run("tables", db)
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "name state rows due failed",
        "docs.n stale 11 1 0",
        "docs.p never computed 11 11 0",
        "a_view source is stale 11 0 0",
        "a_view: up to date with docs.n, which is stale",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert "No tables." in run("tables", db, "--table", "none")


def test_duplicates_lists_the_rows_that_a_view_leaves_out(tmp_path: Path) -> None:
    db = connect(tmp_path / "db")
    noon = datetime(2026, 1, 1, 12)
    data = pa.table(
        {"id": [1, 2, 3, 4, 5], "x": [7, 8, 7, 9, 8], "at": [noon] * 5, "text": ["a\x1b", "b", "c", "d", "e"]}
    )
    docs = db.create_table("docs", data)
    view = docs.query().deduplicate(on="x", keep="max(id)").create_materialized_view(name="clean")
    docs.query().deduplicate(on="id").create_materialized_view(name="all_rows").refresh(runner="inline")
    docs.query().create_materialized_view(name="plain")
    assert "no refresh of it has ended" in run("duplicates", db.uri, "clean", code=1)
    view.refresh(runner="inline")
    asked = ("duplicates", db.uri, "clean", "--column", "id", "--column", "text")
    lines = run(*asked).splitlines()
    assert [line.split() for line in lines] == [
        ["row", "id", "cluster", "duplicate", "of", "id", "text"],
        ["2", "0", "3", "c"],
        ["0", "0", "2", "1", "a\\x1b"],
        ["4", "1", "5", "e"],
        ["1", "1", "4", "2", "b"],
        ["2", "rows", "left", "out", "of", "2", "clusters."],
    ]
    assert run(*asked, "--rows", "1").endswith("2 rows left out of 2 clusters; --rows shows more.\n")
    rows = view.duplicates(["id", "at"])
    found = json.loads(run("duplicates", db.uri, "clean", "--column", "id", "--column", "at", "--json"))
    assert found == [{**row, "at": str(noon)} for row in rows.to_pylist()]
    run("duplicates", db.uri, "clean", "--column", "id", "--column", "at", "--output", str(tmp_path / "left.parquet"))
    assert pyarrow.parquet.read_table(tmp_path / "left.parquet").equals(rows)
    assert run("duplicates", db.uri, "all_rows") == "No duplicates.\n"
    assert "created without deduplicate()" in run("duplicates", db.uri, "plain", code=1)


def test_errors_and_plans_advise_commands_and_options(db: str) -> None:
    run("define", db, "docs", "n", "own_udfs:double", "--input", "x")
    run("backfill", db, "docs", "n", "--runner", "inline")
    run("define", db, "docs", "n", "own_udfs:picky", "--input", "id")
    said = run("backfill", db, "docs", "n", code=1)
    assert "with --on-code-change recompute" in said
    assert "on_code_change=" not in said
    assert "airflow-geneva jobs DB lists the newest" in run("status", db, "20260101T000000-none", code=1)
    assert "airflow-geneva define" in run("backfill", db, "docs", "x", code=1)


def test_a_module_of_the_dags_folder_is_found_with_a_connection(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "dags_folder", lambda: str(tmp_path / "dags"))
    monkeypatch.setattr(work, "open_database_argument", lambda given, conn_id, *rest: (connect(db), list(given)))
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "of_dags.py").write_text(UDFS)
    assert "of_dags:double" in run("define", "--conn-id", "shelf", "docs", "n", "of_dags:double", "--input", "x")


def test_the_shell_completes_commands_and_options() -> None:
    asked = {"_AIRFLOW_GENEVA_COMPLETE": "complete_bash", "COMP_WORDS": "airflow-geneva ta", "COMP_CWORD": "1"}
    answer = CliRunner().invoke(app, [], prog_name="airflow-geneva", env=asked)
    assert answer.stdout.split() == ["tables"]
