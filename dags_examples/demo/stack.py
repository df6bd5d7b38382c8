"""Run Airflow with its own home and database: scheduler, DAG processor and API server."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from airflow_geneva.spark.installation import java_environment
from airflow_geneva.spark.server import HOST, run_server

# The API server reads this machine's task logs itself, so no log server is needed.
COMPONENTS: dict[str, list[str]] = {"api-server": [], "scheduler": ["--skip-serve-logs"], "dag-processor": []}
START_SECONDS = 300
STOP_SECONDS = 8
_USUAL_PORT = 18080
_SLOTS = 2


class AirflowStopped(Exception):
    """A component of Airflow ended, or did not start in time."""


@dataclass(frozen=True)
class DemoHome:
    """The folder with all files of the demo.

    Args:
        root: its path.
    """

    root: Path

    @property
    def database(self) -> Path:
        """The Lance database."""
        return self.root / "lance"

    @property
    def airflow(self) -> Path:
        return self.root / "airflow"

    @property
    def logs(self) -> Path:
        """The logs of Airflow's components."""
        return self.airflow / "logs"

    @property
    def counts(self) -> Path:
        """The folder in which each UDF counts its rows."""
        return self.root / "rows_in_udfs"

    @property
    def spark_conf(self) -> Path:
        return self.root / "spark"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def lock(self) -> Path:
        return self.root / "lock"


@dataclass(frozen=True)
class Airflow:
    """Airflow's running components.

    Args:
        url: URL of the API server and the UI.
        processes: processes by component.
        logs: the folder of their logs.
    """

    url: str
    processes: Mapping[str, subprocess.Popen[bytes]]
    logs: Path

    def check(self) -> None:
        """Check that all components run.

        Raises:
            AirflowStopped: a component ended.
        """
        for name, process in self.processes.items():
            if process.poll() is not None:
                text = (self.logs / f"{name}.log").read_text(errors="replace")
                raise AirflowStopped(f"airflow {name} ended with status {process.returncode}:\n{_last_lines(text)}")

    def wait(self) -> None:
        """Wait until a component ends, and raise `AirflowStopped`."""
        while True:
            self.check()
            time.sleep(1)

    def is_healthy(self) -> bool:
        try:
            health = httpx.get(f"{self.url}/api/v2/monitor/health", trust_env=False, timeout=10).json()
        except (httpx.HTTPError, ValueError):
            return False
        return all(health[part]["status"] == "healthy" for part in ("metadatabase", "scheduler", "dag_processor"))


def spark_environment(home: DemoHome, variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Spark, without settings of the user's own Airflow or Spark; see `run_airflow`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW_", "SPARK_", "PYSPARK_"))
    }
    return {
        **kept,
        **variables,
        **java_environment(home.root / "java"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
        "SPARK_CONF_DIR": str(home.spark_conf),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": str(home.temporary),
    }


def airflow_environment(home: DemoHome, dags: Path, port: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Airflow's components.

    Args:
        dags: the DAGs folder.
        port: port of the API server.
        variables: more variables, for UDFs that a task runs itself, and connections.
    """
    url = f"http://127.0.0.1:{port}"
    return {
        **spark_environment(home, {}),
        "AIRFLOW_HOME": str(home.airflow),
        "AIRFLOW_CONN_LANCE_DEFAULT": json.dumps({"conn_type": "lance", "host": str(home.database)}),
        # Only the JSON form: Airflow silently turns "spark://local[2]" into yarn.
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(
            {"conn_type": "spark", "host": f"local[{_SLOTS}]", "extra": {"deploy-mode": "client"}}
        ),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(64),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        # Reading all examples again each half minute takes a core; what has changed is read at once.
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600",
        **variables,
    }


def write_spark_conf(home: DemoHome, executor_environment: Mapping[str, str]) -> None:
    """Write `spark-defaults.conf`, which configures Spark outside the DAGs.

    Args:
        executor_environment: variables that the Python workers get.
    """
    settings = {f"spark.executorEnv.{name}": value for name, value in executor_environment.items()}
    home.spark_conf.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} {value}\n" for name, value in settings.items()]
    (home.spark_conf / "spark-defaults.conf").write_text("".join(lines))


@contextlib.contextmanager
def run_spark_server(home: DemoHome, variables: Mapping[str, str]) -> Iterator[str]:
    """Start a Spark Connect server, and return it as an Airflow connection.

    Raises:
        GenevaError: it did not start.
    """
    for folder in (home.logs, home.temporary):
        folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    with (
        open(home.logs / "spark-server.log", "w") as log,
        run_server(home.temporary, port, f"local[{_SLOTS}]", spark_environment(home, variables), log),
    ):
        yield json.dumps({"conn_type": "spark_connect", "host": f"sc://{HOST}", "port": port})


@contextlib.contextmanager
def run_airflow(home: DemoHome, dags: Path, variables: Mapping[str, str]) -> Iterator[Airflow]:
    """Create the database if needed, start Airflow, and stop all processes at the end.

    Args:
        dags: the DAGs folder.
        variables: more variables, for UDFs that a task runs itself, and connections.

    Raises:
        AirflowStopped: a component did not start.
    """
    for folder in (home.logs, home.temporary):
        folder.mkdir(parents=True, exist_ok=True)
    port = _free_port(_USUAL_PORT)
    environment = airflow_environment(home, dags, port, variables)
    _migrate(home, environment)
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, options in COMPONENTS.items():
            with open(home.logs / f"{name}.log", "wb") as log:
                # In a new session: Ctrl-C reaches only the demo, which then stops the components in order.
                started[name] = subprocess.Popen(
                    [sys.executable, "-m", "airflow", name, *options],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        airflow = Airflow(f"http://127.0.0.1:{port}", started, home.logs)
        _wait_until_healthy(airflow)
        yield airflow
    finally:
        _stop(list(started.values()))


def _migrate(home: DemoHome, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise AirflowStopped(f"airflow db migrate failed:\n{_last_lines(done.stdout + done.stderr)}")


def _wait_until_healthy(airflow: Airflow) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not airflow.is_healthy():
        airflow.check()
        if time.monotonic() > deadline:
            raise AirflowStopped(f"Airflow was not up after {START_SECONDS} s. Its logs are in {airflow.logs}.")
        time.sleep(0.2)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Stop the components and their descendants: tasks, Spark drivers and workers."""
    impatient = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        family = [member for process in processes for member in _with_descendants(process.pid)]
        for process in processes:
            process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for member in [late for stubborn in alive for late in _with_descendants(stubborn.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in processes:
            process.wait()
    finally:
        signal.signal(signal.SIGINT, impatient)


def _with_descendants(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port(*wanted: int) -> int:
    for port in (*wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AirflowStopped("There is no free port on 127.0.0.1.")


def _last_lines(text: str, count: int = 30) -> str:
    return "\n".join(text.splitlines()[-count:])
