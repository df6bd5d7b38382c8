"""A plan above a threshold waits for a person; before the approval no UDF is called."""

from __future__ import annotations

import re

import airflow
import pytest

from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.errors import InvalidInput
from airflow_geneva.task_groups import RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.desk import ROWS, make_dag, make_view, texts
from tests.support.driving import Driver, events

waiting = pytest.mark.skipif(airflow.__version__ < "3.3", reason="a task waits in the triggerer, which tests lack")
pytestmark = pytest.mark.airflow


@pytest.fixture
def due(desk: Desk) -> Desk:
    desk.append("ab")
    desk.define(n="length")
    return desk


@pytest.mark.core
@waiting
def test_a_plan_above_the_threshold_waits_and_is_computed_after_the_approval(
    due: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__GENEVA__INLINE_BELOW_SECONDS")
    Driver.trigger(make_dag(due)).go()
    due.calls()
    due.append("c")  # small, with a history: without the threshold its plan task would compute it
    run = Driver.trigger(make_dag(due, approve_above={"rows": f"{{{{ {ROWS - 1} }}}}", "seconds": 3600})).go()
    assert run.states()["backfill.approve"] == "awaiting_input"
    assert due.calls() == []
    asked = run.xcom("backfill.plan", "summary")["approval"]
    assert f"Compute {ROWS} rows of {due.table.name}.n?" == asked["subject"]
    assert f"rows {ROWS} is above {ROWS - 1}" in asked["body"]
    assert re.search(rf"^- `\d+ rows: {ROWS} pending, .*`$", asked["body"], re.MULTILINE)
    assert "\n- `Estimate: " in asked["body"]
    job = due.database.job(run.xcom("backfill.plan", "summary")["job_id"])
    assert job.state == "PENDING"
    assert str(job.time_left).startswith("waits until it is approved and its first task starts: ")
    run.answer("backfill.approve", "Approve")
    assert run.state == "success", run.errors
    assert run.states()["backfill.shards.apply"] == ["success"]
    assert due.calls() == texts("c")
    assert len(events(due.asset)) == 2


@waiting
@pytest.mark.parametrize("of_view", [False, True])
def test_after_a_rejection_the_run_is_green_and_skipped_and_says_so(due: Desk, of_view: bool) -> None:
    from airflow.sdk import DAG

    dag, group, location = make_dag(due, approve_above={"cost": 1}), "backfill", due.table.location
    if of_view:
        view = make_view(due)
        group, location = "refresh", view.location
        with DAG(f"dag_{due.table.name}", schedule=None) as dag:
            RefreshTaskGroup(view="v", approve_above={"cost": 1})
    run = Driver.trigger(dag).go().answer(f"{group}.approve", "Reject")
    assert run.state == "success", run.errors
    states = run.states()
    assert (states[f"{group}.shards.apply"], states[f"{group}.finish"]) == ("skipped", "skipped")
    assert due.calls() == []
    assert events(due.asset) == []
    [job] = read_jobs(location.checkpoints, job_ids(location.checkpoints)[:1])
    assert (job.state, job.rows_left, job.rows_computed) == ("PARTIAL", 2 * ROWS, 0)
    assert job.notes[-1] == "not approved, by Ada"
    if not of_view:  # the rejection outlives a clear
        run.clear("backfill.plan").go(kill="backfill.approve")
        assert (run.state, run.states()["backfill.finish"]) == ("failed", "failed")


@waiting
@pytest.mark.parametrize("limit", ["nan", "inf", "-1"])
def test_a_threshold_that_is_no_number_lets_no_plan_pass(due: Desk, limit: str) -> None:
    run = Driver.trigger(make_dag(due, approve_above={"rows": f"{{{{ '{limit}' }}}}"})).go()
    assert "is not valid: give numbers of at least 0" in run.error("backfill.plan")
    assert due.calls() == []


def test_a_plan_below_the_threshold_does_not_wait(due: Desk) -> None:
    run = Driver.trigger(make_dag(due, approve_above={"rows": 2 * ROWS})).go()
    assert run.state == "success", run.errors
    assert run.states()["backfill.approve"] == "success"
    assert due.calls() == texts("ab")
    again = Driver.trigger(make_dag(due, approve_above={"rows": 0})).go()
    assert again.states()["backfill.finish"] == "success"


def test_a_wrong_threshold_is_refused_when_the_dag_is_parsed(desk: Desk) -> None:
    with pytest.raises(InvalidInput, match="Give numbers by rows, seconds, slot_seconds, cost"):
        make_dag(desk, approve_above={"dollars": 3})
