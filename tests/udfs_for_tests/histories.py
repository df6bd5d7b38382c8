"""The UDFs of the kill harness: every input is unique to a row and a change of it, so that a trace tells which ran."""

from __future__ import annotations

import pyarrow as pa

from airflow_geneva import UDF, udf
from tests.counting import leave_trace


def is_bad(x: int) -> bool:
    """Whether the UDF fails on an input, when it is told to fail at all."""
    return x % 13 == 5


def value_of(x: int, version: str = "1", picky: bool = False) -> int | None:
    """What a version of the UDF computes; NULL where it fails."""
    return None if picky and is_bad(x) else 10 * x + int(version)


@udf(data_type=pa.int64(), name="valued", version="1")
def valued(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    return pa.array([value_of(one) for one in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), name="valued", version="2")
def valued_anew(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    return pa.array([value_of(one, "2") for one in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), name="valued", version="1", on_error="skip")
def picky(x: int) -> int:
    leave_trace([x])
    if is_bad(x):
        raise ValueError(f"cannot do {x}")
    return value_of(x) or 0


@udf(data_type=pa.int64(), version="1")
def negative(x: pa.Int64Array) -> pa.Int64Array:
    """For another column; leaves no trace."""
    return pa.array([-one for one in x.to_pylist()], pa.int64())


BY_KIND: dict[str, UDF] = {"plain": valued, "where": valued, "skip": picky, "continue": valued_anew}
