"""What DAG authors give to groups and operators: what other tasks return, params, templates, `default_args`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from airflow.sdk import DAG, task, task_group

from airflow_geneva.assets import one_run_per_batch
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators import (
    AddColumnsOperator,
    ApplyOperator,
    CleanupCheckpointsOperator,
    CreateMaterializedViewOperator,
    RefreshDatabaseOperator,
)
from airflow_geneva.operators._lance_task import LanceOperator
from airflow_geneva.sensors import NewFragmentsSensor
from airflow_geneva.task_groups import BackfillTaskGroup, LoadColumnsTaskGroup, RefreshTaskGroup
from airflow_geneva.triggers import NewFragmentsTrigger
from tests.airflow.conftest import Desk
from tests.support.driving import Driver, events

pytestmark = [pytest.mark.airflow, pytest.mark.core]

SMALL = {"inline_below_rows": 10**9, "shard_size": 1}
EXAMPLES = Path(__file__).parents[2] / "dags_examples"
PARSE = """
import runpy, sys

for file in sys.argv[1:]:
    runpy.run_path(file)
print(*(name for name in ("lance", "pyarrow", "numpy", "pandas", "pyspark") if name in sys.modules))
"""


@pytest.fixture
def due(desk: Desk) -> Desk:
    """A table of two fragments, with a column that is defined and not computed."""
    desk.append("ab")
    desk.define(n="length")
    return desk


def run_through(dag: DAG, conf: dict[str, Any] | None = None) -> Driver:
    run = Driver.trigger(dag, conf).go()
    assert run.state == "success", (run.states(), run.errors)
    return run


def test_parsing_dag_files_imports_no_library_that_computes() -> None:
    """The dag processor imports each file in a fresh process."""
    texts = {str(file): file.read_text() for file in EXAMPLES.glob("*.py")}
    files = [file for file, text in texts.items() if "Group(" in text and "import pyarrow" not in text]
    assert len(files) > 5
    told = subprocess.run([sys.executable, "-c", PARSE, *files], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == ""


def test_every_argument_may_be_what_another_task_returns(due: Desk) -> None:
    with DAG(f"dag_{due.table.name}", schedule=None) as dag:

        @task
        def give(what: Any) -> Any:
            return what

        BackfillTaskGroup(
            table=give(due.table.name),
            column=give("n"),
            udf=give("geneva_dag_udfs:length"),
            where=give("text > 'a05'"),
            shard_size=give(1),
            inline_below_rows=give(10**9),
            lance_conn_id=give("lance_default"),
            database=give(due.database.uri),
        )
    run = run_through(dag)
    assert run.states()["backfill.shards.commit"] == ["success"] * 2
    assert len(due.calls()) == 14
    assert len(events(due.asset)) == 1


def test_params_are_taken_as_they_are(due: Desk) -> None:
    with DAG(f"dag_{due.table.name}", schedule=None) as dag:
        table, where = dag.param("table", due.table.name), dag.param("where", "")
        BackfillTaskGroup(table=table, column="n", where=where, **SMALL)
    run_through(dag, {"where": "text = 'a00'"})
    assert due.calls() == ["a00"]
    assert len(events(due.asset)) == 1


def test_what_a_template_renders_may_have_blanks_around_it(due: Desk) -> None:
    with DAG(f"dag_{due.table.name}", schedule=None, params={"table": due.table.name}) as dag:
        BackfillTaskGroup(
            table="\n  {{ params.table }}\n", column=" n ", lance_conn_id="{{ 'lance_default' }} ", **SMALL
        )
    run = run_through(dag)
    assert run.xcom("backfill.plan", "summary")["lance_conn_id"] == "lance_default"
    assert len(events(due.asset)) == 1


def test_a_table_whose_name_looks_like_a_number_may_be_rendered_as_one(due: Desk) -> None:
    due.table = due.database.create_table("2024", pa.table({"text": ["a"]}))
    due.define(n="length")
    with DAG("native", schedule=None, params={"year": 2024}, render_template_as_native_obj=True) as dag:
        BackfillTaskGroup(table="{{ params.year }}", column="n", **SMALL)
    run_through(dag)
    assert len(events("lance_default/2024")) == 1


def test_default_args_name_the_connections_of_a_group(due: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    due.table.query().create_materialized_view(due.database, "v")
    monkeypatch.setenv("AIRFLOW_CONN_MINE", json.dumps({"conn_type": "lance", "host": due.database.uri}))
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps({"conn_type": "lance", "host": "/nowhere"}))
    given = {"lance_conn_id": "mine", "spark_conn_id": "my_spark", "inline_below_rows": 10**9}
    with DAG(f"dag_{due.table.name}", schedule=None, default_args=given) as dag:
        computed = BackfillTaskGroup(table=due.table.name, column="n")
        computed >> RefreshTaskGroup(view="v", source=due.table.name, spark_conn_id="its_own")
    run_through(dag)
    assert len(events(f"mine/{due.table.name}")) == len(events("mine/v")) == 1
    assert [asset.name for asset in dag.task_dict["refresh.finish"].inlets] == [f"mine/{due.table.name}"]
    of_spark = [dag.task_dict[f"{group}.shards.apply"].spark_conn_id for group in ("backfill", "refresh")]
    assert of_spark == ["my_spark", "its_own"]


def test_a_connection_that_is_given_goes_before_default_args_whatever_its_name(airflow_db: Any) -> None:
    given = {"lance_conn_id": "mine", "spark_conn_id": "my_spark"}
    with DAG("explicit", schedule=None, default_args=given) as dag:
        BackfillTaskGroup(table="docs", column="n", lance_conn_id="lance_default", spark_conn_id="spark_default")
        RefreshTaskGroup(view="v", lance_conn_id="lance_default")
    assert {getattr(task, "lance_conn_id", None) for task in dag.task_dict.values()} == {"lance_default"}
    of_spark = [dag.task_dict[f"{group}.shards.apply"].spark_conn_id for group in ("backfill", "refresh")]
    assert of_spark == ["spark_default", "my_spark"]


def test_the_source_of_a_view_is_shown_where_it_is_known(due: Desk) -> None:
    with DAG("shows", schedule=None, params={"conn": "lance_default"}) as dag:
        RefreshTaskGroup("plain", view="v", source="docs")
        RefreshTaskGroup("of_a_connection", view="v", source="docs", lance_conn_id="{{ params.conn }}")
        RefreshTaskGroup("of_a_table", view="v", source="{{ params.table }}")
    groups = ("plain", "of_a_connection", "of_a_table")
    shown = {group: [asset.name for asset in dag.task_dict[f"{group}.finish"].inlets] for group in groups}
    assert shown == {"plain": ["lance_default/docs"], "of_a_connection": [], "of_a_table": []}


def test_the_spark_connection_is_a_template(due: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):
        pass

    def stop(operator: ApplyOperator, conn_id: str) -> Any:
        raise Seen(conn_id)

    monkeypatch.setattr(ApplyOperator, "_connection", stop)
    with DAG(f"dag_{due.table.name}", schedule=None, params={"conn": "my_spark"}) as dag:
        BackfillTaskGroup(table=due.table.name, column="n", spark_conn_id="{{ params.conn }}")
    run = Driver.trigger(dag).go()
    assert run.error("backfill.shards.apply", 0) == "my_spark"


def test_columns_may_come_out_of_a_template(due: Desk) -> None:
    view = f"v_{due.table.name}"
    params = {
        "columns": {"m": "geneva_dag_udfs:length"},
        "select": ["text"],
        "more": {"m": {"udf": "geneva_dag_udfs:length"}},
    }
    with DAG(f"dag_{due.table.name}", schedule=None, params=params) as dag:
        AddColumnsOperator(task_id="define", table=due.table.name, columns="{{ params.columns | tojson }}")
        CreateMaterializedViewOperator(
            task_id="view",
            table=due.table.name,
            view=view,
            select="{{ params.select | tojson }}",
            add_columns="{{ params.more | tojson }}",
        )
        AddColumnsOperator(task_id="no_json", table=due.table.name, columns="{{ params.columns }}")
        AddColumnsOperator(task_id="a_list", table=due.table.name, columns="{{ params.select | tojson }}")
    run = Driver.trigger(dag).go()
    assert "m" in due.database.open_table(due.table.name).schema.names
    assert {"text", "m"} <= set(due.database.open_table(view).schema.names)
    assert "'| tojson'" in run.error("no_json")
    assert "Give UDFs by column" in run.error("a_list")


def at_once(make: Callable[[], LanceOperator]) -> list[Any]:
    """What four tasks return that do the same at the same moment."""
    barrier = threading.Barrier(4)

    def execute(_: int) -> Any:
        operator = make()
        barrier.wait()
        return operator.execute({})

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(execute, range(4)))


def test_a_view_that_several_runs_define_at_once_is_made_by_one(due: Desk) -> None:
    done = at_once(lambda: CreateMaterializedViewOperator(task_id="x", view="v", table=due.table.name, select=["text"]))
    assert [one["created"] for one in sorted(done, key=str)] == [False, False, False, True]
    with pytest.raises(InvalidInput, match="with another definition"):
        CreateMaterializedViewOperator(task_id="x", view="v", table=due.table.name, select=["n"]).execute({})


def test_a_column_that_several_runs_define_at_once_is_added_by_one(due: Desk) -> None:
    done = at_once(
        lambda: AddColumnsOperator(task_id="x", table=due.table.name, columns={"m": "geneva_dag_udfs:length"})
    )
    assert sorted(one["added"] for one in done) == [[], [], [], ["m"]]
    assert sorted(one["unchanged"] for one in done) == [[], ["m"], ["m"], ["m"]]


def test_a_group_inside_of_a_mapped_one_is_refused_while_the_dag_is_read(airflow_db: Any) -> None:
    with DAG("nested", schedule=None):

        @task_group
        def each(table: str) -> None:
            BackfillTaskGroup(table=table, column="n")

        with pytest.raises(InvalidInput, match="inside a mapped task group"):
            each.expand(table=["docs", "books"])


@pytest.mark.parametrize("most", [0, -1])
def test_no_shard_at_once_is_refused_while_the_dag_is_read(airflow_db: Any, most: int) -> None:
    with DAG("none_at_once", schedule=None), pytest.raises(InvalidInput, match="max_active_shards"):
        BackfillTaskGroup(table="docs", column="n", max_active_shards=most)


LOAD: dict[str, Any] = {"table": "t", "source": "s3://b/d.parquet", "on": "id"}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: BackfillTaskGroup("g", table="t", column="c", on_code_change="again"), "on_code_change='again'"),
        (lambda: RefreshTaskGroup("g", view="v", on_unknown_values="keep"), "on_unknown_values='keep' is unknown"),
        (lambda: BackfillTaskGroup("g", table="t", column="c", concurrency=0), "concurrency=0 is not valid"),
        (lambda: BackfillTaskGroup("g", table="t", column="c", max_cost=-1.0), "give a number of at least 0"),
        (
            lambda: BackfillTaskGroup("g", table="t", column="c", num_cpus=0),
            "num_cpus=0 is not valid: give a number above 0",
        ),
        (lambda: RefreshTaskGroup("g", view="v", indexes=True), "indexes=True is unknown"),
        (lambda: RefreshTaskGroup("g", view="v", max_rows_per_fragment=0), "max_rows_per_fragment=0 is not valid"),
        (lambda: LoadColumnsTaskGroup("g", **LOAD, on_duplicate="newest"), "on_duplicate='newest' is unknown"),
        (lambda: LoadColumnsTaskGroup("g", **LOAD, on_missing="drop"), "on_missing='drop' is unknown"),
        (lambda: RefreshDatabaseOperator(task_id="r", runner="fast"), "runner='fast' is unknown"),
        (
            lambda: AddColumnsOperator(task_id="a", table="t", columns=["n"]),
            r"columns is \['n'\]. Give UDFs",
        ),
        (lambda: one_run_per_batch("docs"), "'docs' is a name"),
        (lambda: CleanupCheckpointsOperator(task_id="c", ttl="week"), "ttl='week' is not an age"),
        (lambda: NewFragmentsSensor(task_id="s", table="t", since="views:x"), "since='views:x' is not understood"),
    ],
)
def test_a_constant_that_is_not_valid_is_refused_while_the_dag_is_parsed(
    airflow_db: Any, make: Callable[[], object], told: str
) -> None:
    with DAG("constants", schedule=None), pytest.raises(InvalidInput, match=told):
        make()


def test_what_happens_to_a_partial_run_is_checked_while_the_dag_is_read_or_once_it_is_rendered(due: Desk) -> None:
    with DAG("wrong", schedule=None), pytest.raises(InvalidInput, match="on_partial='red' is unknown"):
        BackfillTaskGroup(table="docs", column="n", on_partial="red")
    given = {"on_partial": "{{ params.ending }}"}
    with DAG(f"dag_{due.table.name}", schedule=None, params={"ending": "red"}, default_args=given) as dag:
        BackfillTaskGroup(table=due.table.name, column="n", **SMALL)
    run = Driver.trigger(dag).go()
    assert "on_partial='red' is unknown. Use 'warn' or 'fail'" in run.error("backfill.finish")
    assert events(due.asset) == []


def test_a_trigger_takes_no_credentials(airflow_db: Any) -> None:
    """Airflow keeps in its database what a trigger is made of."""
    for place in ("s3://somebody:secret@bucket/db", "s3://bucket/db?token=secret"):
        with pytest.raises(InvalidInput) as caught:
            NewFragmentsTrigger("docs", database=place)
        assert "secret" not in str(caught.value)
    assert NewFragmentsTrigger("docs", database="s3://bucket/db").database == "s3://bucket/db"
