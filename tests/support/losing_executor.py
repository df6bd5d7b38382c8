"""Refresh a view of groups by a shuffle on a cluster with an executor that dies; run in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pyspark
from pyspark.sql import SparkSession

import airflow_geneva
from airflow_geneva.engine.run import groups as groups_run
from tests.spark.spark_udfs import note, seen


def executor() -> int:
    """Return the process of the executor whose worker this is: its own parent is the daemon that forks workers."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


@airflow_geneva.udf(data_type=pa.int64(), version="1")
def total(g: pa.Int64Array, x: pa.Int64Array, log: pa.StringArray) -> int:
    """Called once per group; kills its executor, with its part of the shuffle, in the first call for group 350."""
    note(log[0].as_py(), [g[0].as_py()])
    if g[0].as_py() == 350 and seen(log[0].as_py()).count(350) == 1:
        os.kill(executor(), signal.SIGKILL)
        signal.pause()  # until Spark ends this worker, too
    return int(sum(x.to_pylist()))


def main(folder: Path) -> None:
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    session = (
        SparkSession.builder.master("local-cluster[2,1,512]")
        .config("spark.executor.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.executorEnv.PYTHONPATH", os.pathsep.join(sys.path))
        .getOrCreate()
    )
    groups_run._ROWS_WORTH_A_SHUFFLE = 0
    log, rows = str(folder / "log"), 4_200
    data = pa.table({"g": [x % 700 for x in range(rows)], "x": range(rows), "log": [log] * rows})
    table = airflow_geneva.connect(folder / "db").create_table("numbers", data, max_rows_per_file=900)
    query = table.query().group_by("g").agg({"n": "count(*)", "total": (total, ["g", "x", "log"])})
    view = query.create_materialized_view(name="v")
    assert view.plan_refresh().spec.shuffles
    result = view.refresh(runner="spark", task_size=60, concurrency=2)
    shown = {row["g"]: (row["n"], row["total"]) for row in view.to_arrow().to_pylist()}
    right = {g: (6, sum(range(g, rows, 700))) for g in range(700)}
    print(json.dumps({"state": result.state, "rows": result.rows_computed, "right": shown == right}))
    session.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
