"""UDFs that also count their rows: `make demo` compares the counts with the rows that Airflow reports."""

from __future__ import annotations

import os

import pyarrow as pa

from airflow_geneva import udf
from embedding_udfs import embed

COUNTS = "GENEVA_DEMO_COUNTS"
"""Environment variable with the path of a folder in which each UDF appends one line per call to a file."""


@udf(data_type=embed.data_type)
def counted_embed(text: pa.StringArray) -> pa.FixedSizeListArray:
    """Embed texts like the example."""
    vectors = embed(text)
    _note("counted_embed", len(text))
    return vectors


@udf
def counted_words(text: pa.StringArray) -> pa.Int64Array:
    """Count the words of texts."""
    _note("counted_words", len(text))
    return pa.array([len(verse.split()) for verse in text.to_pylist()], pa.int64())


def _note(udf_name: str, rows: int) -> None:
    # Several processes append to the file at once; a short line in one write is atomic.
    with open(os.path.join(os.environ[COUNTS], f"{udf_name}.txt"), "ab", buffering=0) as file:
        file.write(b"%d\n" % rows)
