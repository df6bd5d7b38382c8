"""The quick start and the steps to a refresh on arrival, followed as the pages show them; the clicks are left out."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FILES = DOCS / "snippets" / "quickstart"


def shown(page: str, start: str) -> str:
    """The one block of text on a page that begins like this."""
    # A block in a list is indented.
    blocks = re.findall(r"^ *```text\n(.*?)^ *```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    [block] = [lines for block in blocks if (lines := re.sub(r"^ {4}(?=\{)", "", block, flags=re.M)).startswith(start)]
    return str(block)


def without_chance(text: str) -> list[str]:
    """The words of a text, without ids and times."""
    return re.sub(r"job \S+|\d\.\d s", "", text).split()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the page works in, after the script, with the DAGs folder on the Python path."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(DOCS / "snippets" / "notebook.py"))
    monkeypatch.syspath_prepend(str(FILES))
    yield tmp_path
    sys.modules.pop("text_udfs", None)


def test_the_script_prints_what_the_page_shows(capfd: pytest.CaptureFixture[str], place: Path) -> None:
    assert without_chance(capfd.readouterr().out) == without_chance(shown("quickstart.md", "Backfill of docs.n"))


def test_the_settings_are_connections_that_lead_to_the_library(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    (home / "geneva" / "venv" / "bin").mkdir(parents=True)
    (home / "geneva" / "venv" / "bin" / "activate").touch()
    command = ["bash", "-ec", f". '{FILES / 'env.sh'}'; env -0"]
    told = subprocess.run(command, env={"HOME": str(home)}, check=True, capture_output=True, text=True).stdout
    settings = dict(line.partition("=")[::2] for line in told.split("\0") if line)
    lance, spark = (json.loads(settings[f"AIRFLOW_CONN_{name}_DEFAULT"]) for name in ("LANCE", "SPARK"))
    assert lance == {"conn_type": "lance", "host": f"{home}/geneva/library"}
    assert (spark["conn_type"], spark["host"]) == ("spark", "local[2]")
    assert settings["AIRFLOW_HOME"] == f"{home}/geneva/airflow"
    assert settings["AIRFLOW__API__BASE_URL"].endswith(f":{settings['AIRFLOW__API__PORT']}")


@pytest.mark.airflow
@pytest.mark.spark
@pytest.mark.slow
def test_the_dags_make_what_the_pages_show(
    airflow_db: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.support.driving import DagBag, Driver

    def go(name: str) -> Driver:
        bag = DagBag(FILES / f"{name}.py")
        assert not bag.import_errors
        run = Driver.trigger(bag.dags[name]).go()
        assert run.state == "success", run.errors
        return run

    def look(table: str) -> str:
        monkeypatch.setattr(sys, "argv", ["look.py", table])
        capfd.readouterr()
        runpy.run_path(str(FILES / "look.py"))
        return capfd.readouterr().out

    def append() -> None:
        runpy.run_path(str(FILES / "append.py"))

    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps({"conn_type": "lance", "host": str(place / "library")}))
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[2]"}))
    go("count_words")
    assert look("docs") == shown("quickstart.md", "{'text': 'a'")
    # What comes now is few rows, for which a second start of Spark would show nothing new.
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_ROWS", "1000")
    append()
    assert go("count_words").xcom("backfill.finish")["rows_computed"] == 2

    go("follow_docs")
    assert look("long_docs") == shown("arrival.md", "{'text': 'another")
    append()
    assert go("follow_docs").xcom("refresh.finish")["rows_computed"] == 2
    assert len(look("long_docs").splitlines()) == 4


@pytest.mark.airflow
def test_the_tests_of_a_dag_pass_as_the_page_shows_them(tmp_path: Path) -> None:
    pytest.importorskip("airflow.dag_processing.dagbag", reason="Airflow 3.1 has it in airflow.models")
    file = DOCS / "snippets" / "testing" / "test_words.py"
    settings = {"PYTHONPATH": str(FILES), "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    plugins = ["-p", "no:cacheprovider", "-p", "airflow_geneva.testing"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(file), "--rootdir", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **settings}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
