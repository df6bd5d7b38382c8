"""The same embedding, which also counts its rows: `make demo` compares them with the rows that Airflow reports."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

from airflow_geneva import udf
from embedding_udfs import embed

COUNTS = "GENEVA_DEMO_COUNTS"
"""Environment variable with the path of the file that gets one line per call."""


@udf(data_type=embed.data_type)
def counted_embed(text: pa.StringArray) -> np.ndarray:
    """Embed texts, and note how many there were."""
    vectors = embed(text)
    # Several processes write to the file at once: a short line that is appended in one write stays whole.
    with open(os.environ[COUNTS], "ab", buffering=0) as file:
        file.write(b"%d\n" % len(text))
    return vectors
