"""Split PDF documents into pages."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.udf import UDF
from airflow_geneva.functions.made import check_choice, library, make

_NUMBER, _TEXT = pa.field("number", pa.int32()), pa.field("text", pa.string())
_IMAGE = pa.field("image", pa.binary())
_POINTS_PER_INCH = 72
_MOST_PIXELS = 100_000_000
"""Maximum pixels of a rendered page, which take 400 MB. A4 at 600 dpi has 35 million."""
_SPLIT = "\ufffe"
"""The character that PDFium returns for a hyphen that splits a word at the end of a line."""

_pdfium = threading.RLock()
"""Held while a thread calls PDFium, which is not thread-safe, not even for different documents."""


class _Pages:
    """Split a PDF into its pages."""

    name = "pages"
    revision = 1
    dpi: int | None
    output: str

    def __init__(self) -> None:
        self.pdfium = library("pypdfium2", "airflow-geneva[pdf]")
        if self.dpi is not None:
            library("PIL.Image", "airflow-geneva[pdf]")

    def __call__(self, pdf: bytes) -> Iterator[dict[str, Any]]:
        if pdf is not None:
            yield from self.read(pdf)

    def read(self, pdf: bytes) -> list[dict[str, Any]]:
        """Return all pages; a generator would keep the lock while its caller works on a page."""
        with _pdfium:
            number = 0
            try:
                with closing(self.pdfium.PdfDocument(pdf)) as document:
                    if self.dpi is not None:
                        document.init_forms()  # render the values of form fields, too
                    found = []
                    for number in range(1, len(document) + 1):
                        with closing(document[number - 1]) as page:
                            found.append({"number": number, **self.read_page(page)})
                    return found
            except self.pdfium.PdfiumError as error:
                what = f"Page {number} of the PDF" if number else "The PDF"
                raise ValueError(f"{what} of {len(pdf):,} bytes cannot be read: {error}") from error

    def read_page(self, page: Any) -> dict[str, Any]:
        with closing(page.get_textpage()) as textpage:
            text = textpage.get_text_range().replace("\r\n", "\n").replace(_SPLIT, "")
        return {"text": text} if self.dpi is None else {"text": text, "image": self.render(page, self.dpi)}

    def render(self, page: Any, dpi: int) -> bytes:
        scale = dpi / _POINTS_PER_INCH
        width, height = (side * scale for side in page.get_size())
        if width * height > _MOST_PIXELS:
            raise ValueError(
                f"A page of the PDF has {width:,.0f} x {height:,.0f} pixels at dpi={dpi}, more than {_MOST_PIXELS:,}."
            )
        written = io.BytesIO()
        with closing(page.render(scale=scale)) as bitmap:
            bitmap.to_pil().save(written, self.output)
        return written.getvalue()


def pages(*, dpi: int | None = None, output: str = "png", **settings: Any) -> UDF:
    """Make a UDF that splits PDF documents into pages, for a view with a row each: `.explode("page")`.

    A page is a struct of `number`, counted from 1, and `text`. Words that a hyphen splits at the end of a line are
    joined. A scanned page has an empty text: render it with `dpi`, and have a model read the image. NULL has no pages.
    It needs `airflow-geneva[pdf]`.

    A document that is damaged or needs a password fails its row with a `ValueError`. PDFium is not thread-safe, so each
    process reads one document at a time; a larger `concurrency` starts more processes.

    Args:
        dpi: also render each page, at this resolution; the struct then has a field `image` as well.
        output: format of the images: `"png"`, `"jpeg"` or `"webp"`.
        settings: arguments of the decorator `udf`, such as `on_error`.
    """
    if dpi is not None:
        check_whole("dpi", dpi)
    check_choice("output", output, ["png", "jpeg", "webp"])
    kind = pa.struct([_NUMBER, _TEXT] if dpi is None else [_NUMBER, _TEXT, _IMAGE])
    return make(_Pages, pa.list_(kind), {"dpi": dpi, "output": output if dpi is not None else None}, settings)
