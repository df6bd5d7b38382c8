"""A table, a view or its source is dropped and made again while a job runs: the job touches the new one nowhere."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import airflow_geneva.engine.run.pipeline  # noqa: F401  (every module with a fault point is there to be patched)
from airflow_geneva import connect
from airflow_geneva.database import Database
from airflow_geneva.engine.lance_io import table_versions
from airflow_geneva.engine.lance_io.staged_files import StagedFiles
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.errors import JobFailed, StorageError, TableRemade
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import double, doubled, triple
from tests.support.invariants import assert_right
from tests.udfs_for_tests import views as udfs

SIZES = {"checkpoint_size": 4, "batch_size": 4, "checkpoint_interval": 0.0}
REMADE = "was dropped and made again"


def at_passage(monkeypatch: pytest.MonkeyPatch, passage: int, action: Callable[[], Any]) -> list[str]:
    """Do something once, at so many passages of fault points from now; the names of all that were passed.

    Threads that are there already do not count: the one that keeps up with a limit outlives its test.
    """
    passed: list[str] = []
    others = set(threading.enumerate()) - {threading.current_thread()}

    def pass_by(name: str) -> None:
        if threading.current_thread() in others:
            return
        passed.append(name)
        if len(passed) == passage:
            action()

    for name, module in list(sys.modules.items()):
        if name.startswith("airflow_geneva.") and hasattr(module, "fault_point"):
            monkeypatch.setattr(module, "fault_point", pass_by)
    return passed


def drop(db: Database, name: str, passage: int) -> None:
    """By the engine, or by deleting the folder."""
    if passage % 2:
        db.drop_table(name)
        return
    folder = Path(db.location(name).uri)
    while folder.exists():  # a thread of the job may write a file into a folder that is being removed
        shutil.rmtree(folder, ignore_errors=True)


def age(table: Table, version: int) -> Table:
    """Let a table stand at a version, or a later one."""
    while table.version < version:
        table.lance.update_config({"aged": str(table.version)})
    return table


@pytest.mark.parametrize("writes", [1, 1000], ids=["once", "always"])
def test_a_table_is_dropped_while_a_job_writes_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    db, drop, calls = connect(tmp_path / "db"), lance.LanceDataset.drop, list[int]()
    folder = Path(db.create_table("docs", numbers(0)).uri)

    def dropped(uri: str, *given: Any, **named: Any) -> None:
        drop(uri, *given, **named)
        calls.append(len(calls))
        if len(calls) <= writes:  # what pylance does if a file comes into a folder that it has just emptied
            Path(uri, "data").mkdir(parents=True)
            raise OSError("LanceError(IO): Directory not empty (os error 39), lance-io/src/local.rs:48:14")

    monkeypatch.setattr(lance.LanceDataset, "drop", dropped)
    if writes > 1:
        with pytest.raises(StorageError, match=r"a job writes into .* again and again"):
            db.drop_table("docs")
    else:
        db.drop_table("docs")
    assert folder.exists() == (writes > 1)
    assert db.table_names() == []


def numbers(first: int) -> pa.Table:
    values = pa.array(range(first, first + 4), pa.int64())
    return pa.table({"id": values, "x": values})


def make_table(db: Database, first: int, function: Any, version: int = 0) -> Table:
    """Two fragments with a column to compute; the second one has no file with the column that it is computed from."""
    table = db.create_table("docs", numbers(first))
    table.add(numbers(first + 4).drop_columns("x"))
    table.add_columns({"y": function})
    return age(table, version)


def rows(first: int) -> list[dict[str, int | None]]:
    return [{"id": id, "x": id if id < first + 4 else None, "y": None} for id in range(first, first + 8)]


def at_every_point(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Database], Callable[[], BackfillResult]],
    make_again: Callable[[Database, int], Any],
    check: Callable[[Database], Any],
) -> set[str]:
    """Let a job meet a table that is made again at the first and the last passage of every fault point.

    Args:
        prepare: makes what there is before the job, and gives the job.
        make_again: given the number of the passage.
        check: what has to hold afterwards.

    Returns:
        The names of the points.
    """
    with monkeypatch.context() as patch:
        job = prepare(connect(folder / "alone"))
        passages = at_passage(patch, 0, lambda: None)
        assert job().state == "DONE"
    names = set(passages)
    last = len(passages) - 1
    made: list[int] = []

    def make(db: Database, passage: int) -> None:
        make_again(db, passage)
        made.append(passage)

    for at in sorted({*map(passages.index, names), *(last - passages[::-1].index(name) for name in names)}):
        db = connect(folder / str(at))
        job, state, failed = prepare(db), "", ""
        with monkeypatch.context() as patch:
            passed = at_passage(patch, at + 1, partial(make, db, at))
            try:
                state = job().state
            except (JobFailed, TableRemade) as error:
                failed = str(error)
        assert len(passed) > at, (at, passages, passed)
        assert made[-1:] == [at], failed
        # Of a table that is dropped after the last look, the job's end is told as it was.
        over = {"finish.begin", "swap.after"} & set(passed[:at])
        assert REMADE in failed or (over and state == "DONE"), (at, passages[at], failed)
        check(db)
    return names


@pytest.mark.slow
@pytest.mark.shows("Run", "drop a table, a view or its source while a job works on it, and create it again")
def test_a_table_that_is_made_again_during_a_backfill_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(db: Database) -> Callable[[], BackfillResult]:
        table = make_table(db, 0, triple)
        return partial(table.backfill, "y", runner="inline", commit_granularity=1, **SIZES)

    def make_again(db: Database, passage: int) -> None:
        version = db.open_table("docs").version
        drop(db, "docs", passage)
        make_table(db, 100, double, version)

    def check(db: Database) -> None:
        table = db.open_table("docs")
        assert table.to_arrow().to_pylist() == rows(100)
        assert table.backfill("y", runner="inline").state == "DONE"
        assert_right(table, "y", doubled)

    names = at_every_point(tmp_path, monkeypatch, prepare, make_again, check)
    assert names >= {"plan.saved", "apply.step", "staged.write", "commit.before", "commit.after", "finish.begin"}


def make_view(db: Database, added: int) -> View:
    query = db.open_table("docs").query().select({"id": "id", "more": f"id + {added}"})
    return query.add_columns({"p": (udfs.plus, ["id"])}).create_materialized_view(db, "v")


def refresh(db: Database) -> BackfillResult:
    view = db.open_table("v")
    assert isinstance(view, View)
    return view.refresh(runner="inline", **SIZES)


def shown(db: Database) -> list[dict[str, int]]:
    view = db.open_table("v")
    assert isinstance(view, View)
    return sorted(view.to_arrow().to_pylist(), key=lambda row: row["id"])


def queried(first: int, added: int, count: int = 8) -> list[dict[str, int]]:
    return [{"id": id, "more": id + added, "p": id + 1} for id in range(first, first + count)]


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.shows("Run", "drop a table, a view or its source while a job works on it, and create it again")
def test_a_view_that_is_made_again_during_a_refresh_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    def prepare(db: Database) -> Callable[[], BackfillResult]:
        make_table(db, 0, triple)
        make_view(db, 1000)
        if not first:
            refresh(db)
            db.open_table("docs").add([{"id": 8, "x": None}])
        return partial(refresh, db)

    def make_again(db: Database, passage: int) -> None:
        version = db.open_table("v").version
        drop(db, "v", passage)
        age(make_view(db, 2000), version)

    def check(db: Database) -> None:
        assert shown(db) == []
        assert refresh(db).state == "DONE"
        assert shown(db) == queried(0, 2000, 8 if first else 9)

    names = at_every_point(tmp_path, monkeypatch, prepare, make_again, check)
    assert names >= {"plan.saved", "apply.step", "staged.write", "swap.before", "swap.after", "finish.begin"}


@pytest.mark.slow
@pytest.mark.shows("Run", "drop a table, a view or its source while a job works on it, and create it again")
def test_a_source_that_is_made_again_during_a_refresh_is_what_the_next_one_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(db: Database) -> Callable[[], BackfillResult]:
        make_table(db, 0, triple)
        make_view(db, 1000)
        return partial(refresh, db)

    def make_again(db: Database, passage: int) -> None:
        version = db.open_table("docs").version
        drop(db, "docs", passage)
        make_table(db, 100, double, version + passage // 2 % 2 * 3)  # at the same version, and at a later one

    def check(db: Database) -> None:
        assert shown(db) in ([], queried(0, 1000))
        assert refresh(db).state == "DONE"
        assert shown(db) == queried(100, 1000)

    names = at_every_point(tmp_path, monkeypatch, prepare, make_again, check)
    assert names >= {"plan.saved", "apply.step", "staged.write", "swap.before", "swap.after", "finish.begin"}


def test_a_commit_that_reached_the_new_table_is_taken_back_unless_others_have_built_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for others in (False, True):
        db = connect(tmp_path / str(others))
        old = make_table(db, 0, triple)

        def meanwhile(name: str, db: Database = db, others: bool = others) -> None:
            if name == "commit.before":
                drop(db, "docs", 1)
                make_table(db, 100, double)
            elif name == "commit.after" and others:
                db.open_table("docs").add([{"id": 200}])

        match = "version 4 is a commit of this job, and others have committed since" if others else REMADE
        with monkeypatch.context() as patch:
            patch.setattr(table_versions, "fault_point", meanwhile)
            with pytest.raises(JobFailed, match=match):
                old.backfill("y", runner="inline")
        new = db.open_table("docs")
        undone = new.lance.read_transaction(new.version)
        assert undone is not None
        assert isinstance(undone.operation, lance.LanceOperation.Append if others else lance.LanceOperation.Restore)
        assert new.version == 5
        assert new.backfill("y", runner="inline").state == "DONE"
        assert_right(new, "y", doubled)


def test_nothing_is_committed_to_a_table_that_is_made_again_while_staged_files_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = connect(tmp_path)
    old = make_table(db, 0, triple)
    describe, planned = StagedFiles.data_files, old.version
    made: list[int] = []

    def meanwhile(*arguments: Any) -> Any:
        described = describe(*arguments)
        if not made:
            drop(db, "docs", 1)
            new = make_table(db, 100, double)
            while new.version < planned:  # else Lance refuses a commit that was made from a later version
                new.add([{"id": 300 + new.version}])
            made.append(new.version)
        return described

    with monkeypatch.context() as patch:
        patch.setattr(StagedFiles, "data_files", meanwhile)
        with pytest.raises(JobFailed, match=REMADE):
            old.backfill("y", runner="inline")
    assert [db.open_table("docs").version] == made


def test_what_others_commit_while_a_commit_is_taken_back_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = connect(tmp_path)
    old = make_table(db, 0, triple)
    commit = lance.LanceDataset.commit
    late = [{"id": 200}]

    def meanwhile(name: str) -> None:
        if name == "commit.before":
            drop(db, "docs", 1)
            make_table(db, 100, double)

    def after_others(uri: Any, transaction: Any, *args: Any, **options: Any) -> lance.LanceDataset:
        operation = getattr(transaction, "operation", transaction)  # threads of other tests may commit, too
        if isinstance(operation, lance.LanceOperation.Restore) and late:
            db.open_table("docs").add([late.pop()])
        return commit(uri, transaction, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(table_versions, "fault_point", meanwhile)
        patch.setattr(lance.LanceDataset, "commit", staticmethod(after_others))
        with pytest.raises(JobFailed, match="version 4 is a commit of this job, and others have committed since"):
            old.backfill("y", runner="inline")
    assert 200 in db.open_table("docs").lance.to_table(columns=["id"])["id"].to_pylist()
