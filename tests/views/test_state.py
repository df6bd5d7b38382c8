"""What is known of a view's rows when transactions are gone, far back, or of one job twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import lance
import lance.commit
import pytest

from airflow_geneva.engine.commit import view_swap as swap
from airflow_geneva.engine.job.folder import new_job_id
from airflow_geneva.engine.lance_io import table_versions
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.run import view as run, view as swapping
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.views.state import newest_swap, write_intent
from airflow_geneva.view import View
from tests.support.broken_off import Died
from tests.support.counting import Trace
from tests.support.queries import Asked, Refresh, assert_equals_query, assert_nothing_to_refresh
from tests.support.tables import MakeTable


def refresh(view: View, job_id: str) -> None:
    """A refresh under a given job, as one that is planned again after it was cleared."""
    request = RefreshRequest(job_id=job_id)
    taken = Refresh(view)
    taken.made = run.plan(view.location, view.view_definition, view.source().location, request)
    taken.saved = record_plan(taken.made, view.location)
    assert taken.apply().finish().state == "DONE"


def is_unknown(view: View) -> bool:
    return newest_swap(view.location, view.lance).changed == "unknown"


def forget(view: View) -> None:
    """Leave a version of the view that is no swap, and no other."""
    commit_harmlessly(view, 1)
    view.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)


def commit_harmlessly(view: View, times: int) -> None:
    for number in range(times):
        view.lance.update_config({"number": str(number)})


def test_of_a_job_that_swapped_twice_the_metadata_is_not_taken_for_the_second_swap(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(40)
    view = Asked().make(table)
    job = new_job_id()
    refresh(view, job)
    table.add([{"id": 40, "x": 40}])
    with monkeypatch.context() as patched:
        # As if it had been killed before it could repeat in the metadata what it did.
        patched.setattr(swapping, "mirror_swap", lambda *_: None)
        refresh(view, job)
    forget(view)
    assert is_unknown(view)
    table.add([{"id": 41, "x": 41}])
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 42
    assert_nothing_to_refresh(view, trace)


def test_a_swap_that_landed_although_it_was_told_to_conflict_is_not_forgotten_with_the_versions(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(40)
    view = Asked().make(table)
    view.refresh(runner="inline")
    table.add([{"id": 40, "x": 40}])
    taken = Refresh(view).plan().apply()
    commit = lance.LanceDataset.commit

    def landed(*arguments: Any, **options: Any) -> Any:
        patched.undo()
        commit(*arguments, **options)
        forget(view)
        raise lance.commit.CommitConflictError("Retryable commit conflict with itself")

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "commit", landed)
        assert taken.finish().state == "PARTIAL"
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 41
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("dies", [True, False])
def test_a_first_swap_that_got_the_number_of_a_removed_version_is_done_again(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Lance gives it the next number, which is free again, and no later version has its rows."""
    table = make_table(40)
    view = Asked().make(table)
    taken = Refresh(view).plan().apply()
    commit = lance.LanceDataset.commit

    def overtaken(*arguments: Any, **options: Any) -> Any:
        patched.undo()
        commit_harmlessly(view, 2)
        view.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=False)
        committed = commit(*arguments, **options)
        assert committed.version < view.lance.version
        if dies:
            raise Died
        return committed

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "commit", overtaken)
        with pytest.raises(Died) if dies else nullcontext():
            assert taken.finish().state == "PARTIAL"
    assert not dies or taken.finish().state == "PARTIAL"
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 40
    assert_nothing_to_refresh(view, trace)


def lose(view: View, others: Callable[[], Any], written_last: bool) -> Any:
    """Finish a refresh while another one swaps between what this one writes down and its commit."""
    taken = Refresh(view).plan().apply()

    def interrupt(point: str) -> None:
        if point == "swap.before":
            patched.undo()
            if written_last:
                # As if this one had written down what it is about to do after the other one did.
                patched.setattr(swap, "write_intent", lambda location, snapshot: None)
            others()
            patched.undo()

    patched = pytest.MonkeyPatch()
    patched.setattr(table_versions, "fault_point", interrupt)
    return taken.finish()


@pytest.mark.parametrize("written_last", [True, False])
def test_a_refresh_that_lost_a_race_leaves_no_doubt_about_the_winner(
    make_table: MakeTable, trace: Trace, written_last: bool
) -> None:
    table = make_table(40)
    view = Asked().make(table)
    view.refresh(runner="inline")
    table.add([{"id": 40, "x": 40}])
    assert lose(view, lambda: view.refresh(runner="inline"), written_last).state == "PARTIAL"
    forget(view)
    assert not is_unknown(view)
    assert_nothing_to_refresh(view, trace)


def test_a_swap_that_was_broken_off_after_its_commit_leaves_no_doubt_once_it_is_finished(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(40)
    view = Asked().make(table)
    view.refresh(runner="inline")
    table.add([{"id": 40, "x": 40}])
    taken = Refresh(view).plan().apply()

    def interrupt(point: str) -> None:
        if point == "swap.after":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", interrupt)
        with pytest.raises(KeyboardInterrupt):
            taken.finish()
    assert taken.finish().state == "DONE"
    forget(view)
    assert not is_unknown(view)
    assert_nothing_to_refresh(view, trace)


def test_a_snapshot_that_the_store_failed_to_write_is_there_before_the_swap(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(40)
    view = Asked().make(table)
    save, calls = swap.save_snapshot, list[str]()

    def fail_once(checkpoints: Any, key: str, snapshot: Any) -> None:
        calls.append(key)
        if len(calls) == 1:
            raise OSError("503 Service Unavailable")
        save(checkpoints, key, snapshot)

    monkeypatch.setattr(swap, "save_snapshot", fail_once)
    assert view.refresh(runner="inline").state == "DONE"
    assert len(calls) == 2
    assert_equals_query(view, table, Asked())
    assert_nothing_to_refresh(view, trace)


def test_a_swap_that_was_begun_and_not_done_is_forgotten_with_the_next(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    view = Asked().make(table)
    view.refresh(runner="inline")
    write_intent(view.location, "swap.of-a-job.that-died")
    assert not is_unknown(view)
    table.add([{"id": 40, "x": 40}])
    view.refresh(runner="inline")
    forget(view)
    assert not is_unknown(view)
    assert_nothing_to_refresh(view, trace)
    write_intent(view.location, "swap.of-a-job.that-died")
    assert is_unknown(view)
    assert len(trace) == 41


@pytest.mark.parametrize("versions", [1, 9])
def test_a_swap_that_lies_far_back_is_not_done_again(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, versions: int
) -> None:
    monkeypatch.setattr(swap, "_MOST_VERSIONS", 5)
    table = make_table(40)
    view = Asked().make(table)
    taken = Refresh(view).plan().apply()
    first = taken.finish()
    commit_harmlessly(view, versions)
    version = view.lance.version
    again = taken.finish()
    # Beyond what is looked at, it counts as lost to another refresh, and the next one finds nothing left.
    told = ("DONE", first.commits, 0) if versions == 1 else ("PARTIAL", (), 40)
    assert (again.state, again.commits, again.rows_left, view.lance.version) == (*told, version)
    assert_equals_query(view, table, Asked())
    assert_nothing_to_refresh(view, trace)


@pytest.mark.slow
def test_what_others_changed_is_seen_however_much_came_after(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    view = Asked().make(table)
    view.refresh(runner="inline")
    view.lance.delete("id IN (3, 20)")
    commit_harmlessly(view, 1_005)
    seen = len(trace)
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert (view.lance.count_rows(), len(trace)) == (40, seen)
    assert_nothing_to_refresh(view, trace)
