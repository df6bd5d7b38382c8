"""Functions that read scanned documents: pages of PDF and image files, their text, and its language."""

from __future__ import annotations

# --8<-- [start:example]
import io
import re
from collections.abc import Iterator

import pyarrow as pa

from airflow_geneva import udf
from airflow_geneva.functions import pages, sentence_embeddings, text_chunks

PAGE = pa.struct([("number", pa.int32()), ("text", pa.string()), ("image", pa.binary())])
read_pdf = pages(dpi=100)


@udf(data_type=pa.list_(PAGE), on_error="skip")
def pages_of(file: bytes) -> Iterator[dict]:
    """Split a PDF into its pages; an image file is one page."""
    if file.startswith(b"%PDF-"):
        yield from read_pdf(file)
    else:
        from PIL import Image

        Image.open(io.BytesIO(file)).verify()
        yield {"number": 1, "text": "", "image": file}


@udf(data_type=pa.string(), on_error="skip")
class read_text:
    """Return the text that a PDF has for a page, or else read its image."""

    def __init__(self) -> None:
        from rapidocr import RapidOCR

        one_thread = {"EngineConfig.onnxruntime.intra_op_num_threads": 1}  # of a Spark task
        size = {"Det.limit_type": "max", "Det.limit_side_len": 1280}  # pixels: larger pages are scaled down
        self.ocr = RapidOCR(params={"Global.log_level": "error", "Global.use_cls": False, **one_thread, **size})

    def __call__(self, page: dict) -> str:
        if page["text"].strip():
            return page["text"]
        return "\n".join(self.ocr(page["image"]).txts or ())


COMMON = {
    "en": {"the", "and", "of", "is", "in", "that", "every", "a"},
    "de": {"der", "die", "das", "und", "nicht", "ein", "von", "mit"},
    "fr": {"le", "la", "les", "et", "est", "une", "des", "dans"},
}


@udf(data_type=pa.string())
def language(text: str | None) -> str | None:
    """Return the language whose most common words a text has most of; None if it has none of them."""
    words = re.findall(r"\w+", (text or "").lower())
    counts = {name: sum(word in common for word in words) for name, common in COMMON.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else None


chunks = text_chunks(size=400, overlap=50)
embed = sentence_embeddings(dimensions=256)
# --8<-- [end:example]
