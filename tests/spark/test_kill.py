"""Random SIGKILLs of driver, JVM and Python workers, with a delete and a compaction between kill and resume."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.plan.request import BackfillRequest, plan_request
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.spark.submit import APPLICATION
from tests.spark.spark_udfs import seen, slow

KILLS = int(os.environ.get("GENEVA_KILLS", "10" if os.environ.get("GENEVA_SOAK") == "1" else "3"))
ROWS = 1_000 * KILLS
SECONDS_A_ROW = 0.004
INTERVAL = 0.2
SLOTS = 2

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow]


def start(database: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.spark.kill_me", str(database)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )  # fmt: skip


def command_line(process: psutil.Process) -> str:
    """The command line of a process; of one that has ended, nothing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def victims(process: subprocess.Popen[str], what: str) -> list[psutil.Process]:
    """The driver itself, the JVM it started, or the Python workers below the JVM."""
    driver = psutil.Process(process.pid)
    if what == "driver":
        return [driver]
    below = driver.children(recursive=True)
    if what == "jvm":
        return [child for child in below if "java" in child.name()]
    # A daemon starts the workers, and they keep its command line.
    daemons = {child.pid for child in below if "pyspark.daemon" in command_line(child)}
    return [child for child in below if child.ppid() in daemons]


def end(process: subprocess.Popen[str]) -> None:
    """Nothing of a killed run lives on into the next."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.shows("Stop, kill, restart", "kill a driver or a worker of Spark")
def test_whatever_is_killed_whenever_the_result_is_right_and_little_runs_twice(tmp_path: Path) -> None:
    targets = ["driver", "jvm", "worker"]
    chance = random.Random(f"spark-{KILLS}")
    log = str(tmp_path / "log")
    data = pa.table({"x": pa.array(range(ROWS)), "log": pa.array([log] * ROWS)})
    database = airflow_geneva.connect(tmp_path / "db")
    table = database.create_table("numbers", data, max_rows_per_file=500)
    table.add_columns({"y": slow})
    killed = 0
    for attempt in range(KILLS * 3):
        process = start(tmp_path / "db")
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if killed == KILLS:  # by a kill that ended the run
            break
        before = len(seen(log))
        deadline = time.monotonic() + 120
        while len(seen(log)) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(chance.uniform(0.05, 1.0))
        what = targets[attempt % len(targets)]
        hit = [victim for victim in victims(process, what) if victim.is_running()] if process.poll() is None else []
        for victim in hit:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        killed += bool(hit)
        if what == "worker" and hit:
            # Spark starts another worker and the job goes on by itself.
            if killed == KILLS:
                break
            time.sleep(1.0)
        end(process)
        if killed == 1 and hit:
            table.lance.delete("x % 100 = 7")
        elif killed == 2 and hit:
            table.lance.optimize.compact_files(target_rows_per_fragment=1_000)
    assert killed == KILLS
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert out.startswith("done"), out

    values = table.to_arrow()
    assert values.column("y").to_pylist() == [2 * x for x in values.column("x").to_pylist()]
    runs = Counter(seen(log))
    assert set(values.column("x").to_pylist()) <= set(runs)
    again = sum(count - 1 for count in runs.values())
    # A worker's death is followed by the end of the whole run, so that each round may cost two intervals a task.
    step = INTERVAL * 1.5 / SECONDS_A_ROW + 100
    assert again <= 2 * killed * SLOTS * step, f"{again} rows ran twice after {killed} kills"
    print(f"{killed} kills, {len(runs)} rows, {again} ran twice")
    assert table.plan_backfill("y", udf=slow).rows_pending == 0


@pytest.mark.shows("Stop, kill, restart", "end the Python process of a Spark driver by SIGTERM")
def test_the_tasks_of_a_driver_that_is_told_to_end_keep_what_they_computed(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    data = pa.table({"x": pa.array(range(ROWS)), "log": pa.array([log] * ROWS)})
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=500)
    table.add_columns({"y": slow})
    # No checkpoint is due, and the tasks look often.
    sizing = {"concurrency": SLOTS, "checkpoint_interval": 1e6, "max_seconds": 1e6}
    plan = plan_request(table.location, BackfillRequest("y", sizing=sizing), slow, None)
    saved = record_plan(plan, table.location, store_code=True)
    job = JobFolder.of(table.location.checkpoints, plan.spec.job_id).storage.root
    settings = {"spark.master": f"local[{SLOTS}]", "spark.ui.enabled": "false", "spark.log.level": "OFF"}
    asked = " ".join(f"--conf {name}={value}" for name, value in settings.items())
    variables = {
        "PYSPARK_SUBMIT_ARGS": f"{asked} pyspark-shell",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.getcwd(),
    }
    command = [sys.executable, str(APPLICATION), "--job", job, "--fingerprint", saved.fingerprint, "--shard", "0"]
    driver = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, start_new_session=True)
    try:
        while len(seen(log)) < 20:
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.05)
        below = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=120)
        gone, alive = psutil.wait_procs(below, timeout=60)
    finally:
        end(driver)
    assert driver.returncode == 128 + signal.SIGTERM
    assert gone
    assert not alive
    computed = seen(log)
    assert len(computed) == len(set(computed)) < ROWS
    assert table.plan_backfill("y", udf=slow).rows_to_run == ROWS - len(computed)
