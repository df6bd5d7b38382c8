"""The walks and paths of the architecture page lead to code that exists."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from scripts import walks

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_geneva"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALKS = PAGE.partition("## Three walks")[2].partition("\n## ")[0].split("### ")[1:]


def definitions(path: str) -> set[str]:
    """Return the functions and classes of a module, methods as `Class.method`."""
    found = set()
    for node in ast.parse((PACKAGE / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
    return found


def test_each_walk_has_at_most_ten_stops_and_each_stop_exists() -> None:
    assert len(WALKS) == 3
    for walk in WALKS:
        stops = re.findall(r"^\| (\d+) \| (\w+) \| `([\w/.]+)` \| `([\w.]+)` \|", walk, re.MULTILINE)
        assert [int(stop[0]) for stop in stops] == list(range(1, len(stops) + 1))
        assert 5 <= len(stops) <= 10
        for _, room, file, function in stops:
            rooms = [part for part in file.split("/")[:-1] if part != "engine"]
            assert room == (rooms[0] if rooms else "root")
            assert function in definitions(file), f"{file} has no {function}"


def test_every_function_that_a_walk_mentions_exists() -> None:
    everything = {name for path in PACKAGE.rglob("*.py") for name in definitions(str(path.relative_to(PACKAGE)))}
    mentioned = {name for walk in WALKS for name in re.findall(r"`([A-Za-z]+_\w+|[A-Z]\w+\.\w+)`", walk)}
    assert mentioned - everything == {"checkpoint_interval"}


def test_every_path_of_the_page_exists() -> None:
    paths = [path for path in re.findall(r"`([\w/]+\.py)`", PAGE) if "/" in path]
    assert len(paths) >= 50
    missing = {path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()}
    assert not missing


def test_every_file_that_the_table_of_rooms_names_exists() -> None:
    rooms = re.findall(r"^\| `([\w/]+)/` \|[^|]*\|([^|]*)\|$", PAGE, re.MULTILINE)
    assert len(rooms) >= 15
    for room, named in rooms:
        for path in re.findall(r"`([\w/]+\.py)`", named):
            assert (PACKAGE / room / path).exists() or (PACKAGE / path).exists(), f"{room}/{path}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames have no qualified names")
def test_the_ways_to_the_function_and_to_the_commit_are_short() -> None:
    traced = walks.walks()
    assert "run/pipeline.py: run_new" in walks.described(traced)
    to_function, to_commit = (
        [len(walk) for name, walk in traced.items() if name.endswith(end)] for end in ("function", "commit")
    )
    assert max(to_function) <= 17
    assert max(to_commit) <= 10


def test_each_document_that_has_a_name_of_its_own_has_a_row() -> None:
    table = PAGE.partition("## What is kept on disk")[2].partition("\n## ")[0]
    sources = [
        file.read_text()
        for room in ("job", "cleanup", "checkpoint")
        for file in (PACKAGE / "engine" / room).glob("*.py")
    ]
    names = {name for source in sources for name in re.findall(r'"([a-z]+\.json)"', source)}
    assert {"job.json", "cancel.json"} <= names
    assert {name for name in names if not re.search(rf"`[^`]*\b{re.escape(name)}`", table)} == set()
