"""Copies of tables and views: nothing is due in them, and nothing is shared with what they were made from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, connect, udf
from airflow_geneva.engine.run.copying import copy_table
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact, assert_nothing_to_do_is_free
from tests.support.marks import slow_after
from tests.support.queries import Asked, assert_equals_query, assert_nothing_to_refresh


@udf(data_type=pa.int64(), version="v1", on_error="skip")
def double(x: int) -> int:
    leave_trace([x])
    if x == 13:
        raise ValueError("an unlucky number")
    return 2 * x


def run(table: Table, **options: Any) -> Any:
    return table.backfill("y", udf=double, runner="inline", **options)


@pytest.fixture
def db(tmp_path: Path) -> Database:
    return connect(tmp_path / "db")


@pytest.fixture
def other(tmp_path: Path) -> Database:
    return connect(tmp_path / "other")


def plain(db: Database) -> Table:
    table = db.create_table("t", pa.table({"x": range(20)}), max_rows_per_file=10)
    table.add_columns({"y": double})
    for _ in range(3):
        run(table)
    return table


def aged(db: Database) -> Table:
    """A table with a filter, deletions, a compaction, an update, and a column of siblings that was dropped."""
    table = plain(db)
    table.lance.create_scalar_index("x", "BTREE")
    table.lance.delete("x = 3")
    table.lance.optimize.compact_files()
    table.lance.update({"x": "105"}, where="x = 5")
    run(table)
    run(table, where="x > 100")
    return table


def cloned(db: Database) -> Table:
    table = plain(db)
    table.lance.shallow_clone(f"{db.uri}/clone.lance", table.version)
    clone = db.open_table("clone")
    clone.add([{"x": 30}])
    run(clone)
    return clone


def just_cloned(db: Database) -> Table:
    table = aged(db)
    table.lance.shallow_clone(f"{db.uri}/clone.lance", table.version)
    return db.open_table("clone")


@pytest.mark.parametrize("make", slow_after(1, [aged, plain, cloned, just_cloned]))
def test_nothing_is_due_in_a_copy(
    db: Database, other: Database, trace: Trace, make: Callable[[Database], Table]
) -> None:
    table = make(db)
    for copy in (db.copy_table(table.name, "t2"), other.copy_table(table)):
        assert copy.to_arrow() == table.to_arrow()
        assert len(copy.get_failed_row_addresses()) == 1
        assert [one.message for one in copy.get_errors()] == [one.message for one in table.get_errors()]
        trace.clear()
        assert_nothing_to_do_is_free(copy, "y", trace, udf=double)
    shutil.rmtree(db.uri)
    copy = other.open_table(table.name)
    copy.lance.optimize.compact_files()
    copy.lance.update({"x": "x + 1000"}, where="x < 2")
    copy.add([{"x": 40}])
    trace.clear()
    run(copy)
    assert_exact(trace, [1000, 1001, 40])
    assert {job.table for job in other.jobs()} == {table.name}


def test_a_copy_of_a_view_is_up_to_date_and_reads_the_source_beside_it(
    db: Database, other: Database, trace: Trace, make_docs_in: Callable[[Database], Table]
) -> None:
    table, asked = make_docs_in(db), Asked("x % 3 != 0")
    view = asked.make(table)
    view.refresh(runner="inline")
    table.lance.delete("x = 3")
    view.refresh(runner="inline")  # only a note tells of it: the query does not select the row
    with pytest.raises(InvalidInput, match=r"'docs', of which .* has no copy"):
        other.copy_table(view)
    trace.clear()
    assert_nothing_to_refresh(db.copy_table("v", "v2"), trace)
    source, copy = other.copy_table(table), other.copy_table(view)
    assert_nothing_to_refresh(copy, trace)
    shutil.rmtree(db.uri)
    source.add([{"id": 100, "x": 100}])
    other.open_view("v").refresh(runner="inline")
    assert_exact(trace, [100])
    assert_equals_query(copy, source, asked)
    assert_nothing_to_refresh(copy, trace)


def test_a_copy_of_a_view_that_is_behind_computes_what_the_view_has_to(
    db: Database, other: Database, trace: Trace, make_docs_in: Callable[[Database], Table]
) -> None:
    """Rows that moved are known by the history of the source, which its copy does not have."""
    table, asked = make_docs_in(db), Asked("x % 3 != 0")
    view = asked.make(table)
    view.refresh(runner="inline")
    table.lance.update({"x": "x + 1000"}, where="id IN (1, 25)")
    table.lance.delete("id IN (4, 11)")
    table.lance.update({"id": "id"}, where="id IN (7, 8)")
    table.add([{"id": 100, "x": 100}])
    source = other.copy_table(table)
    table.lance.optimize.compact_files()
    copy = other.copy_table(view)
    source.lance.optimize.compact_files()
    shutil.rmtree(db.uri)
    trace.clear()
    copy.refresh(runner="inline")
    assert_exact(trace, [1001, 1025, 100])
    assert_equals_query(copy, source, asked)
    source.lance.update({"id": "id"}, where="id = 2")
    trace.clear()
    copy.refresh(runner="inline")
    assert_exact(trace, [])
    assert_nothing_to_refresh(copy, trace)


@pytest.fixture
def make_docs_in() -> Callable[[Database], Table]:
    rows = pa.table({"id": range(30), "x": range(30)})
    return lambda db: db.create_table("docs", rows, max_rows_per_file=10)


def test_what_cannot_be_copied_is_refused(db: Database) -> None:
    plain(db)
    for name in ("t", None):
        with pytest.raises(InvalidInput, match="'t' already exists"):
            db.copy_table("t", name)
    with pytest.raises(InvalidInput, match="There is no table 'u'"):
        db.copy_table("u", "t2")
    for wrong in (db, db.open_table("t").uri):
        with pytest.raises(InvalidInput, match=r"is no table.*connect\(\.\.\.\)\.open_table"):
            db.copy_table(wrong, "t2")  # type: ignore[arg-type]


def test_a_copy_to_a_table_that_another_process_made_meanwhile_leaves_its_facts(db: Database, trace: Trace) -> None:
    table = plain(db)
    other = db.copy_table("t", "t2")
    other.add([{"x": 40}])
    run(other)
    with pytest.raises(InvalidInput, match="'t2' already exists"):
        copy_table(table.location, other.location)
    trace.clear()
    assert_nothing_to_do_is_free(other, "y", trace, udf=double)


def test_a_copy_has_to_compute_what_the_table_has_to(db: Database, trace: Trace) -> None:
    """Rows that moved are known by the history of the table, which the copy does not have."""
    table = plain(db)
    table.lance.update({"x": "x + 1000"}, where="x < 2")
    table.lance.optimize.compact_files()
    table.lance.update({"x": "x"}, where="x = 7")
    table.add([{"x": 40}])
    copy = db.copy_table("t", "t2")
    trace.clear()
    run(copy)
    assert_exact(trace, [1000, 1001, 40])
    assert_nothing_to_do_is_free(copy, "y", trace, udf=double)


def old_form(db: Database) -> Table:
    """A table without stable row ids in an older storage version, with a failed row, and rows that are due."""
    options = {"new_table_enable_stable_row_ids": "false"}
    rows, form = pa.table({"x": range(20)}), {"max_rows_per_file": 7, "data_storage_version": "2.0"}
    table = db.create_table("t", rows, storage_options=options, **form)
    table.add_columns({"y": double})
    for _ in range(3):
        run(table)
    table.lance.delete("x IN (0, 8)")
    table.lance.update({"x": "105"}, where="x = 5")
    table.add([{"x": 40}])
    return table


def test_a_table_gets_stable_row_ids_and_keeps_what_is_known_of_its_values(db: Database, trace: Trace) -> None:
    table = old_form(db)
    copy = db.copy_table("t", "t2", rewrite=True)
    assert copy.lance.has_stable_row_ids
    assert copy.lance.data_storage_version == "2.2"
    assert copy.to_arrow() == table.to_arrow()
    trace.clear()
    run(copy)
    assert_exact(trace, [105, 40])
    assert_nothing_to_do_is_free(copy, "y", trace, udf=double)
    copy.lance.optimize.compact_files()
    copy.lance.update({"x": "x + 1000"}, where="x < 2")
    trace.clear()
    run(copy)
    assert_exact(trace, [1001])


@pytest.mark.parametrize("rewrite", [False, True])
def test_values_of_inputs_that_changed_are_due_in_a_copy_that_is_compacted(
    db: Database, trace: Trace, rewrite: bool
) -> None:
    table = plain(db)
    table.lance.update({"x": "x + 1000"}, where="x < 2")
    copy = db.copy_table("t", "t2", rewrite=rewrite)
    copy.lance.update({"x": "x + 1000"}, where="x = 1001")
    copy.lance.optimize.compact_files()
    trace.clear()
    run(copy, on_unknown_values="adopt")
    assert_exact(trace, [1000, 2001])


def test_a_rewritten_copy_knows_from_which_inputs_values_were_computed(db: Database, trace: Trace) -> None:
    table = db.create_table("t", pa.table({"x": range(5), "z": range(5, 10)}))
    table.add_columns({"y": double})
    run(table)
    table.alter_columns({"y": (double, ["z"])})
    copy = db.copy_table("t", "t2", rewrite=True)
    copy.alter_columns({"y": (double, ["x"])})
    trace.clear()
    assert_nothing_to_do_is_free(copy, "y", trace, udf=double)


@pytest.mark.crash
def test_a_copy_of_a_view_that_is_killed_is_completed_by_the_next_attempt(
    db: Database, other: Database, trace: Trace, make_docs_in: Callable[[Database], Table]
) -> None:
    view = Asked().make(make_docs_in(db))
    view.refresh(runner="inline")
    other.copy_table(db.open_table("docs"))
    code = f"from airflow_geneva import connect; connect({other.uri!r}).copy_table(connect({db.uri!r}).open_table('v'))"
    ended = subprocess.run([sys.executable, "-c", code], env={"AIRFLOW_GENEVA_FAULT": "copy.cloned"}, check=False)
    assert ended.returncode == -9
    with pytest.raises(InvalidInput, match="'v' already exists"):
        other.copy_table("docs", "v")
    copy = other.copy_table(view)
    shutil.rmtree(db.uri)
    trace.clear()
    assert_nothing_to_refresh(copy, trace)
    with pytest.raises(InvalidInput, match="'v' already exists"):
        other.copy_table(copy, "v")


@pytest.mark.crash
def test_a_copy_that_is_killed_leaves_no_table_and_is_made_by_the_next_attempt(db: Database, trace: Trace) -> None:
    table = plain(db)
    code = f"from airflow_geneva import connect; connect({db.uri!r}).copy_table('t', 't2')"
    ended = subprocess.run([sys.executable, "-c", code], env={"AIRFLOW_GENEVA_FAULT": "copy.recorded"}, check=False)
    assert ended.returncode == -9
    assert db.table_names() == ["t"]
    trace.clear()
    copy = db.copy_table("t", "t2")
    assert copy.to_arrow() == table.to_arrow()
    assert len(copy.get_errors()) == len(table.get_errors())
    assert_nothing_to_do_is_free(copy, "y", trace, udf=double)
