"""A complete Airflow: API server, scheduler and DAG processor as processes, driven through REST."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tests.support.airflow_databases import connection_to, database_named

START_SECONDS = 240
RUN_SECONDS = 420
LOCKED_SECONDS = 120
LONG_AGO = "2020-01-01 00:00:00.000000"
POLL_SECONDS = 0.5  # an answer of the API server takes 20 ms of its CPU
COMPONENTS = ("api-server", "scheduler", "dag-processor")
AIRFLOW = (sys.executable, "-m", "airflow")
# Tasks are forked off the scheduler, DAG files are read in forks of their processor: neither imports these again.
PRELOADED = ("pyarrow", "airflow.providers.apache.spark.operators.spark_submit", "airflow_geneva.task_groups")
FORKING = ("scheduler", "dag-processor")
NEVER = "86400"
# Airflow considers a process with a late heartbeat dead, and restarts its tasks; on a busy machine any process may be
# late. Here the timeouts are very long; tests that kill a process call `Stack.declare_dead`.
NOBODY_IS_LATE = {
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": NEVER,
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": NEVER,
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": NEVER,
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": NEVER,
    "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": NEVER,
    "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": NEVER,
    "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": NEVER,
}


@dataclass
class Stack:
    """A running Airflow.

    Args:
        home: its AIRFLOW_HOME.
        database: a file; None if a database server is used.
        url: its REST interface.
        environment: environment variables of its processes.
        processes: its components.
        orphans: child processes of killed components.
    """

    home: Path
    database: Path | None
    url: str
    environment: Mapping[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    orphans: list[psutil.Process] = field(default_factory=list)

    def start(self, component: str, *command: str, **variables: str) -> None:
        """Start a component by its name on Airflow's command line, or by another command, with variables of its own."""
        imports = "; ".join(f"import {name}" for name in (*PRELOADED, "airflow.__main__"))
        forking = (sys.executable, "-c", f"{imports}; airflow.__main__.main()")
        airflow = forking if component in FORKING else AIRFLOW
        with (self.home / f"{component}.out").open("ab") as output:
            self.processes[component] = subprocess.Popen(
                [*airflow, *(command or (component,))],
                env={**self.environment, **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the started components answer."""
        wait_for(lambda: _answers(self), START_SECONDS, "Airflow's REST interface")

    def kill(self, component: str) -> None:
        """Kill a component with SIGKILL, and leave its child processes running."""
        process = self.processes.pop(component)
        self.orphans += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()

    def lose(self, component: str) -> None:
        """Kill a component and all its child processes with SIGKILL, as if their machine had failed."""
        process = self.processes.pop(component)
        _end([psutil.Process(process.pid)])
        process.wait()

    def declare_dead(self, what: str, where: str, *values: str) -> None:
        """Make the last heartbeat of killed processes look old to Airflow.

        Args:
            what: the table and the column of the heartbeat.
            where: a condition with a "?" for each value.
        """
        assert self.database
        table, column = what.split(".")
        with closing(sqlite3.connect(self.database, timeout=LOCKED_SECONDS)) as database, database:
            database.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", [LONG_AGO, *values])

    def airflow(self, *command: str) -> str:
        """Run a command line of Airflow's; returns what it printed."""
        done = subprocess.run([*AIRFLOW, *command], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return self._ask(method, f"/api/v2{path}", {"authorization": f"Bearer {self.token}"}, body)

    @cached_property
    def token(self) -> str:
        """Get a token; every user is an administrator, but Airflow 3.1 requires a token."""
        return str(self._ask("GET", "/auth/token", {})["access_token"])

    def _ask(self, method: str, path: str, headers: Mapping[str, str], body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        until = time.monotonic() + LOCKED_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                told = error.read().decode()
                # SQLite is locked while another process writes, so the request had no effect; Airflow 3.2 gives less
                # detail.
                locked = error.code == 500 and ("Database error" in told or told == "Internal Server Error")
                if not locked or time.monotonic() > until:
                    raise AssertionError(f"{method} {path}: {error.code} {told}") from error
            time.sleep(0.25)

    def unpause(self, dag_id: str) -> None:
        """Let the scheduler work on a DAG, as soon as it is known."""
        self.wait_for_dag(dag_id)
        self.call("PATCH", f"/dags/{dag_id}", {"is_paused": False})

    def pause(self, dag_id: str) -> None:
        self.call("PATCH", f"/dags/{dag_id}", {"is_paused": True})

    def read_again(self, dag_id: str) -> None:
        """Let the DAG processor parse a file now: its watchers start when it is parsed while the DAG is not paused."""
        self.call("PUT", f"/parseDagFile/{self.call('GET', f'/dags/{dag_id}')['file_token']}")

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Start a run without a logical date; returns its id."""
        self.unpause(dag_id)
        run = self.call("POST", f"/dags/{dag_id}/dagRuns", {"logical_date": None, "conf": dict(conf or {})})
        return str(run["dag_run_id"])

    def wait_for_dag(self, dag_id: str) -> None:
        wait_for(lambda: self._knows(dag_id), START_SECONDS, f"DAG {dag_id}")

    def _knows(self, dag_id: str) -> bool:
        return any(dag["dag_id"] == dag_id for dag in self.call("GET", "/dags")["dags"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        found = self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances?limit=200")
        return list(found["task_instances"])

    def finish(self, dag_id: str, run_id: str, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Wait for the end of a run; returns its state."""
        until = time.monotonic() + RUN_SECONDS
        while (state := self.run_state(dag_id, run_id)) not in ("success", "failed"):
            assert time.monotonic() < until, self.tasks(dag_id, run_id)
            for _ in range(20):
                meanwhile()
                time.sleep(0.05)
        return state

    def logs(self) -> str:
        """Return all logs of Airflow: of all tasks, and the output of its components."""
        files = [*self.home.glob("*.out"), *(path for path in (self.home / "logs").rglob("*") if path.is_file())]
        return "\n".join(f"--- {path.relative_to(self.home)}\n{path.read_text(errors='replace')}" for path in files)

    def below(self) -> list[psutil.Process]:
        """Return all living child processes of the components."""
        found = []
        for process in self.processes.values():
            try:
                found += psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(ready: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, f"{what} did not come within {seconds} seconds"
        time.sleep(POLL_SECONDS)


@contextmanager
def start_stack(
    home: Path,
    new_database: Path | None,
    files: Mapping[str, str],
    extra: Mapping[str, str],
    components: Sequence[str] = COMPONENTS,
) -> Iterator[Stack]:
    """Start an Airflow on these DAG files, and end all of its processes.

    Args:
        new_database: copied for it; None if `extra` names a database.
    """
    database = None
    if new_database:
        database = database_named(secrets.token_hex(4))
        shutil.copyfile(new_database, database)
    own = make_home(home, files)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
        **own,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__FERNET_KEY": "bmV2ZXItdXNlZC1vdXRzaWRlLW9mLXRoaXMtdGVzdC4=",
        **({"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": connection_to(database)} if database else {}),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(48),
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600",
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
        # How soon Airflow notices that the process of a task has ended, also when an orphan still holds its pipes.
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "AIRFLOW__WORKERS__SOCKET_CLEANUP_TIMEOUT": "1",
        # A worker repeats a request that is not answered in time (5 s), and Airflow executes both, even if the first
        # one comes last: a succeeded task then counts as running again, and fails.
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": str(START_SECONDS),
        **NOBODY_IS_LATE,
        **extra,
    }
    stack = Stack(home, database, url, environment)
    try:
        for component in components:
            stack.start(component)
        if components:
            stack.wait()
        yield stack
    finally:
        _end([*(psutil.Process(process.pid) for process in stack.processes.values()), *stack.orphans])
        for path in database.parent.glob(f"{database.name}*") if database else ():
            path.unlink()


def _answers(stack: Stack) -> bool:
    try:
        health = stack.call("GET", "/monitor/health")
    except (OSError, AssertionError):
        return False
    return "scheduler" not in stack.processes or health["scheduler"]["status"] == "healthy"


def make_home(home: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Create folders for Airflow or one worker, with these DAG files; return the variables that name them."""
    variables = {
        "AIRFLOW_HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
    }
    for folder in ("dags", "tmp"):
        (home / folder).mkdir(parents=True)
    for name, text in files.items():
        path = home / "dags" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return variables


def _end(roots: Sequence[psutil.Process]) -> None:
    """Stop every process before the first one is killed, so that none starts another meanwhile."""
    held: set[psutil.Process] = set()
    while found := {member for root in roots for member in _family(root)} - held:
        for member in found:
            with suppress(psutil.NoSuchProcess):
                member.suspend()
        held |= found
    for member in held:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(held, timeout=10)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
