"""Small DAG runs in a real Airflow, beside an empty DAG of two tasks: what an hourly run costs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_geneva import Table, connect
from dags_examples.demo.rest import ENDED, AirflowApi, run_seconds
from dags_examples.demo.runs import wait_for_dag
from dags_examples.demo.stack import DemoHome, run_airflow, write_spark_conf

EMPTY, SMALL, ON_SPARK = "empty", "small", "on_spark"
# In this order: the second run of a DAG after the same rows has nothing to do.
KINDS = {"two empty tasks": EMPTY, "new rows": SMALL, "nothing to do": SMALL, "new rows, on Spark": ON_SPARK}

DAGS = """
from airflow.sdk import DAG, task

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG("empty", schedule=None):

    @task
    def first() -> None: ...

    @task
    def second() -> None: ...

    first() >> second()

for column in ("small", "on_spark"):
    with DAG(column, schedule=None):
        BackfillTaskGroup(table="docs", column=column)
"""

# A UDF that asks for memory goes to Spark whatever its rows take.
UDFS = """
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf


@udf(data_type=pa.int64())
def small(x: pa.Int64Array) -> pa.Array:
    return pc.multiply(x, 2)


@udf(data_type=pa.int64(), memory="512m")
def on_spark(x: pa.Int64Array) -> pa.Array:
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
    import hourly_udfs  # type: ignore[import-not-found]

    table.add_columns({SMALL: hourly_udfs.small, ON_SPARK: hourly_udfs.on_spark})
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with run_airflow(home, dags, {}) as airflow, AirflowApi(airflow.url, airflow.check) as api:
        for dag_id in (EMPTY, SMALL, ON_SPARK):
            wait_for_dag(api, dag_id)
            run(api, dag_id)
        for _ in range(hours):
            table.add(pa.table({"x": pa.array(range(rows), pa.int64())}))
            for kind, dag_id in KINDS.items():
                seconds[kind].append(run(api, dag_id))
    return {"seconds": seconds, "rows": rows, "hours": hours, "agree": agrees(table)}


def run(api: AirflowApi, dag_id: str) -> float:
    """Trigger a run, wait for its end, and return the seconds between both by Airflow's clock."""
    run_id = api.trigger(dag_id)
    while (found := api.run(dag_id, run_id))["state"] not in ENDED:
        time.sleep(0.5)
    if found["state"] != "success":
        raise SystemExit(f"The run {run_id} of {dag_id} ended as {found['state']}.")
    return run_seconds(found)


def agrees(table: Table) -> bool:
    """Whether both columns hold the UDF's values."""
    values = table.to_arrow()
    expected = pa.chunked_array([[2 * x for x in values["x"].to_pylist()]], pa.int64())
    return bool(values[SMALL].equals(expected) and values[ON_SPARK].equals(expected))
