"""UDFs of the views that live through random histories; the tests put other versions in their place."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from airflow_geneva.engine.udf import UDF, udf
from tests.support.counting import leave_trace


def first_value(code: int, id: int, x: int | None) -> int:
    return 1_000_000 * code + 1_000 * id + (0 if x is None else x)


def second_value(p: int) -> int:
    return p + 7


def other_value(x: int | None) -> int:
    return -3 if x is None else -10 * x - 4


def is_bad(x: int | None) -> bool:
    return x is not None and x % 10 == 7


def first_of(code: int) -> UDF:
    """The first UDF in one version."""

    def first(id: Any, x: Any) -> Any:
        leave_trace(id)
        rows = zip(id.to_pylist(), x.to_pylist(), strict=True)
        return pa.array([first_value(code, *row) for row in rows], pa.int64())

    first.__annotations__ = {"id": pa.Int64Array, "x": pa.Int64Array, "return": pa.Int64Array}
    return udf(data_type=pa.int64(), version=str(code), name="first")(first)


@udf(data_type=pa.int64(), version="1", name="first")
def first(id: pa.Int64Array, x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(id)
    return pa.array([first_value(1, *row) for row in zip(id.to_pylist(), x.to_pylist(), strict=True)], pa.int64())


@udf(data_type=pa.int64(), version="1")
def second(p: int) -> int:
    return second_value(p)


@udf(data_type=pa.int64(), version="1-other")
def other(x: int | None) -> int:
    return other_value(x)


@udf(data_type=pa.int64(), version="1", on_error="skip")
def refusing(x: int | None) -> int:
    leave_trace([x], ".refusing")
    if is_bad(x):
        raise ValueError(f"not {x}")
    return 0 if x is None else x


@udf(data_type=pa.int64(), version="1")
def filled(x: pa.Int64Array) -> pa.Int64Array:
    return pa.array([None if x is None else x % 5 for x in x.to_pylist()], pa.int64())
