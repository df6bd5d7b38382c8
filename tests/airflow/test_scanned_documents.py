"""The example that makes scanned documents searchable, with a real model, a torn scan and a repaired function."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image, ImageDraw, ImageFont

from airflow_geneva import View
from tests.airflow.conftest import Desk, Logs
from tests.support.driving import DagBag, Driver

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
PAGES = {
    "en": "The harbour master keeps the ledger of ships.\nEvery vessel pays a toll in silver.",
    "de": "Der Pfarrer war nicht in der Kirche,\nund das Buch von der Taufe fehlte.",
    "fr": "Le livre est dans la maison et une lampe.",
}
READS_IMAGES = "        Image.open(io.BytesIO(file)).verify()\n"


def scan(*texts: str, kind: str = "PDF") -> bytes:
    """Draw each text on a page, as a scanner stores it: without the text."""
    images, written = [], io.BytesIO()
    for text in texts:
        images.append(Image.new("L", (620, 120), "white"))
        ImageDraw.Draw(images[-1]).text((20, 20), text, fill="black", font=ImageFont.load_default(20))
    more: dict[str, Any] = {"save_all": True, "append_images": images[1:], "resolution": 100} if kind == "PDF" else {}
    images[0].save(written, kind, **more)
    return written.getvalue()


def test_scans_become_searchable_a_torn_one_is_given_up_and_a_repaired_function_reads_the_others(
    desk: Desk, logs: Logs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_ROWS", "1000")
    monkeypatch.syspath_prepend(str(tmp_path))
    functions, written = (EXAMPLES / "scan_udfs.py").read_text(), tmp_path / "scan_udfs.py"
    assert READS_IMAGES in functions

    def run(code: str, **conf: str) -> Driver:
        """Deploy the functions, and run the DAG."""
        written.write_text(code)
        sys.modules.pop("scan_udfs", None)
        dag = DagBag(EXAMPLES / "scanned_documents.py").dags["scanned_documents"]
        if not conf:
            dag.get_task("read.shards.apply").inline_below_rows = 0
        made = Driver.trigger(dag, conf).go()
        assert made.state == "success", made.errors
        return made

    letter = scan(PAGES["en"], PAGES["de"])
    files = pa.array([letter, scan(PAGES["fr"], kind="PNG"), letter[:900]], pa.binary())
    desk.database.create_table("scans", pa.table({"path": ["letter.pdf", "book.png", "torn.pdf"], "file": files}))
    first = run(functions.replace(READS_IMAGES, "        raise ValueError('this is no PDF')\n"))
    assert any("2 rows computed on Spark" in line for line in logs.by_task["read.shards.apply[0]"])
    assert (first.xcom("split.finish")["rows_computed"], first.xcom("split.finish")["rows_failed"]) == (1, 2)
    nearest = first.xcom("search")[0]
    assert (nearest["path"], nearest["number"], nearest["language"]) == ("letter.pdf", 1, "en")

    pages = desk.database.open_table("scan_pages")
    assert isinstance(pages, View)
    assert [pages.refresh(runner="inline").rows_run for _ in range(3)] == [2, 2, 0]
    assert {record.message for record in pages.get_errors()} >= {"this is no PDF"}

    second = run(functions, on_code_change="new_rows", question="Où est le livre?")
    assert (second.xcom("split.finish")["rows_computed"], second.xcom("split.finish")["rows_failed"]) == (1, 1)
    found = second.xcom("search")[0]
    assert (found["path"], found["language"], found["text"]) == ("book.png", "fr", PAGES["fr"])
    texts = desk.database.open_table("scan_texts").to_arrow().to_pylist()
    assert {row["language"]: row["text"] for row in texts} == PAGES
    [torn] = pages.get_errors()
    assert "cannot be read" in torn.message
