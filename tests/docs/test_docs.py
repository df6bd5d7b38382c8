"""What the documentation shows is what runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def section(path: Path, name: str) -> str:
    begin, end = (rf"(?:#|<!--) --8<-- \[{edge}:{name}\]" for edge in ("start", "end"))
    match = re.search(rf"{begin}(?: -->)?\n(.*?){end}", path.read_text(), re.DOTALL)
    assert match, f"{path} has no section {name}"
    return match[1]


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_notebook_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(ROOT / "docs" / "snippets" / "notebook.py"))
    assert left["table"].to_arrow().column("n").to_pylist() == [1, 2, 3]
    assert left["r"].rows_computed == 3


def test_the_snippet_about_errors_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(ROOT / "docs" / "snippets" / "errors.py"))
    assert left["table"].to_arrow().column("price").to_pylist() == [1.5, 2.25, 0.0]
    assert (left["r"].rows_computed, left["r"].rows_failed) == (2, 1)
    assert [job.state for job in left["db"].jobs()] == ["DONE"] * 3


def test_the_snippet_about_views_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "snippets"))
    left = runpy.run_path(str(ROOT / "docs" / "snippets" / "views.py"))
    assert (left["r"].rows_computed, left["r"].commits != ()) == (1, True)
    assert left["view"].to_arrow().to_pylist() == [
        {"id": 1, "letters": 9, "words": 2},
        {"id": 2, "letters": 5, "words": 1},
    ]
    assert left["sentences"].to_arrow().column("sentence").to_pylist() == ["One", "Two", "Four five six"]


def test_the_readme_shows_the_tested_notebook_and_the_tested_dag() -> None:
    notebook = ROOT / "docs" / "snippets" / "notebook.py"
    dag = ROOT / "dags_examples" / "backfill_embeddings.py"
    shown = blocks(README)
    assert section(notebook, "define") + section(notebook, "backfill") in shown
    assert section(dag, "example") in shown


def test_every_snippet_that_the_documentation_names_exists() -> None:
    named = [
        (path, name)
        for page in (ROOT / "docs").rglob("*.md")
        for path, name in re.findall(r'--8<-- "([^":]+):([^"]+)"', page.read_text())
    ]
    assert len(named) >= 6, "the include lines were damaged"
    for path, name in named:
        assert section(ROOT / path, name)
