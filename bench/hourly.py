"""The duration of small hourly DAG runs in a real Airflow, compared with an empty DAG of two tasks."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import Table, connect
from dags_examples.demo.rest import ENDED, AirflowApi, run_seconds
from dags_examples.demo.runs import wait_for_dag
from dags_examples.demo.stack import DemoHome, run_airflow, run_spark_server, write_spark_conf
from dags_examples.demo.verses import read_books

EMBEDDING = Path(__file__).parents[1] / "dags_examples" / "embedding_udfs"

CONNECT, SUBMIT = "on_connect", "on_submit"
# In this order: the second run of a DAG after the same rows has nothing to do.
IN_THE_PLAN_TASK = {"two empty tasks": "empty", "new rows": "docs_small", "nothing to do": "docs_small"}
ON_SPARK = {"new rows, Spark Connect": f"docs_{CONNECT}", "new rows, spark-submit": f"docs_{SUBMIT}"}
LARGE = {"Spark Connect": CONNECT, "spark-submit": SUBMIT}

DAGS = """
from airflow.sdk import DAG, task

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG("empty", schedule=None):

    @task
    def first() -> None: ...

    @task
    def second() -> None: ...

    first() >> second()

for name in ("docs_small", "docs_on_connect", "docs_on_submit", "verses_on_connect", "verses_on_submit"):
    table, _, column = name.partition("_")
    with DAG(name, schedule=None):
        spark_conn_id = "spark_server" if column == "on_connect" else "spark_default"
        BackfillTaskGroup(table=table, column=column, spark_conn_id=spark_conn_id)
"""

UDFS = """
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf


@udf(data_type=pa.int64())
def double(x: pa.Int64Array) -> pa.Array:
    return pc.multiply(x, 2)
"""


def measure(folder: str, hours: int, rows: int, verses: int) -> dict[str, Any]:
    """Simulate hours in which some rows arrive; return the seconds of every run, from trigger to end, by kind.

    Then embed verses like the demo, and return the seconds of the apply tasks too.

    Args:
        hours: number of hours after the first run, which computes the whole table.
        rows: rows that arrive in an hour.
        verses: rows to embed.
    """
    home, dags = DemoHome(Path(folder)), Path(folder) / "dags"
    dags.mkdir(parents=True)
    (dags / "hourly_dags.py").write_text(DAGS)
    (dags / "hourly_udfs.py").write_text(UDFS)
    (dags / ".airflowignore").write_text("hourly_udfs.py\nembedding_udfs/\n")
    write_spark_conf(home, {})
    database = connect(home.database)
    table = database.create_table("docs", pa.table({"x": pa.array(range(50 * rows), pa.int64())}))
    shutil.copytree(EMBEDDING, dags / EMBEDDING.name)
    sys.path.insert(0, str(dags))
    from embedding_udfs import embed
    from hourly_udfs import double  # type: ignore[import-not-found]

    books = pa.concat_tables(read_books())
    copies = pa.concat_tables([books] * -(-verses // books.num_rows)).slice(0, verses)
    texts = database.create_table("verses", copies, max_rows_per_file=-(-verses // 16))
    texts.add_columns(dict.fromkeys(LARGE.values(), embed))

    columns = ("small", CONNECT, SUBMIT)
    table.add_columns(dict.fromkeys(columns, double))
    with airflow(home, dags, {}) as api:
        seconds = simulate(api, table, IN_THE_PLAN_TASK, hours, rows)
    with run_spark_server(home, {}) as connection:
        on_spark = {"AIRFLOW__GENEVA__INLINE_BELOW_SECONDS": "0", "AIRFLOW_CONN_SPARK_SERVER": connection}
        with airflow(home, dags, on_spark) as api:
            seconds |= simulate(api, table, ON_SPARK, hours, rows)
            applied = {way: seconds_of_apply(api, f"verses_{column}") for way, column in LARGE.items()}
    agree = agrees(table, columns) and all(texts.count_rows(f"{column} IS NULL") == 0 for column in LARGE.values())
    about = {"rows": rows, "hours": hours, "verses": verses}
    return {"seconds": seconds, "applied": applied, "agree": agree, **about}


@contextmanager
def airflow(home: DemoHome, dags: Path, variables: Mapping[str, str]) -> Iterator[AirflowApi]:
    with run_airflow(home, dags, variables) as running, AirflowApi(running.url, running.check) as api:
        yield api


def simulate(api: AirflowApi, table: Table, kinds: Mapping[str, str], hours: int, rows: int) -> dict[str, list[float]]:
    """Run each kind's DAG once for the existing rows, and then once per hour; return the seconds of the hourly runs."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for dag_id in dict.fromkeys(kinds.values()):
        run(api, dag_id)
    for _ in range(hours):
        table.add(pa.table({"x": pa.array(range(rows), pa.int64())}))
        for kind, dag_id in kinds.items():
            seconds[kind].append(run_seconds(run(api, dag_id)))
    return seconds


def seconds_of_apply(api: AirflowApi, dag_id: str) -> float:
    """Run a DAG, and return the seconds that its apply tasks took by Airflow's clock."""
    found = api.tasks(dag_id, run(api, dag_id)["dag_run_id"])
    return sum(task.seconds or 0.0 for task in found if task.step == "apply")


def run(api: AirflowApi, dag_id: str) -> Mapping[str, Any]:
    """Trigger a run, wait for its end, and return it."""
    wait_for_dag(api, dag_id)
    run_id = api.trigger(dag_id)
    while (found := api.run(dag_id, run_id))["state"] not in ENDED:
        time.sleep(0.5)
    if found["state"] != "success":
        raise SystemExit(f"The run {run_id} of {dag_id} ended as {found['state']}.")
    return found


def agrees(table: Table, columns: Sequence[str]) -> bool:
    """Whether the columns hold the UDF's values, for all rows that existed at their last run."""
    values = table.to_arrow()
    found = [values.filter(pc.is_valid(values[column])) for column in columns]
    right = all(rows[column].equals(pc.multiply(rows["x"], 2)) for rows, column in zip(found, columns, strict=True))
    return right and all(rows.num_rows > 0 for rows in found) and values[columns[-1]].null_count == 0
