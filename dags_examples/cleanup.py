"""Once a day, remove files beside the tables that are not needed any more."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_geneva.operators import CleanupCheckpointsOperator

with DAG(
    dag_id="cleanup",
    schedule="@daily",
    catchup=False,
    params={
        "ttl": Param("7d", type="string", description="Remove only what is older than this, such as 7d or 12h"),
        "dry_run": Param(False, type="boolean", description="Remove nothing, only report"),
    },
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    CleanupCheckpointsOperator(task_id="clean_up", ttl="{{ params.ttl }}", dry_run="{{ params.dry_run }}")
# --8<-- [end:example]
