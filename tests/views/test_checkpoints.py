"""What a refresh computed before it was killed is not computed again, although its source was compacted meanwhile."""

from __future__ import annotations

import pytest

from tests.support.counting import Trace
from tests.support.invariants import assert_exact
from tests.support.queries import NOT_THIRD, Asked, Refresh, assert_equals_query
from tests.support.tables import MakeTable


@pytest.mark.parametrize("asked", [Asked(), Asked(NOT_THIRD)], ids=["all rows", "a filter"])
@pytest.mark.parametrize("rows_per_fragment", [30, 1_000])
def test_a_compaction_after_the_rows_were_computed_costs_nothing(
    make_table: MakeTable, trace: Trace, asked: Asked, rows_per_fragment: int
) -> None:
    table = make_table(100, per_fragment=10)
    view = asked.make(table)
    Refresh(view).plan().apply()
    trace.clear()
    table.lance.optimize.compact_files(target_rows_per_fragment=rows_per_fragment)
    table.lance.delete("id IN (5, 55)")
    table.add([{"id": 100, "x": 100}])
    result = view.refresh(runner="inline")
    assert_exact(trace, [100])
    assert (result.rows_computed, result.rows_reused) == (1, len(asked.rows(table)) - 1)
    assert_equals_query(view, table, asked)


def test_rows_that_were_updated_before_a_compaction_are_computed_again(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, per_fragment=10)
    view = Asked().make(table)
    Refresh(view).plan().apply()
    trace.clear()
    table.lance.update({"x": "x + 1000"}, where="id IN (5, 55)")
    table.lance.optimize.compact_files(target_rows_per_fragment=1_000)
    view.refresh(runner="inline")
    assert_exact(trace, [1005, 1055])
    assert_equals_query(view, table, Asked())


def test_a_refresh_of_some_rows_is_continued_after_a_compaction(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, per_fragment=10)
    view = Asked().make(table)
    view.refresh(runner="inline")
    table.lance.update({"x": "x + 1000"}, where="id < 20")
    Refresh(view).plan().apply()
    trace.clear()
    table.lance.optimize.compact_files(target_rows_per_fragment=1_000)
    view.refresh(runner="inline")
    assert_exact(trace, [])
    assert_equals_query(view, table, Asked())
