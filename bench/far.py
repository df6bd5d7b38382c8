"""Runs on an object store with slow requests, compared with pylance alone: requests, their depth, and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import connect, udf
from airflow_geneva.database import Database
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from bench import floor, udfs
from bench.cases import TABLE
from tests.support.latency import Requests, SlowProxy
from tests.support.object_store import Bucket, options_of, running_server

_ROWS = 1_000
_IMAGE_BYTES = 20_000
_SECONDS_AN_IMAGE = 0.004
_THREADS = 8

_calls: list[tuple[float, float]] = []


@udf(data_type=pa.int64(), version="1")
def size_of_image(image: bytes) -> int:
    began = time.perf_counter()
    time.sleep(_SECONDS_AN_IMAGE)
    _calls.append((began, time.perf_counter()))
    return len(image)


def measure(
    folder: str, latencies: Sequence[int], fragments: int, image_fragments: int, images: int, staged: int
) -> dict[str, Any]:
    """Run the same jobs at each latency, once; return for each the seconds, requests and depth by run.

    Args:
        latencies: delays of every request in milliseconds.
        fragments: fragments of 1,000 rows.
        image_fragments: fragments of images.
        images: images in a fragment.
        staged: fragments that are committed from their checkpoints.
    """
    Path(folder).mkdir(parents=True)
    with running_server(Path(folder)) as endpoint, SlowProxy(endpoint).running() as proxy:
        # Imports and one-time setup are not part of any run.
        _Store(proxy, 0).runs(2, 1, 1, 2)
        found = {ms: _Store(proxy, ms).runs(fragments, image_fragments, images, staged) for ms in latencies}
    return {
        "at": [{"ms": ms, **runs} for ms, runs in found.items()],
        "fragments": fragments,
        "rows": _ROWS,
        "image_fragments": image_fragments,
        "images": images,
        "staged": staged,
    }


@dataclass
class _Store:
    """A database in a separate bucket, which is filled without the proxy and measured through it."""

    proxy: SlowProxy
    latency_ms: int
    found: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.proxy.seconds = self.latency_ms / 1_000
        self.uri = f"s3://{Bucket(self.proxy.endpoint).name}/db"
        self.near = connect(self.uri, storage_options=options_of(self.proxy.endpoint))

    @property
    def far(self) -> Database:
        return connect(self.uri, storage_options=options_of(self.proxy.url))

    def runs(self, fragments: int, image_fragments: int, images: int, staged: int) -> dict[str, Any]:
        self._numbers(fragments)
        self._staged(staged)
        return {"runs": self.found, "busy": self._images(image_fragments, images)}

    def _numbers(self, fragments: int) -> None:
        x = pa.array(range(fragments * _ROWS))
        table = self.near.create_table(TABLE, pa.table({"x": x}), max_rows_per_file=_ROWS)
        table.add_columns({"y": (udfs.double, ["x"])})
        table.query().select({"x": "x", "y": (udfs.double, ["x"])}).create_materialized_view(self.near, "view")
        floor.add_column(table.uri, "floor", udfs.double, options_of(self.proxy.endpoint))
        with self._measured("pylance alone"):
            floor.fill_column(
                table.uri, "x", "floor", udfs.double, options=options_of(self.proxy.url), threads=_THREADS
            )
        self._both("first")
        self._both("nothing to do")
        table.add(pa.table({"x": pa.array([-1])}))
        self._both("one new row")
        column, view = self.near.open_table(TABLE).to_arrow(), self.near.open_view("view").to_arrow()
        if not all(rows["y"].equals(pc.multiply(rows["x"], 2)) for rows in (column, view)):
            raise SystemExit("Case far: a value is wrong.")

    def _both(self, name: str) -> None:
        with self._measured(f"column, {name}"):
            self.far.open_table(TABLE).backfill("y", udf=udfs.double, runner="inline")
        with self._measured(f"view, {name}"):
            self.far.open_view("view").refresh(runner="inline")

    def _staged(self, fragments: int) -> None:
        """Stage fragments of one row without the delay, and let another process plan and commit them with it."""
        table = self.near.create_table("staged", pa.table({"x": pa.array(range(fragments))}), max_rows_per_file=1)
        table.add_columns({"y": (udfs.double, ["x"])})
        plan = table.plan_backfill("y", udf=udfs.double, checkpoint_interval=0.0)
        saved = record_plan(plan, table.location)
        for shard in plan.shards:
            PlannedJob(table.location, saved).apply(shard, Udfs({"y": udfs.double}))
        far = self.uri, options_of(self.proxy.url)
        runs = {"plan": (_plan_staged, *far), "commit": (_commit_staged, *far, saved.spec.job_id, saved.fingerprint)}
        # The proxy has this process to itself.
        with ProcessPoolExecutor(1, get_context("spawn")) as another:
            for name, run in runs.items():
                with self.proxy.counting() as requests:
                    seconds, rows = another.submit(*run).result()
                self._add(f"staged fragments, {name}", seconds, requests)
                if rows != fragments:
                    raise SystemExit(f"Case far: {name} found {rows} of {fragments} staged fragments.")

    def _images(self, fragments: int, images: int) -> float:
        """Compute a column of images; return the fraction of the time from its first to its last call the function
        ran."""
        pixels = np.random.default_rng(0)
        rows = pa.table({"image": pa.array([pixels.bytes(_IMAGE_BYTES) for _ in range(fragments * images)])})
        self.near.create_table("images", rows, max_rows_per_file=images).add_columns({"size": size_of_image})
        _calls.clear()
        with self._measured("images, first"):
            self.far.open_table("images").backfill("size", udf=size_of_image, runner="inline")
        if len(_calls) != fragments * images:
            raise SystemExit("Case far: an image was not computed once.")
        return sum(ended - began for began, ended in _calls) / (_calls[-1][1] - _calls[0][0])

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        with self.proxy.counting() as requests:
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began, requests)

    def _add(self, name: str, seconds: float, requests: Requests) -> None:
        self.found[name] = {"seconds": seconds, "requests": len(requests), "depth": requests.depth}


def _plan_staged(uri: str, options: dict[str, str]) -> tuple[float, int]:
    """Plan the column again; return the seconds, and the rows that a run of the plan would not compute."""
    began = time.perf_counter()
    plan = connect(uri, storage_options=options).open_table("staged").plan_backfill("y", udf=udfs.double)
    return time.perf_counter() - began, plan.rows_pending - plan.rows_to_run


def _commit_staged(uri: str, options: dict[str, str], job: str, fingerprint: str) -> tuple[float, int]:
    """Commit the planned shards, as the tasks of a DAG run do; return the seconds, and the rows that became visible."""
    began = time.perf_counter()
    location = connect(uri, storage_options=options).location("staged")
    storage = JobFolder.of(location.checkpoints, job).storage
    saved = load_plan(storage, fingerprint)
    shards = [saved.load_shard(storage, index) for index in range(len(saved.shards))]
    results = [PlannedJob(location, saved).commit(shard) for shard in shards]
    return time.perf_counter() - began, sum(result.rows_computed for result in results)
