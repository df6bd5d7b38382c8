"""`BackfillTaskGroup` with a real spark-submit."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.airflow.conftest import Desk
from tests.airflow.driving import Driver, events
from tests.airflow.test_backfill_group import make_dag, texts
from tests.spark.test_standalone import bare_python, master

pytestmark = [pytest.mark.airflow, pytest.mark.spark]

__all__ = ["bare_python", "master"]


def go(desk: Desk, **settings: object) -> Driver:
    desk.append("ab")
    desk.define(n="length")
    return Driver.trigger(make_dag(desk, inline_below_rows=0, shard_size=None, **settings)).go()


def test_a_shard_that_failed_on_spark_says_why_and_its_retry_runs_only_the_rest(desk: Desk) -> None:
    desk.break_at("b07", once=True)
    # One slot: beside a failure another task may lose what it has not checkpointed yet.
    run = go(desk, default_args={"retries": 1}, concurrency=1)
    assert run.state == "success", run.errors
    assert run.tries("backfill.shards.apply", 0) == 2
    told = run.error("backfill.shards.apply", 0)
    assert told.startswith(f"Computing shard 0 of {desk.table.name}.n failed: UdfError: ")
    assert "cannot measure b07 yet" in told
    assert desk.calls() == sorted([*texts("ab"), "b07"])
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    assert len(events(desk.asset)) == 1
    assert list(Path(tempfile.gettempdir()).glob("airflow-geneva-2*")) == []


@pytest.mark.slow
def test_a_standalone_cluster_whose_workers_do_not_have_the_package_computes_a_shard(
    desk: Desk, master: str, bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": master}))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    conf = {
        "spark.pyspark.python": bare_python,
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
    }
    run = go(desk, concurrency=2, spark_submit={"conf": conf})
    assert run.state == "success", run.errors
    assert desk.calls() == texts("ab")
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
