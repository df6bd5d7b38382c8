"""`ApplyOperator`: the spark-submit that it starts, recorded by a program of that name, and those it does not start."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.apache.spark.hooks import spark_submit
from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

from airflow_geneva import connect
from airflow_geneva.engine.job.folder import RECORD, JobFolder, plan_name
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions.service import settings_now
from airflow_geneva.hooks.openai import openai_connection
from airflow_geneva.operators._lance_task import load_job
from airflow_geneva.spark.submit import APPLICATION, CREDENTIALS
from tests.airflow.conftest import Desk
from tests.support.desk import connect_lance, connect_spark, make_dag
from tests.support.driving import DagSerialization, Driver

pytestmark = pytest.mark.airflow

RECORDER = """#!{python} -I
import json, os, sys, zipfile
argv = sys.argv[1:]
packed = argv[argv.index("--py-files") + 1].split(",")
names = {{os.path.basename(path): zipfile.ZipFile(path).namelist() for path in packed}}
told = {{"argv": argv, "environment": dict(os.environ), "packed": names}}
json.dump(told, open({record!r}, "w"))
print("airflow_geneva: UdfError: cannot be measured")
print("second line")
sys.exit(3)
"""


@dataclass
class Submitted:
    """What spark-submit was started with."""

    argv: list[str]
    environment: dict[str, str]
    packed: dict[str, list[str]]

    @property
    def conf(self) -> dict[str, str]:
        pairs = [self.argv[at + 1] for at, word in enumerate(self.argv) if word == "--conf"]
        return dict(pair.split("=", 1) for pair in pairs)

    def option(self, name: str) -> str:
        return self.argv[self.argv.index(name) + 1]

    @property
    def arguments(self) -> list[str]:
        return self.argv[self.argv.index(str(APPLICATION)) + 1 :]


@dataclass
class Recorder:
    file: Path

    @property
    def seen(self) -> bool:
        return self.file.exists()

    def read(self) -> Submitted:
        return Submitted(**json.loads(self.file.read_text()))


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    folder = tmp_path / "bin"
    folder.mkdir()
    record = tmp_path / "submitted.json"
    program = folder / "spark-submit"
    program.write_text(RECORDER.format(python=sys.executable, record=str(record)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    return Recorder(record)


def go(desk: Desk, udf: str = "length", **settings: Any) -> Driver:
    desk.append("a")
    desk.define(n=udf)
    return Driver.trigger(make_dag(desk, **{"inline_below_rows": 0, **settings})).go()


def error(run: Driver) -> str:
    assert run.state == "failed"
    return run.error("backfill.shards.apply", 0)


def left_in_scratch() -> list[str]:
    return glob.glob(os.path.join(tempfile.gettempdir(), "airflow-geneva-2*"))


@pytest.mark.core
def test_who_may_edit_xcoms_may_not_choose_a_plan(desk: Desk, recorder: Recorder, tmp_path: Path) -> None:
    """Its code would be handed to Spark."""
    reference = go(desk).xcom("backfill.plan")[0]
    assert load_job(desk.database, reference).saved.fingerprint == reference["fingerprint"]
    # A plan with code of somebody's own, in a database that the editor may write.
    shutil.copytree(desk.database.uri, tmp_path / "own")
    own = connect(tmp_path / "own").open_table(desk.table.name)
    planned = record_plan(own.plan_backfill("n", ignore_checkpoints=True), own.location, store_code=True)
    place = JobFolder.of(own.location.checkpoints, planned.spec.job_id).storage.path(plan_name(planned.fingerprint))
    elsewhere = {**reference, "plan_uri": place, "fingerprint": planned.fingerprint, "shard": 0}
    outside = {**reference, "plan_uri": reference["plan_uri"].replace(desk.database.uri, f"{desk.database.uri}/../own")}
    for edited in (elsewhere, outside, {**reference, "plan_uri": "/plan.json"}):
        with pytest.raises(InvalidInput, match="which is none of a table in this task's database"):
            load_job(desk.database, edited)
    # Another plan beside the same table, which no record names.
    job = JobFolder.of(desk.table.location.checkpoints, reference["job_id"])
    header = {**json.loads(job.storage.read_bytes(plan_name(reference["fingerprint"]))), "run": "another"}
    data = json.dumps(header).encode()
    job.storage.write_bytes(plan_name(sha256(data)), data)
    for edited in ({**reference, "fingerprint": sha256(data)}, {**reference, "fingerprint": sha256(data), "shard": 0}):
        with pytest.raises(InvalidInput, match=r"the record of job .* names"):
            load_job(desk.database, edited)
    record = job.storage.read_bytes(RECORD)
    job.storage.delete(RECORD)
    with pytest.raises(InvalidInput, match=r"the record of job .* names none"):
        load_job(desk.database, reference)
    job.storage.write_bytes(RECORD, record)
    load_job(desk.database, reference)


def test_a_local_master_gets_the_slots_asked_for(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_spark(monkeypatch, host="local[*]")
    run = go(desk, "costly", concurrency=1)
    submitted = recorder.read()
    assert submitted.option("--master") == "local[1,4]"
    assert submitted.option("--name") == f"{run.dag.dag_id}: {desk.table.name}.n, shard 0"
    assert submitted.conf["spark.log.level"] == "WARN"
    assert (submitted.conf["spark.ui.port"], submitted.conf["spark.ui.killEnabled"]) == ("0", "false")
    assert submitted.environment["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert submitted.conf["spark.executorEnv.OPENBLAS_NUM_THREADS"] == "1"
    assert submitted.environment["SPARK_LOCAL_DIRS"] == submitted.environment["TMPDIR"]
    assert not any(name.startswith(("spark.task", "spark.executor.", "spark.cores")) for name in submitted.conf)


def test_what_the_udf_needs_is_asked_of_yarn(desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_spark(monkeypatch, host="yarn", extra={"queue": "night"})
    go(desk, "costly", concurrency=6)
    submitted = recorder.read()
    assert submitted.option("--master") == "yarn"
    assert submitted.option("--queue") == "night"
    found = {name: value for name, value in submitted.conf.items() if ".task." in name or "spark.executor." in name}
    assert found == {
        "spark.task.cpus": "2",
        "spark.executor.cores": "4",
        "spark.executor.instances": "3",
        "spark.executor.memoryOverhead": "4096m",
        "spark.task.resource.gpu.amount": "0.5",
        "spark.executor.resource.gpu.amount": "1",
        "spark.excludeOnFailure.task.maxTaskAttemptsPerExecutor": "2",
        "spark.excludeOnFailure.task.maxTaskAttemptsPerNode": "4",
    }


def test_what_the_udf_needs_is_asked_of_a_standalone_cluster(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_spark(monkeypatch, host="spark://master", port=7077)
    go(desk, "costly", concurrency=6)
    submitted = recorder.read()
    assert submitted.option("--master") == "spark://master:7077"
    assert submitted.conf["spark.cores.max"] == "12"
    assert submitted.conf["spark.executor.memory"] == "4096m"


def test_what_the_author_says_goes_first(desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_spark(monkeypatch, host="yarn")
    conf = {"spark.log.level": "INFO", "spark.task.cpus": "3"}
    go(desk, "costly", spark_submit={"conf": conf, "num_executors": 5, "name": "mine"})
    submitted = recorder.read()
    assert submitted.conf["spark.log.level"] == "INFO"
    assert submitted.conf["spark.task.cpus"] == "3"
    assert submitted.option("--num-executors") == "5"
    assert "spark.executor.instances" not in submitted.conf
    assert submitted.option("--name") == "mine"


def test_the_spark_job_is_told_to_openlineage_as_part_of_its_task(desk: Desk, recorder: Recorder) -> None:
    go(desk, spark_submit={"openlineage_inject_parent_job_info": True})
    conf = recorder.read().conf
    assert conf["spark.openlineage.parentJobName"] == f"dag_{desk.table.name}.backfill.shards.apply"
    assert conf["spark.openlineage.rootParentJobName"] == f"dag_{desk.table.name}"
    assert conf["spark.log.level"] == "WARN"


@pytest.mark.core
def test_the_plan_goes_by_reference_and_the_code_goes_along(desk: Desk, recorder: Recorder) -> None:
    run = go(desk)
    submitted = recorder.read()
    [shard] = run.xcom("backfill.plan")
    job = shard["plan_uri"].rpartition("/")[0]
    *place, _, submitted_at, _, code_seconds = submitted.arguments
    assert place == ["--job", job, "--fingerprint", shard["fingerprint"], "--shard", "0"]
    assert time.time() - float(submitted_at) >= float(code_seconds) >= 0
    code = next(names for file, names in submitted.packed.items() if file.startswith("code-"))
    assert code == ["geneva_dag_udfs.py"]
    package = next(names for file, names in submitted.packed.items() if file.startswith("airflow_geneva-"))
    assert "airflow_geneva/engine/udf/decorator.py" in package


@pytest.mark.core
def test_the_driver_inherits_nothing_of_airflow(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_CMD", "planted")
    monkeypatch.setenv("UNKNOWN_PASSWORD", "planted")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    connect_lance(monkeypatch, desk, aws_secret_access_key="the-key")
    go(desk, spark_submit={"env_vars": {"MODEL": "{{ dag.dag_id }}"}})
    submitted = recorder.read()
    assert [name for name in submitted.environment if "AIRFLOW" in name] == [CREDENTIALS]
    assert "planted" not in submitted.environment.values()
    assert json.loads(submitted.environment[CREDENTIALS]) == {"aws_secret_access_key": "the-key"}
    assert submitted.environment["MODEL"] == f"dag_{desk.table.name}"
    assert {submitted.environment[name] for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")} == {"1"}
    assert "the-key" not in " ".join(submitted.argv)
    assert Path(submitted.environment["JAVA_HOME"], "bin", "java").name == "java"


def test_without_credentials_in_the_connection_the_machines_identity_is_passed_on(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "machine")
    go(desk)
    submitted = recorder.read()
    assert submitted.environment["AWS_PROFILE"] == "machine"
    assert CREDENTIALS not in submitted.environment


def test_env_vars_are_no_rendered_field(desk: Desk, recorder: Recorder) -> None:
    variables = {"env_vars": {"TOKEN": "planted-token"}}
    run = go(desk, spark_submit=variables)
    assert recorder.read().environment["TOKEN"] == "planted-token"
    assert "planted-token" not in json.dumps(run.rendered("backfill.shards.apply", 0))
    assert "planted-token" not in " ".join(recorder.read().argv)
    assert "planted-token" not in json.dumps(DagSerialization.serialize_dag(make_dag(desk, spark_submit=variables)))


def test_the_error_is_the_first_line_of_what_the_application_said_last(desk: Desk, recorder: Recorder) -> None:
    assert error(go(desk)) == f"Computing shard 0 of {desk.table.name}.n failed: UdfError: cannot be measured"


def test_nothing_is_left_in_scratch(desk: Desk, recorder: Recorder) -> None:
    go(desk)
    assert not Path(recorder.read().environment["TMPDIR"]).exists()
    assert left_in_scratch() == []


def test_a_cluster_deploy_mode_takes_no_credentials(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_spark(monkeypatch, host="yarn", extra={"deploy-mode": "cluster"})
    connect_lance(monkeypatch, desk, aws_secret_access_key="the-key")
    told = error(go(desk))
    assert "identity of its own" in told
    assert "the-key" not in told
    assert not recorder.seen


def test_the_key_of_a_model_service_is_on_no_command_line_and_not_on_a_cluster(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cluster mode the driver has no environment of spark-submit's, so only the command line could carry it."""
    monkeypatch.setenv("AIRFLOW_CONN_SERVICE", '{"conn_type": "openai", "password": "planted"}')
    run = go(desk, openai_conn_id="service")
    assert recorder.read().environment["OPENAI_API_KEY"] == "planted"
    assert "planted" not in " ".join(recorder.read().argv)
    connect_spark(monkeypatch, host="local[2]", extra={"deploy-mode": "cluster"})
    run.clear(("backfill.shards.apply", 0)).go()
    assert recorder.read().option("--deploy-mode") == "cluster"
    assert "planted" not in " ".join(recorder.read().argv)


def test_a_cluster_deploy_mode_takes_harmless_options_as_arguments(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On YARN the Spark provider would also want to know how to track the application.
    connect_spark(monkeypatch, host="local[2]", extra={"deploy-mode": "cluster"})
    connect_lance(monkeypatch, desk, aws_region="eu-west-1")
    go(desk)
    assert recorder.read().arguments[-2:] == ["--storage-option", "aws_region=eu-west-1"]
    assert CREDENTIALS not in recorder.read().environment
    assert "spark.ui.port" not in recorder.read().conf


def test_a_cluster_deploy_mode_takes_no_variables(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_spark(monkeypatch, host="yarn", extra={"deploy-mode": "cluster"})
    told = error(go(desk, spark_submit={"env_vars": {"TOKEN": "planted"}}))
    assert "spark.yarn.appMasterEnv" in told
    assert "planted" not in told
    assert not recorder.seen


def test_a_standalone_master_takes_no_python_program_in_cluster_mode(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_spark(monkeypatch, host="spark://master:7077", extra={"deploy-mode": "cluster"})
    assert "Use deploy mode 'client'" in error(go(desk))
    assert not recorder.seen


@pytest.mark.parametrize(
    ("connection", "told"),
    [
        (None, "'spark_default' does not exist"),
        ("spark://local[2", "'spark_default' cannot be read"),
        ("spark://local[2]", "'spark_default'"),  # Python 3.10 reads it, as the host 2
        ('{"conn_type": "spark"}', "'spark_default' has no host"),
        ('{"conn_type": "http", "host": "master"}', "the Spark master 'http://master', which Spark does not know"),
    ],
)
def test_a_connection_that_airflow_would_take_for_yarn_is_an_error(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, connection: str | None, told: str
) -> None:
    if connection is None:
        monkeypatch.delenv("AIRFLOW_CONN_SPARK_DEFAULT")
    else:
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection)
    found = error(go(desk))
    assert told in found
    assert "spark://local%5B2%5D" in found
    assert not recorder.seen


def test_a_master_on_kubernetes_needs_the_kubernetes_provider(
    desk: Desk, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(spark_submit, "kube_client", raising=False)
    connect_spark(monkeypatch, host="k8s://https://cluster:6443")
    assert "only with apache-airflow-providers-cncf-kubernetes" in error(go(desk))
    assert not recorder.seen


def test_no_spark_submit_is_said_in_words(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_spark(monkeypatch, host="local[2]", extra={"spark-binary": "spark3-submit"})
    assert "There is no program 'spark3-submit'" in error(go(desk))
    assert left_in_scratch() == []


def test_code_that_is_not_what_was_planned_is_not_run(desk: Desk, recorder: Recorder) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk, inline_below_rows=0)).go(kill="backfill.shards.apply")
    [shard] = run.xcom("backfill.plan")
    [code] = Path(shard["plan_uri"]).parent.glob("code-*.zip")
    other = BytesIO()
    zipfile.ZipFile(other, "w").close()
    code.write_bytes(other.getvalue())
    run.clear(("backfill.shards.apply", 0)).go()
    assert "is not the planned code" in error(run)
    code.unlink()
    run.clear(("backfill.shards.apply", 0)).go()
    assert "was removed, or is not the planned code" in error(run)
    assert not recorder.seen


def test_a_task_that_airflow_stops_does_not_report_its_command_line(desk: Desk, recorder: Recorder) -> None:
    program = recorder.file.parent / "bin" / "spark-submit"
    program.write_text("#!/bin/sh\nsleep 0.3\nkill -TERM $PPID\nexec sleep 60\n")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        run = go(desk)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert error(run).startswith("Airflow stopped the task.")
    [job] = desk.database.jobs()
    assert not any(shard.error for shard in job.shards)
    assert left_in_scratch() == []


def test_spark_that_ends_well_without_a_result_is_an_error(desk: Desk, recorder: Recorder) -> None:
    program = recorder.file.parent / "bin" / "spark-submit"
    program.write_text("#!/bin/sh\n")
    assert "wrote no result" in error(go(desk))


def test_a_small_shard_is_computed_in_the_task_when_it_has_the_planned_code(desk: Desk, recorder: Recorder) -> None:
    run = go(desk, inline_below_rows=11)
    assert run.state == "success", run.errors
    assert not recorder.seen
    assert len(desk.calls()) == 10


def test_a_shard_that_is_not_small_enough_goes_to_spark(desk: Desk, recorder: Recorder) -> None:
    go(desk, inline_below_rows=10)
    assert recorder.seen


def test_a_function_gets_the_key_of_the_connection_that_it_names(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    for name in ("service", "voyage_eu"):
        service = {"conn_type": "openai", "password": f"planted-{name}", "host": f"http://{name}/v1"}
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(service))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with openai_connection("service", ["voyage_eu", "voyage_eu"]):
        assert os.environ["OPENAI_API_KEY"] == "planted-service"
        assert settings_now("voyage_eu") == ("planted-voyage_eu", "http://voyage_eu/v1")
        assert mask_secrets("with planted-voyage_eu and planted-service") == "with *** and ***"
    assert not [name for name in os.environ if name.startswith("OPENAI_API_KEY")]
    with pytest.raises(InvalidInput, match="not_there"), openai_connection(None, ["not_there"]):
        pass


def test_the_wait_for_a_batch_api_is_in_the_triggerer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def trigger(delta: timedelta) -> TimeDeltaTrigger:
        waits.append(delta.total_seconds())
        return TimeDeltaTrigger(delta)

    monkeypatch.setattr("airflow_geneva.operators.apply.TimeDeltaTrigger", trigger)
    monkeypatch.setenv("AIRFLOW_CONN_SERVICE", '{"conn_type": "openai", "password": "planted"}')
    desk.append("ab")
    desk.define(n="Later")
    run = Driver.trigger(make_dag(desk, openai_conn_id="service")).go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(desk.values(), 3)
    assert desk.calls() == sorted(desk.values())
    assert [run.tries("backfill.shards.apply", shard) for shard in (0, 1)] == [1, 1]
    # After the submission, and after two looks.
    assert waits == [0.2] * 6
    # A task that is woken has the key, as the one that submitted had.
    assert {line.split()[1] for line in (desk.folder / "polls").read_text().splitlines()} == {"planted"}
