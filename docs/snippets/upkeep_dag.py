# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators import CleanupCheckpointsOperator
from airflow_geneva.task_groups import BackfillTaskGroup

with DAG(
    "upkeep",
    schedule="@daily",
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
) as dag:

    @task
    def compact() -> None:
        """Merge small fragments; it makes no row due."""
        LanceHook().get_conn().open_table("docs").lance.optimize.compact_files()

    @task
    def remove_old_versions() -> None:
        dataset = LanceHook().get_conn().open_table("docs").lance
        dataset.cleanup_old_versions(older_than=timedelta(days=14), error_if_tagged_old_versions=False)

    update = BackfillTaskGroup(table="docs", column="embedding", indexes="update")
    compact() >> update >> remove_old_versions() >> CleanupCheckpointsOperator(task_id="clean_up", ttl="14d")
# --8<-- [end:example]
