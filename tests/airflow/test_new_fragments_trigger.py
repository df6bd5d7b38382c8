"""`NewFragmentsTrigger`: what it sends and when, what it remembers, and that many of them cost next to nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest
from airflow.models.dag import DagModel
from airflow.models.trigger import Trigger
from airflow.sdk import DAG, Asset, BaseOperator
from airflow.triggers.base import BaseEventTrigger
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_geneva import connect
from airflow_geneva.assets import lance_asset, new_fragments, watched_lance_asset
from airflow_geneva.engine.watch import watcher as _looking
from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.task_groups import RefreshTaskGroup
from airflow_geneva.triggers import NewFragmentsTrigger, new_fragments as module
from tests.airflow.conftest import Desk
from tests.support.desk import make_view
from tests.support.driving import register
from tests.support.triggering import QUIET, Listener, Store, connect_to, play, trigger

pytestmark = pytest.mark.airflow

Step: TypeAlias = "Callable[[Desk], Any] | dict[str, Any] | None"
"""Something happens; an event tells of it, at least this; or there is none for a while."""


def revived(given: BaseEventTrigger) -> NewFragmentsTrigger:
    """What the triggerer makes of what Airflow keeps in its database."""
    path, arguments = given.serialize()
    assert path == "airflow_geneva.triggers.new_fragments.NewFragmentsTrigger"
    found = NewFragmentsTrigger(**json.loads(json.dumps(arguments)))
    assert found.serialize() == (path, arguments)
    return found


@pytest.mark.core
def test_it_is_the_same_after_airflow_has_kept_it() -> None:
    assert revived(NewFragmentsTrigger("docs")).serialize()[1] == {
        "table": "docs", "lance_conn_id": "lance_default", "poll_interval": 60.0,
    }  # fmt: skip
    every = {
        "table": "docs", "lance_conn_id": "other", "database": "/db", "since": "view:v", "changed_rows": True,
        "min_new_rows": 5, "min_new_fragments": 2, "quiet_period": 1.5, "max_wait": 7.0, "poll_interval": 3.0,
        "asset": "some", "once": True,
    }  # fmt: skip
    found = revived(NewFragmentsTrigger(**every))
    assert found.serialize()[1] == every
    assert found.wanted.max_wait == 7.0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"since": "views:v"}, "is not understood"),
        ({"since": "view:"}, "is not understood"),
        ({"since": "view:../v"}, "is not a view name"),
        ({"table": "../docs"}, "is not a table name"),
        ({"min_new_rows": 0}, "min_new_rows=0 is not valid"),
        ({"quiet_period": -1.0}, "quiet_period=-1.0 is not valid"),
        ({"poll_interval": 0}, "poll_interval=0 is not valid"),
    ],
)
def test_what_makes_no_sense_is_refused_while_the_dag_is_read(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        NewFragmentsTrigger(**{"table": "docs", **settings})


def test_a_watched_asset_says_in_its_name_how_it_is_watched() -> None:
    first, second = (
        watched_lance_asset("docs"),
        watched_lance_asset("docs", since="view:v", poll_interval=timedelta(0, 5)),
    )
    assert first.name == "lance_default/docs?watch=new_rows"
    assert second.name == "lance_default/docs?since=view:v&watch=new_rows"
    assert first.uri == "lance://lance_default/docs?watch=new_rows"
    assert watched_lance_asset("docs", since="view:v").name == second.name  # only the interval was tuned
    long = watched_lance_asset("docs", quiet_period=timedelta(days=14, seconds=1))
    assert long.name == "lance_default/docs?quiet_period=1209601&watch=new_rows"
    assert len({asset.uri for asset in (first, second, lance_asset("docs"))}) == 3
    triggers = [revived(asset.watchers[0].trigger) for asset in (first, second)]
    assert [found.asset for found in triggers] == [first.name, second.name]
    assert [found.poll_interval for found in triggers] == [60.0, 5.0]
    # Airflow runs two triggers of one hash as one.
    assert len({BaseEventTrigger.hash(*found.serialize()) for found in triggers}) == 2


def test_other_dags_do_not_end_the_watching(desk: Desk) -> None:
    """Airflow drops the watcher of an asset when a DAG is read that names the asset without it."""
    place = lance_asset(desk.table.name)
    watched = [watched_lance_asset(desk.table.name), watched_lance_asset(desk.table.name, since="view:v")]
    with DAG(f"watching_{desk.table.name}", schedule=watched) as watching:
        RefreshTaskGroup(view="v", source=desk.table.name)
    with DAG(f"writing_{desk.table.name}", schedule=None) as writing:
        BaseOperator(task_id="write", outlets=[place])
    with DAG(f"reading_{desk.table.name}", schedule=[place]) as reading:
        BaseOperator(task_id="read", inlets=[place])

    def triggers() -> dict[str, int]:
        """The ids of the triggers that run, by their asset."""
        with create_session() as session:
            found = session.scalars(select(Trigger)).all()
            return {asset.name: row.id for row in found for asset in row.assets if desk.table.name in asset.name}

    register(watching)
    with create_session() as session:
        session.get_one(DagModel, watching.dag_id).is_paused = False
    register(watching)
    running = triggers()
    assert running.keys() == {asset.name for asset in watched}
    assert len(set(running.values())) == 2
    for dag in (writing, reading, watching, writing):
        register(dag)
        with create_session() as session:
            session.get_one(DagModel, dag.dag_id).is_paused = False
        assert triggers() == running


def test_an_event_is_read_nested_and_plain(desk: Desk) -> None:
    said = {"table": "docs", "version": 3, "fragment_ids": [1], "new_rows": 10}
    for given in (said, {"from_trigger": True, "payload": said}):
        assert new_fragments(given) == said
        assert new_fragments(type("Event", (), {"extra": given})()) == said
    for other in (None, {}, {"payload": None}, {"table": "docs", "to_version": 3}, {"error": "no"}, Asset("a")):
        assert new_fragments(other) is None


@pytest.mark.core
def test_a_watcher_tells_of_rows_once(desk: Desk) -> None:
    async def story() -> None:
        listener = Listener(trigger(desk.table.name))
        assert await listener.silent()  # the table is empty
        desk.append("ab")
        first = await listener.event()
        assert first["from_version"] is None or first["from_version"] == 1
        if first["new_rows"] == 10:  # it looked in between
            assert (await listener.event())["new_rows"] == 10
        assert await listener.silent()
        before = desk.table.version
        desk.append("c")
        assert await listener.event() == {
            "table": desk.table.name, "since": None, "from_version": before, "version": before + 1, "fragments": 1,
            "fragment_ids": [2], "new_rows": 10, "changed_rows": 0, "deleted_rows": 0,
        }  # fmt: skip
        desk.table.lance.optimize.compact_files()
        desk.table.lance.delete("text = 'a03'")
        assert await listener.silent()
        await listener.stop()

    play(story)


def appended(letter: str) -> Step:
    return lambda desk: desk.append(letter)


def restored(version: int) -> Step:
    return lambda desk: desk.table.lance.checkout_version(version).restore()


STORIES: dict[str, tuple[dict[str, Any], list[Step]]] = {
    "updates and deletions when asked for": (
        {"changed_rows": True},
        [
            appended("a"),
            {"new_rows": 10},
            lambda desk: desk.table.lance.update({"text": "'new'"}, where="text < 'a02'"),
            {"new_rows": 0, "changed_rows": 2, "deleted_rows": 0},
            lambda desk: desk.table.lance.delete("text = 'new' OR text = 'a05'"),
            {"new_rows": 0, "changed_rows": 0, "deleted_rows": 3},
        ],
    ),
    "a table that comes, goes and comes again with the same version": (
        {"table": "later"},
        [
            None,
            lambda desk: desk.database.create_table("later", [{"text": "x"}] * 3),
            *({"from_version": None, "version": 1, "new_rows": 3}, None),
            *(lambda desk: desk.database.drop_table("later"), None),
            lambda desk: desk.database.create_table("later", [{"text": "x"}] * 4),
            *({"from_version": None, "version": 1, "new_rows": 4}, None),
            *(lambda desk: desk.database.drop_table("later"), None),
        ],
    ),
    "rows that a restore brings back": (
        {},
        [
            *(appended("a"), lambda desk: desk.table.lance.delete("text > 'a05'"), {"new_rows": 6}),
            *(restored(2), {"new_rows": 4}, restored(3), None),
        ],
    ),
    "rows that a view lacks, once, and all of them when the view is gone": (
        {"since": "view:v"},
        [
            *(appended("a"), {"new_rows": 10}, None),
            *(make_view, None, lambda desk: desk.database.open_view("v").refresh(runner="inline"), None),
            *(appended("b"), {"since": "view:v", "new_rows": 10, "fragments": 1}),
            lambda desk: desk.database.open_view("v").refresh(runner="inline"),
            # The source stands still, and the view lacks all of it.
            *(lambda desk: desk.database.drop_table("v"), {"new_rows": 20}),
        ],
    ),
    "enough rows": (
        {"min_new_rows": 25},
        [appended("a"), None, appended("b"), None, appended("c"), {"new_rows": 30}],
    ),
    "enough fragments, counted from the last event": (
        {"min_new_fragments": 2},
        [appended("a"), None, appended("b"), {"fragments": 2}, appended("c"), None],
    ),
}


@pytest.mark.parametrize("what", STORIES)
def test_a_watcher_tells_of(desk: Desk, what: str) -> None:
    settings, steps = STORIES[what]

    async def story() -> None:
        listener = Listener(trigger(**{"table": desk.table.name, **settings}))
        for step in steps:
            if callable(step):
                step(desk)
            elif step is None:
                assert await listener.silent()
            else:
                found = await listener.event()
                assert {name: found[name] for name in step} == step
        await listener.stop()

    play(story)


def test_a_burst_settles_and_max_wait_ends_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [timedelta(0)]
    monkeypatch.setattr(module, "_now", lambda: datetime.now(timezone.utc) + ahead[0])

    async def story() -> None:
        listener = Listener(trigger(desk.table.name, quiet_period=600.0))
        for letter in "abc":
            desk.append(letter)
            assert await listener.silent()
        ahead[0] = timedelta(seconds=600)
        found = await listener.event()
        assert (found["new_rows"], found["fragments"]) == (30, 3)
        ahead[0] = timedelta(0)
        await listener.stop()
        impatient = Listener(trigger(desk.table.name, min_new_rows=1000, min_new_fragments=1000, max_wait=0.5))
        assert (await impatient.event())["new_rows"] == 30
        await impatient.stop()

    play(story)


@pytest.mark.shows("Stop, kill, restart", "restart the triggerer")
def test_a_restart_of_the_triggerer_loses_nothing_and_doubles_nothing(desk: Desk) -> None:
    desk.append("a")

    async def story() -> None:
        store = Store()
        first = Listener(trigger(desk.table.name), store)
        await first.event()
        assert store.written == 0  # the event may still be on its way
        assert await first.silent()
        assert store.written == 1
        await first.stop()

        second = Listener(trigger(desk.table.name), store)
        assert await second.silent()
        await second.stop()
        desk.append("b")  # while nobody looks
        third = Listener(trigger(desk.table.name), store)
        found = await third.event()
        assert (found["from_version"], found["new_rows"]) == (desk.table.version - 1, 10)
        await third.stop()  # before it could write that down: told again

        fourth = Listener(trigger(desk.table.name), store)
        assert await fourth.event() == found
        assert await fourth.silent()
        await fourth.stop()

    play(story)


def test_a_state_store_that_fails_costs_an_event_too_many_at_most(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Airflow raises when two assets share a trigger."""
    desk.append("a")

    class Broken:
        async def aget(self, key: str) -> Any:
            raise ValueError("Task has 2 concrete inlets and outlets")

        async def aset(self, key: str, value: Any) -> None:
            raise ValueError("Task has 2 concrete inlets and outlets")

    async def story() -> None:
        listener = Listener(trigger(desk.table.name), Broken())  # type: ignore[arg-type]
        await listener.event()
        assert await listener.silent()
        desk.append("b")
        assert (await listener.event())["new_rows"] == 10
        await listener.stop()

    play(story)


def test_without_a_state_store_it_remembers_by_itself_and_tells_again_after_a_restart(desk: Desk) -> None:
    """Before Airflow 3.3."""
    desk.append("a")

    async def story() -> None:
        for _ in range(2):
            listener = Listener(trigger(desk.table.name))
            assert (await listener.event())["new_rows"] == 10
            assert await listener.silent()
            await listener.stop()

    play(story)


@pytest.fixture
def refusing() -> Iterator[str]:
    """An object store that lets nobody into the bucket `lake`, and has no other."""

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.startswith("/lake")
            self.send_response(403 if known else 404)
            self.end_headers()
            self.wfile.write(b"" if known else b"<Error><Code>NoSuchBucket</Code></Error>")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_task_is_not_woken_before_the_scheduler_knows_that_it_waits(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("a")
    monkeypatch.setattr(module, "_RESUME_DELAY", 4 * QUIET)

    async def story() -> None:
        task = Listener(trigger(desk.table.name, once=True))
        watcher = Listener(trigger(desk.table.name))
        assert await task.silent()
        assert (await watcher.event())["new_rows"] == 10
        assert (await task.event())["new_rows"] == 10
        await watcher.stop()

    play(story)


def test_a_task_that_waits_in_vain_is_told_why(desk: Desk, refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_to(monkeypatch, refusing.replace("http://", "http://planted:planted@"))
    monkeypatch.delenv("AIRFLOW_CONN_NOWHERE", raising=False)
    hopeless = {
        "'nowhere' does not exist": {"lance_conn_id": "nowhere"},
        "403": {"lance_conn_id": "lance_remote"},
        "NoSuchBucket": {"lance_conn_id": "lance_remote", "database": "s3://sea/db"},
        "is a table and not a view": {"since": f"view:{desk.table.name}"},
    }

    async def story() -> None:
        for told, settings in hopeless.items():
            waiting = trigger(desk.table.name, once=True, **settings)
            async with aclosing(waiting.run()) as events:
                [event] = [event async for event in events]
            assert told in event.payload["error"]
            assert "planted" not in json.dumps(event.payload).lower()

    play(story)


def test_a_watcher_that_cannot_look_waits_longer_each_time_and_goes_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.append("a")
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    troubles: list[Exception] = [StorageError("gone for a while"), OSError("and again"), PermissionError("not for you")]
    peek = _looking.newest_versions

    def fail_at_first(*args: Any) -> Any:
        if troubles:
            raise troubles.pop(0)
        return peek(*args)

    monkeypatch.setattr(_looking, "newest_versions", fail_at_first)
    monkeypatch.setattr(module.asyncio, "sleep", noted)

    async def story() -> None:
        listener = Listener(trigger(desk.table.name, poll_interval=100.0))
        assert (await listener.event())["new_rows"] == 10
        await listener.stop()

    play(story)
    assert pauses == [200.0, 400.0, 600.0]


def test_a_connection_is_read_again_after_a_failure(
    desk: Desk, refusing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    desk.append("a")
    connect_to(monkeypatch, refusing)

    async def story() -> None:
        listener = Listener(trigger(desk.table.name, lance_conn_id="lance_remote"))
        assert await listener.silent()
        right = json.dumps({"conn_type": "lance", "host": desk.database.uri})
        monkeypatch.setenv("AIRFLOW_CONN_LANCE_REMOTE", right)
        assert (await listener.event())["new_rows"] == 10
        await listener.stop()

    play(story)


def test_a_connection_that_names_another_place_is_noticed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_CONNECTION_SECONDS", 0.0)
    desk.append("a")

    async def story() -> None:
        listener = Listener(trigger(desk.table.name))
        assert (await listener.event())["new_rows"] == 10
        moved = connect(tmp_path / "moved")
        moved.create_table(desk.table.name, pa.table({"text": ["b"] * 7}))
        monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps({"conn_type": "lance", "host": moved.uri}))
        assert (await listener.event())["new_rows"] == 7
        await listener.stop()

    play(story)


def test_a_damaged_table_is_waited_for(desk: Desk) -> None:
    desk.append("a")
    newest = min((Path(desk.table.uri) / "_versions").glob("*.manifest"))
    kept = newest.read_bytes()
    newest.write_bytes(kept[:70])

    async def story() -> None:
        listener = Listener(trigger(desk.table.name))
        assert await listener.silent()
        newest.write_bytes(kept)
        assert (await listener.event())["new_rows"] == 10
        await listener.stop()

    play(story)


def test_two_hundred_triggers_on_tables_that_stand_still_open_none_of_them_and_leave_the_loop_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200
    desk.append("a")
    for number in range(count):
        shutil.copytree(desk.table.uri, f"{desk.database.uri}/still{number}.lance")
    looks: list[str] = []
    seen: list[str] = []
    look, peek = _looking.observe, _looking.newest_versions

    def noted_look(database: Any, wanted: Any, *rest: Any) -> Any:
        looks.append(wanted.table)
        return look(database, wanted, *rest)

    def noted_peek(database: Any, wanted: Any) -> Any:
        seen.append(threading.current_thread().name)
        return peek(database, wanted)

    monkeypatch.setattr(_looking, "observe", noted_look)
    monkeypatch.setattr(_looking, "newest_versions", noted_peek)

    async def story() -> None:
        listeners = [Listener(trigger(f"still{number}", poll_interval=0.5)) for number in range(count)]
        for listener in listeners:
            await listener.event()
        assert sorted(looks) == sorted(f"still{number}" for number in range(count))
        looks.clear()
        seen.clear()
        waiting = [asyncio.ensure_future(listener.silent()) for listener in listeners]
        lags, began, used = [], time.monotonic(), time.process_time()
        while time.monotonic() - began < 3:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - before - 0.01)
        used = time.process_time() - used
        await asyncio.gather(*waiting)
        for listener in listeners:
            await listener.stop()
        late, latest = (1000 * lag for lag in (sorted(lags)[len(lags) // 2], max(lags)))
        print(f"{len(seen)} looks at versions, {used / len(seen) * 1e6:.0f} us of CPU each,", end=" ")
        print(f"the loop late by {late:.1f} ms, at most {latest:.0f} ms")
        assert looks == []
        assert len(seen) >= count
        assert threading.main_thread().name not in seen
        assert max(lags) < 5

    play(story)
