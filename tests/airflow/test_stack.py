"""What only a scheduler and its worker processes can show: secrets that stay where they belong, and kills."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import psutil
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer

import airflow_geneva
from airflow_geneva import Database
from airflow_geneva.spark.submit import CREDENTIALS
from tests.support.stack import RUN_SECONDS, START_SECONDS, Stack, start_stack, wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

SECRET = "planted-7f3a91c2d8e64b05"

UDFS = '''
from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa

from airflow_geneva import udf

GATE = Path({gate!r})


@udf(data_type=pa.int64(), version="1")
def length(text: str) -> int:
    return len(text)


@udf(data_type=pa.int64(), version="1")
def waiting(text: str) -> int:
    """Computes rows only once the gate is open; says so by a file when it stands before it."""
    while not GATE.exists():
        GATE.with_name("reached").touch()
        time.sleep(0.1)
    return len(text)
'''

SLOW_MODULE = """
import time
from pathlib import Path

while True:
    Path({gate!r}).with_name("importing").touch()
    time.sleep(0.1)
"""

DAGS = """
from __future__ import annotations

from airflow.sdk import DAG, Param

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG("remote", schedule=None, params={{"where": Param(None, type=["null", "string"])}}):
    BackfillTaskGroup(
        table="docs",
        column="n",
        where="{{{{ params.where or '' }}}}",
        lance_conn_id="lance_remote",
        spark_submit={{"env_vars": {{"TOKEN": "{secret}-token"}}}},
    )

with DAG("local", schedule=None):
    BackfillTaskGroup(table="docs", column="n", udf="stack_udfs:waiting", lance_conn_id="lance_local", concurrency=2)

with DAG("planning", schedule=None):
    BackfillTaskGroup(table="docs", column="n", udf="slow_udfs:waiting", lance_conn_id="lance_local")
"""


@dataclass
class Site:
    stack: Stack
    remote: Database
    local: Database
    gate: Path
    s3: Any


@pytest.fixture(scope="module")
def site(java_home: str, new_airflow_db: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("stack")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    options = {
        "aws_access_key_id": "AKIAPLANTED0000000000",
        "aws_secret_access_key": SECRET,
        "aws_region": "us-east-1",
        "aws_endpoint": endpoint,
        "allow_http": "true",
    }
    s3 = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="x", aws_secret_access_key="x", region_name="us-east-1"
    )
    s3.create_bucket(Bucket="lake")
    gate = root / "gate"
    udfs = UDFS.format(gate=str(gate))
    files = {
        "stack_udfs.py": udfs,
        "slow_udfs.py": SLOW_MODULE.format(gate=str(gate)),
        "stack_dags.py": DAGS.format(secret=SECRET),
        ".airflowignore": "udfs",
    }
    local = airflow_geneva.connect(root / "db")
    remote = airflow_geneva.connect("s3://lake/db", options)
    connections = {
        "AIRFLOW_CONN_LANCE_LOCAL": json.dumps({"conn_type": "lance", "host": str(root / "db")}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
    }
    with start_stack(root / "home", new_airflow_db, files, connections) as stack:
        # In the database and not in the environment, so that no process of Airflow's has it there.
        extra = json.dumps({"storage_options": options})
        body = {"connection_id": "lance_remote", "conn_type": "lance", "host": "s3://lake/db", "extra": extra}
        stack.call("POST", "/connections", body)
        define_columns(root, files["stack_udfs.py"], [local, remote])
        yield Site(stack, remote, local, gate, s3)
    server.stop()


def define_columns(root: Path, udfs: str, databases: list[Database]) -> None:
    module = root / "udfs" / "stack_udfs.py"
    module.parent.mkdir()
    module.write_text(udfs)
    sys.path.insert(0, str(module.parent))
    import stack_udfs

    for database, udf in zip(databases, (stack_udfs.waiting, stack_udfs.length), strict=True):
        table = database.create_table("docs", pa.table({"text": [f"t{row}" for row in range(40)]}))
        table.add_columns({"n": udf})


@dataclass
class Watch:
    """Looks at every process below Airflow, again and again."""

    stack: Stack
    command_lines: set[str] = field(default_factory=set)
    drivers: dict[int, dict[str, str]] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)

    def look(self) -> None:
        for process in self.stack.below():
            line = command_line(process)
            try:
                environment = process.environ()
            except (psutil.Error, OSError):
                continue
            self.command_lines.add(line)
            if CREDENTIALS in environment:
                self.drivers[process.pid] = environment
            self.leaks += [
                f"{name} of {line}"
                for name, value in environment.items()
                if SECRET in value and name not in (CREDENTIALS, "TOKEN")
            ]


def test_a_secret_stays_in_the_drivers_environment(site: Site) -> None:
    watch = Watch(site.stack)
    run = site.stack.trigger("remote", {"where": "text LIKE 't%'"})
    assert site.stack.finish("remote", run, watch.look) == "success", site.stack.logs()
    assert site.remote.open_table("docs").count_rows("n IS NOT NULL") == 40

    assert any("spark-submit" in line or "SparkSubmit" in line for line in watch.command_lines)
    assert not [line for line in watch.command_lines if SECRET in line]
    assert watch.leaks == []
    assert watch.drivers, "the driver was never seen"
    for environment in watch.drivers.values():
        assert [name for name in environment if "AIRFLOW" in name] == [CREDENTIALS]
        assert site.stack.environment["AIRFLOW__API_AUTH__JWT_SECRET"] not in environment.values()

    assert "backfill.shards.apply" in site.stack.logs()
    assert SECRET not in site.stack.logs()
    base = f"/dags/remote/dagRuns/{run}"
    told: list[Any] = []
    for task in site.stack.tasks("remote", run):
        where = f"{base}/taskInstances/{task['task_id']}"
        # Airflow 3.1 leaves the rendered fields out of the list of all tasks.
        told.append(site.stack.call("GET", f"{where}/{task['map_index']}"))
        entries = site.stack.call("GET", f"{where}/xcomEntries?map_index_filter={task['map_index']}")
        for entry in entries["xcom_entries"]:
            index = task["map_index"]
            told.append(site.stack.call("GET", f"{where}/xcomEntries/{entry['key']}?map_index={index}"))
    told.append(site.stack.call("GET", "/assets/events"))
    told.append(site.stack.call("GET", "/dagSources/remote"))
    assert "plan_uri" in json.dumps(told)
    assert '"shard":' in json.dumps([answer.get("rendered_fields") for answer in told])
    assert SECRET not in json.dumps(told[:-1])

    objects = site.s3.list_objects_v2(Bucket="lake")["Contents"]
    names = [found["Key"] for found in objects]
    assert any("/plan-" in name for name in names)
    for name in names:
        assert SECRET.encode() not in site.s3.get_object(Bucket="lake", Key=name)["Body"].read(), name
    # The newest commits lie beside the database.
    database = site.stack.database
    stored = b"".join(path.read_bytes() for path in database.parent.glob(f"{database.name}*"))
    assert b"lance_remote" in stored
    # The DAG's own source and the spelled-out env_vars of this test are the author's; the key is nowhere.
    assert SECRET.encode() not in stored.replace(f"{SECRET}-token".encode(), b"")


def test_an_apply_that_is_marked_as_failed_ends_spark_and_leaves_nothing(site: Site) -> None:
    run = site.stack.trigger("local")
    reached = site.gate.with_name("reached")
    wait_for(reached.exists, RUN_SECONDS, "the UDF")
    spark = [process for process in site.stack.below() if "SparkSubmit" in command_line(process)]
    [family] = [[process, *process.children(recursive=True)] for process in spark]
    assert scratch(site.stack)
    base = f"/dags/local/dagRuns/{run}/taskInstances/backfill.shards.apply"
    site.stack.call("PATCH", f"{base}/0", {"new_state": "failed"})
    _, alive = psutil.wait_procs(family, timeout=START_SECONDS)
    assert not alive
    wait_for(lambda: not scratch(site.stack), START_SECONDS, "an empty scratch folder")
    assert site.stack.finish("local", run) == "failed"
    assert site.local.open_table("docs").count_rows("n IS NOT NULL") == 0

    site.gate.touch()
    body = {
        "dry_run": False,
        "dag_run_id": run,
        "task_ids": ["backfill.shards.apply"],
        "include_downstream": True,
        "only_failed": False,
    }
    site.stack.call("POST", "/dags/local/clearTaskInstances", body)
    assert site.stack.finish("local", run) == "success", site.stack.logs()
    assert site.local.open_table("docs").count_rows("n IS NOT NULL") == 40
    site.gate.unlink()


def test_a_plan_that_is_marked_as_failed_ends_at_once(site: Site) -> None:
    reached = site.gate.with_name("importing")
    jobs = site.local.location("docs").checkpoints.list_folder("jobs")[0]
    run = site.stack.trigger("planning")
    wait_for(reached.exists, RUN_SECONDS, "the plan task")
    site.stack.call("PATCH", f"/dags/planning/dagRuns/{run}/taskInstances/backfill.plan", {"new_state": "failed"})
    assert site.stack.finish("planning", run) == "failed"

    def quiet() -> bool:
        reached.unlink(missing_ok=True)
        return not wait_briefly(reached)

    wait_for(quiet, START_SECONDS, "the end of the plan task")
    assert site.local.location("docs").checkpoints.list_folder("jobs")[0] == jobs


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def wait_briefly(path: Path) -> bool:
    time.sleep(1)
    return path.exists()


def scratch(stack: Stack) -> list[Path]:
    return list((stack.home / "tmp").glob("airflow-geneva-2*"))
