"""UDFs that also count their rows: `make demo` compares them with the rows that Airflow reports."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

from airflow_geneva import udf
from embedding_udfs import embed

COUNTS = "GENEVA_DEMO_COUNTS"
"""Environment variable with the path of a folder, in which each UDF has a file that gets one line per call."""


@udf(data_type=embed.data_type)
def counted_embed(text: pa.StringArray) -> np.ndarray:
    """Embed texts as the example does."""
    vectors = embed(text)
    _note("counted_embed", len(text))
    return vectors


@udf
def counted_words(text: pa.StringArray) -> pa.Int64Array:
    """Count the words of texts."""
    _note("counted_words", len(text))
    return pa.array([len(verse.split()) for verse in text.to_pylist()], pa.int64())


def _note(udf_name: str, rows: int) -> None:
    # Several processes write to the file at once: a short line that is appended in one write stays whole.
    with open(os.path.join(os.environ[COUNTS], f"{udf_name}.txt"), "ab", buffering=0) as file:
        file.write(b"%d\n" % rows)
