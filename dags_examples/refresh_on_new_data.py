"""Wait until the table `verses` has rows that the view `long_verses` has not seen, refresh it, and wait again."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import datetime, timedelta

from airflow.sdk import DAG

from airflow_geneva.sensors import NewFragmentsSensor
from airflow_geneva.task_groups import RefreshTaskGroup

with DAG(
    dag_id="refresh_on_new_data",
    schedule="@continuous",
    start_date=datetime(2025, 1, 1),  # without a start date, Airflow creates at most one run
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    wait = NewFragmentsSensor(
        task_id="wait",
        table="verses",
        since="view:long_verses",
        changed_rows=True,
        mode="reschedule",
        poke_interval=300,
    )
    wait >> RefreshTaskGroup(view="long_verses", source="verses")
# --8<-- [end:example]
