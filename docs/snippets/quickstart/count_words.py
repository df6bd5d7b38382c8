from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.operators import AddColumnsOperator
from airflow_geneva.task_groups import BackfillTaskGroup

with DAG(
    dag_id="count_words",
    schedule=None,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
):
    define = AddColumnsOperator(task_id="define", table="docs", columns={"words": "text_udfs:count_words"})
    define >> BackfillTaskGroup(table="docs", column="words")
