# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG(
    "nightly_embeddings",
    schedule="@daily",
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
) as dag:
    BackfillTaskGroup(
        table="verses",
        column="embedding",
        concurrency=32,  # Spark task slots of one spark-submit
        shard_size=500,  # fragments per spark-submit
        max_active_shards=2,  # spark-submits of one run at a time
        spark_submit={"pool": "spark", "priority_weight": 10},  # of the apply tasks only
    )
# --8<-- [end:example]
