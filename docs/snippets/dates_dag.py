# --8<-- [start:example]
from datetime import datetime, timedelta, timezone

from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

from airflow_geneva.task_groups import BackfillTaskGroup

# No filter in a run without a date, which is one that a user triggers.
where = (
    "{% if data_interval_start is defined %}"
    "day >= date '{{ data_interval_start | ds }}' AND day < date '{{ data_interval_end | ds }}'"
    "{% endif %}"
)

with DAG(
    "embeddings_by_day",
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
) as dag:
    BackfillTaskGroup(table="events", column="embedding", where=where)
# --8<-- [end:example]
