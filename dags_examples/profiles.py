"""A view with one row for each book: a change of `verses` computes the books whose verses changed."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.assets import lance_asset, one_run_per_batch
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

with DAG(
    dag_id="profiles",
    schedule=one_run_per_batch(lance_asset("verses")),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    define = CreateMaterializedViewOperator(
        task_id="define",
        view="books",
        table="verses",
        group_by=["book"],
        agg={"verses": "count(*)", "words": {"udf": "book_udfs:vocabulary", "inputs": ["text"]}},
        order_by=["chapter", "verse"],
    )
    define >> RefreshTaskGroup(view="books", source="verses")
# --8<-- [end:example]
