"""`RefreshDatabaseOperator`: everything in one task, with the events of what changed, and again after a failure."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG

from airflow_geneva.operators import RefreshDatabaseOperator
from tests.airflow.conftest import Desk
from tests.support.driving import Driver, events

pytestmark = pytest.mark.airflow


@pytest.mark.core
def test_everything_is_computed_in_order_and_a_task_that_is_tried_again_sends_all_events(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")
    view = f"v_{desk.table.name}"
    desk.table.query().select(["n"]).where("n >= 0").create_materialized_view(desk.database, view)
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        RefreshDatabaseOperator(task_id="all", runner="{{ 'inline' }}", retries=1)
    desk.break_at("a00")
    run = Driver.trigger(dag).go()
    assert f"{view}: not run, because {desk.table.name}.n failed" in run.error("all")
    assert events(desk.asset) == []
    desk.mend()
    run.clear("all").go()
    assert run.state == "success", run.errors
    found = run.xcom("all")
    assert (found["blocked"], found["jobs"][view]) == ({}, {"computed": 20, "failed": 0})
    assert found["jobs"][f"{desk.table.name}.n"]["failed"] == 0
    assert [event["table"] for event in events(desk.asset)] == [desk.table.name]
    assert [event["table"] for event in events(f"lance_default/{view}")] == [view]
    assert desk.database.open_table(view).count_rows() == 20
    # There is nothing to do.
    run = Driver.trigger(dag).go()
    assert run.xcom("all") == {"jobs": {}, "blocked": {}}
    assert len(events(desk.asset)) == 1
