"""A cold spark-submit: the seconds of each part up to the first call, and the import of this package on a worker."""

from __future__ import annotations

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
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.spark.code import package_zip, planned_archives
from airflow_geneva.spark.submit import (
    APPLICATION,
    SparkMaster,
    driver_environment,
    find_spark_submit,
    session_settings,
)
from bench import udfs

_ROWS = 1_000
_MASTER = "local[2]"
_IMPORT = """
import time, pyarrow, lance
began = time.perf_counter()
import airflow_geneva.spark.tasks as task
print(time.perf_counter() - began, task.__file__)
"""


def measure(folder: str, submissions: int, imports: int) -> dict[str, Any]:
    """Submit a new job some times, and import what a worker's task needs in some new processes, from the zip."""
    place = Path(folder)
    rows = pa.table({"x": pa.array(range(_ROWS))})
    table = airflow_geneva.connect(place).create_table("docs", rows)
    starts = [_submit(table, f"y{turn}", place) for turn in range(submissions)]
    (archive := place / "package.zip").write_bytes(package_zip())
    return {"starts": [asdict(start) for start in starts], "imports": [_import(archive) for _ in range(imports)]}


def _submit(table: airflow_geneva.Table, column: str, place: Path) -> SparkStart:
    table.add_columns({column: (udfs.double, ["x"])})
    job = api.PlannedJob(table.location, record_plan(table.plan_backfill(column), table.location, store_code=True))
    shard = job.load_shard(0)
    job.begin(shard)
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
    job.finish([job.commit(shard)])
    if table.to_arrow()[column].to_pylist() != [2 * x for x in range(_ROWS)]:
        raise SystemExit("Case start: a value is wrong.")
    [status] = airflow_geneva.connect(place).job(job.spec.job_id).shards
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
