"""UDFs with a stage: it works out what their function takes, and says in which process it ran."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.udf import Retry, Skip, udf
from tests.support.counting import leave_trace
from tests.udfs_for_tests.failing import do

WITH_PROCESS = pa.struct({"x": pa.int64(), "pid": pa.int64()})
BOTH = pa.struct({"stage": pa.int64(), "call": pa.int64(), "loads": pa.int64()})

FAILS_LATER = -100
"""Added to what the stage shall pass on: the call fails as the rest says."""


@udf(data_type=WITH_PROCESS)
def located(x: int) -> dict[str, int]:
    return {"x": x, "pid": os.getpid()}


@udf(data_type=BOTH, preprocess=located, preprocess_workers=2, version="1")
class InProcesses:
    """Says how many processes loaded it: `loads` is where it did."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __call__(self, made: dict[str, int]) -> dict[str, int]:
        return {"stage": made["pid"], "call": os.getpid(), "loads": self.pid}


def half(x: int) -> int:
    """Fail as the row says, or pass on, that the call fails."""
    return x - FAILS_LATER if x <= FAILS_LATER else do(x)


def call(half: int) -> int:
    return do(half) if half < 0 else half // 10 + 1


def halves(x: pa.Int64Array) -> pa.Int64Array:
    return pa.array([half(value) for value in x.to_pylist()], pa.int64())


def calls(half: pa.Int64Array) -> pa.Int64Array:
    return pa.array([call(value) for value in half.to_pylist()], pa.int64())


scalar = udf(name="scalar", on_error="skip", version="1", preprocess=half)(call)
array = udf(name="array", on_error="skip", version="1", preprocess=halves, preprocess_workers=2)(calls)
timed = udf(name="timed", on_error="skip", timeout=1.5, version="1", preprocess=half)(call)
retried = udf(
    name="retried", on_error=[Retry(ValueError, attempts=3, backoff=0.0), Skip(Exception)], version="1", preprocess=half
)(call)


def traced(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    return pc.multiply(x, 10)


@udf(version="1", preprocess=traced, preprocess_workers=2)
def plus_one(ten: pa.Int64Array) -> pa.Int64Array:
    return pc.add(ten, 1)
