"""UDFs of views of groups that live through random histories; the tests put other versions in their place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.udf import UDF, udf
from tests.support.counting import leave_trace

TEXTS = ["a", "b", "", None]


def number_of(k: float | None, t: str | None) -> int:
    """Number a key, so that a trace can hold it."""
    of_k = 90 if k is None else 91 if math.isnan(k) else int(k * 2)
    return 10 * of_k + TEXTS.index(t)


def told_value(code: int, ids: list[int], xs: list[int | None]) -> str:
    return f"{code}: " + " ".join(f"{id}={x}" for id, x in zip(ids, xs, strict=True))


def is_bad(xs: list[int | None]) -> bool:
    return 13 in xs


def told_of(code: int) -> UDF:
    """The function in one version."""

    def told(k: Any, t: Any, id: Any, x: Any) -> str:
        leave_trace([number_of(k[0], t[0])])
        return told_value(code, id, x)

    return udf(data_type=pa.string(), version=str(code), name="told")(told)


@udf(data_type=pa.string(), version="1", name="told")
def told(k: list[float], t: list[str], id: list[int], x: list[int]) -> str:
    leave_trace([number_of(k[0], t[0])])
    return told_value(1, id, x)


@udf(data_type=pa.int64(), version="1")
def largest(x: pa.Int64Array) -> int | None:
    return max((value for value in x.to_pylist() if value is not None), default=None)


@udf(data_type=pa.int64(), version="1", on_error="skip")
def refusing(id: list[int], x: list[int]) -> int:
    leave_trace([min(id)], ".refusing")
    if is_bad(x):
        raise ValueError("not with 13")
    return len(id)


@udf(data_type=pa.list_(pa.int64()), version="1")
def in_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch["id"].to_pylist()


@udf(data_type=pa.list_(pa.int64()), version="1")
def each(id: list[int]) -> list[int]:
    return sorted(id)


@udf(data_type=pa.int64(), version="1")
def failing(x: list[int]) -> int:
    raise ValueError("never")
