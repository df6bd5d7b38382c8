# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_geneva.task_groups import BackfillTaskGroup

ANSWERS = ["error", "recompute", "new_rows"]

with DAG(
    "words",
    schedule="@hourly",
    catchup=False,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    params={"on_code_change": Param("error", type="string", enum=ANSWERS)},
) as dag:
    BackfillTaskGroup(table="docs", column="words", on_code_change="{{ params.on_code_change }}")
# --8<-- [end:example]
