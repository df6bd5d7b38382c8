# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_geneva.assets import one_run_per_batch, watched_lance_asset
from airflow_geneva.operators import AddColumnsOperator
from airflow_geneva.task_groups import BackfillTaskGroup

with DAG(
    "sizes_of_photos",
    schedule=one_run_per_batch(watched_lance_asset("photos", since="column:size", changed_rows=True)),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    params={"errors_only": Param(False, type="boolean")},
) as dag:
    define = AddColumnsOperator(task_id="define", table="photos", columns={"size": ("photo_udfs:size", ["link"])})
    define >> BackfillTaskGroup(table="photos", column="size", errors_only="{{ params.errors_only }}")
# --8<-- [end:example]
