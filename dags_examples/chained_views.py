"""A view on a view: a change of `verses` triggers the first DAG, and its refresh triggers the second."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.assets import lance_asset, one_run_per_batch
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

with DAG(
    dag_id="refresh_long_verses",
    schedule=one_run_per_batch(lance_asset("verses")),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    RefreshTaskGroup(view="long_verses", source="verses")

with DAG(
    dag_id="refresh_verses_of_light",
    schedule=one_run_per_batch(lance_asset("long_verses")),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    define = CreateMaterializedViewOperator(
        task_id="define", view="verses_of_light", table="long_verses", where="text LIKE '%light%'"
    )
    define >> RefreshTaskGroup(view="verses_of_light", source="long_verses")
# --8<-- [end:example]
