"""A refresh that is killed anywhere, whatever happens to source and view before it is run again."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace, double, doubled, triple, tripled
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.queries import NOT_THIRD, POINTS, Asked, assert_equals_query, assert_nothing_to_refresh, shown
from tests.support.tables import MakeTable

pytestmark = pytest.mark.crash

HISTORIES = 300 if os.environ.get("GENEVA_SOAK") == "1" else 4
SIZES = {"checkpoint_size": 5, "batch_size": 5}
SLACK = 5
QUERIES = [Asked(), Asked(NOT_THIRD), Asked(NOT_THIRD, seed=3), Asked(limit=20, offset=5)]


def refresh_and_die(database: str, fault: str, shaped: bool) -> None:
    """Refresh a view in this process, which may not live to see the end; called in a forked one."""
    view = connect(database).open_table("v")
    Fault(fault).arm()
    view.refresh(runner="inline", checkpoint_interval=0, max_rows_per_fragment=15 if shaped else None, **SIZES)


def die_at(view: View, trace: Trace, fault: str, shaped: bool = False) -> bool:
    arguments = {"database": view.location.database_uri, "fault": fault, "shaped": shaped}
    code = forge().run("tests.promises.test_view_kills:refresh_and_die", arguments, {TRACE: str(trace.path)})
    assert code in (0, -signal.SIGKILL)
    return code != 0


def change(table: Table) -> None:
    table.lance.update({"x": "x + 300"}, where="id % 4 = 1")
    table.lance.delete("id >= 55")
    table.add([{"id": number, "x": number} for number in range(100, 140)])


AS_BEFORE = {"apply.step", "checkpoint.write", "staged.write", "finish.begin", "finish.end"}
"""See test_kills."""
DEATHS = [
    pytest.param(point, asked, marks=[pytest.mark.core] if core else [], id=f"{point}-{name}")
    for point in POINTS
    for asked, name, core in (
        (QUERIES[1], "plain", point not in AS_BEFORE),
        (QUERIES[2], "shuffled and cut", False),
    )
]


@pytest.mark.parametrize(("point", "asked"), DEATHS)
def test_a_refresh_that_dies_is_seen_whole_or_not_at_all_and_runs_no_row_again(
    make_table: MakeTable, trace: Trace, point: str, asked: Asked
) -> None:
    table = make_table(60, per_fragment=20)
    view = asked.make(table)
    view.refresh(runner="inline")
    then = table.version
    change(table)
    trace.clear()
    shaped = asked.seed is not None
    assert die_at(view, trace, f"{point}:{POINTS[point]}", shaped)
    assert sorted(shown(view)) in (sorted(asked.rows(table, then)), sorted(asked.rows(table)))
    due = len(set(asked.rows(table)) - set(asked.rows(table, then)))
    result = view.refresh(runner="inline", max_rows_per_fragment=15 if shaped else None, **SIZES)
    assert result.state == "DONE"
    assert due <= len(trace) <= due + SLACK
    assert_equals_query(view, table, asked)
    assert_nothing_to_refresh(view, trace)


SWAP = ("swap.before", "swap.after", "mirror.write")


@pytest.mark.parametrize(
    ("point", "rows", "indexed"),
    [(point, rows, indexed) for point in SWAP for rows in (0, 5) for indexed in (False, True)]
    + [(point, 0, True) for point in ("ground.write", "swap.ground")],
)
def test_a_first_refresh_that_dies_is_done_by_the_next(
    make_table: MakeTable, trace: Trace, point: str, rows: int, indexed: bool
) -> None:
    """Without an index, it replaces the view's version; with one, rows, and an empty view gets one first."""
    table = make_table(rows)
    view = Asked().make(table)
    if indexed:
        view.lance.create_scalar_index("twice", "BTREE")
    table.add([{"id": number, "x": number} for number in range(rows, 10)])
    assert die_at(view, trace, f"{point}:1")
    assert shown(view) in ([], Asked().rows(table))
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 10
    assert len(trace) == 10
    assert [index.name for index in view.lance.describe_indices()] == ["twice_idx"] * indexed
    assert_nothing_to_refresh(view, trace)


@pytest.mark.parametrize("point", ["swap.after", "mirror.write"])
def test_a_swap_that_nothing_but_its_rows_remembers_is_not_done_again(
    make_table: MakeTable, trace: Trace, point: str
) -> None:
    table = make_table(60, per_fragment=20)
    view = Asked().make(table)
    view.refresh(runner="inline")
    table.add([{"id": 60, "x": 60}])
    assert die_at(view, trace, f"{point}:1")
    view.lance.optimize.compact_files()
    view.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    table.add([{"id": 61, "x": 61}])
    view.refresh(runner="inline")
    assert_equals_query(view, table, Asked())
    assert view.lance.count_rows() == 62
    assert_nothing_to_refresh(view, trace)


Between = Callable[[Table, View, random.Random], object]
BETWEEN: list[Between] = [
    lambda table, view, dice: None,
    lambda table, view, dice: table.add([{"id": 1_000 + table.version, "x": dice.randrange(90)}]),
    lambda table, view, dice: table.lance.update({"x": "x + 1"}, where=f"id % {dice.randint(3, 9)} = 0"),
    lambda table, view, dice: table.lance.update({"other": "7"}, where=f"id % {dice.randint(2, 5)} = 0"),
    lambda table, view, dice: table.lance.delete(f"id % {dice.randint(9, 19)} = 1"),
    lambda table, view, dice: table.lance.optimize.compact_files(target_rows_per_fragment=dice.choice([30, 1_000])),
    lambda table, view, dice: table.location.open(dice.randint(max(1, table.version - 3), table.version)).restore(),
    lambda table, view, dice: upsert_in_place(table, dice),
    lambda table, view, dice: view.lance.optimize.compact_files(),
    lambda table, view, dice: view.location.open(dice.choice(view.lance.versions()[-3:])["version"]).restore(),
    lambda table, view, dice: view.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True),
    lambda table, view, dice: collect(view.location, find_garbage(view.location, "1s")),
]


def upsert_in_place(table: Table, dice: random.Random) -> None:
    ids = sorted({dice.randrange(60) for _ in range(3)})
    rows = {"id": pa.array(ids, pa.int64()), "x": pa.array([200 + i for i in ids], pa.int64())}
    table.lance.merge_insert("id").when_matched_update_all().execute(pa.table(rows))


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_history_with_kills_ends_with_the_query(make_table: MakeTable, trace: Trace, seed: int) -> None:
    dice = random.Random(seed)
    asked = dice.choice(QUERIES)
    table = make_table(60, per_fragment=20, other=pa.array(range(60), pa.int64()))
    view = asked.make(table)
    for _ in range(3):
        for what in dice.choices(BETWEEN[:8], k=dice.randint(0, 2)):
            what(table, view, dice)
        for _ in range(dice.randint(1, 2)):
            before = Counter(shown(view))
            fault = f"after:{dice.uniform(0, 0.15):.3f}" if dice.random() < 0.2 else f"any:{dice.randint(1, 60)}"
            die_at(view, trace, fault, dice.random() < 0.5)
            assert Counter(shown(view)) in (before, Counter(asked.rows(table)))
            for what in dice.choices(BETWEEN, k=dice.randint(0, 2)):
                what(table, view, dice)
        result = view.refresh(runner="inline", max_rows_per_fragment=dice.choice([None, 15]))
        assert result.state == "DONE"
        assert_equals_query(view, table, asked)
        assert_nothing_to_refresh(view, trace)


def promote_and_die(database: str, fault: str) -> None:
    """Promote a column of a view in this process; called in a forked one."""
    view = connect(database).open_table("v")
    Fault(fault).arm()
    view.promote_column("c", to="p", keep_as="before", require_index=False)


@pytest.mark.parametrize("point", ["promote.before", "promote.after"])
def test_a_promotion_of_a_view_s_column_that_dies_is_made_once(make_table: MakeTable, trace: Trace, point: str) -> None:
    table = make_table(20)
    query = table.query().select({"id": "id", "p": (triple, ["x"]), "c": (double, ["x"])})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    view.refresh(runner="inline")
    trace.clear()
    then = view.version
    arguments = {"database": view.location.database_uri, "fault": f"{point}:1"}
    code = forge().run("tests.promises.test_view_kills:promote_and_die", arguments, {TRACE: str(trace.path)})
    assert code == -signal.SIGKILL
    assert view.version == then + (point == "promote.after")
    view.promote_column("c", to="p", keep_as="before", require_index=False)
    assert view.version == then + 1
    table.add([{"id": 100, "x": 100}])
    view.refresh(runner="inline")
    rows = {row["id"]: (row["p"], row["before"]) for row in view.to_arrow().to_pylist()}
    assert rows == {number: (doubled(x), tripled(x)) for number, x in inputs_of(table).items()}
    assert len(trace) == 2


def inputs_of(table: Table) -> dict[int, int | None]:
    rows = table.to_arrow(["id", "x"])
    return dict(zip(rows["id"].to_pylist(), rows["x"].to_pylist(), strict=True))
