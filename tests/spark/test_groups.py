"""Groups computed on a SparkSession."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import airflow_geneva
from tests.spark import spark_udfs
from tests.spark.spark_udfs import seen

pytestmark = pytest.mark.spark


@pytest.mark.core
def test_touched_groups_are_computed_once_by_the_tasks(spark: object, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    data = pa.table({"g": [x % 700 for x in range(4_200)], "x": range(4_200), "log": [log] * 4_200})
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=1_000)
    columns = {"n": "count(*)", "most": "max(x)", "total": (spark_udfs.logged_total, ["g", "x", "log"])}
    columns["batches"] = (spark_udfs.total_of_batches, ["x"])
    view = table.query().group_by("g").agg(columns).create_materialized_view(name="v")

    def right() -> dict[int, tuple[int, ...]]:
        rows = table.to_arrow().group_by("g").aggregate([("x", "count"), ("x", "max"), ("x", "sum")]).to_pylist()
        return {row["g"]: (row["x_count"], row["x_max"], row["x_sum"], row["x_sum"]) for row in rows}

    def shown() -> dict[int, tuple[int, ...]]:
        return {row.pop("g"): tuple(row.values()) for row in view.to_arrow().to_pylist()}

    result = view.refresh(runner="spark", task_size=200)
    assert (result.state, result.rows_run, result.rows_computed) == ("DONE", 2 * 700, 700)
    assert sorted(seen(log)) == list(range(700))
    assert shown() == right()
    Path(log).unlink()
    table.lance.update({"x": "x + 1"}, where="x < 30")
    table.lance.delete("g = 5")
    result = view.refresh(runner="spark")
    assert (result.rows_run, result.rows_computed) == (2 * 29, 29)
    assert sorted(seen(log)) == [g for g in range(30) if g != 5]
    assert shown() == right()
