"""UDFs of groups, which worker processes import."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import Retry, Skip, udf

STAMP = pa.timestamp("us")


@udf(data_type=pa.string())
def joined_arrays(kind: pa.StringArray, amount: pa.Int64Array) -> str:
    assert isinstance(kind, pa.StringArray)
    assert isinstance(amount, pa.Int64Array)
    return " ".join(f"{k}{a}" for k, a in zip(kind.to_pylist(), amount.to_pylist(), strict=True))


@udf(data_type=pa.string())
def joined_lists(kind: list[str], amount: list[int]) -> str:
    return " ".join(f"{k}{a}" for k, a in zip(kind, amount, strict=True))


@udf(data_type=pa.string())
def joined_plain(kind: Any, amount: Any) -> str:
    return joined_lists(kind, amount)


@udf(data_type=pa.string(), input_columns=["kind", "amount"])
def joined_batch(rows: pa.RecordBatch) -> str:
    return joined_lists(rows["kind"].to_pylist(), rows["amount"].to_pylist())


@udf(data_type=pa.string(), input_columns=["kind", "amount"])
def joined_batches(batches: Iterator[pa.RecordBatch]) -> str:
    return " ".join(joined_batch.func(batch) for batch in batches)


@udf(data_type=pa.string())
async def joined_async(kind: pa.Array, amount: pa.Array) -> str:
    return joined_lists(kind.to_pylist(), amount.to_pylist())


class _Joined:
    def __call__(self, kind: list[str], amount: list[int]) -> str:
        return joined_lists(kind, amount)


joined_by_class = udf(data_type=pa.string(), name="joined_by_class")(_Joined)


@udf(data_type=pa.int64())
def total(amount: pa.Int64Array) -> pa.Scalar:
    return pc.sum(amount)


@udf(data_type=pa.list_(pa.int64()))
def doubled(amount: list[int]) -> Iterator[int]:
    for one in amount:
        yield one * 2


@udf(data_type=pa.list_(pa.int64()))
def doubled_arrays(amount: pa.Int64Array) -> Iterator[int]:
    for one in amount.to_pylist():
        yield one * 2


@udf(data_type=pa.struct({"kinds": pa.int64(), "last": pa.string()}))
def profile(kind: pa.StringArray) -> dict[str, Any] | None:
    return None if kind[0].as_py() == "none" else {"kinds": len(kind), "last": kind[-1].as_py()}


@udf(data_type=pa.int64(), on_error="skip")
def picky(amount: pa.Int64Array) -> int:
    if (sum_ := pc.sum(amount).as_py()) < 0:
        raise ValueError(f"a sum of {sum_}")
    return int(sum_)


@udf(data_type=pa.int64(), on_error="skip", timeout=1.0)
def deadly(amount: list[int]) -> int:
    match sum(amount):
        case -1:
            os._exit(3)
        case -2:
            time.sleep(60)
    return sum(amount)


@udf(data_type=pa.int64(), on_error=[Retry(ConnectionError, attempts=3, backoff=0.001), Skip(ConnectionError)])
def counting(batches: Iterator[pa.RecordBatch]) -> int:
    """Fails at the first call of each group in a process, after it has read a batch."""
    first = next(batches)
    key = first["amount"][0].as_py()
    if key not in _called:
        _called.add(key)
        raise ConnectionError("away")
    return int(pc.sum(first["amount"]).as_py()) + sum(int(pc.sum(batch["amount"]).as_py()) for batch in batches)


_called: set[int] = set()


@udf(data_type=pa.int64(), deterministic=True, dedup=True)
def recorded(amount: list[int]) -> int:
    calls.append(amount)
    return sum(amount)


calls: list[list[int]] = []
