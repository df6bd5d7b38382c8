"""`BackfillTaskGroup` with a real spark-submit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.airflow.conftest import Desk
from tests.airflow.driving import Driver, events
from tests.airflow.test_backfill_group import make_dag, texts

pytestmark = [pytest.mark.airflow, pytest.mark.spark]


def test_a_shard_that_failed_on_spark_says_why_and_its_retry_runs_only_the_rest(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")
    desk.break_at("b07", once=True)
    # One slot: beside a failure another task may lose what it has not checkpointed yet.
    given = {"default_args": {"retries": 1}, "concurrency": 1}
    run = Driver.trigger(make_dag(desk, inline_below_rows=0, shard_size=None, **given)).go()
    assert run.state == "success", run.errors
    assert run.tries("backfill.shards.apply", 0) == 2
    told = run.error("backfill.shards.apply", 0)
    assert told.startswith(f"Computing shard 0 of {desk.table.name}.n failed: UdfError: ")
    assert "cannot measure b07 yet" in told
    assert desk.calls() == sorted([*texts("ab"), "b07"])
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    assert len(events(desk.asset)) == 1
    assert list(Path(tempfile.gettempdir()).glob("airflow-geneva-2*")) == []
