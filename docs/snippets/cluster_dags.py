from airflow.sdk import DAG

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG("on_gpus", schedule=None) as on_gpus:
    # --8<-- [start:gpu]
    BackfillTaskGroup(table="docs", column="embedding", udf="gpu_udfs:Embed", concurrency=4)
    # --8<-- [end:gpu]

with DAG("on_a_cluster", schedule=None) as on_a_cluster:
    # --8<-- [start:python]
    BackfillTaskGroup(
        table="docs",
        column="embedding",
        concurrency=32,
        spark_submit={"conf": {"spark.pyspark.python": "/opt/python/bin/python"}},
    )
    # --8<-- [end:python]
