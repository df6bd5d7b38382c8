"""Compute the missing values of the column `embedding` of the table `verses`, on Spark."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG(
    dag_id="backfill_embeddings",
    schedule=None,
    params={"where": Param(None, type=["null", "string"], description="SQL filter: compute only these rows")},
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    BackfillTaskGroup(table="verses", column="embedding", where="{{ params.where or '' }}")
# --8<-- [end:example]
