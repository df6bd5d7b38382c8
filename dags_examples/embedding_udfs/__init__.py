"""A text-embedding UDF with wordllama's model, which is small, runs on any CPU, and is part of its package."""

from __future__ import annotations

# --8<-- [start:example]
import os

import numpy as np
import pyarrow as pa
import wordllama

from airflow_geneva import udf

DIMENSIONS = 256


@udf(data_type=pa.list_(pa.float32(), DIMENSIONS))
class embed:
    """Embed texts; the model is loaded once per process."""

    def __init__(self) -> None:
        weights = os.path.dirname(wordllama.__file__)
        self.model = wordllama.WordLlama.load(cache_dir=weights, disable_download=True)

    def __call__(self, text: pa.StringArray) -> np.ndarray:
        return self.model.embed(text.to_pylist())


# --8<-- [end:example]
