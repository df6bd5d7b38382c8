# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG, AssetAndTimeSchedule, CronTriggerTimetable

from airflow_geneva.assets import watched_lance_asset
from airflow_geneva.task_groups import RefreshTaskGroup

new_verses = watched_lance_asset("verses", since="view:long_verses", changed_rows=True)

with DAG(
    dag_id="hourly_if_new",
    schedule=AssetAndTimeSchedule(timetable=CronTriggerTimetable("@hourly", timezone="UTC"), assets=new_verses),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
):
    RefreshTaskGroup(view="long_verses", source="verses")
# --8<-- [end:example]
