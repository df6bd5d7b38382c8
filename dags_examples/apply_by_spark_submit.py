"""Compute the shards of `verses.embedding` with the Spark provider's own operator."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG

from airflow_geneva.operators import spark_application
from airflow_geneva.task_groups import BackfillTaskGroup


def submit(shard: Any) -> SparkSubmitOperator:
    job = spark_application(shard, master="local[2]")
    return SparkSubmitOperator(
        task_id="apply",
        application=job.application,
        application_args=job.arguments,
        py_files=job.py_files,
        conf=job.conf,
    )


with DAG(
    dag_id="apply_by_spark_submit",
    schedule=None,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    BackfillTaskGroup(table="verses", column="embedding", apply=submit)
# --8<-- [end:example]
