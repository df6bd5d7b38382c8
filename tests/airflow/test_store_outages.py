"""The store is away in the middle of each task of a run: no try of any task is spent."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from airflow_geneva import connect
from airflow_geneva.engine.storage import outages
from tests.airflow.conftest import Desk
from tests.support.desk import connect_lance, make_dag, texts
from tests.support.driving import Driver
from tests.support.object_store import Bucket
from tests.support.outage import Proxy, at_log

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

TASKS = {
    "backfill.plan": rb"PUT .*/jobs/.*/job\.json",
    "backfill.shards.apply": rb"PUT .*/data/",
    "backfill.shards.commit": rb"PUT .*/_versions/",
    "backfill.finish": rb"GET .*/jobs/.*/commit-",
}
"""By task, a request in the middle of it."""


@pytest.fixture
def far_desk(
    desk: Desk, bucket: Bucket, proxy: Proxy, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Desk:
    options = {**options, "aws_endpoint": proxy.endpoint, "lance_aimd_max_retries": "0"}
    database = connect(f"s3://{bucket.name}/db", options)
    table = database.create_table(desk.table.name, desk.table.to_arrow().schema.empty_table())
    far = replace(desk, database=database, table=table)
    connect_lance(monkeypatch, far, **options)
    far.define(n="length")
    far.append("a")
    return far


def assert_no_try_was_spent(run: Driver, desk: Desk) -> None:
    assert run.state == "success", run.errors
    for task in TASKS:
        assert run.tries(task, 0 if "shards" in task else -1) == 1
    assert sorted(desk.table.to_arrow()["n"].to_pylist()) == [len(text) for text in texts("a")]


@pytest.mark.parametrize(
    "away", [pytest.param(0.6, id="short"), pytest.param(60.0, id="a minute", marks=pytest.mark.soak)]
)
@pytest.mark.shows("Retries", "lose the object store in the middle of any of the four tasks, for a minute")
def test_a_store_that_is_away_in_each_task_costs_no_try(
    far_desk: Desk, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, away: float
) -> None:
    if away < 1:
        monkeypatch.setattr(outages, "_SLOW_SECONDS", 0.1)
    for line in TASKS.values():
        proxy.at_request(line, lambda: proxy.down_for(away))
    with at_log("airflow_geneva.storage", "", lambda: None) as lines:
        run = Driver.trigger(make_dag(far_desk, default_args={"retries": 0})).go()
    assert proxy.watched == 0
    assert_no_try_was_spent(run, far_desk)
    # A thread of the test before may still wait for its own bucket.
    (bucket, _, _) = far_desk.database.uri.rpartition("/")
    said = [line.partition(" ")[2][:13] for line in lines if line.startswith(f"{bucket} ")]
    assert said == ["does not answ", "answers again"] * (len(said) // 2)
    assert said


@pytest.mark.parametrize("task", ["backfill.shards.apply", "backfill.shards.commit"])
@pytest.mark.shows("Retries", "the same, and the task has an `execution_timeout`")
def test_the_execution_timeout_of_a_task_ends_its_wait(far_desk: Desk, proxy: Proxy, task: str) -> None:
    began: list[float] = []
    proxy.at_request(TASKS[task], lambda: (began.append(time.monotonic()), proxy.down()))  # type: ignore[func-returns-value]
    run = Driver.trigger(make_dag(far_desk, default_args={"retries": 0, "execution_timeout": timedelta(seconds=3)}))
    run.go()
    assert run.state == "failed"
    assert "Timeout" in run.error(task, 0)
    assert time.monotonic() - began[0] < 60
    # The task's other threads end with its process; here they still wait for the store.
    proxy.up()
    for thread in threading.enumerate():
        if thread.name in ("geneva-read", "geneva-keep", "geneva-progress", "geneva-heartbeat"):
            thread.join(30)


@pytest.mark.shows("Retries", "the same for longer than `[geneva] store_patience`")
def test_the_configured_patience_ends_the_wait(far_desk: Desk, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__GENEVA__STORE_PATIENCE", "0")
    proxy.down()
    run = Driver.trigger(make_dag(far_desk)).go()
    assert run.state == "failed"
    assert "does not answer" in run.error("backfill.plan")
