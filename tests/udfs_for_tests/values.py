"""A UDF that fails as long as a file is there."""

from __future__ import annotations

import os

import pyarrow as pa

from airflow_geneva import udf

BREAKS = "GENEVA_TEST_BREAKS"
"""Names a file in the environment: as long as it is there, the UDF fails on row 5."""


@udf(data_type=pa.int64(), version="1", batch_size=2)
def breaks(id: pa.Array) -> pa.Array:
    path = os.environ.get(BREAKS)
    if path and os.path.exists(path) and 5 in id.to_pylist():
        raise ValueError("broken")
    return id
