"""The requests to the store that a job counts are those that the store sees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from airflow_geneva import Database, connect
from airflow_geneva.engine.counts import StoreRequests
from airflow_geneva.engine.storage.requests import take_requests
from tests.support.counting import double
from tests.support.latency import SlowProxy
from tests.support.object_store import Bucket, numbers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FRAGMENTS = 12


@pytest.fixture
def proxy(endpoint: str) -> Iterator[SlowProxy]:
    with SlowProxy(endpoint, 0.002).running() as running:
        yield running


@pytest.fixture
def far(bucket: Bucket, proxy: SlowProxy, options: dict[str, str]) -> Database:
    """A database with a column and a view to compute, behind the proxy."""
    db = connect(f"{bucket.uri}/db", storage_options={**options, "aws_endpoint": proxy.url})
    table = db.create_table("docs", numbers(*range(FRAGMENTS * 10)), max_rows_per_file=10)
    table.add_columns({"y": double})
    table.query().select({"id": "id", "y": (double, ["x"])}).create_materialized_view(db, "v")
    table.query().group_by("x").agg({"n": "count(*)"}).create_materialized_view(db, "g")
    return db


PROGRAM = """
import json, sys
from dataclasses import asdict
from functools import partial
from airflow_geneva import connect
from airflow_geneva.engine.storage.requests import take_requests

db = connect(sys.argv[1], storage_options=json.loads(sys.argv[2]))
table, view, groups = db.open_table("docs"), db.open_view("v"), db.open_view("g")
refresh, refresh_groups = (partial(one.refresh, runner="inline") for one in (view, groups))
for run in (partial(table.backfill, "y", runner="inline"), refresh, refresh_groups):
    print("READY", flush=True)
    input()
    result = run()
    print(json.dumps([asdict(result.store_requests), asdict(take_requests())]), flush=True)
    assert db.job(result.job_id).store_requests == result.store_requests
    print(result, "END", sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.core
def test_a_job_counts_each_request_of_its_process_until_it_writes_its_end(far: Database, proxy: SlowProxy) -> None:
    command = [sys.executable, "-c", PROGRAM, far.uri, json.dumps(dict(far.options))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for _ in ("column", "view", "view of groups"):
            assert program.stdout.readline() == "READY\n"
            with proxy.counting() as requests:
                print(file=program.stdin, flush=True)
                counted, after = (StoreRequests(**kinds) for kinds in json.loads(program.stdout.readline()))
            told = "\n".join(map(str, requests))
            assert counted + after == requests.by_kind, told
            assert counted.total > FRAGMENTS
            assert after.total <= 8, told  # beside the record of the end
            assert f"  {counted}\n" in list(iter(program.stdout.readline, "END\n"))


@pytest.mark.slow
@pytest.mark.spark
def test_a_job_on_spark_counts_what_its_tasks_request_until_their_last_report(
    far: Database, proxy: SlowProxy, spark: SparkSession
) -> None:
    table = far.open_table("docs")
    with proxy.counting() as requests:
        result = table.backfill("y", runner="spark", concurrency=2, task_size=20)
    counted, seen = result.store_requests + take_requests(), requests.by_kind
    # A worker's last report does not count its own write, and a task that finds nothing to compute reports nothing.
    missed = seen.total - counted.total
    assert abs(missed) <= 0.2 * seen.total, f"{counted} of {seen}:\n" + "\n".join(map(str, requests))
