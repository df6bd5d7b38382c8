"""A small job is computed by its plan task: who decides, what becomes visible, and what a failure or a retry does."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.engine.run import choice, pipeline
from airflow_geneva.task_groups import RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.desk import ROWS, make_dag, make_view, texts
from tests.support.driving import Driver, events

pytestmark = pytest.mark.airflow


@pytest.fixture
def dag(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> DAG:
    """A DAG whose first run has computed fragment `a` in mapped tasks, and fragment `b` is new."""
    desk.append("a")
    desk.define(n="length")
    made = make_dag(desk, default_args={"retries": 0})
    assert Driver.trigger(made).go().states()["backfill.shards.apply"] == ["success"]
    monkeypatch.delenv("AIRFLOW__GENEVA__INLINE_BELOW_SECONDS")
    desk.calls()
    desk.append("b")
    return made


def newest_record(desk: Desk) -> Any:
    checkpoints = desk.table.location.checkpoints
    return read_jobs(checkpoints, job_ids(checkpoints)[:1])[0]


class Killed(BaseException):
    pass


def kill_after_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next plan task die when it has committed its first shard."""
    step = pipeline.apply_and_commit

    def killed_after(*arguments: Any) -> None:
        step(*arguments)
        monkeypatch.setattr(pipeline, "apply_and_commit", step)
        raise Killed

    monkeypatch.setattr(pipeline, "apply_and_commit", killed_after)


@pytest.mark.core
def test_a_small_job_is_computed_committed_and_announced_without_a_shard(desk: Desk, dag: DAG) -> None:
    version = desk.table.version
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert run.states()["backfill.shards.apply"] == "skipped"
    assert run.xcom("backfill.plan") == []
    assert (run.states()["backfill.finish"], run.states()["after"]) == ("success", "success")
    assert desk.calls() == texts("b")
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    event = events(desk.asset)[-1]
    assert (event["to_version"], event["rows_computed"]) == (version + 1, ROWS)
    record = newest_record(desk)
    assert (record.state, record.rows_computed, record.runner) == ("DONE", ROWS, "inline")
    assert f"for {ROWS} rows, by an earlier job" in record.runner_reason
    assert run.xcom("backfill.plan", "summary")["runner"] == "inline"


def test_a_version_of_the_code_that_never_ran_is_not_loaded_into_the_plan_task(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__GENEVA__INLINE_BELOW_SECONDS")
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go()
    assert run.states()["backfill.shards.apply"] == ["success"]
    assert run.xcom("backfill.plan", "summary")["runner"] == "spark"
    assert "no earlier job" in newest_record(desk).runner_reason


@pytest.mark.core
def test_a_failure_in_the_plan_task_is_recorded_and_a_clear_goes_on_from_the_checkpoint(desk: Desk, dag: DAG) -> None:
    desk.break_at("b04")
    run = Driver.trigger(dag).go()
    assert run.state == "failed"
    assert run.states()["backfill.shards.apply"] == "upstream_failed"
    assert "b04" in run.error("backfill.plan")
    assert "Clear the plan task" in run.error("backfill.finish")
    record = newest_record(desk)
    assert (record.state, record.rows_failed, record.rows_left) == ("FAILED", 1, ROWS - 1)
    assert "b04" in record.error
    assert desk.values()["b00"] is None

    desk.mend()
    desk.calls()
    run.clear("backfill.plan").go()
    assert run.state == "success", run.errors
    assert desk.calls() == texts("b")[4:]
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    assert events(desk.asset)[-1]["to_version"] == desk.table.version


def test_a_retry_of_the_plan_task_goes_on_too(desk: Desk, dag: DAG) -> None:
    desk.break_at("b07", once=True)
    again = make_dag(desk, default_args={"retries": 1})
    run = Driver.trigger(again).go()
    assert run.state == "success", run.errors
    assert run.tries("backfill.plan") == 2
    assert desk.calls() == sorted([*texts("b"), "b07"])


def test_what_a_killed_plan_task_committed_is_announced_by_the_next_try(
    desk: Desk, dag: DAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_after_a_shard(monkeypatch)
    announced = events(desk.asset)[-1]["to_version"]
    run = Driver.trigger(make_dag(desk, default_args={"retries": 1}))
    run.go()
    assert run.state == "success", run.errors
    assert desk.calls() == texts("b")
    assert len(events(desk.asset)) == 2
    event = events(desk.asset)[-1]
    assert (event["from_version"], event["to_version"]) == (announced, desk.table.version)
    assert event["rows_computed"] == ROWS
    record = newest_record(desk)
    assert (record.rows_computed, record.rows_skipped, record.rows_left) == (ROWS, ROWS, 0)
    assert record.commits == (desk.table.version,)


def test_a_job_that_turns_out_slow_goes_on_in_mapped_tasks(
    desk: Desk, dag: DAG, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: choice.Pace, rows: int) -> None:
        raise choice.TooSlow("it takes too long")

    monkeypatch.setattr(choice.Pace, "__call__", slow)
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert run.states()["backfill.shards.apply"] == ["success"]
    assert desk.calls() == texts("b")
    record = newest_record(desk)
    assert (record.runner, record.runner_reason) == ("spark", "it takes too long")
    assert [len(run.xcom("backfill.plan")), record.rows_computed + record.rows_reused] == [1, ROWS]


@pytest.mark.core
def test_a_small_refresh_is_swapped_when_it_finishes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.append("a")
    view = make_view(desk)
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        RefreshTaskGroup(view=view.name, inline_below_rows=10**9)
    assert Driver.trigger(dag).go().states()["refresh.shards.apply"] == ["success"]
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_SECONDS", "1000")  # however busy the machine is
    desk.calls()
    desk.append("b")
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert run.states()["refresh.shards.apply"] == "skipped"
    assert desk.calls() == texts("b")
    assert sorted(view.to_arrow()["text"].to_pylist()) == texts("ab")
    assert events(f"lance_default/{view.name}")[-1]["rows_computed"] == ROWS


def test_a_retry_does_not_fail_for_rows_that_were_within_the_limit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that an earlier try gave up count against the limit, so the rows of that try do, too."""
    desk.append("a")
    desk.define(n="lenient")
    made = make_dag(desk, default_args={"retries": 1})
    assert Driver.trigger(made).go().state == "success"
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_SECONDS", "1000")  # however busy the machine is
    desk.append("bc")
    for text in ("b01", "b02", "c01", "c02"):
        desk.break_at(text)
    kill_after_a_shard(monkeypatch)
    desk.calls()
    run = Driver.trigger(made).go()
    assert run.state == "success", run.errors
    assert run.tries("backfill.plan") == 2
    record = newest_record(desk)
    assert (record.rows_computed, record.rows_failed, len(record.commits)) == (2 * ROWS - 4, 4, 2)
    assert record.rows_run == len(desk.calls())
    assert events(desk.asset)[-1]["rows_computed"] == 2 * ROWS - 4
    assert [text for text, n in desk.values().items() if n is None] == ["b01", "b02", "c01", "c02"]

    red = Driver.trigger(make_dag(desk, max_failed="{{ '0.5' }}", default_args={"retries": 0})).go()
    assert (red.state, red.states()["backfill.plan"], red.states()["after"]) == ("failed", "success", "upstream_failed")
    assert "4 of 4 due rows failed, and max_failed allows 0.5 of them" in red.error("backfill.finish")
    assert newest_record(desk).state == "FAILED"
    assert "max_failed allows" in newest_record(desk).error
