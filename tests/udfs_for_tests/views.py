"""UDFs of views; they leave a trace of the rows they see."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.udf import udf
from tests.support.counting import leave_trace


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


@udf(data_type=pa.int64(), version="2", name="picky")
def strict(x: int) -> int:
    if x % 10 == 2:
        raise ValueError(f"not {x}")
    return x


@udf(data_type=pa.int64(), version="1")
def fussy(x: int) -> int:
    """Fails on what the environment says."""
    leave_trace([x], ".fussy")
    if str(x) in os.environ.get("FUSSY_ABOUT", "").split(","):
        raise ValueError(f"not {x}")
    return x


@udf(data_type=pa.int64(), version="1")
def fussy_about_sums(p: int, f: int) -> int:
    leave_trace([p], ".sums")
    if str(p + f) in os.environ.get("FUSSY_ABOUT", "").split(","):
        raise ValueError(f"not {p} and {f}")
    return p + f


@udf
def digits(x: int) -> Iterator[int]:
    """As many values as the last digit says, none for 0."""
    leave_trace([x])
    if x == 13:
        raise ValueError("unlucky")
    yield from (100 * x + at for at in range(x % 10))


@udf(data_type=pa.list_(pa.int64()), name="digits", on_error="skip")
def digits_if_they_can(x: int) -> Iterator[int]:
    if x == 13:
        raise ValueError("unlucky")
    yield from (100 * x + at for at in range(x % 10))
