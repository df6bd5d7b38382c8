"""A real standalone master with two workers that do not have this package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest

import airflow_geneva
from airflow_geneva.engine.plan.request import BackfillRequest, plan_request
from airflow_geneva.engine.plan.saved_plan import SavedPlan, load_plan
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.spark.code import package_zip
from tests.spark.spark_udfs import of_package, surroundings
from tests.support.bare_python import make_bare_python
from tests.support.stack import free_port

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

SPARK = Path(pyspark.__file__).parent
GPUS = ("3", "5")  # what Spark believes its two workers to have
APPLICATION = Path(airflow_geneva.__file__).parent / "spark" / "application" / "main.py"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_bare_python(tmp_path_factory.mktemp("python"))


@pytest.fixture(scope="module")
def master(java_home: str, bare_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("cluster")
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "JAVA_HOME": java_home,
        "SPARK_HOME": str(SPARK),
        "PYSPARK_PYTHON": bare_python,
        "SPARK_DAEMON_JAVA_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
        "SPARK_LOCAL_IP": "127.0.0.1",
    }

    def start(*arguments: str, **more: str) -> subprocess.Popen[bytes]:
        log = (folder / f"{arguments[0].rsplit('.', 1)[1]}.log").open("ab")
        command = [str(SPARK / "bin" / "spark-class"), *arguments]
        return subprocess.Popen(command, env={**environment, **more}, stdout=log, stderr=log, cwd=folder)

    deploy = "org.apache.spark.deploy"
    url = f"spark://127.0.0.1:{port}"
    ports = ["--webui-port", "0"]
    processes = [start(f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), *ports)]
    for number, gpu in enumerate(GPUS):
        where = str(folder / f"work{number}")
        worker = ["--host", "127.0.0.1", "-c", "1", "-m", "1G", "-d", where, *ports]
        discovery = folder / f"gpu{number}.sh"
        discovery.write_text(f"""#!/bin/sh\necho '{{"name": "gpu", "addresses": ["{gpu}"]}}'\n""")
        discovery.chmod(0o700)
        asked = f"-Dspark.worker.resource.gpu.amount=1 -Dspark.worker.resource.gpu.discoveryScript={discovery}"
        processes.append(start(f"{deploy}.worker.Worker", *worker, url, SPARK_WORKER_OPTS=asked))
    log = folder / "Master.log"
    deadline = time.monotonic() + 120
    while not log.exists() or log.read_text().count("Registering worker") < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    yield url
    for process in processes:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Planned:
    """A column of a table whose backfill is planned as one shard."""

    table: airflow_geneva.Table
    saved: SavedPlan
    job: Storage
    folder: Path

    @staticmethod
    def of(folder: Path, rows: int, function: airflow_geneva.UDF = surroundings) -> Planned:
        log = str(folder / "log")
        data = pa.table({"x": pa.array(range(rows)), "log": pa.array([log] * rows)})
        table = airflow_geneva.connect(folder / "db").create_table("numbers", data, max_rows_per_file=250)
        table.add_columns({"y": function})
        plan = plan_request(table.location, BackfillRequest("y", sizing={"concurrency": 2}), function, None)
        saved = record_plan(plan, table.location, store_code=True)
        job = table.location.checkpoints.folder("jobs", plan.spec.job_id)
        return Planned(table, load_plan(job, saved.fingerprint), job, folder)


def submit(
    master: str, python: str, planned: Planned, memory: str = "512m", more: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    folder, code = planned.folder, planned.folder / "code.zip"
    code.write_bytes(planned.job.read_bytes(planned.saved.spec.codes[0].zip))
    package = folder / "airflow_geneva.zip"
    package.write_bytes(package_zip())
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": memory,
        "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
        "spark.pyspark.python": python,
        "spark.pyspark.driver.python": python,
        "spark.log.level": "WARN",
        **(more or {}),
    }
    command = [str(SPARK / "bin" / "spark-submit"), "--master", master, "--py-files", f"{package},{code}"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += [str(APPLICATION), "--job", planned.job.root, "--fingerprint", planned.saved.fingerprint, "--shard", "0"]
    command += ["--progress-seconds", "0.5"]
    kept = ("PATH", "JAVA_HOME", "SPARK_SUBMIT_OPTS")
    environment = {**{name: os.environ[name] for name in kept}, "SPARK_LOCAL_IP": "127.0.0.1"}
    # spark-submit passes what its Python driver writes, to either stream, on to its own output.
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=environment, cwd=folder, **output)


def test_workers_without_the_package_compute_and_stage_and_the_caller_commits(
    master: str, bare_python: str, tmp_path: Path
) -> None:
    planned = Planned.of(tmp_path, 2_000)
    table, saved, job = planned.table, planned.saved, planned.job
    driver = submit(master, bare_python, planned)
    told, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, told[-4_000:]
    [status] = Path(job.root).glob("status-*.json")
    outcome = json.loads(status.read_text())["applied"]
    assert (outcome["rows_run"], outcome["fragments_staged"]) == (2_000, 8)
    shares = [int(share) for share in re.findall(r"\((\d+) %\)", told)]
    assert shares == sorted(shares), "progress never goes back"
    assert len(shares) > 1, "progress shows while Spark works"
    assert shares[-1] == 100
    assert table.to_arrow().column("y").null_count == 2_000, "only the commit makes it visible"
    result = PlannedJob(table.location, saved).finish(
        [PlannedJob(table.location, saved).commit(saved.load_shard(job, 0))]
    )
    assert (result.state, result.rows_computed) == ("DONE", 2_000)
    values = table.to_arrow().column("y").to_pylist()
    assert [value["double"] for value in values] == [2 * x for x in range(2_000)]
    seen = {(value["installed"], value["gpus"]) for value in values}
    assert seen == {(False, gpu) for gpu in GPUS}, "workers used what was shipped, and each its own GPU"
    ran = (tmp_path / "log").read_text().split()
    assert sorted(map(int, ran)) == list(range(2_000))


def test_spark_itself_refuses_a_python_program_in_cluster_mode(master: str) -> None:
    command = [str(SPARK / "bin" / "spark-submit"), "--master", master, "--deploy-mode", "cluster", str(APPLICATION)]
    found = subprocess.run(command, env={**os.environ, "SPARK_HOME": str(SPARK)}, capture_output=True, text=True)
    assert found.returncode != 0
    told = "Cluster deploy mode is currently not supported for python applications on standalone clusters"
    assert told in found.stdout + found.stderr
    page = Path(__file__).parents[2] / "docs" / "how-to" / "move-to-a-cluster.md"
    assert told in " ".join(page.read_text().split())


def test_a_package_that_workers_lack_is_named_and_comes_in_an_archive(
    master: str, bare_python: str, tmp_path: Path
) -> None:
    planned = Planned.of(tmp_path, 20, of_package)
    driver = submit(master, bare_python, planned)
    told, _ = driver.communicate(timeout=300)
    assert driver.returncode != 0
    assert "UDF 'of_package' lacks what its requirements name" in told
    assert "the Python of Spark's workers" in told
    assert "geneva-probe==3.* is not installed" in told

    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:  # as pip install --target makes a folder
        archive.writestr("geneva_probe.py", "SUMMAND = 100\n")
        archive.writestr(
            "geneva_probe-3.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: geneva-probe\nVersion: 3.1\n"
        )
    more = {"spark.archives": f"{archive.filename}#packages", "spark.executorEnv.PYTHONPATH": "packages"}
    driver = submit(master, bare_python, planned, more=more)
    told, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, told[-4_000:]
    job = PlannedJob(planned.table.location, planned.saved)
    assert job.finish([job.commit(planned.saved.load_shard(planned.job, 0))]).rows_computed == 20
    assert planned.table.to_arrow().column("y").to_pylist() == [100 + x for x in range(20)]


def test_a_shard_for_which_no_worker_has_room_says_that_it_waits_for_an_executor(
    master: str, bare_python: str, tmp_path: Path
) -> None:
    driver = submit(master, bare_python, Planned.of(tmp_path, 10), memory="3g")
    assert driver.stdout is not None
    try:
        told = next(line for line in driver.stdout if "waits for an executor" in line)
        [job] = airflow_geneva.connect(tmp_path / "db").jobs()
    finally:
        driver.kill()
        driver.communicate()
    assert told.startswith("Shard 0 waits for an executor: ")
    assert [shard.step for shard in job.shards] == ["waiting for an executor"]
