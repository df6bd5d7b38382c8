"""`airflow-geneva init` writes a project that runs at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from airflow_geneva import connect
from airflow_geneva.cli.app import app

FILES = {"Makefile", "env.sh", "progress.awk", "dags/functions.py", "dags/keep_up_to_date.py", "tests/test_dags.py"}


def init(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def files_of(project: Path) -> set[str]:
    return {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}


def run(project: Path, *target: str, code: int = 0) -> str:
    """Run a target of the project's Makefile as a user does, who has no settings of Airflow."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "GENEVA", "PYTEST"))}
    done = subprocess.run(["make", *target], cwd=project, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_project_has_its_files(tmp_path: Path) -> None:
    project = tmp_path / "words"
    found = init(project)
    assert found.exit_code == 0, found.output
    assert f"cd {project} && make run" in found.output
    assert files_of(project) == {*FILES, "make_table.py"}
    for name in files_of(project):
        if name.endswith(".py"):
            compile((project / name).read_text(), name, "exec")


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    found = init(tmp_path)
    assert found.exit_code == 1
    assert "is not an empty folder" in found.output
    assert files_of(tmp_path) == {"mine"}


def test_a_project_of_ones_own_table(tmp_path: Path) -> None:
    """The new column has a free name, and its function takes a column that the table has."""
    db = connect(tmp_path / "my library")
    db.create_table("docs", pa.table({"class": ["a"], "len": ["a"], "title": ["a"], "words": [1]}))
    found = init(tmp_path / "project", "--from-table", tmp_path / "my library" / "docs")
    assert found.exit_code == 0, found.output
    assert files_of(tmp_path / "project") == FILES
    assert "def words_2(title: str | None) -> int | None:" in (tmp_path / "project/dags/functions.py").read_text()
    settings = f"cd {tmp_path}/project && . ./env.sh && echo $AIRFLOW_CONN_LANCE_DEFAULT"
    said = subprocess.run(["sh", "-c", settings], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f'{{"conn_type": "lance", "host": "{tmp_path}/my library"}}'


@pytest.mark.parametrize(
    ("table", "message"),
    [("missing/docs", "no database|No database|There is no"), ("docs", "is not|no table|There is no")],
)
def test_a_table_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    found = init("project", "--from-table", table)
    assert found.exit_code == 1
    assert any(part in found.output for part in message.split("|")), found.output
    assert not (tmp_path / "project").exists()


def test_a_table_without_a_column_for_a_first_function(tmp_path: Path) -> None:
    connect(tmp_path).create_table("docs", pa.table({"vector": [[1.0]]}))
    found = init(tmp_path / "project", "--from-table", tmp_path / "docs")
    assert found.exit_code == 1
    assert "only vector" in found.output


@pytest.mark.airflow
@pytest.mark.spark
@pytest.mark.slow
def test_a_project_runs_at_once_and_again(tmp_path: Path) -> None:
    project = tmp_path / "words"
    assert init(project).exit_code == 0
    run(project, "test")
    assert "task backfill.plan" in run(project, "run")
    run(project, "run")
    found = connect(project / "library").open_table("docs").to_arrow()
    assert found["words"].to_pylist() == [len(text.split()) for text in found["text"].to_pylist()]
    assert found.num_rows == 4


@pytest.mark.airflow
@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    """Of a table of pylance's own, with NULLs, whose function fails."""
    lance.write_dataset(pa.table({"title": ["a b", None]}), tmp_path / "library" / "docs.lance")
    project = tmp_path / "mine"
    assert "no stable row ids" in init(project, "--from-table", tmp_path / "library" / "docs").output
    run(project, "run")
    assert connect(tmp_path / "library").open_table("docs").to_arrow()["words"].to_pylist() == [2, None]
    connect(tmp_path / "library").open_table("docs").add([{"title": "c"}])
    functions = project / "dags" / "functions.py"
    functions.write_text(functions.read_text().replace("else len(", "else 1 + len("))
    said = run(project, "run", code=2)
    assert "airflow_geneva.errors.CodeChanged" in said
    run(project, "run", "ANSWER=recompute")
    assert connect(tmp_path / "library").open_table("docs").to_arrow()["words"].to_pylist() == [3, None, 2]
