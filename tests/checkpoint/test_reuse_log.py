"""The log says which checkpoints a run goes on from, and which it cannot use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva.engine.plan.reusable_checkpoints import Mismatch
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace, triple, tripled
from tests.support.invariants import assert_exact, assert_right
from tests.support.queries import NOT_THIRD, Asked, Refresh, assert_equals_query
from tests.support.tables import MakeTable

Log = Callable[[], tuple[list[str], list[str]]]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    """The lines about collected checkpoints and about mismatches since it was asked last."""
    caplog.set_level(logging.INFO, "airflow_geneva")

    def read() -> tuple[list[str], list[str]]:
        records = [record for record in caplog.records if record.name == "airflow_geneva.run"]
        found = [(record.getMessage(), record.levelname) for record in records]
        caplog.clear()
        return (
            [line for line, level in found if line.startswith("Collected ") and level == "INFO"],
            [line for line, level in found if line.startswith("Checkpoint data files mismatch") and level == "WARNING"],
        )

    return read


def begin_backfill(table: Table, **arguments: Any) -> None:
    """Compute and stage a column, and leave it at that."""
    plan = table.plan_backfill("y", **arguments)
    record_plan(plan, table.location)
    for shard in plan.shards:
        apply_inline(table.location, plan.spec, shard, Udfs({plan.spec.column: triple}))


def replace_inputs(table: Table, ids: list[int]) -> None:
    """Write other inputs in place, so that their fragments keep their ids and get other data files."""
    rows = pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array([1_000 + i for i in ids], pa.int64())})
    merge = table.lance.merge_insert("id").write_mode("rewrite_columns")
    merge.when_matched_update_all().execute(rows)


def input_files(table: Table, fragment: int) -> set[str]:
    """Data files of ``x``."""
    field = table.lance.lance_schema.field("x").id()
    files = table.lance.get_fragment(fragment).metadata.files
    return {file.path for file in files if field in file.fields}


def refresh(view: View, **arguments: Any) -> Any:
    return view.refresh(runner="inline", **arguments)


def test_a_backfill_says_what_it_collects(make_table: MakeTable, trace: Trace, log: Log) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    begin_backfill(table, where="x < 60")
    assert log() == ([], [])
    print(table.plan_backfill("y", where="x < 60"))
    assert log() == ([], [])
    table.backfill("y", where="x < 60", runner="inline")
    assert log() == (["Collected 3 checkpointed fragments with 60 rows for docs.y."], [])
    table.backfill("y", runner="inline")
    table.backfill("y", runner="inline")
    assert log() == ([], [])
    assert_exact(trace, range(100))


def test_a_refresh_says_what_it_collects(make_table: MakeTable, trace: Trace, log: Log) -> None:
    table = make_table(100)
    view = Asked(NOT_THIRD).make(table)
    Refresh(view).plan().apply()
    assert log() == ([], [])
    refresh(view)
    assert log() == (["Collected 4 checkpointed fragments with 66 rows for v."], [])
    refresh(view)
    assert log() == ([], [])
    assert len(trace) == 66


def test_checkpoints_of_other_data_files_are_named(make_table: MakeTable, trace: Trace, log: Log) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    begin_backfill(table)
    (before,) = input_files(table, 1)
    replace_inputs(table, list(range(25, 50)))
    log()
    table.backfill("y", runner="inline")
    (now,) = input_files(table, 1) - {before}
    collected, mismatches = log()
    assert collected == ["Collected 3 checkpointed fragments with 75 rows for docs.y."]
    assert len(mismatches) == 1
    assert mismatches[0].startswith("Checkpoint data files mismatch for docs.y, fragment 1: expected [")
    expected, found = mismatches[0].split("expected")[1].split("found")
    assert now in expected
    assert before in found
    assert before not in expected
    assert_exact(trace, [*range(100), *range(1_025, 1_050)])
    assert_right(table, "y", tripled)


def test_a_checkpoint_that_lacks_a_data_file_is_not_said_to_be_of_none(
    make_table: MakeTable, trace: Trace, log: Log
) -> None:
    table = make_table(100, other=pa.array([0] * 100, pa.int64()))
    table.add_columns({"y": triple})
    begin_backfill(table, where="other = 0")
    (before,) = input_files(table, 1)
    replace_inputs(table, list(range(25, 50)))
    log()
    table.backfill("y", where="other = 0", runner="inline")
    (now,) = input_files(table, 1) - {before}
    line = f"Checkpoint data files mismatch for docs.y, fragment 1: expected [{now}] as well; it is not used."
    assert log()[1] == [line]


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [
        (("a", "b"), ("c",), "expected [a, b], found [c]"),
        (("a",), (), "expected [a] as well"),
        ((), ("c",), "found [c], which the fragment no longer has"),
        ((), (), "expected other columns in the same data files"),
        (("a",), None, "expected [a], found a checkpoint that cannot be read"),
    ],
)
def test_a_mismatch_reads_well(expected: tuple[str, ...], found: tuple[str, ...] | None, told: str) -> None:
    assert str(Mismatch(3, expected, found)) == f"fragment 3: {told}"


def test_of_many_mismatches_a_few_are_named_and_the_others_counted(
    make_table: MakeTable, trace: Trace, log: Log
) -> None:
    table = make_table(80, per_fragment=10, other=pa.array([0] * 80, pa.int64()))
    view = Asked().make(table)
    refresh(view)
    replace_inputs(table, [1, 11, 21, 31, 41, 51, 61])
    log()
    refresh(view)
    collected, mismatches = log()
    assert collected == []
    assert [line.split(":")[0].rpartition(" ")[2] for line in mismatches[:-1]] == list("01234")
    assert mismatches[-1] == "Checkpoint data files mismatch for v in 2 more fragments."
    assert_equals_query(view, table, Asked())
    # A fragment that has a checkpoint for its files is not one of them.
    replace_inputs(table, [2])
    Refresh(view).plan().apply()
    assert len(log()[1]) == 1
    refresh(view)
    assert log() == (["Collected 1 checkpointed fragment with 1 row for v."], [])
