"""`pages`, on PDF files that the tests write."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from airflow_geneva import connect
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions import pages

LOCKED = "<< /Filter /Standard /V 1 /R 2 /P -1 /O <{0}> /U <{0}> >>".format("ab" * 32)


def pdf_of(*texts: str, side: int = 200, encrypt: str | None = None) -> bytes:
    """Write a PDF with a page for each text, whose lines are separated by newlines."""
    children = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(texts)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{children}] /Count {len(texts)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for at, text in enumerate(texts):
        lines = " T* ".join(f"({line}) Tj" for line in text.split("\n"))
        drawn = f"BT /F 12 Tf 14 TL 10 150 Td {lines} ET"
        font = "/Resources << /Font << /F 3 0 R >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {side} {side}] {font} /Contents {5 + 2 * at} 0 R >>"
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    return written(objects, "/ID [<00> <00>] /Encrypt " + encrypt if encrypt else "")


def written(objects: Sequence[str], trailer: str) -> bytes:
    out, offsets = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{one}\nendobj\n".encode("latin1")
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n" + "".join(f"{at:010} 00000 n \n" for at in offsets)
    end = f"trailer << /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + table.encode() + end.encode()


def test_a_view_has_a_row_for_each_page_and_skips_documents_that_cannot_be_read(tmp_path: Path) -> None:
    database = connect(tmp_path / "db")
    documents = [pdf_of("One", "Two\nlines", ""), None, b"no document", pdf_of("Na\xefve"), pdf_of("A", encrypt=LOCKED)]
    table = database.create_table("documents", pa.table({"id": range(5), "pdf": pa.array(documents, pa.binary())}))
    query = table.query().select({"id": "id", "page": (pages(on_error="skip"), ["pdf"])}).explode("page")
    view = query.create_materialized_view(database, "pages")
    assert view.refresh(runner="inline").rows_failed == 2
    found = [(row["id"], row["page"]["number"], row["page"]["text"]) for row in view.to_arrow().to_pylist()]
    assert sorted(found) == [(0, 1, "One"), (0, 2, "Two\nlines"), (0, 3, ""), (3, 1, "Na\xefve")]
    messages = [record.message for record in view.get_errors()]
    assert any("The PDF of 11 bytes cannot be read: " in message for message in messages)
    assert any("password" in message for message in messages)


def test_a_word_that_a_line_splits_is_one_word() -> None:
    assert pages()(pdf_of("An exam-\nple"))[0]["text"] == "An example"


def test_a_damaged_page_is_named() -> None:
    whole = pdf_of("One", "Two")
    with pytest.raises(ValueError, match=r"^Page 2 of the PDF of [\d,]+ bytes cannot be read: "):
        pages()(whole.replace(b"/Kids [4 0 R 6 0 R]", b"/Kids [4 0 R 99 0 R]"))


@pytest.mark.parametrize("output", ["png", "jpeg", "webp"])
def test_pages_are_rendered_at_a_resolution(output: str) -> None:
    made = pages(dpi=144, output=output)
    assert made.data_type.value_type.field("image").type == pa.binary()
    [empty, full] = made(pdf_of("", "Words"))
    with Image.open(io.BytesIO(empty["image"])) as white, Image.open(io.BytesIO(full["image"])) as black:
        assert (white.format, white.size) == (output.upper(), (400, 400))
        assert white.convert("L").getextrema() == (255, 255)
        assert black.convert("L").getextrema()[0] < 50
    with pytest.raises(ValueError, match="14,400 x 14,400 pixels at dpi=72"):
        pages(dpi=72)(pdf_of("", side=14_400))


def test_threads_read_one_document_at_a_time() -> None:
    documents = [pdf_of(*(f"{document} {page}" for page in range(20))) for document in range(40)]
    several = [pages(), pages(dpi=10)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: several[at % 2](documents[at]), range(len(documents))))
    texts = [[page["text"] for page in one] for one in found]
    assert texts == [[f"{document} {page}" for page in range(20)] for document in range(40)]


def test_the_version_follows_the_resolution_and_bad_parameters_are_named() -> None:
    versions = [
        pages().code_version,
        *(pages(dpi=72, output=output).code_version for output in ("png", "jpeg")),
        pages(dpi=150).code_version,
    ]
    assert len(set(versions)) == 4
    for wrong, named in (({"dpi": 0}, "dpi=0"), ({"output": "gif"}, "output='gif'")):
        with pytest.raises(InvalidInput, match=named):
            pages(**wrong)  # type: ignore[arg-type]
