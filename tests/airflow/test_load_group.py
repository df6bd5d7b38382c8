"""`LoadColumnsTaskGroup`: deliveries are loaded by key on Spark and in the plan task, and sent as an event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from airflow.sdk import DAG

from airflow_geneva.task_groups import LoadColumnsTaskGroup
from tests.airflow.conftest import Desk
from tests.support.driving import Driver, events

pytestmark = pytest.mark.airflow


def loading(desk: Desk, place: Path, **settings: Any) -> DAG:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        LoadColumnsTaskGroup(**{"table": desk.table.name, "source": str(place), "on": "text", **settings})
    return dag


def deliver(place: Path, ids: list[str]) -> Path:
    pq.write_table(pa.table({"text": ids, "caption": [f"about {one}" for one in ids]}), place)
    return place


@pytest.mark.spark
def test_a_delivery_is_loaded_on_spark_and_a_second_one_changes_what_differs(desk: Desk, tmp_path: Path) -> None:
    desk.append("ab")
    place = deliver(tmp_path / "delivery.parquet", [f"a{row:02}" for row in range(10)] + ["b00"])
    run = Driver.trigger(loading(desk, place)).go()
    assert run.state == "success", run.errors
    expected = {f"{letter}{row:02}": None for letter in "ab" for row in range(10)}
    expected |= {key: f"about {key}" for key in (*(f"a{row:02}" for row in range(10)), "b00")}
    assert desk.values("caption") == expected
    found = run.xcom("load.finish")
    assert (found["state"], found["rows_computed"], found["rows_missing"]) == ("DONE", 11, 9)
    [event] = events(desk.asset)
    assert event["column"] == "caption"
    # The same delivery has nothing to change; as a table of Spark, it is checked where a session is.
    version = desk.table.version
    again = Driver.trigger(loading(desk, place, source=f"parquet.`{place}`", format="spark", columns="caption")).go()
    assert again.state == "success", again.errors
    assert again.xcom("load.finish")["rows_missing"] == 9
    assert desk.table.version == version


@pytest.mark.core
def test_what_does_not_fit_fails_the_plan_and_nothing_is_written(desk: Desk, tmp_path: Path) -> None:
    desk.append("a")
    version = desk.table.version
    place = deliver(tmp_path / "delivery.parquet", ["a00", "a00"])
    run = Driver.trigger(loading(desk, place)).go()
    assert "text='a00' (2 rows)" in run.error("load.plan")
    assert desk.table.version == version
    run = Driver.trigger(loading(desk, place, source=f"parquet.`{place}`", format="spark")).go()
    assert "This process has no session of Spark" in run.error("load.plan")
