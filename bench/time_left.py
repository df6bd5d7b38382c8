"""Is the remaining time that a running job reports correct? Runs of many shapes, checked at half of their duration."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva import Table, connect
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.status import job_ids, read_job
from airflow_geneva.engine.plan.request import BackfillRequest, SizingOptions, plan_request
from airflow_geneva.engine.run.estimate import estimate_by_history
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.spark.submit import APPLICATION
from bench.udfs import WaitsAfterLoading, waits, waits_or_fails

_LOOK_SECONDS = 0.2
_ROWS, _FRAGMENTS = 240, 6
_UDFS = {"plain": waits, "loading": WaitsAfterLoading, "failing": waits_or_fails}


@dataclass(frozen=True)
class Shape:
    """The distribution of a job's cost over its rows and shards.

    Args:
        skew: how the cost of a row changes along the table: ``even``, ``rising``, ``falling`` or ``heavy`` (a few rows
            have most of the cost).
        udf: ``plain``, ``loading`` (a model first) or ``failing`` (a fifth of the rows).
        runner: ``inline`` or ``spark``, which starts Spark for each shard.
        history: whether an earlier job ran the same code.
    """

    skew: str
    udf: str = "plain"
    runner: str = "inline"
    shards: int = 1
    history: bool = False

    def __str__(self) -> str:
        shards = f", {self.shards} shards" if self.shards > 1 else ""
        history = ", after another job" if self.history else ""
        return f"{self.skew} costs, {self.udf}, {self.runner}{shards}{history}"


SHAPES = (
    *(Shape(skew, udf) for skew, udf in (("even", "plain"), ("rising", "plain"), ("falling", "plain"))),
    *(Shape("heavy", udf) for udf in ("plain", "failing")),
    *(Shape("even", udf) for udf in ("loading", "failing")),
    Shape("even", "loading", "spark"),
    Shape("heavy", "failing", "spark", 3),
    Shape("heavy", "plain", "spark", 1, history=True),
)


def measure(folder: str, seconds: float, quick: bool) -> dict[str, Any]:
    """Run each shape with rows that take `seconds` in total; return reported and actual time left at half time.

    Rows only wait, so inline runs and Spark runs can overlap.
    """
    shapes = SHAPES[:8:7] if quick else SHAPES  # one of each runner

    def run(runner: str) -> dict[Shape, dict[str, Any]]:
        return {shape: _measured(shape, Path(folder), seconds) for shape in shapes if shape.runner == runner}

    with ThreadPoolExecutor() as pool:
        found = {shape: one for runs in pool.map(run, ("inline", "spark")) for shape, one in runs.items()}
    return {"runs": [found[shape] for shape in shapes], "seconds": seconds}


def _measured(shape: Shape, folder: Path, seconds: float) -> dict[str, Any]:
    home = folder / str(SHAPES.index(shape))
    table = connect(home).create_table("docs", _rows(shape.skew, seconds), max_rows_per_file=_ROWS // _FRAGMENTS)
    table.add_columns({"y": _UDFS[shape.udf]})
    if shape.history:
        _run(table, shape)
        table.add(_rows(shape.skew, seconds))
    took, said, known = _watched(table, partial(_run, table, shape))
    shutil.rmtree(home)
    return {"shape": str(shape), "took": took, "said": said, "known": known, "left": took / 2}


def _rows(skew: str, seconds: float) -> pa.Table:
    at, heavy = np.linspace(0.0, 1.0, _ROWS), np.random.default_rng(0).pareto(1.5, _ROWS) + 0.1
    costs = {"even": np.ones(_ROWS), "rising": 0.5 + at, "falling": 1.5 - at, "heavy": heavy}[skew]
    return pa.table({"cost": costs * seconds / costs.sum(), "id": range(_ROWS)})


def _run(table: Table, shape: Shape) -> None:
    """Run a backfill as a notebook does, or as the tasks of Airflow do."""
    sizing: SizingOptions = {"concurrency": 2, "batch_size": 5, "shard_size": _FRAGMENTS // shape.shards}
    if shape.runner == "inline":
        table.backfill("y", udf=_UDFS[shape.udf], runner="inline", batch_size=5)
        return
    request = BackfillRequest("y", sizing=sizing)
    plan = plan_request(table.location, request, _UDFS[shape.udf], None)
    about = {"expected": estimate_by_history(plan, "spark").pace()}
    saved = record_plan(plan, table.location, store_code=True, about=about)
    job, results = PlannedJob(table.location, saved), []
    for shard in plan.shards:
        job.begin(shard)
        place = ["--job", job.folder.storage.root, "--fingerprint", saved.fingerprint, "--shard", str(shard.index)]
        command = ["spark-submit", "--master", "local[2]", str(APPLICATION), *place]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        results.append(job.commit(shard))
    job.finish(results)


def _watched(table: Table, run: Callable[[], None]) -> tuple[float, float, bool]:
    """Run and poll the job; return its seconds, its report at half of them, and whether the report was complete."""
    checkpoints = table.location.checkpoints
    before = set(job_ids(checkpoints))
    seen: list[tuple[float, float, bool]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            for name in set(job_ids(checkpoints)) - before:
                job = read_job(JobFolder.of(checkpoints, name))
                if job is not None and (left := job.time_left) is not None:
                    seen.append((time.monotonic() - began, left.seconds, not left.unknown))

    began = time.monotonic()
    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    run()
    took = time.monotonic() - began
    ended.set()
    watcher.join()
    _, said, known = min(seen, key=lambda look: abs(look[0] - took / 2))
    return took, said, known
