"""Stages where Spark runs the UDF: their processes are the task's, and a row fails in either part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import airflow_geneva
from airflow_geneva import udf
from airflow_geneva.spark.submit import Resources, SparkMaster
from tests.udfs_for_tests import staged
from tests.udfs_for_tests.failing import RAISE
from tests.udfs_for_tests.staged import FAILS_LATER


def make_table(tmp_path: Path, values: list[int]) -> airflow_geneva.Table:
    data = pa.table({"x": pa.array(values)})
    return airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=100)


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["column", "view"])
def test_failures_of_stage_and_call_are_those_of_their_rows(spark: object, tmp_path: Path, kind: str) -> None:
    bad = {7: RAISE, 150: FAILS_LATER + RAISE, 299: RAISE}
    table = make_table(tmp_path, [bad.get(row, row) for row in range(300)])
    made: Any = table
    if kind == "column":
        table.add_columns({"y": staged.scalar})
        result = table.backfill("y", runner="spark", concurrency=2)
    else:
        made = table.query().select({"x": "x", "y": staged.scalar}).create_materialized_view(name="v")
        result = made.refresh(runner="spark", concurrency=2)
    assert (result.rows_computed, result.rows_failed) == (297, 3)
    values = made.to_arrow().to_pylist()
    assert all(row["y"] == (None if row["x"] < 0 else row["x"] + 1) for row in values)
    rows = sorted(error.row_address for error in made.get_errors(result.job_id))
    assert rows == [7, 1 << 32 | 50, 2 << 32 | 99]


@pytest.mark.spark
def test_the_stage_of_a_function_of_this_process_runs_in_processes_of_the_tasks(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_geneva.engine.job.busy._TELLING_SECONDS", 1e-9)

    def located(x: int) -> int:
        return os.getpid()

    @udf(data_type=pa.struct({"stage": pa.int64(), "call": pa.int64()}), preprocess=located, preprocess_workers=2)
    def function(stage: pa.Int64Array) -> pa.Array:
        return pa.StructArray.from_arrays([stage, pa.array([os.getpid()] * len(stage))], ["stage", "call"])

    table = make_table(tmp_path, list(range(400)))
    table.add_columns({"y": function})
    result = table.backfill("y", udf=function, runner="spark", concurrency=2)
    assert result.rows_computed == 400
    rows = table.to_arrow().column("y").to_pylist()
    stages, calls = {row["stage"] for row in rows}, {row["call"] for row in rows}
    assert not stages & (calls | {os.getpid()})
    assert os.getpid() not in calls
    assert any(note.startswith("function busy") for note in result.notes)


def test_the_conf_asks_for_the_processes_of_a_stage() -> None:
    def tens(x: pa.Int64Array) -> pa.Int64Array:
        return pc.multiply(x, 10)

    function = udf(preprocess=tens, preprocess_workers=4)(tens)
    asked = Resources(2, function.num_cpus).settings(SparkMaster.parse("spark://master:7077", "spark_default"))
    assert asked == {"spark.task.cpus": "4", "spark.cores.max": "8"}
