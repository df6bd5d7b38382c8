"""What the documentation shows is what runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from airflow_geneva import connect
from scripts import docs_code
from scripts.docs_code import PAGES, fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


def test_the_notebook_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(ROOT / "docs" / "snippets" / "notebook.py"))
    assert left["table"].to_arrow().column("n").to_pylist() == [1, 2, 3]
    assert left["r"].rows_computed == 3


def test_the_snippet_about_several_columns_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(ROOT / "docs" / "snippets" / "several_columns.py"))
    assert left["table"].to_arrow().select(["words", "vowels"]).to_pylist()[0] == {"words": 2, "vowels": 2}


def test_the_snippet_about_copies_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(ROOT / "docs" / "snippets" / "copies.py"))
    assert [left[name].plan_backfill("words").rows_pending for name in ("staging", "experiment", "restored")] == [0] * 3
    assert left["r"].notes[0].startswith("adopted: 3 rows, with values that no job of this table computed, count as")
    assert left["new"].table_names() == ["docs", "long_docs"]


def test_the_snippet_about_loading_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(ROOT / "docs" / "snippets" / "load_values.py"))
    assert left["table"].to_arrow().column("caption").to_pylist() == ["first", "second", "third"]
    assert (left["result"].rows_loaded, left["result"].rows_missing) == (2, 1)


@pytest.mark.spark
def test_the_snippet_about_tables_of_others_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = pa.table({"id": [1, 2, 3]})
    table = connect("library").create_table("docs", ids)
    catalog = load_catalog("warehouse", uri="sqlite:///warehouse.db", warehouse=(tmp_path / "warehouse").as_uri())
    catalog.create_namespace("sales")
    prices = pa.table({"id": [1, 3], "price": [0.5, 1.5]})
    catalog.create_table("sales.prices", prices.schema).append(prices)
    spark.sql("SELECT explode(array(1, 2, 2, 3)) AS id").createOrReplaceTempView("clicks")
    spark.sql("SELECT explode(array(2, 3)) AS id, 5 AS stars").write.mode("overwrite").saveAsTable("ratings")
    runpy.run_path(str(ROOT / "docs" / "snippets" / "load_tables.py"))
    assert [row["id"] for row in table.lance.to_table(filter="price > 1").to_pylist()] == [3]
    found = connect("library").open_table("docs").to_arrow().to_pylist()
    assert [(row["price"], row["clicks"], row["stars"]) for row in found] == [(0.5, 1, None), (None, 2, 5), (1.5, 1, 5)]
    spark.sql("DROP TABLE ratings")


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
    assert (left["r"].rows_computed, left["r"].commits != ()) == (2, True)
    assert left["view"].to_arrow().to_pylist() == [
        {"id": 1, "letters": 9, "words": 2, "sentences": ["One", "Two"]},
        {"id": 4, "letters": 14, "words": 3, "sentences": ["Four five six"]},
    ]
    assert left["sentences"].to_arrow().column("sentence").to_pylist() == ["One", "Two", "Four five six"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_tested_files_as_they_are(page: Path) -> None:
    text = page.read_text()
    assert fill(text) == text, "a file has changed that this page shows: run make format"
    assert not re.search(r"^ *--8<--", text, re.MULTILINE), (
        "write <!-- from PATH: SECTION --> and <!-- end -->, and run make format"
    )


@pytest.mark.parametrize(
    ("section", "line", "shows"), [("Clear", "clear it", True), ("Clear", "mark it", False), ("Run", "clear it", False)]
)
def test_each_line_has_a_test_that_shows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: str, line: str, shows: bool
) -> None:
    monkeypatch.setattr(docs_code, "ROOT", tmp_path)
    for folder in ("docs", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs" / "operating.md").write_text(
        "### Clear\n\n| you | then |\n|---|---|\n| clear it | it goes on |\n"
    )
    (tmp_path / "tests" / "test_a.py").write_text(f"@pytest.mark.shows({section!r}, {line!r})\ndef test_b(): ...\n")
    page = "<!-- from tests -->\n<!-- end -->"
    if shows:
        assert "## Clear\n\n| you | shown by |\n|---|---|\n| clear it | `test_a.py::test_b` |" in fill(page)
    else:
        with pytest.raises(KeyError, match="no test shows what happens in Clear: clear it"):
            fill(page)


def test_code_is_copied_from_sections_and_from_whole_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docs_code, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("x = 0\nif x:\n    # --8<-- [start:b]\n    y = 1\n    # --8<-- [end:b]\n")
    begin, end = "  <!-- from a.py: b -->", "  <!-- end -->"
    filled = f"{begin}\n\n  ```python\n  y = 1\n  ```\n\n{end}\n"
    assert fill(f"{begin}\nold\n{end}\n") == fill(filled) == filled
    assert "```python\nx = 0\nif x:\n    y = 1\n```" in fill("<!-- from a.py -->\n<!-- end -->")
    with pytest.raises(KeyError):
        fill("<!-- from a.py: c -->\n<!-- end -->")
