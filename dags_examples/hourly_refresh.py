"""Every hour, update the view `long_verses` to the table `verses`: only new and changed verses are embedded."""

from __future__ import annotations

# --8<-- [start:example]
from airflow.sdk import DAG

from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

with DAG(
    dag_id="hourly_refresh", schedule="@hourly", catchup=False, max_active_runs=1, tags=["geneva"], doc_md=__doc__
):
    define = CreateMaterializedViewOperator(
        task_id="define",
        view="long_verses",
        table="verses",
        where="length(text) > 100",
        select={"text": "text", "embedding": {"udf": "embedding_udfs:embed", "inputs": ["text"]}},
    )
    define >> RefreshTaskGroup(view="long_verses", source="verses")
# --8<-- [end:example]
