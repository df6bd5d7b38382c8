"""The candidate of the DAG `change_model`: it stands for a new model, whose vectors have the same size."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf
from embedding_udfs import embed as first_model


@udf(data_type=first_model.data_type, version="1")
def embed(text: pa.StringArray) -> pa.FixedSizeListArray:
    return first_model(pc.utf8_lower(text))
