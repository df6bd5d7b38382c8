"""What a plan reads follows what changed, not how old the table is or how many rows a compaction moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lance
import pyarrow as pa
import pytest

from airflow_geneva.table import Table
from tests.support.counting import Trace, triple, tripled
from tests.support.invariants import assert_right
from tests.support.tables import MakeTable


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often transactions, whole versions and row ids are read, in this process."""
    counter: Counter[str] = Counter()

    def counted(kind: type, method: str, name: str, if_given: str = "") -> None:
        original = getattr(kind, method)

        def read(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if not if_given or keywords.get(if_given):
                counter[name] += 1
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(kind, method, read)

    counted(lance.LanceDataset, "read_transaction", "transactions")
    counted(lance.LanceDataset, "checkout_version", "versions")
    counted(lance.LanceFragment, "scanner", "row ids", if_given="with_row_id")
    return counter


@contextmanager
def counted(reads: Counter[str]) -> Iterator[Counter[str]]:
    """What is read inside of the block."""
    before, found = reads.copy(), Counter[str]()
    yield found
    found.update(reads - before)


def rows(*xs: int) -> pa.Table:
    return pa.table({"id": pa.array(xs, pa.int64()), "x": pa.array(xs, pa.int64())})


def pass_versions(table: Table, count: int) -> None:
    """Commits that have nothing to do with any row."""
    for number in range(count):
        table.lance.update_config({"turn": str(number)})


def with_a_past(make_table: MakeTable) -> Table:
    """A table with a computed column, compacted since, whose first fragments' checkpoints are still there."""
    table = make_table(40, per_fragment=10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.lance.optimize.compact_files()
    table.backfill("y", runner="inline")
    return table


@pytest.mark.parametrize("change", ["append", "update", "compaction"])
@pytest.mark.parametrize("between", ["before the change", "after the change"])
def test_versions_between_two_backfills_are_not_read(
    make_table: MakeTable, trace: Trace, reads: Counter[str], change: str, between: str
) -> None:
    table = with_a_past(make_table)
    found = []
    for turn, count in enumerate((4, 60)):
        table.add(rows(1_000 + turn))
        table.backfill("y", runner="inline")
        trace.clear()
        pass_versions(table, count if between == "before the change" else 4)
        if change == "append":
            table.add(rows(100 + turn))
        elif change == "update":
            table.lance.update({"x": str(200 + turn)}, where=f"id = {turn}")
        else:
            table.lance.optimize.compact_files()
        pass_versions(table, count if between == "after the change" and change != "compaction" else 4)
        with counted(reads) as about:
            table.backfill("y", runner="inline")
        found.append(about)
        assert len(trace) == (0 if change == "compaction" else 1)
    assert found[0] == found[1]
    assert_right(table, "y", tripled)


@pytest.mark.slow
def test_an_old_table_is_planned_with_as_many_reads_as_a_young_one(
    make_table: MakeTable, trace: Trace, reads: Counter[str]
) -> None:
    table = make_table(40, per_fragment=10)
    table.add_columns({"y": triple})
    view = table.query().where("x % 2 = 0").add_columns({"z": (triple, ["x"])}).create_materialized_view(name="evens")
    found: dict[str, list[Counter[str]]] = {}
    for hour in range(12):
        table.add(rows(*range(100 + 3 * hour, 103 + 3 * hour)))
        table.lance.update({"x": "x + 1000"}, where=f"id = {2 * hour}")
        table.lance.delete(f"id = {2 * hour + 1}")
        if hour % 3 == 2:
            table.lance.optimize.compact_files()
        kind = ", compacted" if hour % 3 == 2 else ""
        with counted(reads) as about:
            table.backfill("y", runner="inline")
        found.setdefault(f"backfill{kind}", []).append(about)
        with counted(reads) as about:
            view.refresh(runner="inline")
        found.setdefault(f"refresh{kind}", []).append(about)
    for kind, counts in found.items():
        transactions, quarter = [about["transactions"] for about in counts], len(counts) // 4
        assert max(transactions[-quarter:]) <= max(transactions[quarter : 2 * quarter]), (kind, transactions)
    assert_right(table, "y", tripled)
    assert sorted(view.to_arrow()["z"].to_pylist()) == sorted(
        tripled(x) for x in table.to_arrow()["x"].to_pylist() if x % 2 == 0
    )


@pytest.mark.parametrize("times", [1, 2])
def test_a_compaction_of_what_is_known_is_followed_without_a_look_at_rows(
    make_table: MakeTable, trace: Trace, reads: Counter[str], times: int
) -> None:
    table = make_table(80, per_fragment=20)
    table.add_columns({"y": triple})
    view = table.query().add_columns({"z": (triple, ["x"])}).create_materialized_view(name="all_of_it")
    table.lance.delete("id % 10 = 3")
    table.backfill("y", runner="inline")
    view.refresh(runner="inline")
    for size in (40, 1_000)[-times:]:
        table.lance.optimize.compact_files(target_rows_per_fragment=size)
    trace.clear()
    for done in (table.plan_backfill("y"), view.plan_refresh()):
        assert done.rows_pending == 0
    reads.clear()
    table.backfill("y", runner="inline")
    assert reads["row ids"] == 0
    view.refresh(runner="inline")
    assert reads["row ids"] == 0
    reads.clear()
    table.backfill("y", runner="inline")
    assert reads["transactions"] == 0
    assert len(trace) == 0


def test_of_a_compaction_only_the_fragments_that_were_partly_known_are_looked_at(
    make_table: MakeTable, trace: Trace, reads: Counter[str]
) -> None:
    table = make_table(80, per_fragment=10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.add(rows(500, 501))
    table.lance.optimize.compact_files()
    trace.clear()
    with counted(reads) as about:
        assert table.plan_backfill("y").rows_pending == 2
    assert about["row ids"] <= 3
    table.backfill("y", runner="inline")
    assert sorted(trace.rows()) == [500, 501]
    assert_right(table, "y", tripled)


def test_a_compaction_is_followed_when_the_versions_before_it_are_gone(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40, per_fragment=10)
    table.add_columns({"y": triple})
    view = table.query().add_columns({"z": (triple, ["x"])}).create_materialized_view(name="all_of_it")
    table.backfill("y", runner="inline")
    view.refresh(runner="inline")
    table.lance.optimize.compact_files()
    table.lance.cleanup_old_versions(older_than=timedelta(0))
    for plan in (table.plan_backfill("y"), view.plan_refresh()):
        assert (plan.rows_pending, plan.notes) == (0, ())
