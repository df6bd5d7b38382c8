"""Load vectors by key: the memory of a load in this process, and the work that a load on Spark repeats after a kill."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import airflow_geneva

WIDTH = 384
FRAGMENTS = 40
FILES = 8
_STEP = 25_000
_EXECUTOR_MB = 1_024
_KINDS = {
    "CoarseGrainedExecutorBackend": "executor", "pyspark.daemon": "python workers", "SparkSubmit": "driver's JVM",
    "bench.load": "driver's Python",
}  # fmt: skip


def vectors(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the values of keys; another key has another vector."""
    wide = np.empty((len(keys), WIDTH), np.float32)
    wide[:] = (keys[:, None] % 4_093 + np.arange(WIDTH)) / 8
    wide[:, 0] = keys // 4_093
    return wide


def make(folder: Path, keys: int) -> None:
    """Create a table of keys, and files with a vector for each, in another order."""
    ids = pa.RecordBatchReader.from_batches(
        pa.schema([("id", pa.int64())]),
        (pa.record_batch([np.arange(at, min(at + _STEP, keys))], ["id"]) for at in range(0, keys, _STEP)),
    )
    uri = str(folder / "docs.lance")
    lance.write_dataset(ids, uri, enable_stable_row_ids=True, max_rows_per_file=-(-keys // FRAGMENTS))
    place = folder / "delivery"
    place.mkdir()
    stride = next(one for one in range(keys // 3 | 1, keys * 2, 2) if np.gcd(one, keys) == 1)
    share = -(-keys // FILES)
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), WIDTH))])
    for number in range(FILES):
        with pq.ParquetWriter(place / f"{number}.parquet", schema, use_dictionary=False) as writer:
            for at in range(number * share, min((number + 1) * share, keys), _STEP):
                some = np.arange(at, min(at + _STEP, (number + 1) * share, keys)) * stride % keys
                flat = pa.array(vectors(some).reshape(-1))
                writer.write_batch(
                    pa.record_batch([pa.array(some), pa.FixedSizeListArray.from_arrays(flat, WIDTH)], schema=schema),
                    row_group_size=_STEP,
                )


def wrong_rows(folder: Path) -> int:
    """Return the number of rows whose vector is not that of their key."""
    table, wrong = lance.dataset(str(folder / "docs.lance")), 0
    for batch in table.to_batches(columns=["id", "vector"], batch_size=_STEP):
        found = batch.column("vector").flatten().to_numpy()
        right = vectors(batch.column("id").to_numpy())
        wrong += batch.num_rows if found.size != right.size else int((found.reshape(right.shape) != right).any(1).sum())
    return wrong


def load(folder: Path, runner: str) -> dict[str, Any]:
    """Load in this process, or on one executor in a process of its own."""
    if runner == "spark":
        _start_executor(folder)
    began = time.perf_counter()
    result = airflow_geneva.connect(folder).open_table("docs").load_columns(
        folder / "delivery", on="id", runner=runner, commit_granularity=4
    )  # fmt: skip
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return {
        "state": result.state, "rows_loaded": result.rows_loaded, "rows_skipped": result.rows_skipped,
        "seconds": round(time.perf_counter() - began, 1), "peak_mb": peak >> 10,
    }  # fmt: skip


def _start_executor(folder: Path) -> None:
    from pyspark.sql import SparkSession

    from airflow_geneva.spark.submit import session_settings

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["SPARK_LOCAL_DIRS"] = str(folder / "spark")
    builder = SparkSession.builder.master(f"local-cluster[1,1,{_EXECUTOR_MB}]").appName("load")
    settings = {**session_settings(driver_here=True), "spark.executor.memory": f"{_EXECUTOR_MB}m"}
    for name, value in settings.items():
        builder = builder.config(name, value)
    builder.config("spark.log.level", "ERROR").getOrCreate()


def written(folder: Path) -> set[str]:
    """Return the names of the table's finished data files."""
    return {path.name for path in (folder / "docs.lance" / "data").glob("*.lance")}


def measure_each(folder: str, keys: int, runners: Sequence[str]) -> list[dict[str, Any]]:
    """Load a vector for each key of a new table with each runner.

    Raises:
        SystemExit: a row has another vector than that of its key.
    """
    found = []
    for runner in runners:
        place = Path(folder) / runner
        place.mkdir(parents=True)
        make(place, keys)
        found.append({"runner": runner, "keys": keys} | measure(place, runner))
        shutil.rmtree(place)
        if found[-1]["wrong"] or found[-1]["rows_loaded"] != keys:
            raise SystemExit(f"Case load on {runner}: {found[-1]}")
    return found


def measure(folder: Path, runner: str) -> dict[str, Any]:
    """Run a load in a process of its own; on Spark, kill all its processes when half of the fragments are staged."""
    command = [sys.executable, "-m", "bench.load", "--folder", str(folder), "--runner", runner]
    before, found = written(folder), dict[str, Any]()
    if runner == "spark":
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(written(folder) - before) < FRAGMENTS // 2:
            time.sleep(0.05)
        found["killed"] = process.poll() is None
        os.killpg(process.pid, signal.SIGKILL) if found["killed"] else None
        process.wait()
        time.sleep(5)  # executors that outlive their driver end by themselves
        found["files_at_kill"] = len(written(folder) - before)
        shutil.rmtree(folder / "spark")
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    peaks = dict[str, int]()
    while process.poll() is None:
        for name, size in memory(process.pid).items():
            peaks[name] = max(peaks.get(name, 0), size)
        time.sleep(0.2)
    assert process.returncode == 0
    assert process.stdout is not None
    found |= json.loads(process.stdout.read().splitlines()[-1]) | {"peaks_mb": peaks}
    return found | {"files_written": len(written(folder) - before), "fragments": FRAGMENTS, "wrong": wrong_rows(folder)}


def memory(session: int) -> dict[str, int]:
    """Return the memory that the processes of a session have now, in MiB: of each kind, and of all together."""
    found = {"all": 0}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(") ")[2].split()[3]) != session:
                continue
            command = (folder / "cmdline").read_text()
            size = int((folder / "smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) >> 10
        except (OSError, IndexError):  # it has ended
            continue
        kind = next((kind for word, kind in _KINDS.items() if word in command), "other")
        found[kind] = found.get(kind, 0) + size
        found["all"] += size
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runner", required=True)
    given = parser.parse_args()
    print(json.dumps(load(given.folder, given.runner)))
