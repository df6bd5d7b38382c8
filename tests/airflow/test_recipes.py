"""The recipes of `docs/how-to/any-submitter.md`, with the services' real providers: `make test-all RECIPES=1`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import BaseOperator

from airflow_geneva.spark.submit import APPLICATION
from tests.airflow.conftest import Desk
from tests.support.desk import make_dag
from tests.support.driving import Driver

for provider in ("amazon", "apache.livy", "cncf.kubernetes", "databricks"):
    pytest.importorskip(f"airflow.providers.{provider}")

pytestmark = pytest.mark.airflow

RECIPES = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "snippets" / "recipes.py"))


@pytest.fixture
def ran(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that plans for real; it returns a task with its fields rendered, the shard, and the context."""

    def run(name: str) -> tuple[Any, dict[str, Any], Any]:
        made: list[tuple[BaseOperator, Any]] = []

        def apply(shard: Any) -> BaseOperator:
            operator: BaseOperator = RECIPES[name](shard)
            monkeypatch.setattr(type(operator), "execute", lambda self, context: made.append((self, context)))
            return operator

        desk.append("a")
        desk.define(n="costly")
        run = Driver.trigger(make_dag(desk, inline_below_rows=None, apply=apply, concurrency=4)).go()
        assert "no application wrote a result" in run.error("backfill.shards.commit", 0), run.errors
        [(operator, context)] = made
        return operator, run.xcom("backfill.plan")[0], context

    return run


def arguments_of(shard: dict[str, Any]) -> list[str]:
    job = shard["plan_uri"].rpartition("/")[0]
    table = Path(job.partition(".lance/")[0]).name
    named = ["--name", f"dag_{table}: {table}.n, shard 0"]
    return ["--job", job, "--fingerprint", shard["fingerprint"], "--shard", "0", *named]


def check_files(program: str, archives: list[str]) -> None:
    assert Path(program).read_text() == APPLICATION.read_text()
    assert sorted(Path(path).name.rpartition("-")[0] for path in archives) == ["airflow_geneva", "code"]


def test_databricks_takes_one_run_with_one_task(ran: Any) -> None:
    operator, shard, context = ran("on_databricks")
    [task] = operator._prepare_submit_json(context)["tasks"]
    program = task["spark_python_task"]
    given, added = program["parameters"][:8], program["parameters"][8:]
    assert given == arguments_of(shard)
    assert added[::2] == ["--archive", "--archive"]
    check_files(program["python_file"], added[1::2])
    assert task["new_cluster"]["spark_conf"]["spark.task.resource.gpu.amount"] == "0.5"


def test_emr_serverless_takes_a_request_that_boto_finds_valid(ran: Any) -> None:
    import botocore.session
    from botocore.validate import ParamValidator

    operator, shard, _ = ran("on_emr")
    client = botocore.session.get_session().create_client("emr-serverless", region_name="eu-west-1")
    shape = client.meta.service_model.operation_model("StartJobRun").input_shape
    request = {
        "applicationId": operator.application_id,
        "executionRoleArn": operator.execution_role_arn,
        "clientToken": "a",
        "jobDriver": operator.job_driver,
    }
    assert ParamValidator().validate(request, shape).generate_report() == ""
    submit = operator.job_driver["sparkSubmit"]
    assert submit["entryPointArguments"] == arguments_of(shard)
    words = submit["sparkSubmitParameters"].split(" ")
    check_files(submit["entryPoint"], words[words.index("--py-files") + 1].split(","))
    assert "spark.executor.instances=2" in words
    assert operator.wait_for_completion


def test_livy_takes_a_batch_that_its_hook_finds_valid(ran: Any) -> None:
    from airflow.providers.apache.livy.hooks.livy import LivyHook

    operator, shard, _ = ran("on_livy")
    body = LivyHook.build_post_batch_body(**operator.spark_params)
    assert body["args"] == arguments_of(shard)
    check_files(body["file"], body["pyFiles"])
    assert body["conf"]["spark.executor.memoryOverhead"] == "4096m"
    assert operator._polling_interval


def test_the_spark_operator_takes_a_document_with_all_that_its_launcher_reads(ran: Any) -> None:
    from airflow.providers.cncf.kubernetes.operators.custom_object_launcher import CustomObjectLauncher

    operator, shard, _ = ran("on_kubernetes")
    launcher = CustomObjectLauncher("apply", "spark", None, None, template_body=operator.template_body)
    document = launcher.get_body()
    spec = document["spec"]
    assert spec["arguments"] == arguments_of(shard)
    job = shard["plan_uri"].rpartition("/")[0]
    files = [spec["mainApplicationFile"], *spec["deps"]["pyFiles"]]
    table = job.split("/db/", 1)[1]
    assert all(uri.startswith(f"s3a://lake/db/{table}/") for uri in files)
    here = [f"{job}/{uri.rpartition('/')[2]}" for uri in files]
    check_files(here[0], here[1:])
    assert spec["sparkConf"]["spark.executor.resource.gpu.amount"] == "1"
