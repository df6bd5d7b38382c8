"""A backfill and a refresh through a Spark Connect server, whose client has no Spark of its own."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark import connect
from airflow_geneva.spark.connect import open_try
from tests.spark.spark_udfs import seen
from tests.support.run_examples import run_examples

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KILLS = int(os.environ.get("GENEVA_KILLS", "50" if os.environ.get("GENEVA_SOAK") == "1" else "1"))
ROWS = 1_000 + 2_500 * KILLS
PAGES = ("jobs/", "stages/", "environment/", "executors/", "SQL/", "SQL/execution/?id=0", "connect/")

CLIENT = """
import json
import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import airflow_geneva
from airflow_geneva.engine.run import groups
from airflow_geneva.errors import JobFailed

sys.path.insert(0, sys.argv[2])
import udfs_of_the_client as udfs

session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
database = airflow_geneva.connect(Path(sys.argv[2]) / "db")
rows = pa.table({"x": pa.array(range(2_000)), "log": pa.array([sys.argv[3]] * 2_000)})
table = database.create_table("numbers", rows, max_rows_per_file=300)
table.add_columns({"y": udfs.logged, "z": udfs.fails_at_700})
view = table.query().select({"x": "x", "y2": udfs.logged}).create_materialized_view(database, "v")
table.add_columns({"w": udfs.of_a_stage})
table.backfill("w", runner="spark", concurrency=2)
filled = table.backfill("y", runner="spark", concurrency=2, task_size=200)
refreshed = view.refresh(runner="spark", concurrency=2)
groups._ROWS_WORTH_A_SHUFFLE = 0
query = table.query().where("x < 1000").group_by("log").agg({"n": "count(*)", "sum": "sum(x)"})
grouped = query.create_materialized_view(database, "g")
shuffles = "On Spark, a shuffle" in str(grouped.plan_refresh())
grouped.refresh(runner="spark", concurrency=2)
try:
    table.backfill("z", runner="spark", concurrency=2)
except JobFailed as error:
    failed = str(error)
frame = session.range(5).selectExpr("id as x", "id * 3 as three")
loaded = table.load_columns(frame, on="x")
try:
    table.load_columns(frame.union(frame), on="x")
except airflow_geneva.errors.InvalidInput as error:
    twice = str(error)
values = table.to_arrow()
table.add_columns({"late": udfs.logged})
session.client.release_session()  # as a server does that ends an idle session
ended = []
for call in (lambda: table.backfill("late", runner="spark"), lambda: table.load_columns(frame, on="x")):
    try:
        call()
    except airflow_geneva.errors.GenevaError as error:
        ended.append(str(error))
SparkSession.active().stop()
session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
print(json.dumps({
    "session": type(session).__module__,
    "computed": [filled.rows_computed, refreshed.rows_computed],
    "right": values["y"].to_pylist() == [2 * x for x in values["x"].to_pylist()],
    "of_a_stage": values["w"].to_pylist() == [2 * x for x in values["x"].to_pylist()],
    "view": sorted(view.to_arrow()["y2"].to_pylist()) == [2 * x for x in range(2_000)],
    "grouped": [shuffles, *grouped.to_arrow().select(["n", "sum"]).to_pylist()],
    "failed": failed,
    "loaded": [loaded.rows_loaded, loaded.rows_missing, sum(filter(None, values["three"].to_pylist()))],
    "twice": twice,
    "ended": ended,
    "late": table.backfill("late", runner="spark", concurrency=2).rows_computed,
}))
"""

UDFS = """
import os
import time

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf


@udf(data_type=pa.int64())
def logged(x: pa.Int64Array, log: pa.StringArray) -> pa.Array:
    with open(log[0].as_py(), "a") as file:
        file.write("".join(f"{row}\\n" for row in x.to_pylist()))
    return pc.multiply(x, 2)


@udf(data_type=pa.struct({"x": pa.int64(), "pid": pa.int64()}))
def located(x: int) -> dict:
    return {"x": x, "pid": os.getpid()}


@udf(data_type=pa.int64(), preprocess=located, preprocess_workers=1)
def of_a_stage(located: dict) -> int:
    assert located["pid"] != os.getpid()
    return 2 * located["x"]


@udf(data_type=pa.int64())
def fails_at_700(x: int) -> int:
    if x == 700:
        raise ValueError("seven hundred is too much")
    return x


@udf(data_type=pa.int64(), memory="2g")
def greedy(x: int) -> int:
    return x


@udf(data_type=pa.int64())
def slow(x: int, log: str) -> int:
    with open(log, "a") as file:
        file.write(f"{x}\\n")
    time.sleep(0.01)
    return 3 * x
"""


AIRFLOW_CLIENT = """
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa

_, checkout, folder, what, *more = sys.argv
sys.path[:0] = [checkout, folder]

import airflow_geneva
import udfs_of_the_client as udfs

database = airflow_geneva.connect(Path(folder) / "db")
if what in ("define", "plan"):
    size = int(more[0])
    rows = pa.table({"x": pa.array(range(size)), "log": pa.array([str(Path(folder) / "trace")] * size)})
    table = database.create_table("numbers", rows, max_rows_per_file=300)
    table.add_columns({"y": udfs.logged, "z": udfs.fails_at_700, "g": udfs.greedy, "s": udfs.slow})
table = database.open_table("numbers")
if what == "run":
    from airflow.sdk import DAG
    from airflow_geneva.task_groups import BackfillTaskGroup
    from tests.support.driving import Driver

    ended = []
    for column in more:
        with DAG(f"connect_{column}", schedule=None) as dag:
            BackfillTaskGroup(table="numbers", column=column, concurrency=2, checkpoint_interval=0.2)
        run = Driver.trigger(dag).go()
        ended.append([run.state, {task: str(error) for (task, _), error in run.errors.items()}])
    print(json.dumps(ended))
if what == "plan":
    from airflow_geneva.engine.plan.saved_plan import shard_summaries
    from airflow_geneva.engine.run.record import record_plan
    from airflow_geneva.engine.job.folder import JobFolder

    plan = table.plan_backfill("s", concurrency=2, checkpoint_interval=0.2)
    saved = record_plan(plan, table.location, store_code=True)
    print(json.dumps(shard_summaries(plan, saved, JobFolder.of(table.location.checkpoints, saved.spec.job_id).storage)))
if what == "apply":
    from airflow_geneva.operators import ApplyOperator, CommitOperator

    shard, number = json.loads(more[0]), int(more[1])
    done = ApplyOperator(task_id="apply", shard=shard).execute({"ti": SimpleNamespace(try_number=number)})
    CommitOperator(task_id="commit", shard=shard).execute({})
    print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the server's event log."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def server_process(
    port: int, events: Path, java_home: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """A server of two slots, which does not have the clients' UDFs on its path."""
    program = Path(sys.executable).with_name("airflow-geneva")
    command = [program, "spark-server", "--port", str(port), "--master", "local[2]"]
    log = tmp_path_factory.mktemp("connect") / "log"
    settings = {"enabled": "true", "dir": events.as_uri(), "compress": "false", "rolling.enabled": "false"}
    (log.parent / "spark-defaults.conf").write_text(
        "".join(f"spark.eventLog.{name} {value}\n" for name, value in settings.items())
    )
    environment = {**os.environ, "SPARK_CONF_DIR": str(log.parent)}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        said = process.stdout.readline()
        assert f"sc://127.0.0.1:{port}" in said, log.read_text()
        yield process
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
        assert psutil.wait_procs(children, timeout=120)[1] == [], "no process of Spark's is left"


@pytest.fixture
def server(server_process: subprocess.Popen[str], port: int) -> str:
    return f"sc://127.0.0.1:{port}"


@pytest.mark.core
def test_columns_and_views_are_computed_by_a_server(server: str, tmp_path: Path) -> None:
    (tmp_path / "udfs_of_the_client.py").write_text(UDFS)
    trace = tmp_path / "trace"
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, server, str(tmp_path), str(trace)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["session"] == "pyspark.sql.connect.session"
    assert found["computed"] == [2_000, 2_000]
    assert found["right"]
    assert found["of_a_stage"]
    assert found["view"]
    assert found["grouped"] == [True, {"n": 1_000, "sum": 499_500}]
    assert sorted(map(int, trace.read_text().split())) == sorted([*range(2_000)] * 3)
    assert "seven hundred is too much" in found["failed"]
    assert "row 100 of fragment 2" in found["failed"]
    assert found["loaded"] == [5, 1_995, 30]
    assert found["twice"].startswith("Several rows of the DataFrame have the same key: x=0 (2 rows); x=1 (2 rows);")
    new = 'SparkSession.active().stop() and SparkSession.builder.remote("sc://HOST:PORT").getOrCreate()'
    assert [new in message for message in found["ended"]] == [True, True], found["ended"]
    assert found["late"] == 2_000


@pytest.fixture
def client(server: str, airflow_db: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """A function that starts a process of Airflow whose Spark connection is the server."""
    (tmp_path / "udfs_of_the_client.py").write_text(UDFS)
    program = tmp_path / "client.py"
    program.write_text(AIRFLOW_CLIENT)
    host, _, port = server.removeprefix("sc://").partition(":")
    lance = {
        "conn_type": "lance",
        "host": str(tmp_path / "db"),
        "extra": {"storage_options": {"aws_secret_access_key": "planted-key"}},
    }
    connections = {
        "AIRFLOW_CONN_LANCE_DEFAULT": json.dumps(lance),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(
            {"conn_type": "spark_connect", "host": f"sc://{host}", "port": int(port), "login": "tester"}
        ),
    }

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(program), str(Path(__file__).parents[2]), str(tmp_path), *arguments],
            env={**os.environ, **connections}, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def answer(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    lines = output.splitlines()
    return json.loads(lines[-1]) if lines else None


def pages_of_ui(server: subprocess.Popen[str]) -> dict[str, str]:
    """The pages of Spark's UI, by their paths; it listens on a free port."""
    (java,) = (child for child in psutil.Process(server.pid).children() if child.name() == "java")
    for port in sorted(each.laddr.port for each in java.net_connections() if each.status == psutil.CONN_LISTEN):
        with suppress(OSError, http.client.HTTPException):
            return {page: get(f"http://127.0.0.1:{port}/{page}") for page in PAGES}
    raise AssertionError("no port of the server answers with pages")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def test_a_task_group_runs_through_a_connection_of_type_spark_connect(
    client: Callable[..., subprocess.Popen[str]],
    server_process: subprocess.Popen[str],
    events: Path,
    tmp_path: Path,
) -> None:
    answer(client("define", "2000"))
    right, wrong, refused = answer(client("run", "y", "z", "g"))
    assert right == ["success", {}]
    values = airflow_geneva.connect(tmp_path / "db").open_table("numbers").to_arrow()
    assert values["y"].to_pylist() == [2 * x for x in values["x"].to_pylist()]
    assert sorted(seen(str(tmp_path / "trace"))) == list(range(2_000))
    assert [wrong[0], refused[0]] == ["failed", "failed"]
    assert "seven hundred is too much" in wrong[1]["backfill.shards.apply"]
    assert "memory=2147483648 is asked for" in refused[1]["backfill.shards.apply"]
    shown = pages_of_ui(server_process)
    assert "_GroupRunner" in shown["connect/"]
    assert "planted" not in "".join([*shown.values(), *(path.read_text() for path in events.iterdir())])


def test_the_examples_run_on_a_server(server: str, airflow_db: Path, tmp_path: Path) -> None:
    host, _, port = server.removeprefix("sc://").partition(":")
    spark = {"conn_type": "spark_connect", "host": f"sc://{host}", "port": int(port)}
    assert run_examples(tmp_path / "db", spark, "apply_in_pyspark", "apply_on_connect") == {
        "apply_in_pyspark": ["success", 2, {}],
        "apply_on_connect": ["success", 1, {}],
    }


def python_workers(server: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers of a server, and the daemon that forks them."""
    return [each for each in psutil.Process(server.pid).children(recursive=True) if each.name().startswith("python")]


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_for_calls(process: subprocess.Popen[str], trace: Path, more: int) -> None:
    """Wait until the UDF ran on some more rows."""
    before = len(seen(str(trace)))
    wait_until(process, lambda: len(seen(str(trace))) >= before + more)


def test_a_killed_client_leaves_a_server_at_work_and_the_next_try_ends_that_first(
    client: Callable[..., subprocess.Popen[str]], server_process: subprocess.Popen[str], tmp_path: Path
) -> None:
    (shard,) = answer(client("plan", str(ROWS)))
    trace, chance = tmp_path / "trace", random.Random(KILLS)
    for kill in range(1, KILLS + 1):
        process = client("apply", json.dumps(shard), str(kill))
        # Until its session is open, the rows of the try before go on.
        tries = (tmp_path / "db" / "numbers.lance" / "_checkpoints" / "jobs").glob
        wait_until(process, lambda tried=tries, kill=kill: len([*tried("*/progress/*/driver.json")]) == kill)
        wait_for_calls(process, trace, 300)
        if kill % 3 == 0:
            wait_until(process, lambda: python_workers(server_process) != [])
            chance.choice(python_workers(server_process)).kill()
            time.sleep(3.0)  # workers whose daemon was killed look around every two seconds
        time.sleep(chance.uniform(0, 0.5))
        process.kill()
        process.communicate()
    assert len(seen(str(trace))) < ROWS
    answer(client("apply", json.dumps(shard), str(KILLS + 1)))
    values = airflow_geneva.connect(tmp_path / "db").open_table("numbers").to_arrow()
    assert values["s"].to_pylist() == [3 * x for x in values["x"].to_pylist()]
    calls = Counter(seen(str(trace)))
    assert set(calls) == set(range(ROWS))
    # Two tasks ran, each with at most an interval that was not checkpointed: 0.2 s of 100 rows a second, and one step.
    # A worker's kill ends what its task began, and the kill of the client what the next try of it began. If it was the
    # daemon of the workers, they ran for up to two seconds beside those that Spark started in their place.
    again = calls.total() - ROWS
    assert again <= (KILLS + KILLS // 3) * 2 * (20 + 100) + KILLS // 3 * 2 * 200
    print(f"{KILLS} kills of clients, {KILLS // 3} of workers: {again} of {ROWS} rows ran twice")


@pytest.mark.soak
def test_runs_whose_plan_tasks_compute_are_killed_at_random(
    client: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 1_000 + 500 * KILLS
    answer(client("define", "200"))
    assert answer(client("run", "s"))[0][0] == "success"
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_SECONDS", "100000")
    table = airflow_geneva.connect(tmp_path / "db").open_table("numbers")
    trace, chance = tmp_path / "trace", random.Random(KILLS)
    table.add(pa.table({"x": pa.array(range(200, rows)), "log": pa.array([str(trace)] * (rows - 200))}))
    for _ in range(KILLS):
        process = client("run", "s")
        wait_for_calls(process, trace, 1)
        time.sleep(chance.uniform(0, 3.0))
        process.kill()
        process.communicate()
    killed_at = len(seen(str(trace)))
    assert answer(client("run", "s"))[0] == ["success", {}]
    values = table.to_arrow()
    assert values["s"].to_pylist() == [3 * x for x in values["x"].to_pylist()]
    calls = Counter(seen(str(trace)))
    assert set(calls) == set(range(rows))
    again = calls.total() - rows
    assert again <= KILLS * (20 + 100)
    print(f"{KILLS} kills of plan tasks, the last at call {killed_at}: {again} of {rows} rows ran twice")


def test_a_server_that_is_not_there_is_named_at_once_without_its_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (
        pytest.raises(ConnectionError, match=f"answers at 127.0.0.1:{port} .* Start it") as caught,
        open_try(f"sc://127.0.0.1:{port}/;user_id=me;token=secret", "job/plan/0", 2),
    ):
        pass
    assert "secret" not in str(caught.value)


def test_a_slash_in_a_token_is_not_taken_for_a_path_and_no_error_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    asked: list[str] = []

    class Builder:
        def remote(self, url: str) -> Builder:
            asked.append(url)
            return self

        def create(self) -> None:
            raise ValueError(f"cannot read {asked[-1]}")

    monkeypatch.setattr(SparkSession, "builder", Builder())
    monkeypatch.setattr(connect, "check_reachable", lambda url: None)
    with (
        pytest.raises(InvalidInput, match="cannot read the Spark connection") as caught,
        open_try("sc://host:15002/;token=ab/c%2Bd", "job/plan/0", 1),
    ):
        pass
    assert asked[0].startswith("sc://host:15002/;token=ab%2Fc%2Bd;session_id=")
    assert "ab" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_server_whose_port_is_taken_is_refused_in_one_line() -> None:
    program = Path(sys.executable).with_name("airflow-geneva")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([program, "spark-server", "--port", port], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"Error: Port {port} on 127.0.0.1 cannot be used .*--port\n", done.stderr)
