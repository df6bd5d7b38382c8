"""Compute the shards of `verses.embedding` in a task that has a Spark session, of a master or of a Connect server."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task

from airflow_geneva.operators import compute_shard
from airflow_geneva.task_groups import BackfillTaskGroup


def compute(shard: Any) -> Any:
    @task.pyspark(task_id="apply", conn_id="spark_default")
    def apply(shard: Any, spark: Any) -> dict[str, Any]:
        return compute_shard(spark, shard)

    return apply(shard)


with DAG(
    dag_id="apply_in_pyspark",
    schedule=None,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    BackfillTaskGroup(table="verses", column="embedding", apply=compute)
# --8<-- [end:example]
