"""A DAG of each task group in a real Airflow: one loads, its event starts one that computes, and that one a view's."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import airflow_geneva
from tests.support.stack import RUN_SECONDS, start_stack, wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

DAGS = """
from airflow.sdk import DAG

from airflow_geneva.assets import lance_asset
from airflow_geneva.task_groups import BackfillTaskGroup, LoadColumnsTaskGroup, RefreshTaskGroup

with DAG("load", schedule=None, is_paused_upon_creation=False):
    LoadColumnsTaskGroup(table="docs", source={place!r}, on="id", inline_below_rows=1000)

with DAG("column", schedule=None, is_paused_upon_creation=False):
    BackfillTaskGroup(table="docs", column="letters")

with DAG("view", schedule=[lance_asset("docs")], is_paused_upon_creation=False):
    RefreshTaskGroup(view="captions", source="docs", inline_below_rows=1000)
"""

UDFS = """
import airflow_geneva


@airflow_geneva.udf
def letters(caption: str) -> int:
    return len(caption)
"""


def test_a_delivery_is_loaded_a_column_computed_by_spark_submit_and_the_view_follows(
    java_home: str, new_airflow_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    udfs = tmp_path / "udfs" / "caption_udfs.py"
    udfs.parent.mkdir()
    udfs.write_text(UDFS)
    monkeypatch.syspath_prepend(str(udfs.parent))
    database = airflow_geneva.connect(tmp_path / "db")
    table = database.create_table("docs", pa.table({"id": range(10)}), max_rows_per_file=5)
    place = tmp_path / "delivery.parquet"
    pq.write_table(pa.table({"id": range(10), "caption": [f"page {row}" for row in range(10)]}), place)
    files = {"groups.py": DAGS.format(place=str(place)), "caption_udfs.py": UDFS, ".airflowignore": "udfs"}
    settings = {
        "AIRFLOW_CONN_LANCE_DEFAULT": json.dumps({"conn_type": "lance", "host": str(tmp_path / "db")}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[1]"}),
        "AIRFLOW__GENEVA__INLINE_BELOW_SECONDS": "0",  # each stage in a task of its own
    }
    with start_stack(tmp_path / "home", new_airflow_db, files, settings) as stack:
        assert stack.finish("load", stack.trigger("load")) == "success", stack.logs()

        from caption_udfs import letters

        table.add_columns({"letters": letters})
        table.query().select(["caption", "letters"]).create_materialized_view(database, "captions")
        assert stack.finish("column", stack.trigger("column")) == "success", stack.logs()
        view = database.open_table("captions")
        expected = [{"caption": f"page {row}", "letters": 6} for row in range(10)]
        wait_for(lambda: view.to_arrow().to_pylist() == expected, RUN_SECONDS, "the view of what was computed")
        told = {("docs", "DONE", 10), ("captions", "DONE", 10)}
        wait_for(
            lambda: told <= {(job.table, job.state, job.rows_computed) for job in database.jobs()},
            RUN_SECONDS,
            "all jobs",
        )
