from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.assets import one_run_per_batch, watched_lance_asset
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

new_docs = watched_lance_asset("docs", since="view:long_docs", changed_rows=True, poll_interval=10)

with DAG(
    dag_id="follow_docs",
    schedule=one_run_per_batch(new_docs),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
):
    define = CreateMaterializedViewOperator(
        task_id="define",
        view="long_docs",
        table="docs",
        where="length(text) > 10",
        select={"text": "text", "words": {"udf": "text_udfs:count_words", "inputs": ["text"]}},
    )
    define >> RefreshTaskGroup(view="long_docs", source="docs", inline_below_rows=1000)
