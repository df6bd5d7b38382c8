# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, AssetOrTimeSchedule, CronTriggerTimetable

from airflow_geneva.assets import lance_asset
from airflow_geneva.task_groups import RefreshTaskGroup

hourly = CronTriggerTimetable("@hourly", timezone="UTC")

with DAG(
    dag_id="on_events_and_hourly",
    schedule=AssetOrTimeSchedule(timetable=hourly, assets=lance_asset("verses")),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
) as dag:
    RefreshTaskGroup(view="long_verses", source="verses")
# --8<-- [end:example]
