"""Old snapshots of a view go, and none that a refresh may still ask for."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva import connect
from airflow_geneva.database import Database
from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot, load_snapshot, save_snapshot
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.cleanup.garbage import FileKind, Garbage
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.outbox import OutboxEntry, read_outbox, write_outbox
from airflow_geneva.engine.run import view as run
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.views import state as contents
from airflow_geneva.engine.views.state import CommittedViewState, read_advance_note
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.invariants import assert_exact
from tests.support.marks import slow_after
from tests.support.object_store import Bucket, numbers
from tests.support.queries import (
    NOT_THIRD,
    Asked,
    Refresh,
    act,
    assert_equals_query,
    assert_nothing_to_refresh,
    shown,
)
from tests.support.tables import MakeTable
from tests.udfs_for_tests import views as udfs

HISTORIES = 200 if os.environ.get("GENEVA_SOAK") == "1" else 6
A_YEAR = timedelta(days=365).total_seconds()


def refresh(view: View, **arguments: Any) -> Any:
    return view.refresh(runner="inline", **arguments)


def snapshots(view: View) -> list[str]:
    """Names of the snapshots beside a view, the oldest first."""
    folder = Path(view.uri, "_checkpoints/state/view")
    return [path.name for path in sorted(folder.glob("swap.*"), key=os.path.getmtime)]


def clean(view: View, later: float = A_YEAR) -> Garbage:
    return collect(view.location, find_garbage(view.location, "1h", now=time.time() + later))


def forget(view: View) -> None:
    """Leave nothing but the newest version of a view."""
    view.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)


@pytest.fixture
def table(make_table: MakeTable, trace: Trace) -> Table:
    return make_table(100)


def test_outbox_entries_of_a_view_go_if_their_job_ended_without_a_commit(table: Table, trace: Trace) -> None:
    view = Asked(NOT_THIRD).make(table)
    done, nothing = refresh(view), refresh(view)
    assert nothing.commits == ()
    for result in (done, nothing):
        write_outbox(view.location.checkpoints, "view", OutboxEntry(result.job_id, 1))
    removed = clean(view).file_group(FileKind.MARKS).names
    assert [Path(name).name for name in removed] == [f"{nothing.job_id}.json"]
    assert read_outbox(view.location.checkpoints, "view") == [OutboxEntry(done.job_id, 1)]


def test_of_many_refreshes_the_snapshots_that_versions_name_are_left(table: Table, trace: Trace) -> None:
    view = Asked(NOT_THIRD).make(table)
    for number in range(6):
        table.lance.update({"x": "x + 3"}, where=f"id = {12 * number + 1}")
        refresh(view)
    assert len(snapshots(view)) == 6
    assert find_garbage(view.location, "1h").file_group(FileKind.SNAPSHOTS).count == 0
    assert clean(view).file_group(FileKind.SNAPSHOTS).count == 0
    forget(view)
    kept = snapshots(view)[-1]
    removed = clean(view)
    assert (removed.file_group(FileKind.SNAPSHOTS).count, snapshots(view)) == (5, [kept])
    assert "5 view snapshots" in str(removed)
    assert_nothing_to_refresh(view, trace)
    trace.clear()
    table.add([{"id": 100, "x": 100}, {"id": 101, "x": 99}])
    table.lance.update({"x": "x + 3"}, where="id = 4")
    refresh(view)
    assert_exact(trace, [100, 7])
    assert_equals_query(view, table, Asked(NOT_THIRD))
    assert clean(view).file_group(FileKind.SNAPSHOTS).count == 0


def test_nothing_younger_than_the_time_to_live_goes(table: Table) -> None:
    view = Asked().make(table)
    for _ in range(3):
        table.lance.update({"x": "x + 1"}, where="id = 1")
        refresh(view)
    forget(view)
    assert clean(view, later=1_800).file_group(FileKind.SNAPSHOTS).count == 0
    # A snapshot that is being named just now is not old, however short the time to live is.
    assert find_garbage(view.location, "1s", now=time.time() + 60).file_group(FileKind.SNAPSHOTS).count == 0
    assert clean(view, later=2 * 3_600).file_group(FileKind.SNAPSHOTS).count == 2


def test_what_a_restored_version_shows_is_still_known(table: Table, trace: Trace) -> None:
    view = Asked(NOT_THIRD).make(table)
    refresh(view)
    table.add([{"id": 100, "x": 100}])
    refresh(view)
    then = view.lance.version
    table.lance.update({"x": "x + 3"}, where="id = 50")
    refresh(view)
    clean(view)
    view.location.open(then).restore()
    refresh(view)
    assert_equals_query(view, table, Asked(NOT_THIRD))
    trace.clear()
    table.lance.update({"x": "x + 3"}, where="id = 61")
    clean(view)
    view.location.open(then).restore()
    refresh(view, ignore_checkpoints=True)
    assert_exact(trace, [53, 64])
    assert_equals_query(view, table, Asked(NOT_THIRD))


def test_a_tagged_version_keeps_what_it_shows(table: Table, trace: Trace) -> None:
    view = Asked().make(table)
    refresh(view)
    table.add([{"id": 100, "x": 100}])
    refresh(view)
    swap = next(v for v in range(view.lance.version, 0, -1) if contents.snapshot_of_version(view.lance, v))
    view.lance.tags.create("release", swap)
    table.add([{"id": 101, "x": 101}])
    refresh(view)
    view.lance.cleanup_old_versions(older_than=timedelta(0), error_if_tagged_old_versions=False)
    assert clean(view).file_group(FileKind.SNAPSHOTS).count == 1
    view.location.open(swap).restore()
    trace.clear()
    refresh(view, ignore_checkpoints=True)
    assert_exact(trace, [101])
    assert_equals_query(view, table, Asked())


def test_what_only_the_metadata_names_is_kept(table: Table, trace: Trace) -> None:
    view = Asked().make(table)
    refresh(view)
    forget(view)
    assert not any(contents.snapshot_of_version(view.lance, ref["version"]) for ref in view.lance.version_refs())
    contents.drop_intents(view.location, contents.read_intents(view.location))
    assert clean(view).file_group(FileKind.SNAPSHOTS).count == 0
    trace.clear()
    table.add([{"id": 100, "x": 100}])
    refresh(view)
    assert_exact(trace, [100])


def test_refreshes_that_only_advance_leave_one_snapshot_and_those_with_no_news_none(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(100)
    view = Asked(NOT_THIRD).make(table)
    refresh(view)
    version = view.lance.version
    for number in range(5):
        table.add([{"id": 200 + number, "x": 3 * number}])
        refresh(view)
        assert len(snapshots(view)) == 2
    before = snapshots(view)
    for _ in range(3):
        refresh(view)
    assert (snapshots(view), view.lance.version) == (before, version)
    forget(view)
    assert clean(view).file_group(FileKind.SNAPSHOTS).count == 0
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    trace.clear()
    table.add([{"id": 300, "x": 100}])
    refresh(view)
    assert_exact(trace, [100])
    assert_equals_query(view, table, Asked(NOT_THIRD))


def test_code_that_is_accepted_without_a_row_to_run_is_remembered(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Asked().make(table)
    refresh(view)
    other = {name: replace(udf, version="2") for name, udf in run.load_udfs(view.view_definition).items()}
    monkeypatch.setattr(run, "load_udfs", lambda definition: other)
    refresh(view, on_code_change="new_rows")
    assert_nothing_to_refresh(view, trace)


def test_a_planner_that_read_the_note_before_it_advanced_finds_what_the_next_one_names(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Asked(NOT_THIRD).make(table)
    refresh(view)
    table.add([{"id": 200, "x": 3}])
    refresh(view)
    table.add([{"id": 201, "x": 6}])
    asked: list[str] = []

    def slow(checkpoints: Storage, key: str) -> Snapshot | None:
        asked.append(key)
        if len(asked) == 1:
            monkeypatch.setattr(contents, "load_snapshot", load_snapshot)
            refresh(view)
            monkeypatch.setattr(contents, "load_snapshot", slow)
        return load_snapshot(checkpoints, key)

    monkeypatch.setattr(contents, "load_snapshot", slow)
    found = CommittedViewState(view.location, view.lance).snapshot
    assert found is not None
    note = read_advance_note(view.location)
    assert note is not None
    assert (found.source_version, asked[1:]) == (table.version, [note.snapshot])


def test_a_lost_note_of_an_unchanged_view_is_looked_for_once(table: Table) -> None:
    view = Asked(NOT_THIRD).make(table)
    refresh(view)
    swapped = CommittedViewState(view.location, view.lance).snapshot
    table.add([{"id": 200, "x": 3}])
    refresh(view)
    note = read_advance_note(view.location)
    assert note is not None
    contents.remove_snapshot(view.location.checkpoints, note.snapshot)
    found = CommittedViewState(view.location, view.lance).snapshot
    assert found is not None
    assert swapped is not None
    assert found.source_version == swapped.source_version


def test_a_refresh_at_work_keeps_its_snapshot_until_it_is_over(table: Table) -> None:
    view = Asked().make(table)
    refresh(view)
    job = Refresh(view).plan().made.spec.job_id
    known = CommittedViewState(view.location, view.lance).snapshot
    assert known is not None
    save_snapshot(view.location.checkpoints, job, known)
    two_hours = 7_200.0
    assert clean(view, two_hours).file_group(FileKind.SNAPSHOTS).count == 0
    found = find_garbage(view.location, "1h", now=time.time() + two_hours)
    JobFolder.of(view.location.checkpoints, job).write_result("FAILED", {})
    assert collect(view.location, found).file_group(FileKind.SNAPSHOTS).count == 0


def test_a_snapshot_that_is_named_after_it_was_found_stays(table: Table, trace: Trace) -> None:
    view = Asked().make(table)
    refresh(view)
    table.add([{"id": 100, "x": 100}])
    taken = Refresh(view).plan().apply()
    result = taken.finish()
    assert result.state == "DONE"
    second = view.lance.version
    view.location.open(1).restore()
    forget(view)
    found = find_garbage(view.location, "1h", now=time.time() + A_YEAR)
    assert second not in [ref["version"] for ref in view.lance.version_refs()]
    doomed = found.file_group(FileKind.SNAPSHOTS).names
    assert doomed
    key = doomed[0].rsplit("/", 1)[-1].removesuffix(".lance")
    contents.write_intent(view.location, key)
    assert doomed[0] not in collect(view.location, found).file_group(FileKind.SNAPSHOTS).names
    assert load_snapshot(view.location.checkpoints, key) is not None


def test_where_a_version_cannot_be_read_no_snapshot_goes(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    view = Asked().make(table)
    for _ in range(2):
        table.lance.update({"x": "x + 1"}, where="id = 1")
        refresh(view)
    forget(view)
    found = find_garbage(view.location, "1h", now=time.time() + A_YEAR)
    assert found.file_group(FileKind.SNAPSHOTS).count == 1
    for path in Path(view.uri, "_versions").glob("*"):
        data = path.read_bytes()
        view.lance.update_config({"a": "b"})
        path.write_bytes(data[: len(data) // 2])
    assert collect(view.location, found).file_group(FileKind.SNAPSHOTS).count == 0
    later = find_garbage(view.location, "1h", now=time.time() + A_YEAR)
    assert later.file_group(FileKind.SNAPSHOTS).count == 0
    assert any("its snapshots are kept" in note for note in later.notes)


def advance_and_die(database: str, fault: str) -> None:
    """Refresh the view; called in a process of its own, which dies."""
    view = connect(database).open_table("v")
    Fault(fault).arm()
    view.refresh(runner="inline")


@pytest.mark.crash
@pytest.mark.parametrize(("point", "left"), [("snapshot.written:1", 1), ("advance.written:1", 1)])
def test_what_a_killed_refresh_left_goes_with_the_garbage(table: Table, trace: Trace, point: str, left: int) -> None:
    view = Asked(NOT_THIRD).make(table)
    refresh(view)
    table.add([{"id": 200, "x": 3}])
    refresh(view)
    table.add([{"id": 201, "x": 6}])
    arguments = {"database": table.location.database_uri, "fault": point}
    environment = {TRACE: str(trace.path)}
    assert forge().run("tests.cleanup.test_view_cleanup:advance_and_die", arguments, environment) == -signal.SIGKILL
    assert_nothing_to_refresh(view, trace)
    assert len(snapshots(view)) == 2 + left
    for path in Path(view.uri, "_checkpoints/jobs").glob("*/job.json"):
        job = JobFolder.of(view.location.checkpoints, path.parent.name)
        if (job.read("job.json") or {}).get("ended") is None:
            # As if it had been silent for long.
            job.write_result("FAILED", {**dict.fromkeys(COUNTS, 0), "seconds": {}, "commits": [], "notes": []})
    assert clean(view).file_group(FileKind.SNAPSHOTS).count == left
    assert_nothing_to_refresh(view, trace)
    assert_equals_query(view, table, Asked(NOT_THIRD))


COUNTS = ("rows_computed", "rows_reused", "rows_skipped", "rows_failed", "rows_left")


@pytest.mark.slow
def test_snapshots_on_an_object_store_are_like_any_others(db: Database, bucket: Bucket, trace: Trace) -> None:
    table = db.create_table("docs", numbers(1, 2, 4))
    query = table.query().where(NOT_THIRD).select(["id"]).add_columns({"p": (udfs.plus, ["x"])})
    view = query.create_materialized_view(db, "v")
    for x in (5, 7, 9, 12):
        table.add([{"id": x, "x": x}])
        refresh(view)
    assert len(bucket.objects("v.lance/_checkpoints/state/view/swap.")) == 3
    forget(view)
    assert clean(view).file_group(FileKind.SNAPSHOTS).count == 1
    assert len(bucket.objects("v.lance/_checkpoints/state/view/swap.")) == 2
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("seed", slow_after(2, range(HISTORIES)))
def test_two_histories_of_which_one_is_cleaned_up_agree(
    make_table: MakeTable, trace: Trace, tmp_path: Path, seed: int
) -> None:
    """The same things happen to two views of one source; only one of them loses its garbage."""
    dice = random.Random(seed)
    asked = Asked(dice.choice([None, NOT_THIRD]), dice.choice([None, 7]))
    table = make_table(60, per_fragment=20)
    kept, cleaned, spare = (asked.make(table, name) for name in ("kept", "cleaned", "spare"))
    newest = 60
    pasts: list[int] = []
    for number in range(6):
        for _ in range(dice.randint(0, 2)):
            newest = act(dice, table, spare, newest)
        table.add([{"id": 1_000 + number, "x": 100 + number}])
        assert refreshed(kept, trace) == refreshed(cleaned, trace)
        assert kept.lance.version == cleaned.lance.version
        pasts.append(kept.lance.version)
        if dice.random() < 0.4:
            back = dice.choice(pasts)
            for view in (kept, cleaned):
                view.location.open(back).restore()
        if number % 3 == 2:
            for view in (kept, cleaned):
                forget(view)
            pasts = [kept.lance.version]
        clean(cleaned)
    assert refreshed(kept, trace) == refreshed(cleaned, trace)
    assert_equals_query(cleaned, table, asked)
    assert len(snapshots(cleaned)) < len(snapshots(kept))


def refreshed(view: View, trace: Trace) -> tuple[Any, ...]:
    """Rows that a refresh runs when no checkpoint serves, what it says of them, and what the view shows then."""
    trace.clear()
    result = refresh(view, ignore_checkpoints=True)
    counts = (result.state, result.rows_computed, result.rows_reused, result.rows_skipped, len(result.commits))
    return sorted(trace.rows()), counts, shown(view)
