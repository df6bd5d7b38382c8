"""The DAGs folder of `test_operating`: functions that can be made to wait, and a DAG for each operation."""

from __future__ import annotations

import ast
from pathlib import Path

UDFS = '''
from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa

from airflow_geneva import udf

FOLDER = Path({folder!r})


@udf(data_type=pa.int64(), version="1")
def gated(text: str) -> int:
    """Notes the row; at one row it waits for as long as the gate of its table is shut."""
    table, row = text.split("-")
    with (FOLDER / f"{{table}}.calls").open("a") as calls:
        calls.write(row + "\\n")
    gate = FOLDER / f"{{table}}.shut"
    if int(row) == {gate} and gate.exists():
        (FOLDER / f"{{table}}.reached.{{os.getpid()}}").touch()
        while gate.exists():
            time.sleep(0.05)
    return int(row)
'''

ENDLESS = """
import os
import time
from pathlib import Path

(Path({folder!r}) / f"importing.{{os.getpid()}}").touch()
while True:
    time.sleep(0.1)
"""

DAGS = """
from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from airflow.sdk import DAG, Param, task
from airflow.timetables.interval import CronDataIntervalTimetable

from airflow_geneva.engine import faults
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup

FOLDER = Path({folder!r})
DAILY = {{
    "schedule": CronDataIntervalTimetable("@daily", timezone="UTC"),
    "start_date": datetime(2026, 1, 1, tzinfo=timezone.utc),
    "end_date": datetime(2026, 1, 10, tzinfo=timezone.utc),
    "catchup": False,
}}
AGAIN = {{"retries": 2, "retry_delay": timedelta(seconds=1)}}


def hold(context):
    '''Wait at the beginning of a task for as long as there is an order to.'''
    name = f"{{context['ti'].dag_id}}.{{context['ti'].task_id}}"
    while (FOLDER / f"{{name}}.hold").exists():
        (FOLDER / f"{{name}}.held.{{os.getpid()}}").touch()
        time.sleep(0.05)


def die_once(context):
    '''Make this very process die at the point that lies ready for its task.'''
    order = FOLDER / f"{{context['ti'].dag_id}}.{{context['ti'].task_id}}.die"
    if order.exists():
        faults._ARMED = order.read_text()
        order.unlink()


def backfill(table, group_id="backfill", **settings):
    given = {{"inline_below_rows": 1000, "checkpoint_size": 5, "batch_size": 5, "lance_conn_id": "lance_local"}}
    return BackfillTaskGroup(group_id, table=table, column="n", **{{**given, **settings}})


with DAG("dates", **DAILY):
    backfill("dates")

with DAG("days", **DAILY):
    backfill("days", where={where!r}) >> RefreshTaskGroup(
        view="days_view", source="days", lance_conn_id="lance_local", inline_below_rows=1000
    )

with DAG("twice", schedule=None, max_active_runs=2):
    backfill("twice")

with DAG("first", schedule=None):
    backfill("first", spark_submit={{"pool": "one"}})

with DAG("pooled", schedule=None):
    backfill("low", "low", spark_submit={{"pool": "one", "priority_weight": 1}})
    backfill("high", "high", spark_submit={{"pool": "one", "priority_weight": 10}})

with DAG("paused", schedule=None):
    backfill("paused")

with DAG("other", schedule=None):

    @task
    def other():
        pass

    other()

held = ("plan_success", "commit_success", "commit_failed", "finish_failed", "finish_success")
for dag_id in (*held, "plan_away", "apply_away", "commit_away", "finish_away"):
    with DAG(dag_id, schedule=None, default_args={{"on_execute_callback": hold}}):
        backfill(dag_id)

on_spark_at_first = {{"inline_below_rows": "{{{{ 0 if ti.try_number == 1 else 1000 }}}}", "concurrency": 1}}

with DAG("timeout", schedule=None):
    spark = {{"execution_timeout": timedelta(hours=1), "durable": True}}
    backfill("timeout", spark_submit=spark, **on_spark_at_first)

with DAG("apply_failed", schedule=None):
    backfill("apply_failed", **on_spark_at_first)

with DAG("plan_failed", schedule=None):
    backfill("plan_failed", udf="endless_udfs:gated")

with DAG("remote", schedule=None, params={{"where": Param(None, type=["null", "string"])}}):
    spark = {{"env_vars": {{"SERVICE_KEY": "{secret}-token"}}}}
    where = "{{{{ params.where or '' }}}}"
    backfill("remote", where=where, lance_conn_id="lance_remote", inline_below_rows=0, spark_submit=spark)

with DAG("killed", schedule=None, default_args={{**AGAIN, "retries": 3, "on_execute_callback": die_once}}):
    backfill("killed", inline_below_rows=0, concurrency=1, commit_granularity=1)

for killed in ("lost", "ended", "running", "host"):
    with DAG(killed, schedule=None, default_args=AGAIN if killed == "lost" else {{}}):
        backfill(killed)
"""


def where_by_date() -> str:
    """The filter that the documentation shows."""
    shown = Path(__file__).parents[2] / "docs" / "snippets" / "dates_dag.py"
    [where] = [node.value for node in ast.parse(shown.read_text()).body if isinstance(node, ast.Assign)]
    return str(ast.literal_eval(where))
