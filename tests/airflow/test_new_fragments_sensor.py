"""`NewFragmentsSensor`: what counts as new to a view, a column or a version, and waiting in a real DAG."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from airflow.providers.common.compat.sdk import AirflowFailException, AirflowTaskTimeout, TaskDeferred
from airflow.sdk import DAG, task

from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import StorageError
from airflow_geneva.sensors import NewFragmentsSensor
from tests.airflow.conftest import Desk
from tests.support.desk import make_view
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow

Change = Callable[[Desk], Any]

UPDATE: Change = lambda desk: desk.table.lance.update({"text": "'new'"}, where="text = 'a03'")  # noqa: E731
COMPACT: Change = lambda desk: desk.table.lance.optimize.compact_files()  # noqa: E731

CHANGES: dict[str, tuple[Change, bool, bool, bool]] = {
    "append": (lambda desk: desk.append("z"), True, True, True),
    "update": (UPDATE, False, True, True),
    "delete": (lambda desk: desk.table.lance.delete("text = 'a03'"), False, True, False),
    "compaction": (COMPACT, False, False, False),
    "unrelated column": (lambda desk: desk.table.lance.add_columns({"more": "1"}), False, False, False),
    "restore to itself": (lambda desk: desk.table.lance.restore(), False, False, False),
}
"""Whether rows are new after a change, whether they are with `changed_rows`, and whether a column lacks values."""

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whose attribute `time` is when the sensor looks."""
    found = SimpleNamespace(time=None)
    monkeypatch.setattr(
        "airflow_geneva.sensors.new_fragments.datetime", SimpleNamespace(now=lambda zone: found.time.astimezone(zone))
    )
    return found


def commits(desk: Desk) -> list[datetime]:
    """When the versions of the table were committed."""
    return [version["timestamp"].astimezone() for version in desk.table.lance.versions()]


def looks(desk: Desk, since: str | int, **settings: Any) -> bool:
    """Whether one look finds something."""
    given = {"table": desk.table.name, "since": since, **settings}
    return bool(NewFragmentsSensor(task_id="wait", **given).poke({}).is_done)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["view", "version"])
def test_new_rows_are_seen_and_changed_ones_when_asked_for(desk: Desk, kind: str, change: str) -> None:
    make, new, changed, _ = CHANGES[change]
    desk.append("ab")
    view = make_view(desk)
    assert looks(desk, "view:v")
    view.refresh(runner="inline")
    since = "view:v" if kind == "view" else desk.table.version
    assert not looks(desk, since)
    make(desk)
    assert looks(desk, since) is new
    assert looks(desk, since, changed_rows="true") is changed
    view.refresh(runner="inline")
    assert not looks(desk, "view:v", changed_rows=True)


@pytest.mark.parametrize("change", CHANGES)
def test_a_column_lacks_rows_that_are_new_or_whose_inputs_changed(desk: Desk, change: str) -> None:
    make, _, _, new = CHANGES[change]
    desk.append("ab")
    desk.define(n="length")
    assert looks(desk, "column:n")
    desk.table.backfill("n", runner="inline")
    assert not looks(desk, "column:n")
    make(desk)
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
    desk.append("ab")
    since = desk.table.version
    UPDATE(desk)
    COMPACT(desk)
    desk.table.lance.cleanup_old_versions(older_than=timedelta(0))
    assert not looks(desk, since)
    assert looks(desk, since, changed_rows=True)
    desk.append("z")
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
        ("view:other", "is 'other_source'"),
        ("view:other_source", "is a table and not a view"),
        ("column:text", "has no UDF"),
    ],
)
def test_what_makes_no_sense_fails_at_once(desk: Desk, since: str, told: str) -> None:
    other = desk.database.create_table("other_source", [{"text": "a"}])
    other.query().create_materialized_view(desk.database, "other")
    sensor = NewFragmentsSensor(task_id="wait", table=desk.table.name, since="{{ params.since }}")
    sensor.since = since
    with pytest.raises(AirflowFailException, match=told):
        sensor.poke({})  # type: ignore[typeddict-item]


@pytest.mark.core
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
        "from_version": desk.table.version - 1,
        "version": desk.table.version,
        "fragments": 1,
        "fragment_ids": [1],
        "new_rows": 10,
        "changed_rows": 0,
        "deleted_rows": 0,
    }


def test_a_sensor_that_waited_in_vain_can_skip_what_comes_after_it(desk: Desk) -> None:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        NewFragmentsSensor(
            task_id="wait", table=desk.table.name, since=desk.table.version, timeout=0, poke_interval=0, soft_fail=True
        )
    run = Driver.trigger(dag).go()
    assert run.states()["wait"] == "skipped"


def test_it_waits_for_enough_rows_or_fragments(desk: Desk) -> None:
    since = desk.table.version
    desk.append("ab")
    assert looks(desk, since, min_new_rows=20)
    assert not looks(desk, since, min_new_rows="21")
    assert looks(desk, since, min_new_fragments="2")
    assert not looks(desk, since, min_new_fragments=3)
    assert not looks(desk, since, min_new_rows=20, min_new_fragments=3)
    assert looks(desk, since, min_new_rows="", min_new_fragments=None)
    since = desk.table.version
    desk.table.lance.update({"text": "'new'"}, where="text < 'a03'")
    desk.table.lance.delete("text > 'b04' AND text < 'c'")
    assert looks(desk, since, min_new_rows=3 + 5, changed_rows=True)
    assert not looks(desk, since, min_new_rows=3 + 5 + 1, changed_rows=True)
    assert not looks(desk, since, min_new_rows=1)


@pytest.mark.parametrize("since", ["view:v", "column:n", 1])
def test_a_burst_is_let_settle_but_not_for_ever(desk: Desk, clock: SimpleNamespace, since: str | int) -> None:
    """Each look is a sensor of its own, as after a reschedule."""
    make_view(desk).refresh(runner="inline")
    desk.define(n="length")
    time.sleep(0.5)
    desk.append("ab")
    clock.time = first = commits(desk)[-2]
    assert looks(desk, since)
    assert not looks(desk, since, quiet_period=60)
    assert not looks(desk, since, quiet_period=60, max_wait=timedelta(minutes=1))
    # Not since the version that was seen, nor since the others that came before the rows.
    clock.time = first + timedelta(seconds=0.3)
    assert not looks(desk, since, min_new_rows=1000, max_wait=0.4)
    clock.time = commits(desk)[-1] + timedelta(seconds=0.5)
    assert looks(desk, since, quiet_period=0.4)
    desk.table.lance.optimize.compact_files()
    assert not looks(desk, since, quiet_period=60)
    assert looks(desk, since, quiet_period=60, max_wait=0.4)
    assert looks(desk, since, min_new_rows=1000, max_wait=timedelta(seconds=0.4))
    assert not looks(desk, desk.table.version, max_wait=0.001)


def test_a_table_that_was_dropped_and_made_again_is_new_as_a_whole(desk: Desk) -> None:
    desk.append("abc")
    view = make_view(desk)
    view.refresh(runner="inline")
    reached, name = desk.table.version, desk.table.name
    desk.database.drop_table(name)
    assert not looks(desk, "view:v")
    desk.database.create_table(name, schema=pa.schema({"text": pa.string()}))
    assert not looks(desk, "view:v")
    assert not looks(desk, reached)
    while desk.table.version < reached:
        desk.append("a", rows=2)
        assert looks(desk, "view:v"), desk.table.version
        assert looks(desk, reached) is (desk.table.version < reached)
    desk.append("a", rows=2)
    # The row ids are those that the view has seen, of other rows.
    assert looks(desk, "view:v", min_new_rows=2 * reached)
    view.refresh(runner="inline")
    assert not looks(desk, "view:v", changed_rows=True)


def test_rows_that_a_restore_brings_back_are_new(desk: Desk) -> None:
    desk.append("ab")
    whole = desk.table.version
    desk.table.lance.delete("text < 'b'")
    view = make_view(desk)
    view.refresh(runner="inline")
    since = desk.table.version
    desk.table.lance.checkout_version(whole).restore()
    for seen in ("view:v", since):
        assert looks(desk, seen, min_new_rows=10)
        assert not looks(desk, seen, min_new_rows=11)
    view.refresh(runner="inline")
    since = desk.table.version
    desk.table.lance.checkout_version(whole + 1).restore()
    for seen in ("view:v", since):
        assert not looks(desk, seen)
        assert looks(desk, seen, changed_rows=True)


def test_a_store_that_cannot_be_reached_is_waited_for_and_one_that_refuses_is_not(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("a")
    trouble: list[Exception] = [StorageError("the store does not answer"), ConnectionError("nor now")]
    opened = TableLocation.open

    def fail_at_first(location: TableLocation, version: int | None = None) -> Any:
        if trouble:
            raise trouble.pop(0)
        return opened(location, version)

    monkeypatch.setattr(TableLocation, "open", fail_at_first)
    assert [looks(desk, 1) for _ in range(3)] == [False, False, True]
    trouble.append(PermissionError("Access denied"))
    with pytest.raises(AirflowFailException, match="Access denied"):
        looks(desk, 1)
    with pytest.raises(AirflowFailException, match="'nowhere' does not exist"):
        looks(desk, 1, lance_conn_id="nowhere")


def test_a_time_out_of_the_task_is_no_trouble_with_the_store(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise AirflowTaskTimeout("too late")

    desk.append("a")
    monkeypatch.setattr("lance.LanceDataset", late)
    with pytest.raises(AirflowTaskTimeout):
        looks(desk, 1)


def later(seconds: float, act: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_a_dag_waits_in_the_triggerer(desk: Desk) -> None:
    make_view(desk).refresh(runner="inline")
    with DAG(f"dag_{desk.table.name}", schedule=None, params={"rows": 15}) as dag:

        @task
        def after(found: Any) -> list[int]:
            return [found["new_rows"], found["fragments"]]

        wait = NewFragmentsSensor(
            task_id="wait",
            table=desk.table.name,
            since="view:v",
            min_new_rows="{{ params.rows }}",
            quiet_period=timedelta(seconds=1),
            deferrable=True,
            poke_interval=1,
        )
        after(wait.output)
    timers = [later(2, lambda: desk.append("a")), later(4, lambda: desk.append("b"))]
    began = time.monotonic()
    run = Driver.trigger(dag).go()
    for timer in timers:
        timer.join()
    assert run.state == "success", run.errors
    assert time.monotonic() - began > 4
    assert run.xcom("after") == [20, 2]
    assert run.xcom("wait")["version"] == desk.table.version
    again = Driver.trigger(dag).go()  # there already: not deferred at all
    assert again.xcom("wait") == run.xcom("wait")


def deferred(desk: Desk, **settings: Any) -> Any:
    """What a sensor that finds nothing new hands to the triggerer."""
    given = {"task_id": "wait", "table": desk.table.name, "since": desk.table.version, "deferrable": True, **settings}
    with pytest.raises(TaskDeferred) as caught:
        NewFragmentsSensor(**given).execute({})  # type: ignore[typeddict-item]
    return caught.value


def test_what_is_handed_to_the_triggerer_is_plain_and_holds_no_credential(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = {"conn_type": "lance", "host": desk.database.uri, "extra": {"storage_options": {"key": "planted"}}}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps(connection))
    found = deferred(desk, timeout=50, poke_interval=7, max_wait=timedelta(hours=1), database=desk.database.uri)
    assert (found.method_name, found.timeout) == ("execute_complete", timedelta(seconds=50))
    _, arguments = found.trigger.serialize()
    assert arguments == {
        "table": desk.table.name,
        "since": str(desk.table.version),
        "max_wait": 3600.0,
        "lance_conn_id": "lance_default",
        "database": desk.database.uri,
        "poll_interval": 7,
        "once": True,
    }
    with pytest.raises(AirflowFailException, match="holds a user, a password, a query or a fragment"):
        deferred(desk, database="s3://user:planted@bucket/db", table="docs")


def test_what_the_triggerer_says_ends_the_task(desk: Desk) -> None:
    sensor = NewFragmentsSensor(task_id="wait", table="docs", since=1)
    said = {"table": "docs", "version": 3}
    assert sensor.execute_complete({}, said) == said  # type: ignore[typeddict-item]
    for event, told in (({"error": "no such connection"}, "no such connection"), (None, "without an event")):
        with pytest.raises(AirflowFailException, match=told):
            sensor.execute_complete({}, event)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("outcome", ["skipped", "failed"])
def test_a_deferrable_sensor_that_makes_no_sense_skips_or_fails(desk: Desk, outcome: str) -> None:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        NewFragmentsSensor(
            task_id="wait",
            table=desk.table.name,
            since="{{ 'views:v' }}",
            deferrable=True,
            soft_fail=outcome == "skipped",
        )
    assert Driver.trigger(dag).go().states()["wait"] == outcome


def test_airflow_s_setting_makes_sensors_deferrable() -> None:
    told = "import airflow_geneva.sensors as s; print(s.NewFragmentsSensor(task_id='w', table='t', since=1).deferrable)"
    environment = {**os.environ, "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "True"}
    done = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"
    assert not NewFragmentsSensor(task_id="w", table="t", since=1).deferrable
