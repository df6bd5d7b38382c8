"""UDFs of views; they leave a trace of the rows they see."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.udf import udf
from tests.counting import leave_trace


@udf(data_type=pa.int64(), version="1")
def plus(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    return pc.add(x, 1)


@udf(data_type=pa.int64(), version="1")
def ten(p: int) -> int:
    return 10 * p


@udf(data_type=pa.int64(), version="1", on_error="skip")
def picky(x: int) -> int:
    leave_trace([x])
    if x % 10 == 7:
        raise ValueError(f"not {x}")
    return x
