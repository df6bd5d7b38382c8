"""`NewFragmentsTrigger` and tables that cannot be looked at: panics, stores that hang, tables that are other ones."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Table
from airflow_geneva.engine.storage import timeouts as patience
from airflow_geneva.engine.storage.timeouts import StoreThreads
from airflow_geneva.engine.watch import watcher as _looking
from airflow_geneva.triggers import NewFragmentsTrigger, new_fragments as module
from tests.airflow.conftest import Desk
from tests.support.triggering import Listener, Store, connect_to, play, trigger

pytestmark = pytest.mark.airflow

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
"""What pylance raises out of its native code; it cannot be imported."""


def warnings_of(found: NewFragmentsTrigger) -> list[str]:
    """What a trigger warns of from now on."""
    told: list[str] = []
    found._log = SimpleNamespace(info=lambda *_: None, warning=lambda text, *args: told.append(text % args))
    return told


@pytest.mark.parametrize("part", ["newest_versions", "observe"])
def test_a_panic_of_pylance_does_not_end_a_watcher(desk: Desk, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    desk.append("a")
    troubles, works = [PANIC("index out of bounds")], getattr(_looking, part)

    def panic_at_first(*args: Any) -> Any:
        if troubles:
            raise troubles.pop()
        return works(*args)

    monkeypatch.setattr(_looking, part, panic_at_first)

    watcher = trigger(desk.table.name)
    told = warnings_of(watcher)

    async def story() -> None:
        listener = Listener(watcher)
        assert (await listener.event())["new_rows"] == 10
        await listener.stop()

    play(story)
    [warning] = told
    assert warning.endswith("cannot be read: index out of bounds.")


@pytest.mark.parametrize("stop", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_whoever_ends_the_triggerer_ends_its_triggers(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def end(*_: Any) -> Any:
        raise stop

    monkeypatch.setattr(_looking, "newest_versions", end)

    async def story() -> None:
        await anext(trigger(desk.table.name).run())

    with pytest.raises(stop):
        play(story)


def ours() -> int:
    return sum(thread.name == "geneva-look-test" for thread in threading.enumerate())


def test_a_store_that_hangs_is_given_up_and_holds_up_no_other_trigger(
    desk: Desk, deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_to(monkeypatch, deaf, timeout="600s")
    monkeypatch.setattr(module, "_THREADS", StoreThreads("geneva-look-test", most=2))
    monkeypatch.setattr(module, "_STEP_TIMEOUT", 0.3)
    desk.append("a")
    watchers = [trigger("docs", lance_conn_id="lance_remote") for _ in range(6)]
    told = [warnings_of(found) for found in watchers]

    async def story() -> None:
        hanging = [Listener(found) for found in watchers]
        for listener in hanging:
            assert await listener.silent()
        assert ours() <= 2
        # Nor are Airflow's own threads used up.
        assert await asyncio.to_thread(lambda: 1) == 1
        listener = Listener(trigger(desk.table.name))
        assert (await listener.event())["new_rows"] == 10
        until = time.monotonic() + 120
        while not all(told):
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        for each in (*hanging, listener):
            await each.stop()

    play(story)
    assert all("has not answered for 0.3 seconds" in warnings[0] for warnings in told)


def test_a_store_that_hangs_is_not_waited_for_long_unless_its_options_say_so(
    desk: Desk, deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_to(monkeypatch, deaf)
    monkeypatch.setattr(
        patience, "_SHORT_TIMEOUTS", {**patience._SHORT_TIMEOUTS, "timeout": "1s", "client_retry_timeout": "1"}
    )

    watcher = trigger("docs", lance_conn_id="lance_remote")
    told = warnings_of(watcher)

    async def story() -> None:
        listener = Listener(watcher)
        until = time.monotonic() + 120
        while not told:
            assert time.monotonic() < until
            assert await listener.silent()
        await listener.stop()

    play(story)
    assert "Cannot list s3://lake/db" in told[0]


def test_an_answer_that_comes_too_late_loses_no_event(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.append("a")
    monkeypatch.setattr(module, "_STEP_TIMEOUT", 0.3)
    look, slow = _looking.observe, [1.5]

    def late_at_first(*args: Any) -> Any:
        time.sleep(slow.pop() if slow else 0)
        return look(*args)

    monkeypatch.setattr(_looking, "observe", late_at_first)

    async def story() -> None:
        listener = Listener(trigger(desk.table.name, poll_interval=2.0))
        assert (await listener.event())["new_rows"] == 10
        await listener.stop()

    play(story)
    assert not slow


def made_again(desk: Desk, name: str, rows: int, versions: int) -> Table:
    """A table of that name in place of the one that was there, of whose versions only the newest is left."""
    desk.database.drop_table(name)
    table = desk.database.create_table(name, [{"text": "again"}] * rows)
    while table.version < versions:
        table.add([{"text": "later"}])
    forget_versions(table)
    return table


def forget_versions(table: Table) -> None:
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)


def find_event(store: Store, name: str, **settings: Any) -> dict[str, Any] | None:
    """What a triggerer that begins with what Airflow has kept finds, if anything."""
    found: list[dict[str, Any]] = []

    async def story() -> None:
        listener = Listener(trigger(name, **settings), store)
        if not await listener.silent():
            found.append(await listener.event())
            assert await listener.silent()
        await listener.stop()

    play(story)
    return found[0] if found else None


@pytest.mark.parametrize("before", [0, 5])
def test_a_table_that_was_made_again_is_new_as_a_whole_also_when_its_versions_have_passed_the_one_seen(
    desk: Desk, before: int
) -> None:
    store = Store()
    table = desk.database.create_table("later", [{"text": "x"}] * before, schema=pa.schema({"text": pa.string()}))
    table.add([{"text": "y"}])
    if not before:
        table.lance.delete("text = 'y'")
    found = find_event(store, "later")
    assert (found or {}).get("new_rows", 0) == (6 if before else 0)
    made_again(desk, "later", rows=4, versions=table.version + 3)
    again = desk.database.open_table("later")
    found = find_event(store, "later")
    assert found is not None
    assert (found["from_version"], found["new_rows"]) == (None, again.count_rows())
    assert find_event(store, "later") is None


def test_a_table_whose_versions_were_cleaned_up_is_the_same_one(desk: Desk) -> None:
    store = Store()
    desk.append("ab")
    assert (find_event(store, desk.table.name) or {})["new_rows"] == 20
    for letter in "cde":
        desk.append(letter)
    forget_versions(desk.table)
    assert (find_event(store, desk.table.name) or {})["new_rows"] == 30
    # Neither does maintenance, after which no file is left of what was seen.
    desk.table.lance.optimize.compact_files()
    forget_versions(desk.table)
    assert find_event(store, desk.table.name) is None
    desk.append("f")
    desk.table.lance.optimize.compact_files()
    forget_versions(desk.table)
    assert (find_event(store, desk.table.name) or {})["new_rows"] == 10
