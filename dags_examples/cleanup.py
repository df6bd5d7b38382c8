"""Once a day, remove what backfills left beside the tables and nobody needs any more."""

from __future__ import annotations

# --8<-- [start:example]
from airflow.sdk import DAG, Param

from airflow_geneva.operators import CleanupCheckpointsOperator

with DAG(
    dag_id="cleanup",
    schedule="@daily",
    catchup=False,
    params={
        "ttl": Param("7d", type="string", description="How old everything has to be that goes, such as 7d or 12h"),
        "dry_run": Param(False, type="boolean", description="Remove nothing, only tell"),
    },
    tags=["geneva"],
    doc_md=__doc__,
):
    CleanupCheckpointsOperator(task_id="clean_up", ttl="{{ params.ttl }}", dry_run="{{ params.dry_run }}")
# --8<-- [end:example]
