"""A refresh of a view of groups that is killed anywhere: the next one computes what is left, and nothing twice."""

from __future__ import annotations

import os
import random
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.udfs_for_tests import folded, group_histories as udfs

pytestmark = pytest.mark.crash

HISTORIES = 100 if os.environ.get("GENEVA_SOAK") == "1" else 4
SIZES = {"checkpoint_size": 2, "batch_size": 2}
SLACK = 2
# The steps between the hidden tables, with the number of a passage; then those of the refresh itself.
STEPS = {"groups.before": 1, "groups.after": 1, "groups.rows": 1}
POINTS = {"swap.before": 1, "swap.after": 2, "apply.step": 4, "plan.saved": 2, "staged.written": 3, "finish.end": 2}


def refresh_and_die(database: str, fault: str, version: int | None) -> None:
    """Refresh a view in this process, which may not live to see the end; called in a forked one."""
    view = connect(database).open_table("v")
    Fault(fault).arm()
    view.refresh(version, runner="inline", checkpoint_interval=0, **SIZES)


def die_at(view: View, trace: Trace, fault: str, version: int | None = None) -> bool:
    arguments = {"database": view.location.database_uri, "fault": fault, "version": version}
    code = forge().run("tests.promises.test_group_kills:refresh_and_die", arguments, {TRACE: str(trace.path)})
    assert code in (0, -signal.SIGKILL)
    return code != 0


def rows(start: int, stop: int) -> pa.Table:
    data = [{"id": id, "k": float(id % 6), "t": "a", "x": id} for id in range(start, stop)]
    return pa.Table.from_pylist(
        data, pa.schema([("id", pa.int64()), ("k", pa.float64()), ("t", pa.string()), ("x", pa.int64())])
    )


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return connect(tmp_path / "db").create_table("rows", rows(0, 30), max_rows_per_file=10)


def view_of(table: Table) -> View:
    columns = {"n": "count(*)", "told": (udfs.told, ["k", "t", "id", "x"]), "bag": (folded.losing_bag, ["id", "x"])}
    return table.query().group_by("k", "t").agg(columns).create_materialized_view(name="v")


def shown(view: View) -> list[Any]:
    return sorted((row["k"], row["n"], row["told"], row["bag"]) for row in view.to_arrow().to_pylist())


def right(table: Table, version: int | None = None) -> list[Any]:
    groups: dict[float, list[Any]] = {}
    found = table.location.open(version).to_table(with_row_id=True).to_pylist()
    for row in sorted(found, key=lambda row: row["_rowid"]):
        groups.setdefault(row["k"], []).append(row)
    return sorted(
        (k, len(some), udfs.told_value(1, ids, xs), folded.bag_value(ids, sum(xs)))
        for k, some in groups.items()
        for ids, xs in [([row["id"] for row in some], [row["x"] for row in some])]
    )


def change(table: Table) -> list[int]:
    """Change three groups and empty one; return the marks of the three."""
    table.lance.update({"x": "x + 100"}, where="id = 3")
    table.lance.update({"k": "1.0"}, where="id = 2")
    table.lance.delete("k = 4.0")
    return [udfs.number_of(k, "a") for k in (3.0, 1.0, 2.0)]


def assert_nothing_to_refresh(view: View, trace: Trace) -> None:
    before, seen = view.version, len(trace)
    result = view.refresh(runner="inline")
    assert (result.state, result.commits, view.version, len(trace)) == ("DONE", (), before, seen)


@pytest.mark.core
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("point", ["groups.create", *STEPS])
def test_a_refresh_that_dies_between_its_steps_calls_each_function_once(
    table: Table, trace: Trace, point: str, first: bool
) -> None:
    view = view_of(table)
    touched = [udfs.number_of(float(k), "a") for k in range(6)]
    if not first:
        view.refresh(runner="inline")
        touched = change(table)
        trace.clear()
    before = shown(view)
    assert die_at(view, trace, f"{point}:1") == (first or point != "groups.create")
    assert shown(view) in (before, right(table))
    plan = view.plan_refresh()
    view.refresh(runner="inline")
    assert sorted(trace.rows()) == sorted(touched)
    assert plan.rows_pending == (len(touched) if first or point != "groups.create" else 0)
    assert shown(view) == right(table)
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("point", POINTS)
def test_a_refresh_that_dies_in_a_step_repeats_an_interval_at_most(table: Table, trace: Trace, point: str) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    touched, before = change(table), shown(view)
    trace.clear()
    die_at(view, trace, f"{point}:{POINTS[point]}")
    assert shown(view) in (before, right(table))
    view.refresh(runner="inline", **SIZES)
    assert set(trace.rows()) == set(touched)
    assert len(trace) <= len(touched) + SLACK
    assert shown(view) == right(table)
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("point", STEPS)
@pytest.mark.parametrize("back", [False, True], ids=["later version", "earlier version"])
def test_after_a_kill_the_view_can_go_to_another_version(table: Table, trace: Trace, point: str, back: bool) -> None:
    view = view_of(table)
    view.refresh(runner="inline")
    first = table.version
    change(table)
    assert die_at(view, trace, f"{point}:1")
    table.add(rows(30, 33))
    table.lance.update({"x": "0"}, where="id = 3")
    version = first if back else table.version
    view.refresh(version, runner="inline")
    assert shown(view) == right(table, version)
    view.refresh(runner="inline")
    assert shown(view) == right(table)
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("what", ["cleaned up", "created again"])
def test_after_a_kill_the_source_may_lose_the_version_of_the_groups(
    table: Table, trace: Trace, what: str, first: bool
) -> None:
    view = view_of(table)
    if not first:
        view.refresh(runner="inline")
        change(table)
    assert die_at(view, trace, "groups.after:1")
    if what == "cleaned up":
        table.add(rows(30, 33))
        table.lance.cleanup_old_versions(timedelta(0))
    else:
        version, database = table.version, connect(table.location.database_uri)
        database.drop_table("rows")
        table = database.create_table("rows", rows(0, 4))
        while table.version < version:
            table.add(rows(table.version + 3, table.version + 4))
    view.refresh(runner="inline")
    assert shown(view) == right(table)
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_history_with_kills_ends_with_the_query(table: Table, trace: Trace, seed: int) -> None:
    dice, view, newest = random.Random(seed), view_of(table), 30
    for _ in range(4):
        for _ in range(dice.randint(1, 3)):
            match dice.randrange(6):
                case 0:
                    table.add(rows(newest, newest + dice.randint(1, 5)))
                    newest += 5
                case 1:
                    table.lance.update({"x": "x + 1"}, where=f"id % {dice.randint(3, 9)} = 0")
                case 2:
                    table.lance.update({"k": f"{dice.randrange(8)}.0"}, where=f"id % {dice.randint(5, 9)} = 1")
                case 3:
                    table.lance.delete(f"k = {dice.randrange(6)}.0 AND id % 2 = 0")
                case 4:
                    table.lance.optimize.compact_files(target_rows_per_fragment=dice.choice([20, 1_000]))
                case 5:
                    table.location.open(dice.randint(1, table.version)).restore()
        for _ in range(dice.randint(1, 2)):
            before = shown(view)
            version = table.version if dice.random() < 0.8 else dice.randint(max(1, table.version - 2), table.version)
            fault = f"after:{dice.uniform(0, 0.3):.3f}" if dice.random() < 0.2 else f"any:{dice.randint(1, 90)}"
            die_at(view, trace, fault, version)
            assert shown(view) in (before, right(table, version))
    view.refresh(runner="inline")
    assert shown(view) == right(table)
    assert_nothing_to_refresh(view, trace)
