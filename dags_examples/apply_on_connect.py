"""Compute the shards of `verses.embedding` on a Spark Connect server: the connection says so, and nothing else."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG(
    dag_id="apply_on_connect",
    schedule=None,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    BackfillTaskGroup(table="verses", column="embedding", spark_conn_id="spark_connect_default")
# --8<-- [end:example]
