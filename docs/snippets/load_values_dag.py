from airflow.sdk import DAG

from airflow_geneva.task_groups import LoadColumnsTaskGroup

with DAG("deliveries", schedule="@daily", catchup=False):
    LoadColumnsTaskGroup(
        table="docs",
        source="s3://deliveries/{{ ds }}/*.parquet",
        on="id",
        columns=["caption", "embedding"],
        on_duplicate="last",
        indexes="update",
    )
