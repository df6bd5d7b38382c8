"""What a plan says: per fragment done, partly done or to do, each with its reason, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import JobFailed
from airflow_geneva.table import Table
from tests.support.counting import triple


@pytest.fixture
def table(tmp_path: Path) -> Table:
    data = pa.table({"id": pa.array(range(100), pa.int64()), "x": pa.array(range(100), pa.int64())})
    made = connect(tmp_path / "db").create_table("docs", data, max_rows_per_file=25)
    made.add_columns({"y": triple})
    return made


def reason_counts(plan: Plan) -> dict[str, tuple[int, int]]:
    found = {tally.reason: (tally.fragments, tally.rows) for tally in plan.reason_counts}
    assert sum(rows for _, rows in found.values()) == plan.rows_total
    assert plan.rows_pending + plan.rows_skipped == plan.rows_total
    return found


def broken_at(x: int) -> UDF:
    def broken(x: int, at: int = x) -> int:
        if x == at:
            raise ValueError("stop here")
        return x

    return udf(data_type=pa.int64(), version="1", name="broken", input_columns=["x"])(broken)


def test_a_new_column_is_to_do(table: Table) -> None:
    plan = table.plan_backfill("y")
    assert reason_counts(plan) == {"never computed": (4, 100)}
    assert [(task.id, task.status, task.rows) for task in plan.fragments] == [(at, "to do", 25) for at in range(4)]
    assert (plan.rows_pending, plan.rows_to_run, len(plan.shards)) == (100, 100, 1)


def test_a_computed_column_is_known_from_the_manifest(table: Table) -> None:
    table.backfill("y", runner="inline")
    for checkpoints in Path(table.location.checkpoints.root).glob("udf-*"):
        checkpoints.rename(checkpoints.with_name("hidden"))
    plan = table.plan_backfill("y")
    assert reason_counts(plan) == {"computed": (4, 100)}
    assert plan.shards == ()
    assert "Nothing to do: no Spark, no new version." in str(plan)


def test_appended_deleted_and_updated_rows_have_their_reasons(table: Table) -> None:
    table.backfill("y", runner="inline")
    table.lance.delete("id < 25")
    table.add([{"id": 500, "x": 500}])
    table.lance.update({"x": "x + 1000"}, where="id = 30")
    plan = table.plan_backfill("y")
    assert plan.rows_pending == 2
    assert reason_counts(plan)["computed"][1] == 74
    assert "2 pending, 74 with nothing to do" in str(plan)


def test_rows_that_a_filter_selects_and_a_checkpoint_holds_are_not_to_run(table: Table) -> None:
    where = "x % 5 = 0"
    with pytest.raises(JobFailed):
        table.backfill("y", udf=broken_at(70), where=where, runner="inline", checkpoint_size=2)
    plan = table.plan_backfill("y", udf=broken_at(-1), where=where)
    assert plan.rows_to_run == 1 + 5
    assert table.backfill("y", udf=broken_at(-1), where=where, runner="inline", max_rows=3).rows_computed == 3


@pytest.mark.parametrize("deleted", ["id = 3", "id = 55"])
def test_fragments_with_checkpoints_are_partly_done_or_staged(table: Table, deleted: str) -> None:
    function = broken_at(60)
    table.add_columns({"b": function})
    with pytest.raises(JobFailed):
        table.backfill("b", udf=function, runner="inline", checkpoint_size=5)
    table.lance.delete(deleted)
    plan = table.plan_backfill("b", udf=function)
    assert [task.status for task in plan.fragments] == ["staged", "staged", "partly done", "to do"]
    third = plan.fragments[2]
    assert third.missing.pairs() == [[10, 25]]
    assert plan.rows_to_run == 15 + 25
    assert f"({plan.rows_pending - 40:,} rows from checkpoints)" in str(plan)
    assert "fragment 2: partly done" in str(plan)
    assert "rows missing: 10 to 24" in str(plan)


def test_a_filter_has_its_reasons(table: Table) -> None:
    plan = table.plan_backfill("y", where="id < 30")
    assert reason_counts(plan) == {
        "never computed": (2, 30),
        "not selected by where": (2, 50),
        "not selected by where or computed": (1, 20),
    }
    assert (plan.rows_pending, plan.rows_to_run) == (30, 30)
    assert "where id < 30" in str(plan)
    assert [task.missing_selected.pairs() for task in plan.fragments] == [[[0, 25]], [[0, 5]]]
    assert "fragment 1: to do, never computed; rows missing: 0 to 4" in str(plan)


def test_rows_that_a_filter_left_out_were_never_computed(table: Table) -> None:
    table.backfill("y", where="id < 30", runner="inline")
    table.lance.update({"x": "x + 1000"}, where="id = 3")
    assert reason_counts(table.plan_backfill("y")) == {
        "computed": (2, 29),
        "never computed": (3, 70),
        "new, or changed since they were computed": (1, 1),
    }


def test_a_filter_that_selects_nothing_says_so(table: Table) -> None:
    never = "where id < 0 selects no row of the table."
    assert never in str(table.plan_backfill("y", where="id < 0"))
    assert never in table.backfill("y", where="id < 0", runner="inline").notes
    table.backfill("y", where="id < 30", runner="inline")
    assert "where id < 30 selects no row that is due." in table.plan_backfill("y", where="id < 30").notes


def test_rows_newer_than_read_version_have_their_reason(table: Table) -> None:
    then = table.version
    table.add([{"id": 500, "x": 500}])
    plan = table.plan_backfill("y", read_version=then)
    assert reason_counts(plan) == {"never computed": (4, 100), "newer than read_version": (1, 1)}


def test_empty_fragments_and_tables_are_planned(table: Table) -> None:
    table.lance.delete("true")
    plan = table.plan_backfill("y")
    assert (plan.rows_total, plan.rows_pending, plan.shards) == (0, 0, ())


def test_planning_writes_nothing(table: Table) -> None:
    table.backfill("y", runner="inline")
    table.add([{"id": 500, "x": 500}])
    table.lance.optimize.compact_files()
    before = {path: path.stat().st_mtime_ns for path in Path(table.uri).rglob("*")}
    print(table.plan_backfill("y"))
    print(table.plan_backfill("y", where="id > 3"))
    assert {path: path.stat().st_mtime_ns for path in Path(table.uri).rglob("*")} == before


def test_the_text_stays_short_whatever_the_table(tmp_path: Path) -> None:
    data = pa.table({"x": pa.array(range(300), pa.int64())})
    table = connect(tmp_path / "many").create_table("docs", data, max_rows_per_file=1)
    table.add_columns({"y": triple})
    text = str(table.plan_backfill("y"))
    assert "300 fragments in 1 shard" in text
    assert "and 292 more fragments" in text
    assert len(text.splitlines()) < 20


def test_a_plan_names_what_it_computes_with_what(table: Table) -> None:
    plan = table.plan_backfill("y", shard_size=3)
    assert str(plan).startswith(f"Backfill of docs.y with triple (version {triple.code_version}), table version 2")
    assert [shard.index for shard in plan.shards] == [0, 1]
    assert plan.spec.definition.import_path == "tests.support.counting:triple"
    assert plan.spec.inputs == ("x",)
