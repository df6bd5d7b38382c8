"""A job takes rows of some of the due fragments, and leaves the others for the next run."""

from __future__ import annotations

import pytest

from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from tests.support.counting import Trace, triple
from tests.support.invariants import assert_exact
from tests.support.tables import MakeTable


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    table = make_table(100, per_fragment=10)
    table.add_columns({"y": triple})
    return table


@pytest.mark.parametrize("shard_size", [None, 3])
def test_some_of_the_due_fragments_are_taken(table: Table, trace: Trace, shard_size: int | None) -> None:
    plan = table.plan_backfill("y", num_frags=4, skip_frags=2, shard_size=shard_size)
    assert [task.id for task in plan.fragments] == [2, 3, 4, 5]
    assert [shard.index for shard in plan.shards] == list(range(len(plan.shards)))
    assert "num_frags=4, skip_frags=2" in str(plan)
    result = table.backfill("y", runner="inline", num_frags=4, skip_frags=2, shard_size=shard_size)
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 40, 60)
    assert "stopped at its cap of num_frags=4, skip_frags=2: 60 more rows left for the next run" in str(result)
    assert_exact(trace, list(range(20, 60)))
    rest = table.backfill("y", runner="inline", num_frags=5)
    assert (rest.state, rest.rows_computed, rest.rows_left) == ("PARTIAL", 50, 10)
    assert table.backfill("y", runner="inline", num_frags=5).state == "DONE"


def test_rows_are_capped_among_the_fragments_that_are_taken(table: Table) -> None:
    result = table.backfill("y", runner="inline", num_frags=2, max_rows=15)
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 15, 85)


@pytest.mark.parametrize("name", ["num_frags", "skip_frags"])
def test_numbers_that_are_none_are_refused(table: Table, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}=-1 is not valid"):
        table.backfill("y", runner="inline", **{name: -1})  # type: ignore[call-overload]
