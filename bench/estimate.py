"""How often the cost of a job is in the interval that its plan stated; some of the jobs run on Spark."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import airflow_geneva
from airflow_geneva import udf
from airflow_geneva.engine.job.estimate import Interval
from airflow_geneva.engine.run.estimate import estimate_by_history
from airflow_geneva.engine.udf import UDF
from airflow_geneva.spark.runner import SparkRunner
from bench.udfs import waits

SEED = 20_261_123
SLOTS = 2
ON_SPARK = "history, on a warm session"


@dataclass(frozen=True)
class Shape:
    """A job, and the earlier job that its estimate is based on.

    Args:
        kind: ``scalar``, ``array``, or ``skewed``: one row of ten takes ten times as long.
        per_row: mean seconds of a row.
        before, rows: rows of the earlier job, and of the measured one.
        fragments: fragments of the measured one.
        sampled: estimate from a sample of 20 rows, without an earlier job.
        runner: runner of the earlier job: ``inline``; or ``spark``, which starts Spark for it. The measured job uses
            the runner that its plan expects.
    """

    kind: str
    per_row: float
    before: int
    rows: int
    fragments: int
    batch_size: int | None
    loading: float
    sampled: bool
    runner: str

    def make(self, name: str) -> UDF:
        def seconds(x: int) -> float:
            if self.kind == "skewed":
                return self.per_row * (10 if x % 10 == 0 else 1) / 1.9
            return self.per_row

        loaded: list[bool] = []

        def load() -> None:
            if not loaded:
                loaded.append(True)
                time.sleep(self.loading)

        def one(x: int) -> int:
            load()
            _spend(seconds(x))
            return x

        def many(x: pa.Int64Array) -> pa.Int64Array:
            load()
            _spend(sum(seconds(value) for value in x.to_pylist()))
            return x

        function = many if self.kind == "array" else one
        made = udf(data_type=pa.int64(), name=name, version="1", batch_size=self.batch_size)(function)
        assert isinstance(made, UDF)
        return made


def shapes(count: int, quick: bool, seed: object = SEED) -> Iterator[Shape]:
    """Draw jobs; half of the estimates use an earlier job, half a sample, and a fifth of each half is on Spark."""
    draw = random.Random(seed)  # reproducible, and no secret
    for at in range(count):
        # Spark is chosen for jobs that take at least ten seconds in one process.
        runner, seconds, least = ("spark", 40, -0.4) if at % 5 == 4 and not quick else ("inline", 2.5, -0.7)
        per_row = 10 ** draw.uniform(-4.3, -2)
        most = min(20_000 if runner == "inline" else 400_000, int((0.05 if quick else seconds) / per_row)) + 20
        yield Shape(
            kind=draw.choice(["scalar", "array", "skewed"]),
            per_row=per_row,
            before=int(most * 10 ** draw.uniform(-1, 0)) + 20,
            rows=int(most * 10 ** draw.uniform(least, 0)) + 20,
            fragments=draw.choice([1, 2, 5, 12]),
            batch_size=draw.choice([None, None, 50, 500]),
            loading=draw.choice([0.0, 0.0, 0.3]),
            sampled=at % 2 == 1,
            runner=runner,
        )


def measure(folder: str, jobs: int, quick: bool = False, seed: object = SEED) -> list[dict[str, Any]]:
    """Run the jobs; return the estimated and the actual cost of each."""
    database = airflow_geneva.connect(Path(folder) / "db")
    found = [
        _on_warm_spark(database, f"s{at}", shape) for at, shape in enumerate(shapes(0 if quick else 6, quick, ON_SPARK))
    ]
    for at, shape in enumerate(shapes(jobs, quick, seed)):
        function = shape.make(f"f{at}")
        first = 0 if shape.sampled else shape.before
        numbers = pa.table({"x": pa.array(range(first + shape.rows))})
        table = database.create_table(f"t{at}", numbers.slice(0, first))
        table.add_columns({"y": function})
        if first:
            _run(shape, table.uri, shape.runner)
        size = -(-shape.rows // shape.fragments)
        for start in range(first, first + shape.rows, size):
            table.add(numbers.slice(start, min(size, first + shape.rows - start)))
        plan = table.plan_backfill("y", udf=function, concurrency=SLOTS)
        estimate = plan.estimate(sample=20 if shape.sampled else None)
        seconds, slot_seconds = _run(shape, table.uri, estimate.runner)
        found.append(
            {
                "by": "sample" if shape.sampled else "history",
                "kind": shape.kind,
                "rows": shape.rows,
                "runner": estimate.runner,
                "seconds": _judge(estimate.seconds, seconds),
                "slot_seconds": _judge(estimate.slot_seconds, slot_seconds),
            }
        )
    return found


def _on_warm_spark(database: airflow_geneva.Database, name: str, shape: Shape) -> dict[str, Any]:
    """Run a job after another one on a warm session; the table contains the seconds of each row."""
    per_row = max(shape.per_row, 0.001)

    def some(begin: int, rows: int) -> pa.Table:
        skew = [10 if shape.kind == "skewed" and x % 10 == 0 else 1 for x in range(begin, begin + rows)]
        seconds = [per_row * times / (1.9 if shape.kind == "skewed" else 1) for times in skew]
        return pa.table({"cost": pa.array(seconds, pa.float64())})

    before, rows = min(shape.before, 2_000), min(shape.rows, 2_000)
    table = database.create_table(name, some(0, before), max_rows_per_file=-(-before // 2))
    table.add_columns({"y": waits})
    table.backfill("y", runner="spark", concurrency=SLOTS)
    size = -(-rows // shape.fragments)
    for begin in range(0, rows, size):
        table.add(some(before + begin, min(size, rows - begin)))
    plan = table.plan_backfill("y", concurrency=SLOTS)
    estimate = estimate_by_history(plan, "spark", SparkRunner())
    result = table.backfill("y", runner="spark", concurrency=SLOTS)
    return {
        "by": ON_SPARK,
        "kind": shape.kind,
        "rows": rows,
        "runner": "spark",
        "seconds": _judge(estimate.seconds, sum(result.seconds.values())),
        "slot_seconds": _judge(estimate.slot_seconds, _slot_seconds(table, result.job_id)),
    }


def _run(shape: Shape, uri: str, runner: str) -> tuple[float, float]:
    """Run a job, in a separate process on Spark; return its seconds and slot-seconds."""
    if runner == "inline":
        return _backfill(shape, uri, runner)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_backfill, shape, uri, runner).result()


def _backfill(shape: Shape, uri: str, runner: str) -> tuple[float, float]:
    folder, _, name = uri.rpartition("/")
    table = airflow_geneva.connect(folder).open_table(name.removesuffix(".lance"))
    # A newly created function loads again.
    function = shape.make("f" + table.name.removeprefix("t"))
    result = table.backfill("y", udf=function, runner=runner, concurrency=SLOTS)
    return sum(result.seconds.values()), _slot_seconds(table, result.job_id)


def _judge(stated: Interval | None, took: float) -> dict[str, Any]:
    assert stated is not None
    return {"low": stated.low, "high": stated.high, "took": took, "inside": stated.covers(took)}


def _slot_seconds(table: airflow_geneva.Table, job_id: str) -> float:
    from airflow_geneva.engine.job.folder import RECORD, JobFolder
    from airflow_geneva.engine.job.speed import UdfSpeed

    folder = JobFolder.of(table.location.checkpoints, job_id)
    return UdfSpeed.from_json(((folder.read(RECORD) or {}).get("ended") or {}).get("speed")).seconds


def _spend(seconds: float) -> None:
    """Sleep, or busy-wait if the time is too short to sleep."""
    if seconds >= 0.001:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
