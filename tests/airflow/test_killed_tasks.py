"""SIGKILL of the process that runs a task, at every task of a backfill: Airflow tries again, and nobody notices."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva import Database
from tests.airflow.stack import RUN_SECONDS, START_SECONDS, Stack, start_stack, wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow, pytest.mark.crash]

ROWS = 40

UDFS = '''
from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa

from airflow_geneva import udf

FOLDER = Path({folder!r})


def note(text):
    with (FOLDER / "calls").open("a") as calls:
        calls.write(text + "\\n")


@udf(data_type=pa.int64(), version="1")
def waiting(text: str) -> int:
    """Stands before the gate at the last row of the first fragment, until it is opened."""
    note(text)
    if text == "t19":
        (FOLDER / f"reached-{{os.getppid()}}").touch()
        while not (FOLDER / "open").exists():
            time.sleep(0.05)
    return len(text)
'''

DAGS = """
from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from airflow_geneva import faults
from airflow_geneva.task_groups import BackfillTaskGroup

FOLDER = Path({folder!r})


def die_once(context):
    '''Make this very process die at the point that lies ready for its task.'''
    order = FOLDER / context["ti"].task_id
    if order.exists():
        faults._ARMED = order.read_text()
        order.unlink()


again = {{"retries": 3, "retry_delay": timedelta(seconds=1), "on_execute_callback": die_once}}

with DAG("killed", schedule=None, default_args=again):
    BackfillTaskGroup(
        table="docs", column="n", udf="killed_udfs:waiting", lance_conn_id="lance_local", concurrency=1,
        checkpoint_size=5, batch_size=5, commit_granularity=1,
    )
"""


@dataclass
class Site:
    stack: Stack
    database: Database
    folder: Path

    def at_the_gate(self) -> list[Path]:
        """One for each process that ever stood there."""
        return list(self.folder.glob("reached-*"))

    def die_at(self, **points: str) -> None:
        for task, point in points.items():
            name = f"backfill.shards.{task}" if task in ("apply", "commit") else f"backfill.{task}"
            (self.folder / name).write_text(point)


@pytest.fixture
def site(java_home: str, new_airflow_db: Path, tmp_path: Path) -> Iterator[Site]:
    root = tmp_path
    folder = root / "orders"
    folder.mkdir()
    udfs = UDFS.format(folder=str(folder))
    files = {"killed_udfs.py": udfs, "killed_dags.py": DAGS.format(folder=str(folder)), ".airflowignore": "udfs"}
    connections = {
        "AIRFLOW_CONN_LANCE_LOCAL": json.dumps({"conn_type": "lance", "host": str(root / "db")}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[1]"}),
    }
    module = root / "udfs" / "killed_udfs.py"
    module.parent.mkdir()
    module.write_text(udfs)
    sys.path.insert(0, str(module.parent))
    import killed_udfs

    database = airflow_geneva.connect(root / "db")
    data = pa.table({"text": [f"t{row:02}" for row in range(ROWS)]})
    database.create_table("docs", data, max_rows_per_file=20).add_columns({"n": killed_udfs.waiting})
    with start_stack(root / "home", new_airflow_db, files, connections) as stack:
        yield Site(stack, database, folder)


def test_every_task_is_killed_once_and_the_run_ends_as_if_none_had_been(site: Site) -> None:
    site.die_at(plan="plan.saved", commit="commit.after", finish="finish.end")
    run = site.stack.trigger("killed")
    wait_for(lambda: bool(site.at_the_gate()), RUN_SECONDS, "the UDF")
    (driver,) = drivers(site)
    task = driver.parent()
    assert task is not None
    task.kill()
    # The driver outlives its task, and goes on beside the retry.
    wait_for(lambda: len(site.at_the_gate()) == 2, RUN_SECONDS, "the UDF of the retry")
    assert driver.is_running()
    (site.folder / "open").touch()
    assert site.stack.finish("killed", run) == "success"
    tries = {task["task_id"].rsplit(".", 1)[-1]: task["try_number"] for task in site.stack.tasks("killed", run)}
    assert tries == {"plan": 2, "apply": 2, "commit": 2, "finish": 2}
    assert psutil.wait_procs([driver], timeout=START_SECONDS)[1] == []

    table = site.database.open_table("docs")
    assert table.count_rows("n = 3") == ROWS
    (job,) = site.database.jobs()
    assert (job.state, job.rows_left, job.rows_computed + job.rows_reused) == ("DONE", 0, ROWS)
    assert len(job.commits) == 2
    # The retry took over what was kept; what stood at the gate, and what came after it, both may have run.
    calls = Counter((site.folder / "calls").read_text().split())
    assert len(calls) == ROWS
    assert all(calls[f"t{row:02}"] == 1 for row in range(15))
    events = site.stack.call("GET", "/assets/events?limit=100")["asset_events"]
    told = [event["extra"] for event in events if event["name"] == "lance_local/docs"]
    assert [(event["to_version"], event["rows_left"]) for event in told] == [(max(job.commits), 0)]


def drivers(site: Site) -> list[psutil.Process]:
    """The spark-submits below Airflow that have not lost their task."""
    return [process for process in site.stack.below() if "SparkSubmit" in command_line(process)]


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""
