"""UDFs that pad each call to its heaviest row, on a device with little memory; their calls leave a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.udf import udf

LIMIT, MEMORY = 100, 60


def calls(log: str | Path) -> list[list[int]]:
    """The rows of each call, by their weights."""
    path = Path(log)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def padded(weights: list[int]) -> int:
    return max(weights) * len(weights)


def do(x: pa.Array, log: pa.Array, memory: int | None = None) -> pa.Array:
    weights = x.to_pylist()
    with open(log[0].as_py(), "a") as file:
        file.write(json.dumps(weights) + "\n")
    if memory is not None and padded(weights) > memory:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return pc.multiply(x, 2)


@udf(data_type=pa.int64(), version="1", batch_by="x", batch_limit=LIMIT)
def by_column(x: pa.Int64Array, log: pa.StringArray) -> pa.Array:
    return do(x, log)


@udf(data_type=pa.int64(), version="1", batch_by=lambda x, log: x, batch_limit=LIMIT, on_error="skip")
def in_a_worker(x: pa.Int64Array, log: pa.StringArray) -> pa.Array:
    return do(x, log)


@udf(data_type=pa.int64(), version="1", batch_by="x")
class SmallDevice:
    """A class of which a call of more than `MEMORY` does not fit."""

    def __call__(self, x: pa.Int64Array, log: pa.StringArray) -> pa.Array:
        return do(x, log, MEMORY)


@udf(data_type=pa.int64(), version="1", batch_by="x", batch_limit=LIMIT)
async def without_waiting(x: pa.Int64Array, log: pa.StringArray) -> pa.Array:
    return do(x, log)
