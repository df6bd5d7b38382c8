"""What Airflow keeps of this code's DAGs, and a run of it that is killed half way."""

from __future__ import annotations

import json
import os
from typing import Any

import tests.conftest  # noqa: F401  # an Airflow of our own, before it is imported
from tests.written_before.in_airflow import (
    CONNECTION,
    EVERYTHING_HERE,
    HALF,
    airflow_home,
    deferred,
    every_kind_of_task,
    go_on,
    only_plans,
    triggers,
)
from tests.written_before.written import ROOT, unpack


def write() -> dict[str, Any]:
    """Plan a backfill and a refresh, and compute and commit some of each."""
    import airflow

    from airflow_geneva.operators import ApplyOperator, CommitOperator
    from tests.support.driving import DagSerialization, Driver, register

    os.environ["AIRFLOW_CONN_LANCE_DEFAULT"] = CONNECTION
    airflow_home(ROOT)
    dag = every_kind_of_task()
    register(dag)
    run = Driver.trigger(only_plans()).go()
    assert run.state == "success", run.errors
    found: dict[str, Any] = {
        "version": airflow.__version__,
        "dag": DagSerialization.to_dict(dag),
        "triggers": triggers(),
        "deferred": deferred(),
    }
    # Where this checkout lies says nothing of the DAG.
    found["dag"]["dag"] |= {"fileloc": "/dags/written_before.py", "_processor_dags_folder": "/dags"}
    for group in ("backfill", "refresh"):
        shards = run.xcom(f"{group}.plan")
        found[group] = {"shards": shards, "summary": run.xcom(f"{group}.plan", "summary")}
        assert len(shards) > HALF
        for shard in shards[:HALF]:
            ApplyOperator(task_id="apply", shard=shard, inline_below_rows=EVERYTHING_HERE).execute({})
            CommitOperator(task_id="commit", shard=shard).execute({})
    return json.loads(json.dumps(found))


def go_on_with(found: dict[str, Any]) -> dict[str, Any]:
    """What this code makes of the rest of the run."""
    os.environ["AIRFLOW_CONN_LANCE_DEFAULT"] = CONNECTION
    rest = {}
    for group, table in (("backfill", "planned"), ("refresh", "planned_view")):
        unpack("planned", "source", "planned_view")
        rest[group] = go_on(found[group], table)
    return rest
