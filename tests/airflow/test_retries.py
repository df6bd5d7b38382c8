"""Which failures are tried again, and when."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.models.taskinstance import TaskInstance
from airflow.sdk import DAG

from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.errors import CommitConflict, InvalidInput
from airflow_geneva.operators import CommitOperator
from tests.airflow.conftest import Desk
from tests.support.desk import make_dag
from tests.support.driving import Driver

sdk = pytest.importorskip("airflow.sdk")
pytestmark = [
    pytest.mark.airflow,
    pytest.mark.skipif(not hasattr(sdk, "RetryRule"), reason="retry policies came with Airflow 3.3"),
]


def fail_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the first commit fail."""
    real, errors = PlannedJob.commit, [error]

    def fail(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*arguments)

    monkeypatch.setattr(PlannedJob, "commit", fail)


@pytest.mark.shows("Retries", "nothing: the default retry policy (Airflow 3.3)")
def test_a_commit_conflict_is_tried_again_soon(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.append("a")
    desk.define(n="length")
    fail_once(monkeypatch, CommitConflict("others kept changing it"))
    delays: list[timedelta] = []
    real = TaskInstance.next_retry_datetime

    def note(ti: TaskInstance) -> Any:
        found = real(ti)
        delays.append(found - ti.end_date)
        return found

    monkeypatch.setattr(TaskInstance, "next_retry_datetime", note)
    given = {"retries": 2, "retry_delay": timedelta(hours=1)}
    run = Driver.trigger(make_dag(desk, default_args=given)).go()
    assert run.state == "success", run.errors
    assert run.tries("backfill.shards.commit", 0) == 2
    assert timedelta(seconds=30) in delays


@pytest.mark.shows("Retries", "the same")
def test_what_stays_wrong_is_not_tried_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.append("a")
    desk.define(n="length")
    fail_once(monkeypatch, InvalidInput("there is no column n"))
    run = Driver.trigger(make_dag(desk, default_args={"retries": 2})).go()
    assert run.states()["backfill.shards.commit"] == ["failed"]
    assert run.tries("backfill.shards.commit", 0) == 1


@pytest.mark.shows("Retries", "give a `retry_policy` of your own")
def test_the_authors_own_policy_goes_first() -> None:
    own = sdk.ExceptionRetryPolicy(rules=[])
    with DAG("own_policy", schedule=None, default_args={"retry_policy": own}):
        by_default = CommitOperator(task_id="by_default", shard={})
        given = CommitOperator(task_id="given", shard={}, retry_policy=own)
    assert by_default.retry_policy is own
    assert given.retry_policy is own
