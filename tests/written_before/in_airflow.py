"""The same for what Airflow keeps: DAGs, triggers, and what a plan task returned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup, get_current_context, task

from airflow_geneva.assets import watched_lance_asset
from airflow_geneva.operators import (
    AddColumnsOperator,
    ApplyOperator,
    CleanupCheckpointsOperator,
    CommitOperator,
    CreateMaterializedViewOperator,
    FinishOperator,
    PlanBackfillOperator,
    PlanRefreshOperator,
)
from airflow_geneva.sensors import NewFragmentsSensor
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup
from airflow_geneva.triggers import NewFragmentsTrigger
from tests.written_before.written import ROOT, calls, database

CONNECTION = json.dumps({"conn_type": "lance", "host": str(ROOT / "db")})
EVERYTHING_HERE = 10**9
HALF = 1
"""Shards that were computed and committed before the run died."""


def every_kind_of_task() -> DAG:
    """What a user's DAG file holds."""
    with DAG("written_before", schedule=watched_lance_asset("complete", since="view:long_view")) as dag:
        wait = NewFragmentsSensor(task_id="wait", table="complete", since="column:score", deferrable=True)
        add = AddColumnsOperator(task_id="add", table="complete", columns={"late": "written_before_udfs:score"})
        create = CreateMaterializedViewOperator(task_id="create", view="long_view", table="complete", select=["id"])
        clean = CleanupCheckpointsOperator(task_id="clean", ttl="14d")
        column = BackfillTaskGroup(table="complete", column="score", where="{{ params.where or '' }}", shard_size=2)
        view = RefreshTaskGroup(view="long_view", source="complete")
        wait >> add >> create >> column >> view >> clean
    return dag


def only_plans() -> DAG:
    """The first task of each group, by the ids they have there."""
    with DAG("planned_before", schedule=None) as dag:
        with TaskGroup("backfill"):
            PlanBackfillOperator(task_id="plan", table="planned", column="steady", shard_size=2, batch_size=5)
        with TaskGroup("refresh"):
            PlanRefreshOperator(task_id="plan", view="planned_view", shard_size=1, batch_size=5)
    return dag


def what_is_left(xcoms: dict[str, Any], table: str) -> DAG:
    """The other tasks of a group, over what the plan task returned then."""
    with DAG(f"rest_of_{table}", schedule=None) as dag:

        @task
        def plan() -> Any:
            get_current_context()["ti"].xcom_push("summary", xcoms["summary"])
            return xcoms["shards"]

        shards = plan()
        applied = ApplyOperator.partial(task_id="apply", inline_below_rows=EVERYTHING_HERE).expand(shard=shards)
        committed = CommitOperator.partial(task_id="commit").expand(shard=shards)
        applied >> committed >> FinishOperator(task_id="finish", plan_task_id="plan", table=table)
    return dag


def go_on(xcoms: dict[str, Any], table: str) -> Any:
    """Run what is left; what its tasks returned, and the rows that ran."""
    from tests.support.driving import Driver

    before = database().open_table(table).version
    calls()
    run = Driver.trigger(what_is_left(xcoms, table)).go()
    finish = run.xcom("finish") or {}
    counts = ("state", "rows_computed", "rows_reused", "rows_skipped", "rows_failed", "rows_left")
    return {
        "run": run.state,
        "errors": sorted(str(error) for error in run.errors.values()),
        **{name: finish.get(name) for name in counts},
        "versions": database().open_table(table).version - before,
        "calls": calls(),
    }


def deferred() -> Any:
    """What Airflow keeps of a sensor that waits in the triggerer."""
    from airflow.sdk.exceptions import TaskDeferred

    sensor = NewFragmentsSensor(task_id="wait", table="complete", since="column:score", deferrable=True)
    with pytest.raises(TaskDeferred) as caught:
        sensor.execute({})  # type: ignore[typeddict-item]
    path, arguments = caught.value.trigger.serialize()
    return {"classpath": path, "kwargs": arguments, "method": caught.value.method_name}


def triggers() -> list[tuple[str, dict[str, Any]]]:
    every = {
        "table": "docs", "lance_conn_id": "other", "database": "/db", "since": "view:v", "changed_rows": True,
        "min_new_rows": 5, "min_new_fragments": 2, "quiet_period": 1.5, "max_wait": 7.0, "poll_interval": 3.0,
        "asset": "some", "once": True,
    }  # fmt: skip
    watched = watched_lance_asset("complete", since="view:long_view").watchers[0].trigger
    return [NewFragmentsTrigger(**every).serialize(), NewFragmentsTrigger("complete").serialize(), watched.serialize()]


def airflow_home(folder: Path) -> None:
    """Make the database of the Airflow that this process has been set up for."""
    import os
    import shutil

    from tests.conftest import DATABASE
    from tests.support.airflow_databases import migrate

    shutil.copyfile(migrate(folder), DATABASE)
    (Path(os.environ["AIRFLOW_HOME"]) / "dags").mkdir(parents=True, exist_ok=True)
