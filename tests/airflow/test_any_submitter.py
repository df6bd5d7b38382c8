"""`apply=` of the task groups: what another operator is given to compute a shard, and what it must leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, BaseOperator, task

from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators import SparkApplication, spark_application
from airflow_geneva.spark.submit import APPLICATION
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.desk import connect_lance, make_dag, make_view, texts
from tests.support.driving import DagSerialization, Driver
from tests.support.run_examples import run_examples

pytestmark = pytest.mark.airflow

PARTS = tuple(SparkApplication.__annotations__)


class Submitter(BaseOperator):
    """Takes the parts as an operator of a service does, and runs the application's own command line in this process."""

    template_fields = ("request",)

    def __init__(self, request: dict[str, Any], run: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.request = request
        self.run_it = run

    def execute(self, context: Any) -> Any:
        if self.run_it:
            compute_here(self.request["arguments"])
        return self.request


def compute_here(arguments: list[str]) -> None:
    """Leave what the application leaves, without Spark."""
    from airflow_geneva.engine.job.heartbeat import writing_heartbeats
    from airflow_geneva.engine.plan.saved_plan import load_plan
    from airflow_geneva.engine.run.pipeline import PlannedJob
    from airflow_geneva.engine.run.prepare import Udfs
    from airflow_geneva.engine.storage.files import Storage
    from airflow_geneva.engine.storage.location import TableLocation

    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    folder = Storage.at(given["--job"])
    saved = load_plan(folder, given["--fingerprint"])
    job = PlannedJob(TableLocation(saved.spec.table, saved.spec.table_name), saved)
    shard = int(given["--shard"])
    with writing_heartbeats(job.folder, "apply", saved.fingerprint, shard):
        job.apply(saved.load_shard(folder, shard), Udfs.planned(saved.spec))


def submitter(run: bool = True, **settings: Any) -> Callable[[Any], Submitter]:
    def make(shard: Any) -> Submitter:
        job = spark_application(shard, **{"master": "yarn", **settings})
        return Submitter(task_id="apply", request={name: getattr(job, name) for name in PARTS}, run=run)

    return make


def go(desk: Desk, apply: Any, udf: str = "length", **settings: Any) -> Driver:
    desk.append("ab")
    desk.define(n=udf)
    return Driver.trigger(make_dag(desk, **{"inline_below_rows": None, "apply": apply, **settings})).go()


def test_another_operator_computes_the_shards_and_is_given_what_spark_submit_is_given(desk: Desk) -> None:
    run = go(desk, submitter(conf={"spark.log.level": "INFO"}))
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    titles = [run.title("backfill.shards.apply", at) for at in range(2)]
    assert titles == ["fragment 0, 10 rows", "fragment 1, 10 rows"]
    shard = run.xcom("backfill.plan")[1]
    job = Path(shard["plan_uri"]).parent
    given = run.xcom("backfill.shards.apply", map_index=1)
    named = ["--name", f"{run.dag.dag_id}: {desk.table.name}.n, shard 1"]
    assert given["arguments"] == ["--job", str(job), "--fingerprint", shard["fingerprint"], "--shard", "1", *named]
    assert Path(given["application"]).read_text() == APPLICATION.read_text()
    assert [Path(path).parent for path in (given["application"], *given["archives"])] == [job] * 3
    assert all(Path(path).is_file() for path in given["archives"])
    assert given["py_files"] == ",".join(given["archives"])
    assert given["conf"]["spark.log.level"] == "INFO"
    assert given["conf"]["spark.executor.instances"] == "8"
    assert given["submit_parameters"].startswith(f"--py-files {given['py_files']} --conf spark.")
    added = [part for path in given["archives"] for part in ("--archive", path)]
    assert given["arguments_with_archives"] == [*given["arguments"], *added]


def test_what_the_udf_asks_for_becomes_settings_of_the_named_master(desk: Desk) -> None:
    conf = go(desk, submitter(master="spark://one:7077"), "costly", concurrency=3).rendered("backfill.shards.apply", 0)
    found = conf["request"]["conf"]
    assert (found["spark.cores.max"], found["spark.executor.memory"]) == ("6", "4096m")
    assert found["spark.task.resource.gpu.amount"] == "0.5"


def test_what_is_asked_for_a_job_replaces_what_the_udf_asks_for(desk: Desk) -> None:
    asked = {"num_cpus": "{{ 1 }}", "num_gpus": 0, "memory": "{{ '1g' }}"}
    given = go(desk, submitter(master="spark://one:7077"), "costly", concurrency=3, **asked)
    found = given.rendered("backfill.shards.apply", 0)["request"]["conf"]
    assert (found["spark.cores.max"], found["spark.executor.memory"]) == ("3", "1024m")
    assert "spark.task.resource.gpu.amount" not in found


def test_spark_may_reach_the_files_of_the_database_by_another_uri(desk: Desk) -> None:
    given = go(desk, submitter(spark_uri="s3a://lake/db")).xcom("backfill.shards.apply", map_index=0)
    assert all(uri.startswith("s3a://lake/db/docs") for uri in (given["application"], *given["archives"]))


def test_an_operator_that_ends_well_and_leaves_no_result_fails_the_commit(desk: Desk) -> None:
    run = go(desk, submitter(run=False))
    assert run.state == "failed"
    assert "no application wrote a result of it" in run.error("backfill.shards.commit", 0)
    assert desk.values()["a00"] is None
    desk.calls()


def test_a_shard_that_failed_is_cleared_and_goes_on(desk: Desk) -> None:
    desk.break_at("b04", once=True)
    run = go(desk, submitter())
    assert run.states()["backfill.shards.commit"] == ["success", "upstream_failed"]
    run.clear(("backfill.shards.apply", 1)).go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    assert desk.calls() == sorted([*texts("ab"), "b04"])


def test_a_refresh_goes_the_same_way(desk: Desk) -> None:
    desk.append("a")
    view = make_view(desk)
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        RefreshTaskGroup(view=view.name, apply=submitter())
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert sorted(view.to_arrow()["text"].to_pylist()) == texts("a")


def test_harmless_options_go_along_and_credentials_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_lance(monkeypatch, desk, aws_region="eu-west-1", client_max_retries="3")
    run = go(desk, submitter(run=False))
    given = run.xcom("backfill.shards.apply", map_index=0)["arguments"]
    assert given[8:] == ["--storage-option", "aws_region=eu-west-1", "--storage-option", "client_max_retries=3"]
    connect_lance(monkeypatch, desk, aws_secret_access_key="the-key")
    run.clear(("backfill.shards.apply", 0)).go()
    error = run.error("backfill.shards.apply", 0)
    assert "identity of its own" in error
    assert "the-key" not in error


def test_code_that_is_not_the_planned_code_is_not_handed_on(desk: Desk) -> None:
    run = go(desk, submitter(run=False))
    [code] = Path(run.xcom("backfill.plan")[0]["plan_uri"]).parent.glob("code-*.zip")
    code.write_bytes(b"other")
    run.clear(("backfill.shards.apply", 0)).go()
    assert "is not the planned code" in run.error("backfill.shards.apply", 0)


def test_the_stored_dag_is_the_same_whenever_it_is_read(airflow_db: Path) -> None:
    """Airflow keeps a version of a DAG for each text that it is stored as."""

    def stored() -> str:
        with DAG("same", schedule=None) as dag:
            BackfillTaskGroup(table="docs", column="n", apply=submitter())
        return json.dumps(DagSerialization.serialize_dag(dag), sort_keys=True)

    assert stored() == stored()
    assert "arguments of the shard" in stored()


def test_as_many_shards_at_once_as_the_group_says_unless_the_task_does(airflow_db: Path) -> None:
    with DAG("at_once", schedule=None) as dag:
        own = {"apply": lambda shard: EmptyOperator(task_id="apply", max_active_tis_per_dagrun=5)}
        BackfillTaskGroup(table="docs", column="n", max_active_shards=3, apply=submitter())
        RefreshTaskGroup(view="v", max_active_shards=3, **own)
    found = [dag.task_dict[f"{group}.shards.apply"] for group in ("backfill", "refresh")]
    assert [task.max_active_tis_per_dagrun for task in found] == [3, 5]


@task
def outside(shard: Any) -> None:
    pass


@task(task_id="apply")
def mapped(shard: Any, part: int) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda shard: None, "returned None, which is no task"),
        (lambda shard: EmptyOperator, "which is no task"),
        (lambda shard: [EmptyOperator(task_id="apply")], "which is no task"),
        (lambda shard: EmptyOperator(task_id="compute"), r"returned the task 'backfill\.shards\.compute'"),
        (lambda shard: outside(shard), r"returned the task 'backfill\.shards\.outside'"),
        (
            lambda shard: mapped.partial(shard=shard).expand(part=[1, 2]),
            "not mapped, .*Airflow says: operator expansion",
        ),
        (submitter(master="mesos://x"), "spark_application names the Spark master 'mesos://x'"),
    ],
)
def test_what_cannot_compute_a_shard_is_refused_while_the_dag_is_read(airflow_db: Path, make: Any, why: str) -> None:
    with DAG("refused", schedule=None), pytest.raises(InvalidInput, match=why):
        BackfillTaskGroup(table="docs", column="n", apply=make)


@pytest.mark.parametrize("given", [{"spark_submit": {"conf": {}}}, {"spark_conn_id": "x"}, {"inline_below_rows": 3}])
def test_arguments_of_the_built_in_task_are_refused_beside_another(airflow_db: Path, given: Any) -> None:
    with DAG("refused", schedule=None), pytest.raises(InvalidInput, match="is for ApplyOperator"):
        BackfillTaskGroup(table="docs", column="n", apply=submitter(), **given)


@pytest.mark.spark
@pytest.mark.slow
def test_the_examples_run_with_the_operators_of_the_spark_provider(airflow_db: Path, tmp_path: Path) -> None:
    spark = {"conn_type": "spark", "host": "local[2]"}
    assert run_examples(tmp_path / "db", spark, "apply_by_spark_submit", "apply_in_pyspark") == {
        "apply_by_spark_submit": ["success", 2, {}],
        "apply_in_pyspark": ["success", 1, {}],
    }
