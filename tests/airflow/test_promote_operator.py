"""`PromoteColumnOperator`: at once, after a person has seen the comparison, and again after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import airflow
import pytest
from airflow.sdk import DAG

from airflow_geneva.operators import PromoteColumnOperator
from tests.airflow.conftest import Desk
from tests.support.driving import DagBag, Driver, events

waiting = pytest.mark.skipif(airflow.__version__ < "3.3", reason="a task waits in the triggerer, which tests lack")
pytestmark = pytest.mark.airflow

EXAMPLES = Path(__file__).parents[2] / "dags_examples"


@pytest.fixture
def ready(desk: Desk) -> Desk:
    """A live column `n` of texts' lengths, and a candidate `m` of twice as much."""
    desk.append("ab")
    desk.define(n="length", m="longer")
    desk.table.backfill(["n", "m"], runner="inline")
    return desk


def promoting(desk: Desk, **settings: Any) -> DAG:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        given = {"table": desk.table.name, "column": "m", "to": "n", "keep_as": "n_v1", **settings}
        PromoteColumnOperator(task_id="promote", **given)
    return dag


@pytest.mark.core
def test_it_promotes_and_sends_an_event(ready: Desk) -> None:
    version = ready.table.version
    run = Driver.trigger(promoting(ready)).go()
    assert run.state == "success", run.errors
    assert ready.values("n") == {f"{letter}{row:02}": 6 for letter in "ab" for row in range(10)}
    assert set(ready.values("n_v1").values()) == {3}
    expected = {"version": version + 1, "already": False, "rows_due": 0, "columns": {}, "views": {}}
    assert run.xcom("promote") == expected
    [event] = events(ready.asset)
    assert (event["promoted"], event["to"], event["to_version"], event["column"]) == ("m", "n", version + 1, None)
    # A task that is cleared finds out that it is done.
    run.clear("promote").go()
    assert run.state == "success", run.errors
    assert run.xcom("promote")["already"]
    assert ready.table.version == version + 1


def test_a_candidate_that_is_not_ready_fails_the_task(ready: Desk) -> None:
    ready.append("c")
    version = ready.table.version
    run = Driver.trigger(promoting(ready)).go()
    assert "10 rows of 30 are due" in run.error("promote")
    assert ready.table.version == version
    assert events(ready.asset) == []
    run = Driver.trigger(promoting(ready, require_complete="{{ 'false' }}", column="{{ 'm' }}")).go()
    assert run.state == "success", run.errors
    assert run.xcom("promote")["rows_due"] == 10


@waiting
def test_a_person_sees_both_columns_and_approves(ready: Desk) -> None:
    run = Driver.trigger(promoting(ready, approve=True, sample=15)).go()
    assert run.states()["promote"] == "awaiting_input", run.errors
    assert "n_v1" not in ready.table.schema.names
    asked = question(run)
    assert asked.subject == f"Promote m to n in table {ready.table.name}?"
    assert "on 15 of 20 rows" in asked.body
    assert "distance 3 on average, from 3 to 3, values of 15 of 15 rows differ" in asked.body
    assert "candidate 'm': 20 rows, 0 due, 0 failed" in asked.body
    # What rows hold is not for everyone who may answer.
    assert "farthest apart" not in asked.body
    run.answer("promote", "Approve")
    assert run.state == "success", run.errors
    assert set(ready.values("n").values()) == {6}
    assert len(events(ready.asset)) == 1


@waiting
def test_after_a_rejection_nothing_changes(ready: Desk) -> None:
    version = ready.table.version
    run = Driver.trigger(promoting(ready, approve=True)).go().answer("promote", "Reject")
    assert run.state == "success", run.errors
    assert run.xcom("promote") == {"version": None, "rejected_by": "Ada"}
    assert ready.table.version == version
    assert events(ready.asset) == []


@waiting
def test_what_changed_while_a_person_thought_about_it_counts(ready: Desk) -> None:
    run = Driver.trigger(promoting(ready, approve=True)).go()
    ready.append("c")
    run.answer("promote", "Approve")
    assert "10 rows of 30 are due" in run.error("promote")


@waiting
def test_who_may_not_be_promoted_asks_nobody(ready: Desk) -> None:
    ready.append("c")
    run = Driver.trigger(promoting(ready, approve=True)).go()
    assert "10 rows of 30 are due" in run.error("promote")


def question(run: Driver) -> Any:
    from airflow.models.hitl import HITLDetail
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        ti = run._task(session, "promote", -1)
        found = session.scalar(select(HITLDetail).where(HITLDetail.ti_id == ti.id))
        session.expunge_all()
        return found


@waiting
def test_the_example(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wordllama")
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_ROWS", "1000")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from embedding_udfs import embed  # type: ignore[import-not-found]

    table = desk.database.create_table("verses", [{"text": "In the beginning"}, {"text": "Let There Be Light"}])
    table.add_columns({"embedding": embed})
    table.backfill("embedding", runner="inline")
    table.lance.create_index("embedding", "IVF_FLAT", num_partitions=1)
    bag = DagBag(EXAMPLES / "change_model.py")
    assert not bag.import_errors, bag.import_errors
    before = table.to_arrow(["embedding"])
    run = Driver.trigger(bag.dags["change_model"]).go()
    assert run.states()["promote"] == "awaiting_input", run.errors
    run.answer("promote", "Approve")
    assert run.states()["no_way_back"] == "awaiting_input", run.errors
    assert table.to_arrow(["embedding_v1"])["embedding_v1"].to_pylist() == before["embedding"].to_pylist()
    assert table.column_function("embedding").udf.import_path == "embedding_udfs.second:embed"
    run.answer("no_way_back", "Approve")
    assert run.state == "success", run.errors
    assert table.schema.names == ["text", "embedding"]
