"""Files of ours stay few over the runs, and nothing that they say is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva import connect
from airflow_geneva.engine.checkpoint.listing import list_checkpoints
from airflow_geneva.engine.checkpoint.view_snapshot import load_snapshot, packed_snapshots
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.outbox import OutboxEntry, write_outbox
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.run.housekeeping import reduce_old_jobs
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.views.state import newest_swap
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support import broken_off
from tests.support.counting import Trace, double, triple, tripled
from tests.support.invariants import assert_exact, assert_nothing_to_do_is_free, assert_right

MakeTable = Callable[..., Table]

SMALL = {
    "airflow_geneva.engine.checkpoint.facts._FOLD_AFTER": 6,
    "airflow_geneva.engine.checkpoint.packs.MOST_PACKS": 2,
    "airflow_geneva.engine.checkpoint.store.MOST_PACKS": 2,
    "airflow_geneva.engine.run.housekeeping._KEPT_WHOLE": 2,
    "airflow_geneva.engine.run.housekeeping._MANY_CHECKPOINTS": 4,
    "airflow_geneva.engine.run.housekeeping._MANY_SNAPSHOTS": 6,
}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done now and then is done every few runs."""
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)


@pytest.fixture
def table(make_table: MakeTable, trace: Trace) -> Table:
    table = make_table(40, per_fragment=20)
    table.add_columns({"y": triple, "z": double})
    return table


def ours(table: Table | View) -> list[str]:
    """All our files, but the one document that remains of a job."""
    top = Path(table.uri, "_checkpoints")
    names = [str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()]
    return [name for name in names if not name.endswith("/job.json")]


def age(table: Table | View) -> None:
    then = time.time() - 30 * 86_400
    for path in Path(table.uri, "_checkpoints").rglob("*.lance"):
        os.utime(path, (then, then))


def grow(table: Table, first: int, count: int = 1, **options: Any) -> None:
    for x in range(first, first + count):
        table.add([{"id": x, "x": x}])
        table.backfill("y", runner="inline", **options)


def test_the_files_beside_a_table_stay_few(table: Table, trace: Trace, often: None) -> None:
    counts = []
    for cycle in range(3):
        grow(table, 100 + 6 * cycle, 6, checkpoint_size=20)
        counts.append(len(ours(table)))
    assert max(counts[1:]) <= counts[0] + 20, counts
    db = connect(Path(table.uri).parent)
    assert [job.state for job in db.jobs()] == ["DONE"] * 18
    assert sum(job.rows_computed for job in db.jobs()) == 58
    assert sum(group.fragments for group in list_checkpoints(table.location.checkpoints)) == 20
    assert_exact(trace, [*range(40), *range(100, 118)])
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_a_restore_runs_no_row_whose_checkpoint_was_packed(table: Table, trace: Trace, often: None) -> None:
    defined = table.version
    grow(table, 100, 8, checkpoint_size=20)
    assert len(table.lance.get_fragments()) == 10
    assert not [name for name in ours(table) if "frag-0.lance" in name]
    table.location.open(defined).restore()
    trace.clear()
    result = table.backfill("y", runner="inline")
    assert (result.state, result.rows_computed, result.rows_reused) == ("DONE", 0, 40)
    assert_exact(trace, [])
    assert_right(table, "y", tripled)


def test_the_files_beside_a_view_stay_few_and_a_restore_runs_no_row(table: Table, trace: Trace, often: None) -> None:
    db = connect(Path(table.uri).parent)
    view = table.query().select(["id", "x"]).add_columns({"y": triple}).create_materialized_view(db, "tripled_docs")
    counts = []
    versions = []
    for x in range(100, 110):
        table.add([{"id": x, "x": x}])
        view.refresh(runner="inline")
        versions.append(view.version)
        counts.append(len(ours(view)))
    assert max(counts[6:]) <= max(counts[:6]) + 10, counts
    assert_exact(trace, [*range(40), *range(100, 110)])
    trace.clear()
    for version, rows in ((versions[1], 42), (versions[7], 48)):
        view.location.open(version).restore()
        assert view.to_arrow().num_rows == rows
        assert view.refresh(runner="inline").rows_computed == 0
        assert_exact(trace, [])
        assert sorted(view.to_arrow()["y"].to_pylist()) == [tripled(x) for x in (*range(40), *range(100, 110))]
    view.lance.cleanup_old_versions(older_than=timedelta(0))
    age(view)
    collect(view.location, find_garbage(view.location, "1d"))
    assert load_snapshot(view.location.checkpoints, newest_swap(view.location, view.lance).snapshot)
    assert len(packed_snapshots(view.location.checkpoints)) <= 1


def test_a_job_that_ended_long_ago_is_its_record_only_and_its_tasks_say_so(table: Table, often: None) -> None:
    first = table.backfill("y", runner="inline", where="id < 5")
    folder = JobFolder.of(table.location.checkpoints, first.job_id)
    fingerprint = folder.read("job.json")["plan"]
    before = connect(Path(table.uri).parent).job(first.job_id)
    open_job = record_plan(table.plan_backfill("z"), table.location)
    marked = table.backfill("y", runner="inline", where="id = 5")
    write_outbox(table.location.checkpoints, open_job.spec.outbox, OutboxEntry(marked.job_id, marked.version))
    for x in range(6, 12):
        table.backfill("y", runner="inline", where=f"id = {x}")
    assert folder.storage.list_files() == ["job.json"]
    after = connect(Path(table.uri).parent).job(first.job_id)
    assert after == replace(before, shards=(), step=None, last_seen=after.last_seen)
    with pytest.raises(InvalidInput, match="Clear the plan task with its downstream tasks"):
        load_plan(folder.storage, fingerprint)
    for kept in (open_job.spec.job_id, marked.job_id):
        names = JobFolder.of(table.location.checkpoints, kept).storage.list_files()
        assert any(name.startswith("plan-") for name in names)


def test_a_failed_job_stays_until_a_later_one_has_made_up_for_it(table: Table, often: None) -> None:
    failed = record_plan(table.plan_backfill("y"), table.location)
    PlannedJob(table.location, failed).finish([])
    storage = JobFolder.of(table.location.checkpoints, failed.spec.job_id).storage
    for _ in range(4):
        table.backfill("z", runner="inline", ignore_checkpoints=True, on_code_change="recompute", where="id < 3")
    reduce_old_jobs(table.location.checkpoints)
    assert len(storage.list_files()) > 1
    table.backfill("y", runner="inline")
    for _ in range(3):
        table.backfill("z", runner="inline")
    reduce_old_jobs(table.location.checkpoints)
    assert storage.list_files() == ["job.json"]


DIES = """
import sys
import time
from airflow_geneva import connect
import tests.cleanup.test_housekeeping as house
import importlib
for name, value in house.SMALL.items():
    module, _, attribute = name.rpartition(".")
    setattr(importlib.import_module(module), attribute, value)
table = connect(sys.argv[1]).open_table("docs")
house.grow(table, int(sys.argv[2]), 8, checkpoint_size=20)
"""
"""Runs what :func:`often` speeds up in a process that may be killed."""


@pytest.mark.crash
@pytest.mark.parametrize("fault", ["fold.written", "pack.written", "plans.removed", "file.removed:3"])
def test_killed_while_it_tidies_up_nothing_is_lost(table: Table, trace: Trace, often: None, fault: str) -> None:
    defined = table.version
    environment = {**os.environ, "AIRFLOW_GENEVA_FAULT": fault}
    root = str(Path(table.uri).parent)
    died = subprocess.run([sys.executable, "-c", DIES, root, "100"], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    grow(table, 200, 8, checkpoint_size=20)
    rows = table.lance.to_table(columns=["x"])["x"].to_pylist()
    assert_exact(trace, rows)
    assert_right(table, "y", tripled)
    assert len(ours(table)) < 80
    table.location.open(defined).restore()
    trace.clear()
    table.backfill("y", runner="inline")
    assert_exact(trace, [])


def test_garbage_is_found_where_checkpoints_are_packed(table: Table, trace: Trace, often: None) -> None:
    grow(table, 100, 8, checkpoint_size=20)
    assert find_garbage(table.location, "7d").count == 0
    age(table)
    collect(table.location, find_garbage(table.location, "7d"))
    packed = [name for name in ours(table) if "/packed/" in name]
    assert len(packed) == 1  # what the plan of a recent job names stays
    broken_off.age(table)
    collect(table.location, find_garbage(table.location, "7d"))
    assert not [name for name in ours(table) if "/packed/" in name]
    trace.clear()
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)
