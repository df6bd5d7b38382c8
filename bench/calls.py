"""Concurrent calls that wait for a service, compared with a plain asyncio script that stores nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import airflow_geneva
from airflow_geneva import UDF, udf

_SECONDS, _IN_FLIGHT, _SLOTS, _FRAGMENTS = 0.1, 100, 2, 4


async def call(x: int) -> int:
    await asyncio.sleep(_SECONDS)
    return 2 * x


def _waiting(in_flight: int) -> UDF:
    return udf(data_type=pa.int64(), version="1", name="waiting", max_in_flight=in_flight)(call)


def measure(folder: str, counts: Sequence[int], runners: Sequence[str]) -> list[dict[str, Any]]:
    """Return the seconds of these numbers of calls in a script, inline, and in both slots of a warm Spark session."""
    made: dict[str, Callable[[Path, int], float]] = {"script": _script}
    for runner in runners:
        made[runner] = lambda where, count, runner=runner: _job(where, count, runner)  # type: ignore[misc]
        made[runner](Path(folder) / f"warm_{runner}", 10)
    return [
        {"calls": count, **{side: take(Path(folder) / f"{side}_{count}", count) for side, take in made.items()}}
        for count in counts
    ]


def _script(_folder: Path, count: int) -> float:
    async def run() -> list[int]:
        gate = asyncio.Semaphore(_IN_FLIGHT)

        async def one(x: int) -> int:
            async with gate:
                return await call(x)

        return await asyncio.gather(*map(one, range(count)))

    began = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - began


def _job(folder: Path, count: int, runner: str) -> float:
    waiting = _waiting(_IN_FLIGHT if runner == "inline" else _IN_FLIGHT // _SLOTS)
    folder.mkdir(parents=True)
    rows = pa.table({"x": pa.array(range(count), pa.int64())})
    table = airflow_geneva.connect(folder).create_table("docs", rows, max_rows_per_file=-(-count // _FRAGMENTS))
    table.add_columns({"y": waiting})
    began = time.perf_counter()
    result = table.backfill("y", udf=waiting, runner=runner, concurrency=_SLOTS)
    seconds = time.perf_counter() - began
    assert result.rows_computed == count
    return seconds
