"""One backfill in a process of its own, to be killed: ``python kill_me.py DATABASE``."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

import airflow_geneva
from tests.spark.spark_udfs import slow


def main(database: str) -> None:
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    builder.config("spark.log.level", "OFF").getOrCreate()
    table = airflow_geneva.connect(database).open_table("numbers")
    print("ready", flush=True)
    result = table.backfill("y", udf=slow, runner="spark", checkpoint_interval=0.2, task_size=250)
    print("done", result.rows_computed, result.rows_reused, result.rows_left, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(sys.argv[1])
