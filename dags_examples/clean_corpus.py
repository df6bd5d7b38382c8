"""Whenever `verses` changes, keep a view of them without near-duplicates, from which a model can be trained."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.assets import lance_asset, one_run_per_batch
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

with DAG(
    dag_id="clean_corpus",
    schedule=one_run_per_batch(lance_asset("verses")),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    define = CreateMaterializedViewOperator(
        task_id="define",
        view="clean_verses",
        table="verses",
        deduplicate={"on": "text", "method": "minhash", "threshold": 0.8},
        select=["book", "chapter", "verse", "text"],
    )
    define >> RefreshTaskGroup(view="clean_verses", source="verses")
# --8<-- [end:example]
