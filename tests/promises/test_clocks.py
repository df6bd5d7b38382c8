"""Clocks of machines that differ by hours, and clocks that jump: no live job is taken for dead, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import airflow_geneva.engine.checkpoint.facts as state
from airflow_geneva import connect
from airflow_geneva.engine.checkpoint.facts import append_ledger, fold_ledgers, is_fold, load_state, seen
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.cleanup.garbage import FileKind, Garbage
from airflow_geneva.engine.lance_io import table_versions
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import JobFailed
from airflow_geneva.table import Table
from tests.support.broken_off import age, brittle, sturdy
from tests.support.counting import Trace, triple, tripled
from tests.support.invariants import assert_honest, assert_right
from tests.support.tables import MakeTable

HOUR = 3_600.0
real = time.time


def clean(table: Table, ttl: str) -> Garbage:
    return collect(table.location, find_garbage(table.location, ttl))


def shifted(monkeypatch: pytest.MonkeyPatch, hours: float, action: Callable[[], Any]) -> Any:
    """Do something on a machine whose clock is ahead by so many hours; the store keeps its own time."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + hours * HOUR)
        patch.setattr(time, "time_ns", lambda: int((real() + hours * HOUR) * 1e9))
        return action()


@pytest.mark.parametrize("hours", [-30, 3, 1_000])
def test_a_cleanup_on_a_machine_with_another_clock_leaves_a_job_at_work_alone(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    removed: list[int] = []

    def look_around(name: str) -> None:
        removed.append(shifted(monkeypatch, hours, lambda: clean(table, "1h")).count)

    with monkeypatch.context() as patch:
        patch.setattr(table_versions, "fault_point", look_around)
        result = table.backfill("y", runner="inline")
    assert removed == [0, 0]
    assert_honest(result, table)
    assert_right(table, "y", tripled)


@pytest.mark.parametrize("hours", [-30, 30, 1_000_000])
def test_a_job_on_a_machine_with_another_clock_is_at_work_as_long_as_the_store_hears_of_it(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    table = make_table(100)
    table.add_columns({"y": sturdy})
    with pytest.raises(JobFailed, match="told to"):
        table.backfill("y", udf=brittle, runner="inline", checkpoint_size=5)
    age(table)
    plan = table.plan_backfill("y", udf=sturdy)
    nameless = Path(table.uri, "data", f"{'0' * 32}.lance")
    nameless.write_bytes(b"staged, and not named by a checkpoint yet")
    age(table)
    saved = shifted(monkeypatch, hours, lambda: record_plan(plan, table.location))
    assert clean(table, "7d").file_group(FileKind.CHECKPOINTS).count == 0
    assert nameless.exists()
    # What is left of a job that nobody works on any more goes, whatever time its clock has left behind.
    age(table)
    assert clean(table, "7d").file_group(FileKind.CHECKPOINTS).count > 0
    assert not nameless.exists()
    assert not Path(table.uri, "_checkpoints", "jobs", saved.spec.job_id).exists()


def test_a_clock_that_jumps_in_the_middle_of_a_job_changes_nothing_but_times(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    jumps = iter([30 * HOUR, -60 * HOUR] * 50)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + next(jumps))
        result = table.backfill("y", runner="inline", checkpoint_size=5, checkpoint_interval=0.0)
    assert_honest(result, table, rows_run=100)
    assert connect(table.location.database_uri).job(result.job_id).took >= 0
    assert all(seconds >= 0 for seconds in result.seconds.values())
    assert_right(table, "y", tripled)


def test_folds_of_a_clock_that_runs_backwards_hold_all_facts(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = make_table(10).location.checkpoints
    now = iter(range(10**18, 0, -(10**15)))
    monkeypatch.setattr(state.time, "time_ns", lambda: next(now))
    for version in range(1, 61):
        append_ledger(checkpoints, 3, f"job{version:03}", [seen(version)])
        fold_ledgers(checkpoints, 3)
    found = load_state(checkpoints, 3)
    assert set(range(60 - 5, 61)) <= set(found.seen)
    assert len([key for key in found.ledgers if is_fold(key)]) == 1
