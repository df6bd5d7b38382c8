"""A running Airflow with a DAG for each operation of `test_operating`, and the requests of these tests to it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

import airflow_geneva
from airflow_geneva import Database
from tests.support.object_store import KEY, SECRET, Bucket
from tests.support.operating_files import DAGS, ENDLESS, UDFS, where_by_date
from tests.support.stack import RUN_SECONDS, START_SECONDS, Stack, start_stack, wait_for

ROOT = Path(__file__).parents[2]
ROWS, FRAGMENT = 40, 20
GATE = 19  # the row at which the function waits while the gate of its table is closed
KEPT = 15  # rows before it that are in checkpoints at that time
DAYS = [date(2026, 1, day) for day in (1, 2)]
APPLY, COMMIT = "backfill.shards.apply", "backfill.shards.commit"
TABLES = [
    "dates", "days", "twice", "first", "high", "low", "paused", "plan_success", "commit_success", "commit_failed",
    "finish_failed", "finish_success", "timeout", "apply_failed", "plan_failed", "killed", "lost", "ended", "running",
    "host", "plan_away", "apply_away", "commit_away", "finish_away",
]  # fmt: skip

SETTINGS = {
    "AIRFLOW__CORE__PARALLELISM": "24",
    "AIRFLOW__GENEVA__INLINE_BELOW_SECONDS": "0",  # each stage in a task of its own
    # How soon a task notices that it should stop, and how soon Airflow notices that a task has no process.
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "1",
    # As the documentation recommends for outages of the API server.
    "AIRFLOW__WORKERS__EXECUTION_API_RETRIES": "60",
    "AIRFLOW__WORKERS__EXECUTION_API_RETRY_WAIT_MAX": "10",
}


@dataclass
class Site:
    stack: Stack
    database: Database
    folder: Path
    remote: Database
    bucket: Bucket

    # Events that the functions and the tasks wait for.

    def shut(self, table: str) -> None:
        (self.folder / f"{table}.shut").touch()

    def open(self, table: str) -> None:
        (self.folder / f"{table}.shut").unlink()

    def at_the_gate(self, table: str) -> list[int]:
        """Return all processes that have waited at the gate."""
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{table}.reached.*")]

    def reach(self, table: str, processes: int = 1) -> None:
        wait_for(lambda: len(self.at_the_gate(table)) >= processes, RUN_SECONDS, f"the gate of {table}")

    def hold(self, dag_id: str, task_id: str) -> None:
        (self.folder / f"{dag_id}.{task_id}.hold").touch()

    def held(self, dag_id: str, task_id: str) -> psutil.Process:
        """Wait for the process of a task that is held."""
        pattern = f"{dag_id}.{task_id}.held.*"
        wait_for(lambda: any(self.folder.glob(pattern)), RUN_SECONDS, f"{task_id} of {dag_id}")
        [held] = self.folder.glob(pattern)
        return psutil.Process(int(held.suffix[1:]))

    def release(self, dag_id: str, task_id: str) -> None:
        (self.folder / f"{dag_id}.{task_id}.hold").unlink()

    def die_at(self, dag_id: str, **points: str) -> None:
        """Let the process of a task die at a fault point, once."""
        for stage, point in points.items():
            task_id = {"apply": APPLY, "commit": COMMIT}.get(stage, f"backfill.{stage}")
            (self.folder / f"{dag_id}.{task_id}.die").write_text(point)

    def start_scheduler(self) -> None:
        self.stack.start("scheduler")

    def kill_scheduler(self) -> None:
        self.stack.kill("scheduler")
        self.stack.declare_dead("job.latest_heartbeat", "job_type = 'SchedulerJob'")

    def lose(self, dag_id: str, run: str, task_id: str) -> None:
        """Wait until Airflow has noticed that the processes of a task's first attempt were killed."""

        def noticed() -> bool:
            where = "dag_id = ? AND task_id = ? AND try_number = 1 AND state = 'running'"
            # Repeatedly, because the last messages of the processes may still arrive.
            self.stack.declare_dead("task_instance.last_heartbeat_at", where, dag_id, task_id)
            task = self.task(dag_id, run, task_id)
            return task["try_number"] > 1 or task["state"] != "running"

        wait_for(noticed, RUN_SECONDS, f"the loss of {task_id} of {dag_id}")

    def connect_remote(self) -> None:
        """Tell Airflow how to reach the bucket: in its database, so that no process has the key in its environment."""
        extra = json.dumps({"storage_options": dict(self.remote.options)})
        body = {"connection_id": "lance_remote", "conn_type": "lance", "host": self.remote.uri, "extra": extra}
        self.stack.call("POST", "/connections", body)

    # The results.

    def calls(self, table: str) -> Counter[int]:
        trace = self.folder / f"{table}.calls"
        return Counter(int(row) for row in trace.read_text().split()) if trace.exists() else Counter()

    def log(self, dag_id: str) -> str:
        """Return the log of a DAG's tasks."""
        files = (self.stack.home / "logs" / f"dag_id={dag_id}").rglob("*.log")
        return "\n".join(path.read_text(errors="replace") for path in files)

    def visible(self, table: str) -> int:
        """Count the rows with the value of their inputs; fail if a row has another value."""
        rows = self.database.open_table(table).to_arrow()
        known = [
            (text, n) for text, n in zip(rows["text"].to_pylist(), rows["n"].to_pylist(), strict=True) if n is not None
        ]
        assert [n for _, n in known] == [int(text.split("-")[1]) for text, _ in known]
        return len(known)

    def define(self, table: str) -> None:
        import operating_udfs

        self.database.open_table(table).add_columns({"n": operating_udfs.gated})

    def append(self, table: str, rows: Sequence[int]) -> None:
        self.database.open_table(table).add(inputs(table, rows))

    def told(self, table: str) -> list[dict[str, Any]]:
        """Return the events of a table or view, oldest first; check that each starts at the version where the last
        ended."""
        events = self.stack.call("GET", "/assets/events?limit=200&order_by=timestamp")["asset_events"]
        told = [event["extra"] for event in events if event["name"] == f"lance_local/{table}"]
        assert [event["from_version"] for event in told[1:]] == [event["to_version"] for event in told[:-1]]
        return told

    def announced(self, table: str) -> list[dict[str, Any]]:
        """The same, and check that all commits were announced."""
        told = self.told(table)
        commits = [version for job in self.database.jobs(table=table) for version in job.commits]
        assert told[-1]["to_version"] == max(commits)
        assert all(told[0]["from_version"] < version for version in commits)
        return told

    # The operations.

    def mark(self, dag_id: str, run: str, task_id: str, state: str) -> None:
        """Mark a waiting task, and open its gate when its process has ended."""
        process = self.held(dag_id, task_id)
        index = "/0" if ".shards." in task_id else ""
        path = f"/dags/{dag_id}/dagRuns/{run}/taskInstances/{task_id}{index}"
        self.stack.call("PATCH", path, {"new_state": state})
        assert psutil.wait_procs([process], timeout=START_SECONDS)[1] == []
        self.release(dag_id, task_id)

    def clear(self, dag_id: str, run: str, task_id: str) -> None:
        """A task with its downstream."""
        body = {
            "dry_run": False,
            "dag_run_id": run,
            "task_ids": [task_id],
            "include_downstream": True,
            "only_failed": False,
        }
        self.stack.call("POST", f"/dags/{dag_id}/clearTaskInstances", body)

    def clear_run(self, dag_id: str, run: str) -> None:
        self.stack.call("POST", f"/dags/{dag_id}/dagRuns/{run}/clear", {"dry_run": False, "only_failed": False})

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        return list(self.stack.call("GET", f"/dags/{dag_id}/dagRuns?limit=100&order_by=logical_date")["dag_runs"])

    def task(self, dag_id: str, run: str, task_id: str) -> dict[str, Any]:
        [found] = [task for task in self.stack.tasks(dag_id, run) if task["task_id"] == task_id]
        return found

    def wait_for_state(self, dag_id: str, run: str, task_id: str, state: str) -> None:
        wait_for(lambda: self.task(dag_id, run, task_id)["state"] == state, RUN_SECONDS, f"{task_id} {state}")

    def ends(self, dag_id: str, run: str, state: str) -> None:
        ended = ("success", "failed")
        wait_for(lambda: self.stack.run_state(dag_id, run) in ended, RUN_SECONDS, f"the end of {dag_id}")
        assert self.stack.run_state(dag_id, run) == state, self.stack.logs()

    def succeeds(self, dag_id: str, run: str) -> None:
        self.ends(dag_id, run, "success")

    def fails(self, dag_id: str, run: str) -> None:
        self.ends(dag_id, run, "failed")


def inputs(table: str, rows: Sequence[int]) -> pa.Table:
    texts = [f"{table}-{row:02}" for row in rows]
    return pa.table({"text": texts, "day": [DAYS[row % len(DAYS)] for row in rows]})


@contextmanager
def open_site(root: Path, new_database: Path, endpoint: str) -> Iterator[Site]:
    """Start an Airflow with a table of two fragments for every DAG, or for every group of one; without a scheduler.

    Args:
        endpoint: an S3-compatible server, for the table of the DAG ``remote``.
    """
    folder = root / "orders"
    folder.mkdir()
    udfs = UDFS.format(folder=str(folder), gate=GATE)
    files = {
        "operating_udfs.py": udfs,
        "endless_udfs.py": ENDLESS.format(folder=str(folder)),
        "operating_dags.py": DAGS.format(folder=str(folder), where=where_by_date(), secret=SECRET),
        "on_request.py": (ROOT / "dags_examples/on_request.py").read_text(),
        ".airflowignore": "udfs",
    }
    connections = {
        "AIRFLOW_CONN_LANCE_LOCAL": json.dumps({"conn_type": "lance", "host": str(root / "db")}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[1]"}),
    }
    module = root / "udfs" / "operating_udfs.py"
    module.parent.mkdir()
    module.write_text(udfs)
    sys.path.insert(0, str(module.parent))
    import operating_udfs

    bucket = Bucket(endpoint)
    options = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_region": "us-east-1"}
    options |= {"aws_endpoint": endpoint, "allow_http": "true"}
    remote = airflow_geneva.connect(f"s3://{bucket.name}/db", options)
    database = airflow_geneva.connect(root / "db")
    for place, name in [(remote, "remote"), *((database, name) for name in TABLES)]:
        table = place.create_table(name, inputs(name, range(ROWS)), max_rows_per_file=FRAGMENT)
        table.add_columns({"n": operating_udfs.gated})
    days = database.open_table("days")
    days.query().select(["text", "n"]).create_materialized_view(database, "days_view")
    with start_stack(root / "home", new_database, files, {**connections, **SETTINGS}, ()) as stack:
        stack.start("api-server")
        stack.airflow("dags", "reserialize")
        yield Site(stack, database, folder, remote, bucket)
