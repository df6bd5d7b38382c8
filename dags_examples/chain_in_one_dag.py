"""Every hour, in one DAG: backfill a column, refresh a view of the rows that have it, refresh a view on that view."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup

with DAG(
    dag_id="chain_in_one_dag",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    embed = BackfillTaskGroup("embed", table="verses", column="embedding")
    embedded = CreateMaterializedViewOperator(
        task_id="define_embedded",
        view="embedded_verses",
        table="verses",
        where="embedding IS NOT NULL",
        select=["text", "embedding"],
    )
    refresh_embedded = RefreshTaskGroup("refresh_embedded", view="embedded_verses", source="verses")
    of_light = CreateMaterializedViewOperator(
        task_id="define_of_light", view="verses_of_light", table="embedded_verses", where="text LIKE '%light%'"
    )
    refresh_of_light = RefreshTaskGroup("refresh_of_light", view="verses_of_light", source="embedded_verses")
    embed >> embedded >> refresh_embedded >> of_light >> refresh_of_light
# --8<-- [end:example]
