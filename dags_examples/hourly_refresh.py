"""Every hour, update the view `long_verses` to the table `verses`: only new and changed verses are embedded."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

on_code_change = Param("error", type="string", enum=["error", "recompute", "new_rows"])

with DAG(
    dag_id="hourly_refresh",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    params={"on_code_change": on_code_change, "errors_only": Param(False, type="boolean")},
    tags=["geneva"],
    doc_md=__doc__,
):
    define = CreateMaterializedViewOperator(
        task_id="define",
        view="long_verses",
        table="verses",
        where="length(text) > 100",
        select={"text": "text", "embedding": {"udf": "embedding_udfs:embed", "inputs": ["text"]}},
    )
    define >> RefreshTaskGroup(
        view="long_verses",
        source="verses",
        on_code_change="{{ params.on_code_change }}",
        errors_only="{{ params.errors_only }}",
    )
# --8<-- [end:example]
