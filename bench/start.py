"""A cold spark-submit and a running Spark Connect server: the seconds of each part up to the first call."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

import airflow_geneva
from airflow_geneva.engine import api
from airflow_geneva.engine.job.spark_start import SparkStart
from airflow_geneva.engine.plan.saved_plan import SavedPlan
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.spark.code import package_zip, planned_archives, send_archives
from airflow_geneva.spark.connect import open_try
from airflow_geneva.spark.runner import SparkRunner
from airflow_geneva.spark.server import run_server
from airflow_geneva.spark.submit import (
    APPLICATION,
    SparkMaster,
    driver_environment,
    find_spark_submit,
    session_settings,
)
from bench import udfs
from tests.support.stack import free_port

_ROWS = 1_000
_MASTER = "local[2]"
_IMPORT = """
import time, pyarrow, lance
began = time.perf_counter()
import airflow_geneva.spark.tasks as task
print(time.perf_counter() - began, task.__file__)
"""


def measure(folder: str, submissions: int, imports: int) -> dict[str, Any]:
    """Submit a new job some times, each time also to a running server; and import what a worker's task needs."""
    place = Path(folder)
    rows = pa.table({"x": pa.array(range(_ROWS))})
    table = airflow_geneva.connect(place).create_table("docs", rows)
    starts = [_submit(table, f"y{turn}", place) for turn in range(submissions)]
    warm = _warm(table, place, submissions + 1) if submissions else []
    (archive := place / "package.zip").write_bytes(package_zip())
    found = {"starts": [asdict(start) for start in starts], "warm": [asdict(start) for start in warm]}
    return {**found, "imports": [_import(archive) for _ in range(imports)]}


def _submit(table: airflow_geneva.Table, column: str, place: Path) -> SparkStart:
    job = _begin(table, column)
    watch, files = api.Stopwatch(), list[str]()
    for name, data in planned_archives(job.spec, job.folder.storage).items():
        (place / name).write_bytes(data)
        files.append(str(place / name))
    watch.lap("code")
    environment = driver_environment(os.environ, SparkMaster.parse(_MASTER, "The bench"), {}, {})
    command = ["spark-submit", "--master", _MASTER, "--py-files", ",".join(files)]
    for name, value in session_settings(driver_here=True).items():
        command += ["--conf", f"{name}={value}"]
    command += [str(APPLICATION), "--job", job.folder.storage.root, "--fingerprint", job.saved.fingerprint]
    command += ["--shard", "0", "--code-seconds", str(watch.seconds["code"]), "--submitted", str(time.time())]
    environment = find_spark_submit(command[0], environment)
    subprocess.run(command, check=True, env=environment, cwd=place, stderr=subprocess.DEVNULL)
    return _end(table, column, job)


def _warm(table: airflow_geneva.Table, place: Path, jobs: int) -> list[SparkStart]:
    (server := place / "server").mkdir()
    with (server / "log").open("w") as log, run_server(server, port := free_port(), _MASTER, log=log):
        return [_connect(table, f"w{turn}", f"sc://127.0.0.1:{port}") for turn in range(jobs)]


def _connect(table: airflow_geneva.Table, column: str, url: str) -> SparkStart:
    """Compute a new job on a server in a new process, as a task of Airflow does."""
    job = _begin(table, column)
    client = multiprocessing.get_context("spawn").Process(target=_compute, args=(table.location, job.saved, url))
    client.start()
    client.join()
    if client.exitcode:
        raise SystemExit("Case start: a job on the server failed.")
    return _end(table, column, job)


def _compute(location: TableLocation, saved: SavedPlan, url: str) -> None:
    job, watch = api.PlannedJob(location, saved), api.Stopwatch()
    with open_try(url, saved.fingerprint, 1) as session:
        watch.lap("session")
        send_archives(session, planned_archives(job.spec, job.folder.storage))
        watch.lap("code")
        job.apply_on(SparkRunner(session, watch), job.load_shard(0))


def _begin(table: airflow_geneva.Table, column: str) -> api.PlannedJob:
    table.add_columns({column: (udfs.double, ["x"])})
    job = api.PlannedJob(table.location, record_plan(table.plan_backfill(column), table.location, store_code=True))
    job.begin(job.load_shard(0))
    return job


def _end(table: airflow_geneva.Table, column: str, job: api.PlannedJob) -> SparkStart:
    job.finish([job.commit(job.load_shard(0))])
    if table.to_arrow()[column].to_pylist() != [2 * x for x in range(_ROWS)]:
        raise SystemExit("Case start: a value is wrong.")
    [status] = airflow_geneva.connect(Path(table.uri).parent).job(job.spec.job_id).shards
    return status.spark_start


def _import(archive: Path) -> float:
    command = [sys.executable, "-c", _IMPORT]
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    # The working directory precedes PYTHONPATH, and is perhaps a checkout.
    done = subprocess.run(command, check=True, env=environment, cwd=archive.parent, capture_output=True, text=True)
    seconds, file = done.stdout.split()
    if not file.startswith(str(archive)):
        raise SystemExit(f"Case start: {file} was imported, and not the package in {archive}.")
    return float(seconds)
