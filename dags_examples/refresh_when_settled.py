"""Refresh the view `long_verses` when a load of `verses` is over, or after an hour; wait in the triggerer."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import datetime, timedelta

from airflow.sdk import DAG

from airflow_geneva.sensors import NewFragmentsSensor
from airflow_geneva.task_groups import RefreshTaskGroup

with DAG(
    dag_id="refresh_when_settled",
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
        quiet_period=timedelta(minutes=2),
        max_wait=timedelta(hours=1),
        deferrable=True,
        poke_interval=60,
        retries=3,
    )
    wait >> RefreshTaskGroup(view="long_verses", source="verses")
# --8<-- [end:example]
