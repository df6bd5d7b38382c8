"""The UDFs of the kill harness: every input is unique to a row and a change of it, so that a trace tells which ran."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import UDF, RateLimit, udf
from tests.support.counting import TRACE, leave_trace


def is_bad(x: int | None) -> bool:
    """Whether the UDF fails on an input, when it is told to fail at all."""
    return x is not None and x % 13 == 5


def value_of(x: int | None, version: str = "1", picky: bool = False) -> int | None:
    """What a version of the UDF computes; NULL where it fails, and of NULL."""
    return None if x is None or (picky and is_bad(x)) else 10 * x + int(version)


@udf(data_type=pa.int64(), name="valued", version="1")
def valued(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    return pa.array([value_of(one) for one in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), name="valued", version="2")
def valued_anew(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    return pa.array([value_of(one, "2") for one in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), name="valued", version="1", deterministic=True, dedup=True)
def valued_once(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    return pa.array([value_of(one) for one in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), name="valued", version="1", input_columns=["s"])
def valued_nested(s: pa.StructArray) -> pa.Int64Array:
    """Of the field ``v``, where the struct has one by then."""
    x = s.field("v") if s.type.get_field_index("v") >= 0 else pa.nulls(len(s), pa.int64())
    leave_trace(x)
    return pa.array([value_of(one) for one in x.to_pylist()], pa.int64())


@udf(data_type=pa.struct({"y": pa.int64(), "z": pa.int64()}), name="valued", version="1")
def valued_twice(x: pa.Int64Array) -> pa.StructArray:
    """As ``valued``, and its negative."""
    y = valued.function(x)
    return pa.StructArray.from_arrays([y, pc.negate(y)], ["y", "z"])


MANY = RateLimit("histories", requests_per_minute=600_000)


@udf(data_type=pa.int64(), name="valued", version="1", on_error="skip", limit=MANY)
def picky(x: int) -> int:
    leave_trace([x])
    if is_bad(x):
        raise ValueError(f"cannot do {x}")
    return value_of(x) or 0


@udf(data_type=pa.int64(), version="1")
def negative(x: pa.Int64Array) -> pa.Int64Array:
    """For another column; leaves no trace."""
    return pa.array([-one for one in x.to_pylist()], pa.int64())


IN_FLIGHT = 3
"""Calls that `picky_async` has in flight."""


@udf(data_type=pa.int64(), name="valued", version="1", on_error="skip", max_in_flight=IN_FLIGHT, limit=MANY)
async def picky_async(x: int) -> int:
    """As ``picky``; neighbours end in another order than they begin."""
    leave_trace([x])
    await asyncio.sleep(0.001 * (x % IN_FLIGHT))
    if is_bad(x):
        raise ValueError(f"cannot do {x}")
    return value_of(x) or 0


@udf(
    data_type=pa.int64(), name="valued", version="1", on_error="skip", input_columns=["x"],
    poll_interval=0.001, visible_after=0.01,
)  # fmt: skip
class PickyLater:
    """As ``picky``, by a service whose batches are files beside the trace."""

    def submit(self, batch: pa.RecordBatch, key: str) -> str:
        place, rows = f"{os.environ[TRACE]}-{key}", batch["x"].to_pylist()
        Path(f"{place}.new").write_text(json.dumps(rows))
        os.rename(f"{place}.new", place)
        leave_trace(rows)
        return place

    def find(self, key: str) -> str | None:
        place = f"{os.environ[TRACE]}-{key}"
        return place if os.path.exists(place) else None

    def poll(self, handle: str) -> bool:
        return True

    def fetch(self, handle: str) -> list[int | Exception]:
        rows = json.loads(Path(handle).read_text())
        return [ValueError(f"cannot do {x}") if is_bad(x) else value_of(x) or 0 for x in rows]


BY_KIND: dict[str, UDF] = {
    "plain": valued,
    "where": valued,
    "skip": picky,
    "async": picky_async,
    "batch": PickyLater,
    "dedup": valued_once,
    "continue": valued_anew,
    "indexed": valued,
    "nested": valued_nested,
    "siblings": valued_twice,
}


GATE = "GENEVA_TEST_GATE"
"""Names a folder: a call that meets the input ``GATE_AT`` says so there, and waits until it is let through."""
GATE_AT = "GENEVA_TEST_GATE_AT"


@udf(data_type=pa.int64(), name="valued", version="1")
def gated(x: pa.Int64Array) -> pa.Int64Array:
    """As ``valued``, except that a process with a gate waits before it."""
    leave_trace(x)
    folder = Path(os.environ[GATE]) if GATE in os.environ else None
    if folder is not None and int(os.environ[GATE_AT]) in x.to_pylist():
        (folder / "reached").touch()
        while not (folder / "open").exists():
            time.sleep(0.01)
    return pa.array([value_of(one) for one in x.to_pylist()], pa.int64())


def many(count: int) -> list[UDF]:
    """A UDF each for many columns, every one with a trace of its own."""
    return [_one_of_many(number) for number in range(count)]


def _one_of_many(number: int) -> UDF:
    def function(x: pa.Int64Array) -> pa.Int64Array:
        leave_trace(x, f".{number}")
        return pa.array([number * 1_000_000 + one for one in x.to_pylist()], pa.int64())

    return udf(data_type=pa.int64(), name=f"many{number}", version="1")(function)


def rated_value(version: str, number: int, x: int) -> int | None:
    """What a version of ``rated`` computes; NULL where it fails."""
    return None if x % 7 == 3 else int(version) * 1_000_000_000 + 1_000 * x + number


def _rate(version: str, id: int, x: int) -> int:
    leave_trace([id])
    found = rated_value(version, id, x)
    if found is None:
        raise ValueError(f"cannot rate {x}")
    return found


@udf(data_type=pa.int64(), name="rated", version="1", on_error="skip")
def rated_1(id: int, x: int) -> int:
    return _rate("1", id, x)


@udf(data_type=pa.int64(), name="rated", version="2", on_error="skip")
def rated_2(id: int, x: int) -> int:
    return _rate("2", id, x)


@udf(data_type=pa.int64(), name="rated", version="3", on_error="skip")
def rated_3(id: int, x: int) -> int:
    return _rate("3", id, x)


RATED: dict[str, UDF] = {"1": rated_1, "2": rated_2, "3": rated_3}


def reported_value(y: int | None) -> int:
    """What ``reported`` makes of another column's value."""
    return -1 if y is None else y + 1


@udf(data_type=pa.int64(), version="1")
def reported(id: pa.Int64Array, y: pa.Int64Array) -> pa.Int64Array:
    leave_trace(id, ".reported")
    return pa.array([reported_value(one) for one in y.to_pylist()], pa.int64())
