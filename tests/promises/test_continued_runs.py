"""What a killed run computed is not computed again, whatever others change before the next run."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.broken_off import dies_at
from tests.support.counting import Trace, triple, tripled
from tests.support.invariants import assert_exact, assert_untouched
from tests.support.marks import slow_after
from tests.support.tables import MakeTable
from tests.udfs_for_tests import views as udfs

ROWS = 80


def append(table: Table) -> None:
    new = 100 + table.version
    table.add([{"id": new, "x": new, "other": 0}])


def delete(table: Table) -> None:
    table.lance.delete("id % 10 = 3")


def update(table: Table) -> None:
    table.lance.update({"x": "x + 1000"}, where="id % 10 = 3")


def update_another(table: Table) -> None:
    table.lance.update({"other": "other + 1"}, where="id % 10 <> 3")


def compact(table: Table) -> None:
    table.lance.optimize.compact_files(target_rows_per_fragment=30)


def delete_and_compact(table: Table) -> None:
    delete(table)
    compact(table)


def compact_around_an_update(table: Table) -> None:
    compact(table)
    update_another(table)
    table.lance.optimize.compact_files(target_rows_per_fragment=1_000)


def restore(table: Table) -> None:
    version = table.version
    compact_around_an_update(table)
    delete(table)
    table.location.open(version).restore()


def change_other_columns(table: Table) -> None:
    table.lance.drop_columns(["other"])
    table.lance.add_columns({"other": "x + 1"})
    table.rename_column("other", "another")
    table.lance.create_scalar_index("x", "BTREE")


def write_in_place(table: Table) -> None:
    def write(rows: pa.Table) -> None:
        table.lance.merge_insert("id").when_matched_update_all().write_mode("rewrite_columns").execute(rows)

    write(pa.table({"id": pa.array([3, 43], pa.int64()), "x": pa.array([1003, 1043], pa.int64())}))
    write(table.lance.to_table(columns=["id", "other"], filter="id % 2 = 0"))


def upsert(table: Table) -> None:
    rows = table.lance.to_table(columns=["id", "x", "other"], filter="id % 2 = 0 AND id > 10").to_pylist()
    rows = [*rows, {"id": 3, "x": 1003, "other": 3}, {"id": 100, "x": 100, "other": 0}]
    merge = table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(pa.Table.from_pylist(rows, schema=pa.schema([(name, pa.int64()) for name in ("id", "x", "other")])))


CHANGES = (
    append, delete, update, update_another, compact, delete_and_compact, compact_around_an_update, restore,
    change_other_columns, write_in_place, upsert,
)  # fmt: skip


def make_table_of(make_table: MakeTable) -> Table:
    return make_table(ROWS, per_fragment=20, other=pa.array(range(ROWS), pa.int64()))


def column(table: Table) -> Table:
    table.add_columns({"y": triple})
    return table


def view(table: Table) -> View:
    query = table.query().where("x <> 13").select(["id"]).add_columns({"y": (triple, ["x"])})
    return query.create_materialized_view(connect(table.location.database_uri), "v")


def exploded(table: Table) -> View:
    query = table.query().where("x <> 13").select({"id": "id", "y": udfs.digits}).explode("y")
    return query.create_materialized_view(connect(table.location.database_uri), "v")


def run(target: Table | View, interval: int | None = None) -> Any:
    sizes: dict[str, Any] = {"batch_size": 5, "shard_size": 2, "checkpoint_size": interval, "runner": "inline"}
    return target.refresh(**sizes) if isinstance(target, View) else target.backfill("y", **sizes)


def assert_right(target: Table | View, make: Callable[[Table], Table], table: Table) -> None:
    """Every row, or every selected row, has the values of its input."""
    rows = [(row["id"], row["x"]) for row in table.lance.to_table(columns=["id", "x"]).to_pylist()]
    wanted = [(id, tripled(x)) for id, x in rows if make is column or x != 13]
    if make is exploded:
        wanted = [(id, 100 * x + at) for id, x in rows if x != 13 for at in range(x % 10)]
    assert sorted((row["id"], row["y"]) for row in target.to_arrow().to_pylist()) == sorted(wanted)


@pytest.mark.parametrize("make", [column, view, exploded])
@pytest.mark.parametrize("interval", slow_after(1, [5, None]), ids=["interval", "commit"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_killed_run_repeats_an_interval(
    make_table: MakeTable,
    trace: Trace,
    change: Callable[[Table], None],
    interval: int | None,
    make: Callable[[Table], Table],
) -> None:
    table = make_table_of(make_table)
    target = make(table)
    last = "commit.before:2" if make is column else "swap.before"
    with dies_at("checkpoint.write:11" if interval else last):
        run(target, interval)
    assert len(trace) >= (ROWS // 2 if interval else ROWS - 1)
    change(table)
    assert run(target, interval).state == "DONE"
    assert_right(target, make, table)
    again = sum((trace.counts() - Counter(set(trace.rows()))).values())
    assert again <= (interval or 0), f"{again} rows ran twice"


@pytest.mark.parametrize("make", [column, view, exploded])
@pytest.mark.parametrize("seed", slow_after(1, range(int(os.environ.get("GENEVA_CONTINUED_HISTORIES", "3")))))
def test_each_kill_of_a_history_repeats_an_interval(
    make_table: MakeTable, trace: Trace, make: Callable[[Table], Table], seed: int
) -> None:
    dice, kills = random.Random(seed), 5
    table = make_table_of(make_table)
    target = make(table)
    for _ in range(kills):
        point = dice.choice(["checkpoint.write", "checkpoint.written", "staged.write", "staged.written"])
        with dies_at(f"{point}:{dice.randint(1, 9)}", surely=False):
            run(target, 5)
        for change in dice.choices([append, update, update_another, delete, compact, compact_around_an_update], k=2):
            change(table)
    assert run(target, 5).state == "DONE"
    assert_right(target, make, table)
    again = sum((trace.counts() - Counter(set(trace.rows()))).values())
    assert again <= 5 * kills, f"{again} rows ran twice"


def test_values_of_moved_rows_outlast_the_checkpoint_that_replaces_theirs(make_table: MakeTable, trace: Trace) -> None:
    """A view writes files without the rows that left a fragment before those of the fragments that hold them now."""
    table = make_table_of(make_table)
    made = view(table)
    with dies_at("swap.before"):
        run(made)
    update_another(table)
    with dies_at("staged.written:4"):
        run(made)
    result = run(made)
    assert (result.rows_computed, result.rows_reused, len(trace)) == (0, ROWS - 1, ROWS - 1)
    assert_right(made, view, table)


@pytest.mark.parametrize("change", [compact, update_another])
def test_a_refresh_of_some_rows_is_continued(
    make_table: MakeTable, trace: Trace, change: Callable[[Table], None]
) -> None:
    table = make_table_of(make_table)
    made = view(table)
    run(made)
    update(table)
    with dies_at("swap.before"):
        run(made)
    trace.clear()
    change(table)
    table.lance.update({"x": "x + 1000"}, where="id IN (5, 73)")
    run(made)
    assert_exact(trace, [1005, 2073])
    assert_right(made, view, table)


def test_a_row_that_the_filter_no_longer_selects_gets_no_value(make_table: MakeTable, trace: Trace) -> None:
    table = column(make_table_of(make_table))
    with dies_at("commit.before"):
        table.backfill("y", where="other < 40", runner="inline")
    table.lance.update({"other": "100"}, where="id IN (3, 33)")
    table.lance.update({"other": "5"}, where="id IN (4, 50)")
    result = table.backfill("y", where="other < 40", runner="inline")
    assert_exact(trace, [*range(40), 4, 50])
    assert_untouched(table, "y", "other >= 40")
    assert (result.rows_computed, result.rows_reused) == (2, 37)
