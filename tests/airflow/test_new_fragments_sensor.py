"""`NewFragmentsSensor`: what counts as new to a view, a column or a version, and waiting in a real DAG."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_geneva import View
from airflow_geneva.sensors import NewFragmentsSensor
from tests.airflow.conftest import Desk
from tests.airflow.driving import Driver

pytestmark = pytest.mark.airflow

Change = Callable[[Desk], Any]

APPEND: Change = lambda desk: desk.append("z")  # noqa: E731
UPDATE: Change = lambda desk: desk.table.lance.update({"text": "'new'"}, where="text = 'a03'")  # noqa: E731
DELETE: Change = lambda desk: desk.table.lance.delete("text = 'a03'")  # noqa: E731
COMPACT: Change = lambda desk: desk.table.lance.optimize.compact_files()  # noqa: E731
UNRELATED: Change = lambda desk: desk.table.lance.add_columns({"more": "1"})  # noqa: E731
RESTORE: Change = lambda desk: desk.table.lance.restore()  # noqa: E731


PICKY = """
import pyarrow as pa

from airflow_geneva import udf


@udf(data_type=pa.int64(), version="1", on_error="skip")
def picky(text: str) -> int:
    if text == "a03":
        raise ValueError(text)
    return len(text)
"""


@pytest.fixture
def more_udfs(desk: Desk, airflow_db: Path) -> None:
    (airflow_db / "dags" / "geneva_sensor_udfs.py").write_text(PICKY)


def make_view(desk: Desk, name: str = "v") -> View:
    udfs = importlib.import_module("geneva_dag_udfs")
    return desk.table.query().select({"text": "text", "n": udfs.length}).create_materialized_view(desk.database, name)


def looks(desk: Desk, since: str | int, **settings: Any) -> bool:
    """Whether one look finds something."""
    given = {"table": desk.table.name, "since": since, **settings}
    return bool(NewFragmentsSensor(task_id="wait", **given).poke({}).is_done)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("change", "new", "changed"),
    [
        (APPEND, True, True),
        (UPDATE, False, True),
        (DELETE, False, True),
        (COMPACT, False, False),
        (UNRELATED, False, False),
        (RESTORE, False, False),
    ],
    ids=["append", "update", "delete", "compaction", "unrelated column", "restore to itself"],
)
@pytest.mark.parametrize("kind", ["view", "version"])
def test_new_rows_are_seen_and_changed_ones_when_asked_for(
    desk: Desk, kind: str, change: Change, new: bool, changed: bool
) -> None:
    desk.append("ab")
    view = make_view(desk)
    assert looks(desk, "view:v")
    view.refresh(runner="inline")
    since = "view:v" if kind == "view" else desk.table.version
    assert not looks(desk, since)
    change(desk)
    assert looks(desk, since) is new
    assert looks(desk, since, changed_rows="true") is changed
    view.refresh(runner="inline")
    assert not looks(desk, "view:v", changed_rows=True)


@pytest.mark.parametrize(
    ("change", "new"),
    [(APPEND, True), (UPDATE, True), (DELETE, False), (COMPACT, False), (UNRELATED, False), (RESTORE, False)],
    ids=["append", "update", "delete", "compaction", "unrelated column", "restore to itself"],
)
def test_a_column_lacks_rows_that_are_new_or_whose_inputs_changed(desk: Desk, change: Change, new: bool) -> None:
    desk.append("ab")
    desk.define(n="length")
    assert looks(desk, "column:n")
    desk.table.backfill("n", runner="inline")
    assert not looks(desk, "column:n")
    change(desk)
    assert looks(desk, "column:n") is new
    assert bool(desk.table.plan_backfill("n").rows_pending) is new
    desk.table.backfill("n", runner="inline")
    assert not looks(desk, "column:n")


@pytest.mark.parametrize("where", ["text LIKE 'a%'", "text LIKE '%1'"])
def test_rows_that_a_filter_left_out_have_not_been_seen_by_the_column(desk: Desk, where: str) -> None:
    desk.append("ab")
    desk.define(n="length")
    desk.table.backfill("n", where=where, runner="inline")
    assert looks(desk, "column:n")
    desk.table.backfill("n", runner="inline")
    assert not looks(desk, "column:n")


def test_rows_that_failed_are_no_news(desk: Desk, more_udfs: None) -> None:
    from geneva_sensor_udfs import picky

    desk.append("a")
    desk.table.add_columns({"n": picky})
    desk.table.backfill("n", runner="inline")
    view = desk.table.query().select({"m": (picky, ["text"])}).create_materialized_view(desk.database, "v")
    assert view.refresh(runner="inline").rows_failed == 1
    for since in ("column:n", "view:v"):
        assert not looks(desk, since, changed_rows=True)


def test_rows_of_a_view_s_source_that_its_filter_leaves_out_are_new_once(desk: Desk) -> None:
    desk.append("a")
    view = desk.table.query().where("text < 'm'").select(["text"]).create_materialized_view(desk.database, "v")
    view.refresh(runner="inline")
    desk.append("x")
    assert looks(desk, "view:v")
    view.refresh(runner="inline")
    assert not looks(desk, "view:v")


def test_an_update_before_compaction_and_a_cleaned_history_is_still_told_from_new_rows(desk: Desk) -> None:
    from datetime import timedelta

    desk.append("ab")
    since = desk.table.version
    UPDATE(desk)
    COMPACT(desk)
    desk.table.lance.cleanup_old_versions(older_than=timedelta(0))
    assert not looks(desk, since)
    assert looks(desk, since, changed_rows=True)
    APPEND(desk)
    assert looks(desk, since)


def test_without_stable_row_ids_every_fragment_that_came_counts(desk: Desk) -> None:
    plain = desk.database.create_table(
        "plain", [{"text": "a"}], storage_options={"new_table_enable_stable_row_ids": "false"}
    )
    since = plain.version
    assert not looks(desk, since, table="plain")
    plain.add([{"text": "b"}])
    assert looks(desk, since, table="plain")


def test_a_table_that_is_not_there_is_waited_for_and_what_reads_it_has_seen_nothing(desk: Desk) -> None:
    for since in ("view:v", "column:n", 1):
        assert not looks(desk, since, table="elsewhere")
    for since in ("view:v", "column:n", 1):
        assert not looks(desk, since)
    desk.append("a")
    for since in ("view:v", "column:n", 1):
        assert looks(desk, since)


@pytest.mark.parametrize(
    ("since", "told"),
    [
        ("", "since='' is empty"),
        ("views:v", "is not understood"),
        ("view:", "is not understood"),
        ("-3", "is not understood"),
        ("view:other", "is made from 'other_source'"),
        ("view:other_source", "is a table and not a view"),
        ("column:text", "has no UDF"),
    ],
)
def test_what_makes_no_sense_fails_at_once(desk: Desk, since: str, told: str) -> None:
    other = desk.database.create_table("other_source", [{"text": "a"}])
    other.query().create_materialized_view(desk.database, "other")
    with pytest.raises(AirflowFailException, match=told):
        looks(desk, since)


@pytest.mark.parametrize("mode", ["poke", "reschedule"])
def test_a_dag_waits_for_new_rows_and_then_goes_on(desk: Desk, mode: str) -> None:
    desk.append("a")
    view = make_view(desk)
    view.refresh(runner="inline")
    looked = []

    class Watched(NewFragmentsSensor):
        def poke(self, context: Any) -> Any:
            found = super().poke(context)
            looked.append(found.is_done)
            if len(looked) == 2:
                desk.append("b")
            return found

    with DAG(f"dag_{desk.table.name}", schedule=None, params={"view": "v"}) as dag:

        @task
        def after() -> str:
            return "ran"

        since = "view:{{ params.view }}"
        Watched(task_id="wait", table=desk.table.name, since=since, mode=mode, poke_interval=0) >> after()
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert looked == [False, False, True]
    assert run.states()["after"] == "success"
    assert run.xcom("wait") == {
        "table": desk.table.name,
        "since": "view:v",
        "version": desk.table.version,
        "fragments": 1,
    }


def test_a_sensor_that_waited_in_vain_can_skip_what_comes_after_it(desk: Desk) -> None:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        NewFragmentsSensor(
            task_id="wait", table=desk.table.name, since=desk.table.version, timeout=0, poke_interval=0, soft_fail=True
        )
    run = Driver.trigger(dag).go()
    assert run.states()["wait"] == "skipped"
