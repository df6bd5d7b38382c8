"""Small DAG runs in a real Airflow, beside an empty DAG of two tasks: what an hourly run costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import Table, connect
from dags_examples.demo.rest import ENDED, AirflowApi, run_seconds
from dags_examples.demo.runs import wait_for_dag
from dags_examples.demo.stack import DemoHome, run_airflow, run_spark_server, write_spark_conf

EMPTY, SMALL, CONNECT, SUBMIT = "empty", "small", "on_connect", "on_submit"
# In this order: the second run of a DAG after the same rows has nothing to do.
IN_THE_PLAN_TASK = {"two empty tasks": EMPTY, "new rows": SMALL, "nothing to do": SMALL}
ON_SPARK = {"new rows, Spark Connect": CONNECT, "new rows, spark-submit": SUBMIT}

DAGS = """
from airflow.sdk import DAG, task

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG("empty", schedule=None):

    @task
    def first() -> None: ...

    @task
    def second() -> None: ...

    first() >> second()

for column in ("small", "on_connect", "on_submit"):
    with DAG(column, schedule=None):
        spark_conn_id = "spark_server" if column == "on_connect" else "spark_default"
        BackfillTaskGroup(table="docs", column=column, spark_conn_id=spark_conn_id)
"""

UDFS = """
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf


@udf(data_type=pa.int64())
def double(x: pa.Int64Array) -> pa.Array:
    return pc.multiply(x, 2)
"""


def measure(folder: str, hours: int, rows: int) -> dict[str, Any]:
    """Simulate hours in which some rows arrive; return the seconds of every run, from trigger to end, by kind.

    Args:
        hours: number of hours after the first run, which computes the whole table.
        rows: rows that arrive in an hour.
    """
    home, dags = DemoHome(Path(folder)), Path(folder) / "dags"
    dags.mkdir(parents=True)
    (dags / "hourly_dags.py").write_text(DAGS)
    (dags / "hourly_udfs.py").write_text(UDFS)
    (dags / ".airflowignore").write_text("hourly_udfs.py\n")
    write_spark_conf(home, {})
    table = connect(home.database).create_table("docs", pa.table({"x": pa.array(range(50 * rows), pa.int64())}))
    sys.path.insert(0, str(dags))
    from hourly_udfs import double  # type: ignore[import-not-found]

    columns = (SMALL, CONNECT, SUBMIT)
    table.add_columns(dict.fromkeys(columns, double))
    seconds = simulate(home, dags, table, IN_THE_PLAN_TASK, hours, rows, {})
    with run_spark_server(home, {}) as connection:
        on_spark = {"AIRFLOW__GENEVA__INLINE_BELOW_SECONDS": "0", "AIRFLOW_CONN_SPARK_SERVER": connection}
        seconds |= simulate(home, dags, table, ON_SPARK, hours, rows, on_spark)
    return {"seconds": seconds, "rows": rows, "hours": hours, "agree": agrees(table, columns)}


def simulate(
    home: DemoHome, dags: Path, table: Table, kinds: Mapping[str, str], hours: int, rows: int, variables: dict[str, str]
) -> dict[str, list[float]]:
    """Run each kind's DAG once for what is there, and then once an hour; return the seconds of the hours."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with run_airflow(home, dags, variables) as airflow, AirflowApi(airflow.url, airflow.check) as api:
        for dag_id in dict.fromkeys(kinds.values()):
            wait_for_dag(api, dag_id)
            run(api, dag_id)
        for _ in range(hours):
            table.add(pa.table({"x": pa.array(range(rows), pa.int64())}))
            for kind, dag_id in kinds.items():
                seconds[kind].append(run(api, dag_id))
    return seconds


def run(api: AirflowApi, dag_id: str) -> float:
    """Trigger a run, wait for its end, and return the seconds between both by Airflow's clock."""
    run_id = api.trigger(dag_id)
    while (found := api.run(dag_id, run_id))["state"] not in ENDED:
        time.sleep(0.5)
    if found["state"] != "success":
        raise SystemExit(f"The run {run_id} of {dag_id} ended as {found['state']}.")
    return run_seconds(found)


def agrees(table: Table, columns: Sequence[str]) -> bool:
    """Whether the columns hold the UDF's values, for all rows that their last run saw."""
    values = table.to_arrow()
    found = [values.filter(pc.is_valid(values[column])) for column in columns]
    right = all(rows[column].equals(pc.multiply(rows["x"], 2)) for rows, column in zip(found, columns, strict=True))
    return right and all(rows.num_rows > 0 for rows in found) and values[columns[-1]].null_count == 0
