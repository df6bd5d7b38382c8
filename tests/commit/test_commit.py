"""Commits among others: nobody's write is lost, nothing stale becomes visible, what did not fit is left and said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lance.commit
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lance.file import LanceFileReader

from airflow_geneva import connect
from airflow_geneva.engine.checkpoint.facts import STALE, Fact, append_ledger, fold_ledgers
from airflow_geneva.engine.checkpoint.reuse import BrokenFile, CheckpointIndex
from airflow_geneva.engine.lance_io import data_file, table_versions
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.saved_plan import SavedPlan, load_plan
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.run import record
from airflow_geneva.engine.run.column import ColumnTarget
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs, prepare
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.run.units import Unit, stage_computed
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf import UDF, expect, udf
from airflow_geneva.errors import CommitConflict, GenevaError, InvalidInput, JobFailed
from airflow_geneva.table import Table
from tests.support.broken_off import Died
from tests.support.counting import Trace, double, doubled, label, labelled, leave_trace, triple, tripled
from tests.support.invariants import (
    assert_exact,
    assert_honest,
    assert_nothing_to_do_is_free,
    assert_right,
    assert_untouched,
    assert_whole_commits,
)

MakeTable = Callable[..., Table]


@dataclass
class Stations:
    """A backfill taken apart, so that others can act between its stations."""

    table: Table
    plan: Plan
    saved: SavedPlan
    function: UDF = triple

    @staticmethod
    def begin(table: Table, function: UDF = triple, **arguments: object) -> Stations:
        plan = table.plan_backfill("y", udf=function, **arguments)  # type: ignore[arg-type]
        return Stations(table, plan, record_plan(plan, table.location), function)

    def apply(self) -> None:
        for shard in self.plan.shards:
            apply_inline(self.table.location, self.plan.spec, shard, Udfs({self.plan.spec.column: self.function}))

    def apply_without_staging(self) -> None:
        """As Spark does with a fragment that several tasks share: checkpoints only."""
        udfs = Udfs({self.plan.spec.column: self.function})
        with prepare(self.table.location, self.plan.spec, udfs, {}, Meter()) as prepared:
            prepared.run([Unit(task, task.due, False) for task in self.plan.fragments])

    def commit(self) -> BackfillResult:
        results = [PlannedJob(self.table.location, self.saved).commit(shard) for shard in self.plan.shards]
        return PlannedJob(self.table.location, self.saved).finish(results)


@udf(data_type=pa.int64(), on_error="skip")
def fails_on_sevens(x: int) -> int:
    if x % 7 == 0:
        raise ValueError(f"{x} is a multiple of seven")
    return x * 3


@udf(data_type=pa.int64(), expect=[expect.max_null_fraction(0.5)])
def expecting_triple(x: int | None) -> int | None:
    leave_trace([x])
    return tripled(x)


@udf(data_type=lance.blob_field("b").type)
def drawn(x: int) -> bytes:
    leave_trace([x])
    return b"a" * x


@udf(data_type=pa.int64(), on_error="skip")
def fails_on_sevens_with_blob(x: int, b: bytes) -> int:
    return 3 * x if x % 7 else 1 // 0


@udf(data_type=pa.int64(), expect=[expect.max_null_fraction(0.6)])
def empty_at_first(x: int) -> int | None:
    leave_trace([x])
    return None if x < 25 else tripled(x)


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    made = make_table(100)
    made.lance.add_columns({"other": "id * 10"})
    made.add_columns({"y": triple, "w": (double, ["x"])})
    return made


@dataclass
class AtFirst:
    """Calls a function at the first passage of some fault points, not again while it runs or later."""

    function: Callable[[str], object]
    points: tuple[str, ...]

    def __init__(self, function: Callable[[str], object], *points: str) -> None:
        self.function, self.points = function, points

    def __call__(self, point: str) -> None:
        if point == (self.points or ("",))[0] and not getattr(self, "busy", False):
            self.busy, self.points = True, self.points[1:]
            self.function(point)
            self.busy = False


def finish_the_rest(table: Table, trace: Trace, result: BackfillResult, column: str = "y") -> None:
    """What every run that others disturbed must end in: an honest account, and a next run that completes it."""
    assert_honest(result, table)
    after = table.backfill(column, runner="inline", on_unknown_values="recompute")
    assert_honest(after, table)
    assert after.state == "DONE"
    assert_right(table, column, tripled)
    assert_nothing_to_do_is_free(table, column, trace)


def append(table: Table) -> None:
    table.add([{"id": 500, "x": 500}, {"id": 501, "x": None}])


def delete_some(table: Table) -> None:
    table.lance.delete("id % 10 = 1")


def other_column(table: Table) -> None:
    table.backfill("w", runner="inline")


def rename_column(table: Table) -> None:
    table.lance.alter_columns({"path": "y", "name": "z"})


def rename_input(table: Table) -> None:
    table.lance.alter_columns({"path": "x", "name": "renamed"})
    table.lance.alter_columns({"path": "renamed", "name": "x"})


def configure(table: Table) -> None:
    table.lance.update_config({"k": "v"})


HARMLESS = [append, delete_some, other_column, rename_input, configure]


@pytest.mark.parametrize("meanwhile", HARMLESS)
@pytest.mark.parametrize("after_apply", [False, True])
def test_what_does_not_touch_the_planned_rows_costs_nothing(
    table: Table, trace: Trace, meanwhile: Callable[[Table], None], after_apply: bool
) -> None:
    job = Stations.begin(table)
    if not after_apply:
        meanwhile(table)
    job.apply()
    if after_apply:
        meanwhile(table)
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("DONE", table.lance.count_rows("id < 100"), 0)
    assert_right(table, "y", tripled, where="id < 100")
    trace.clear()
    finish_the_rest(table, trace, result)
    assert set(trace.counts()) <= {500, None}


def test_a_column_that_is_renamed_meanwhile_is_filled_under_its_new_name(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    rename_column(table)
    result = job.commit()
    assert (result.state, result.rows_computed) == ("DONE", 100)
    assert_right(table, "z", tripled)
    assert_nothing_to_do_is_free(table, "z", trace)


def update_some(table: Table) -> None:
    table.lance.update({"x": "x + 1000"}, where="id IN (3, 30)")


def upsert_some(table: Table) -> None:
    rows = pa.table({"id": pa.array([4, 700], pa.int64()), "x": pa.array([4_000, 7_000], pa.int64())})
    full = rows.append_column("other", pa.array([0, 0], pa.int64()))
    for name in ("y", "w"):
        full = full.append_column(name, pa.nulls(2, pa.int64()))
    table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(full)


def compact(table: Table) -> None:
    table.lance.optimize.compact_files()


def delete_a_fragment(table: Table) -> None:
    table.lance.delete("id < 25")


def update_and_compact(table: Table) -> None:
    update_some(table)
    compact(table)


def restore_deleted_rows(table: Table) -> None:
    table.location.open(table.version).restore()


def foreign_values(table: Table) -> None:
    table.lance.update({"y": "0"}, where="id < 50")


@pytest.mark.parametrize(
    "meanwhile", [update_some, upsert_some, compact, delete_a_fragment, update_and_compact, foreign_values]
)
@pytest.mark.parametrize("after_apply", [False, True])
def test_what_moves_planned_rows_leaves_them_to_the_next_run(
    table: Table, trace: Trace, meanwhile: Callable[[Table], None], after_apply: bool
) -> None:
    job = Stations.begin(table)
    if not after_apply:
        meanwhile(table)
    job.apply()
    if after_apply:
        meanwhile(table)
    result = job.commit()
    wrong = [value for x, value in zip(*table.to_arrow().select(["x", "y"]).to_pydict().values(), strict=True)
             if value not in (None, 0, tripled(x))]  # fmt: skip
    assert not wrong
    finish_the_rest(table, trace, result)


def test_many_fragments_that_are_left_are_told_in_a_few_lines(
    make_table: MakeTable, trace: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    table = make_table(rows=60, per_fragment=5)
    table.add_columns({"y": triple})
    job = Stations.begin(table)
    job.apply()
    table.lance.update({"x": "x + 1000"}, where="true")
    caplog.clear()
    result = job.commit()
    assert (result.state, result.rows_left) == ("PARTIAL", 60)
    told = [record.getMessage() for record in caplog.records if "eft for the next run" in record.getMessage()]
    assert len(told) == 6
    assert told[0].startswith("Fragment 0 is left for the next run: ")
    assert told[-1] == "Left for the next run: 7 more fragments."


def test_an_update_leaves_only_its_rows_to_be_run_again(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    update_some(table)
    result = job.commit()
    assert result.rows_computed + result.rows_left == 100
    trace.clear()
    finish_the_rest(table, trace, result)
    assert_exact(trace, [1003, 1030])


def compact_twice(table: Table) -> None:
    table.lance.optimize.compact_files(target_rows_per_fragment=50)
    compact(table)


def update_other_column(table: Table) -> None:
    table.lance.update({"other": "other + 1"}, where="id IN (3, 30)")


def upsert_other_column(table: Table) -> None:
    rows = table.lance.to_table(filter="id % 20 = 7")
    other = pc.add(rows["other"], 1)
    rows = rows.set_column(rows.schema.get_field_index("other"), "other", other)
    table.lance.merge_insert("id").when_matched_update_all().execute(rows)


def update_other_column_and_compact(table: Table) -> None:
    update_other_column(table)
    compact(table)
    upsert_other_column(table)


def restore_back_and_forth(table: Table) -> None:
    full = table.version
    compact(table)
    table.location.open(full).restore()


def restore_compacted(table: Table) -> None:
    """The plan is about the compacted fragment, and the restored ones are those from before."""
    table.location.open(table.version - 1).restore()


MOVES = [
    compact, compact_twice, update_other_column, upsert_other_column, update_other_column_and_compact,
    restore_back_and_forth,
]  # fmt: skip


@pytest.mark.parametrize("meanwhile", MOVES)
@pytest.mark.parametrize("after_apply", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_rows_that_others_only_move_become_visible_and_run_once(
    table: Table, trace: Trace, meanwhile: Callable[[Table], None], after_apply: bool, at_once: bool
) -> None:
    function = expecting_triple if at_once else triple
    if at_once:
        table.alter_columns({"y": expecting_triple})
    job = Stations.begin(table, function)
    if not after_apply:
        meanwhile(table)
    job.apply()
    if after_apply:
        meanwhile(table)
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("DONE", 100, 0)
    assert_honest(result, table, rows_run=100)
    assert_exact(trace, range(100))
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)
    again = job.commit()
    assert (again.state, again.rows_computed, again.rows_left) == ("DONE", 100, 0)


def test_rows_that_a_restore_moves_back_become_visible(table: Table, trace: Trace) -> None:
    compact(table)
    job = Stations.begin(table)
    job.apply()
    restore_compacted(table)
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("DONE", 100, 0)
    finish_the_rest(table, trace, result)
    assert_exact(trace, range(100))


def test_of_rows_that_an_update_moves_only_the_changed_are_left(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    table.lance.update({"x": "x + 1000"}, where="id = 3")
    table.lance.update({"other": "other + 1"}, where="id IN (4, 30)")
    table.lance.delete("id = 30")
    compact(table)
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_skipped, result.rows_left) == ("PARTIAL", 98, 1, 1)
    trace.clear()
    finish_the_rest(table, trace, result)
    assert_exact(trace, [1003])


def test_moved_rows_of_other_code_are_recomputed_where_they_are(table: Table, trace: Trace) -> None:
    table.backfill("y", runner="inline")
    job = Stations.begin(table, double, on_code_change="recompute")
    job.apply()
    upsert_other_column(table)
    result = job.commit()
    assert (result.state, result.rows_computed) == ("DONE", 100)
    assert_right(table, "y", doubled)


def test_failed_rows_that_a_compaction_moves_count_once(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    table.add_columns({"y": fails_on_sevens})
    job = Stations.begin(table, fails_on_sevens)
    job.apply()
    compact(table)
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_failed) == ("DONE", 85, 15)
    assert table.plan_backfill("y").rows_pending == 15
    assert len(table.get_errors(job_id=result.job_id)) == 15


def test_rows_that_are_moved_between_two_commits_of_a_run_cost_nothing_later(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that moved early too, when later versions with complete facts are more than a plan compares with."""
    table = make_table(48, per_fragment=6, u=pa.array([0] * 48))
    table.add_columns({"y": triple})
    moves = iter(["id = 1", "id = 7", "id = 2", "id = 8", "id = 25", "id = 3", "id = 9"])

    def meanwhile(point: str) -> None:
        if point == "commit.after" and (where := next(moves, None)):
            table.lance.update({"u": "u + 1"}, where=where)

    monkeypatch.setattr(table_versions, "fault_point", meanwhile)
    result = table.backfill("y", runner="inline", commit_granularity=1)
    assert (result.state, len(result.commits)) == ("DONE", 8)
    assert_exact(trace, range(48))
    assert_nothing_to_do_is_free(table, "y", trace)


def test_rows_that_are_moved_before_and_again_during_the_commit_become_visible(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Stations.begin(table)
    job.apply()
    update_other_column(table)

    def meanwhile(point: str) -> None:
        if point == "commit.before":
            patched.undo()
            compact(table)

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", meanwhile)
        result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("DONE", 100, 0)
    assert_honest(result, table)
    assert_right(table, "y", tripled)


def update_sevens(table: Table) -> None:
    table.lance.update({"other": "other + 1"}, where="id % 7 = 0")


@pytest.mark.parametrize("meanwhile", [compact, update_sevens])
def test_a_second_try_runs_and_counts_moved_rows_that_failed_as_the_first_did(
    table: Table, meanwhile: Callable[[Table], None]
) -> None:
    job = Stations.begin(table, fails_on_sevens, on_code_change="recompute")
    job.apply()
    meanwhile(table)
    first, version = job.commit(), table.version
    again = job.commit()
    for result in (first, again):
        assert (result.state, result.rows_computed, result.rows_failed, result.rows_left) == ("DONE", 85, 15, 0)
    assert table.version == version
    assert table.plan_backfill("y", udf=fails_on_sevens).rows_pending == 15


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", [compact, update_sevens, upsert_other_column])
def test_rows_that_move_while_they_fail_are_given_up_after_three_runs(
    table: Table, meanwhile: Callable[[Table], None]
) -> None:
    for run in range(3):
        job = Stations.begin(table, fails_on_sevens, where=f"id % 3 = {run} OR id % 7 = 0")
        job.apply()
        if run == 2:
            meanwhile(table)
        result = job.commit()
        assert (result.state, result.rows_failed, result.rows_left) == ("DONE", 15, 0)
        assert_honest(result, table)
    assert table.plan_backfill("y", udf=fails_on_sevens).rows_pending == 0


@pytest.mark.slow
def test_rows_beside_moved_ones_that_fail_again_stay_known(make_table: MakeTable) -> None:
    """Values of blobs are not compared, so that a row without a fact would be computed again."""
    table = make_table(100)
    table.add_columns({"b": drawn, "y": (fails_on_sevens_with_blob, ["x", "b"])})
    table.backfill("b", runner="inline")
    table.backfill("y", where="id NOT IN (8, 58)", runner="inline")
    job = Stations.begin(table, fails_on_sevens_with_blob)
    job.apply()
    table.lance.delete("id IN (8, 58)")
    compact(table)
    result = job.commit()
    assert (result.state, result.rows_failed) == ("DONE", 15)
    assert table.plan_backfill("y").rows_pending == 15


def test_several_shards_find_their_rows_in_one_compacted_fragment(table: Table, trace: Trace) -> None:
    job = Stations.begin(table, shard_size=1)
    job.apply()
    compact(table)
    result = job.commit()
    assert (result.state, result.rows_computed, len(result.commits)) == ("DONE", 100, 4)
    assert_exact(trace, range(100))
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)
    again = job.commit()
    assert (again.state, again.rows_computed, len(again.commits)) == ("DONE", 100, 4)


def test_moved_rows_with_blobs_are_computed_again_by_other_processes_and_become_visible(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs cannot be read back from a staged file. What this process wrote of checkpoints is not the newest then."""
    table = make_table(100)
    table.add_columns({"y": drawn})
    job = Stations.begin(table, drawn)
    job.apply()
    compact(table)
    here, (shard,) = PlannedJob(table.location, job.saved), job.plan.shards
    assert here.commit(shard).rows_left == 100

    def apply(shard: Shard, udfs: Udfs, on_rows: Callable[[int], None], target: ColumnTarget) -> None:
        PlannedJob(table.location, job.saved).apply(shard, udfs, on_rows, replace(target, written=None))

    monkeypatch.setattr(here, "apply", apply)
    here.apply_uncomputed(shard, Udfs({"y": drawn}), lambda rows: None)
    result = here.finish([here.commit(shard)])
    assert (result.state, result.rows_computed, len(trace)) == ("DONE", 100, 200)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_data_file_that_a_cleanup_removes_during_the_commit_is_written_again(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch, checkpointed: bool, answered: bool
) -> None:
    """Lance commits a file that does not exist, after which nobody can read the column."""
    before = set(Path(table.uri, "data").iterdir())
    job = Stations.begin(table, where="id >= 25 OR id < 10")
    if checkpointed:
        job.apply_without_staging()
    job.apply()

    commit = lance.LanceDataset.commit

    def lose_the_answer(*given: Any, **named: Any) -> lance.LanceDataset:
        commit(*given, **named)
        patched.undo()
        raise OSError("503 Service Unavailable")

    def meanwhile(point: str) -> None:
        if point == "commit.before":
            patched.undo()
            for file in staged_files(table, before):
                file.unlink()
            if not answered:
                patched.setattr(lance.LanceDataset, "commit", lose_the_answer)

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", meanwhile)
        result = job.commit()
    done = 85 if checkpointed else 0
    assert (result.state, result.rows_computed, result.rows_left) == (
        "DONE" if checkpointed else "PARTIAL", done, 85 - done,
    )  # fmt: skip
    assert table.lance.count_rows("y IS NOT NULL") == done
    trace.clear()
    finish_the_rest(table, trace, result)
    assert len(trace) == 100 - done


def test_a_data_file_that_is_removed_before_and_after_its_commit_is_due_again(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(Path(table.uri, "data").iterdir())
    job = Stations.begin(table)
    job.apply_without_staging()
    job.apply()

    def meanwhile(point: str) -> None:
        for file in staged_files(table, before) if point != "staged.write" else ():
            if file.suffix == ".lance":  # and no file that is being written
                file.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", AtFirst(meanwhile, "commit.before"))
        patched.setattr(data_file, "fault_point", meanwhile)
        result = job.commit()
    assert (result.state, result.rows_left) == ("PARTIAL", 100)
    trace.clear()
    assert table.backfill("y", runner="inline").state == "DONE"
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


@pytest.mark.parametrize("far", [False, True])
def test_what_a_cleanup_removes_after_the_plan_has_found_it_is_computed_by_the_same_run(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    database, before = table.location.database_uri, set(Path(table.uri, "data").iterdir())
    opened = connect(f"file-object-store://{database}" if far else database).open_table(table.name)
    Stations.begin(opened).apply()

    def meanwhile(point: str) -> None:
        staged_files(table, before)[0].unlink()

    monkeypatch.setattr(record, "fault_point", AtFirst(meanwhile, "plan.saved"))
    result = opened.backfill("y", runner="inline")
    assert (result.state, result.rows_computed, result.rows_reused, len(trace)) == ("DONE", 25, 75, 125)
    assert len(result.commits) == 2
    assert_honest(result, table)
    assert_right(table, "y", tripled)


def test_a_data_file_that_is_written_again_is_judged_with_the_whole_column(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(100)
    table.add_columns({"y": empty_at_first})
    job = Stations.begin(table, empty_at_first)
    job.apply_without_staging()
    before = set(Path(table.uri, "data").iterdir())
    job.apply()

    def meanwhile(point: str) -> None:
        if point == "commit.before":
            patched.undo()
            for file in staged_files(table, before):
                if LanceFileReader(str(file)).read_all().to_table().column(0).null_count:
                    file.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", meanwhile)
        result = job.commit()
    assert (result.state, result.rows_computed) == ("DONE", 100)
    assert [(one.rows, one.wrong) for one in result.checked] == [(100, 25)]
    assert table.to_arrow()["y"].null_count == 25


def test_values_that_others_wrote_into_moved_rows_stay(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    compact(table)
    table.lance.update({"y": "0"}, where="id < 10")
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 90, 10)
    assert table.lance.count_rows("y = 0") == 10
    finish_the_rest(table, trace, result)


def test_values_that_others_wrote_into_compacted_rows_stay(table: Table, trace: Trace) -> None:
    """In place, so that the rows are still in the fragment that the compaction made."""
    job = Stations.begin(table)
    job.apply()
    compact(table)
    zeros = pa.table({"id": pa.array(range(10), pa.int64()), "y": pa.array([0] * 10, pa.int64())})
    table.lance.merge_insert("id").when_matched_update_all().write_mode("rewrite_columns").execute(zeros)
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 90, 10)
    assert table.lance.count_rows("y = 0") == 10
    finish_the_rest(table, trace, result)


def test_rows_of_a_table_without_stable_row_ids_are_left_by_a_compaction(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, stable=False)
    table.add_columns({"y": triple})
    job = Stations.begin(table)
    job.apply()
    compact(table)
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 0, 100)
    assert "no stable row ids" in result.notes[-1]
    finish_the_rest(table, trace, result)


def test_rows_that_a_restore_brings_back_are_not_left_empty(table: Table, trace: Trace) -> None:
    full = table.version
    table.lance.delete("id = 3")
    job = Stations.begin(table)
    job.apply()
    table.location.open(full).restore()
    result = job.commit()
    assert (result.state, result.rows_computed) == ("DONE", 99)
    trace.clear()
    finish_the_rest(table, trace, result)
    assert_exact(trace, [3])


def test_rows_that_a_restore_brings_back_keep_the_value_they_had(table: Table) -> None:
    table.backfill("y", runner="inline")
    full = table.version
    table.lance.delete("id = 3")
    job = Stations.begin(table, double, on_code_change="recompute")
    job.apply()
    table.location.open(full).restore()
    job.commit()
    found = table.lance.to_table(["x", "y"], filter="id in (3, 4)").sort_by("x").to_pylist()
    assert found == [{"x": 3, "y": tripled(3)}, {"x": 4, "y": doubled(4)}]


def test_a_restore_to_before_the_column_leaves_everything(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50)
    before = table.version
    table.add_columns({"y": triple})
    job = Stations.begin(table)
    job.apply()
    table.location.open(before).restore()
    result = job.commit()
    assert (result.state, result.rows_left, result.commits) == ("PARTIAL", 50, ())
    assert table.schema.names == ["id", "x"]


def test_a_dropped_column_is_left_alone(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    table.lance.drop_columns(["y"])
    version = table.version
    result = job.commit()
    assert (result.state, result.rows_left, table.version) == ("PARTIAL", 100, version)
    table.add_columns({"y": triple})
    finish_the_rest(table, trace, result)


def test_a_column_dropped_and_added_again_is_not_filled_by_the_old_job(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    table.lance.drop_columns(["y"])
    table.add_columns({"y": label})
    result = job.commit()
    assert (result.state, result.commits) == ("PARTIAL", ())
    assert_untouched(table, "y", "true")
    table.backfill("y", runner="inline")
    assert_right(table, "y", labelled)


def test_an_overwritten_table_is_left_alone(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    lance.write_dataset(pa.table({"id": [1], "x": [1]}), table.uri, mode="overwrite")
    version = table.version
    result = job.commit()
    assert (result.state, result.commits, table.version) == ("PARTIAL", (), version)
    assert table.to_arrow().to_pydict() == {"id": [1], "x": [1]}


def with_computed_input(make_table: MakeTable) -> tuple[Table, Callable[[], object]]:
    """A table whose `y` is computed from a computed column, and a call that replaces values of that one in place."""
    first, second = (udf(data_type=pa.int64(), version=v, name="in")(lambda x, v=v: x * int(v)) for v in ("1", "2"))
    table = make_table(100)
    table.add_columns({"a": first})
    table.backfill("a", udf=first, runner="inline")
    table.add_columns({"y": (triple, ["a"])})
    again = {"udf": second, "where": "id < 25", "on_code_change": "recompute", "runner": "inline"}
    return table, lambda: table.backfill("a", **again)


def test_inputs_replaced_in_place_before_the_commit_are_seen(make_table: MakeTable, trace: Trace) -> None:
    """Lance reports no conflict for this; only comparing the input files finds it."""
    table, replace_inputs = with_computed_input(make_table)
    job = Stations.begin(table)
    job.apply()
    replace_inputs()
    result = job.commit()
    # The input of row 0 is 0 in both versions.
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 76, 24)
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled, inputs=("a",))


def test_inputs_replaced_in_place_during_the_commit_are_seen(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the staged files were compared with the table, and before they are in it."""
    table, replace_inputs = with_computed_input(make_table)
    job = Stations.begin(table)
    job.apply()

    def meanwhile(point: str) -> None:
        if point == "commit.before":
            patched.undo()
            replace_inputs()

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", meanwhile)
        result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 75, 25)
    assert result.notes == ("left for the next run: other writers changed the rows meanwhile",)
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled, inputs=("a",))


@pytest.mark.parametrize(
    ("compacted", "earlier", "folded"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_a_job_that_dies_after_it_committed_values_of_replaced_inputs_stops_no_later_run(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, compacted: bool, earlier: bool, folded: bool
) -> None:
    """It was killed before it could record that the values are its own."""
    table, replace_inputs = with_computed_input(make_table)
    if earlier:  # so facts were complete at a version at which the rows had no value
        table.backfill("y", where="id >= 90", runner="inline")
    job = Stations.begin(table)
    job.apply()

    def meanwhile(point: str) -> None:
        if point == "commit.before":
            replace_inputs()
        if point == "commit.after":
            raise Died

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", AtFirst(meanwhile, "commit.before", "commit.after"))
        with pytest.raises(Died):
            job.commit()
    if compacted:
        table.lance.optimize.compact_files()
    for number in range(16 * folded):
        append_ledger(table.location.checkpoints, job.saved.spec.field_id, f"other{number}", [Fact("", STALE, None, 1)])
    assert fold_ledgers(table.location.checkpoints, job.saved.spec.field_id) == folded
    trace.clear()
    result = table.backfill("y", runner="inline")
    # Row 0 has the same input as before, and a checkpoint has its value.
    assert (result.state, result.rows_computed, result.rows_reused, len(trace)) == ("DONE", 24, 1, 24)
    assert_right(table, "y", tripled, inputs=("a",))
    assert_nothing_to_do_is_free(table, "y", trace)


def test_rows_that_move_after_the_commit_of_a_job_that_dies_are_due_although_another_job_ends(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that ends says that the facts are complete, and no fact is about the rows that moved with their value."""
    dying, ending = Stations.begin(table, where="id < 25"), Stations.begin(table)
    dying.apply()
    ending.apply()

    def die(point: str) -> None:
        if point == "commit.after":
            raise Died

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", die)
        with pytest.raises(Died):
            dying.commit()
    table.lance.update({"x": "x + 1000"}, "id = 3 OR id = 30")
    ending.commit()
    trace.clear()
    result = table.backfill("y", runner="inline")
    assert (result.state, len(trace)) == ("DONE", 2)
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_rows_that_move_with_their_value_during_a_job_are_due_if_earlier_versions_are_cleaned_up(
    table: Table, trace: Trace
) -> None:
    """No version is left that tells what the rows held before they moved."""
    table.backfill("y", runner="inline")
    table.add([{"id": 200, "x": 200}])
    job = Stations.begin(table)
    job.apply()
    table.lance.update({"x": "x + 1000"}, "id < 3")
    job.commit()
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    trace.clear()
    result = table.backfill("y", runner="inline")
    assert (result.state, len(trace)) == ("DONE", 3)
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def die_after_a_commit_without_a_file(table: Table, monkeypatch: pytest.MonkeyPatch) -> Stations:
    """Let others remove a data file of a commit before it lands, and its job die right after."""
    before = set(Path(table.uri, "data").iterdir())
    job = Stations.begin(table)
    job.apply()
    die_after_a_commit(job, monkeypatch, lambda: staged_files(table, before)[0].unlink())
    return job


def die_after_a_commit(job: Stations, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    def meanwhile(point: str) -> None:
        if point == "commit.before":
            before()
        if point == "commit.after":
            raise Died

    with monkeypatch.context() as patched:
        patched.setattr(table_versions, "fault_point", meanwhile)
        with pytest.raises(Died):
            job.commit()


def test_a_data_file_that_is_removed_during_a_commit_whose_job_dies_is_written_by_the_next(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_after_a_commit_without_a_file(table, monkeypatch)
    trace.clear()
    result = table.backfill("y", runner="inline")
    assert (result.state, result.rows_computed, len(trace)) == ("DONE", 25, 25)
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


@pytest.mark.parametrize("apply_again", [False, True])
def test_a_data_file_that_is_removed_during_a_commit_whose_job_dies_is_written_by_its_retry(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch, apply_again: bool
) -> None:
    """The retry has the saved plan, and finds a version whose file is gone."""
    job = die_after_a_commit_without_a_file(table, monkeypatch)
    if apply_again:
        job.apply()
    result = job.commit()
    # The values of its rows were in the removed file only, and a commit task computes nothing.
    left = 0 if apply_again else 25
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL" if left else "DONE", 100 - left, left)
    if left:
        assert table.backfill("y", runner="inline").state == "DONE"
    assert len(trace) == 125
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_rows_of_a_version_without_a_data_file_are_not_compared_with_it_by_a_job(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was planned on such a version finds the file that a retry of the other job has written."""
    dead = die_after_a_commit_without_a_file(table, monkeypatch)
    late = Stations.begin(table)
    late.apply()
    dead.apply()
    assert dead.commit().state == "DONE"
    result = late.commit()
    assert (result.state, result.rows_left) == ("DONE", 0)
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_rows_of_a_version_without_a_data_file_are_not_compared_with_it_by_a_plan(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their inputs change after a retry, which dies too, has written the file again."""
    dead = die_after_a_commit_without_a_file(table, monkeypatch)
    dead.apply()
    die_after_a_commit(dead, monkeypatch, lambda: None)
    table.lance.update({"x": "x + 1000"}, "id % 25 = 3")
    assert table.backfill("y", runner="inline").state == "DONE"
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_a_staged_file_with_old_values_that_were_replaced_since_is_put_together_again(
    table: Table, trace: Trace
) -> None:
    one, two, three = (udf(data_type=pa.int64(), version=v, name="y")(lambda x, v=v: x * int(v)) for v in "123")
    table.backfill("y", udf=one, runner="inline")
    Stations.begin(table, two, where="id >= 10", on_code_change="recompute").apply()
    table.backfill("y", udf=three, runner="inline", on_code_change="recompute")
    again = Stations.begin(table, two, where="id >= 10", on_code_change="recompute")
    assert [fragment.staged for fragment in again.plan.fragments] == [False] * 4
    again.apply()
    result = again.commit()
    assert (result.state, result.rows_computed, result.rows_reused) == ("DONE", 0, 90)
    assert_right(table, "y", lambda x: 2 * x, where="id >= 10")
    assert_right(table, "y", lambda x: 3 * x, where="id < 10")


@pytest.mark.slow
def test_rows_that_failed_in_a_job_that_never_committed_are_tried_again(table: Table, trace: Trace) -> None:
    def failing(version: int) -> UDF:
        def function(x: int) -> int:
            leave_trace([x])
            if x == 30 and version == 1:
                raise ValueError("not yet")
            return tripled(x)

        return udf(data_type=pa.int64(), version="1", name="y", on_error="skip")(function)

    Stations.begin(table, failing(1)).apply()
    trace.clear()
    result = table.backfill("y", udf=failing(2), runner="inline")
    assert (result.state, result.rows_computed, result.rows_reused, result.rows_failed) == ("DONE", 1, 99, 0)
    assert_exact(trace, [30])
    assert_right(table, "y", tripled)


def test_filter_columns_replaced_in_place_are_looked_at_again(make_table: MakeTable, trace: Trace) -> None:
    first, second = (udf(data_type=pa.int64(), version=v, name="in")(lambda x, v=v: x * int(v)) for v in ("1", "0"))
    table = make_table(100, per_fragment=50)
    table.add_columns({"y": triple, "a": first})
    table.backfill("a", udf=first, runner="inline")
    job = Stations.begin(table, where="a < 10")
    job.apply()
    table.backfill("a", udf=second, on_code_change="recompute", runner="inline")
    job.commit()
    table.backfill("y", where="a < 10", runner="inline")
    assert_right(table, "y", tripled)


def test_a_second_commit_of_the_same_job_changes_nothing_and_reports_the_same(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    first = job.commit()
    version = table.version
    append(table)
    again = job.commit()
    assert table.version == version + 1
    assert (again.rows_computed, again.commits, again.state) == (first.rows_computed, first.commits, "DONE")


def test_a_second_apply_of_the_same_job_runs_nothing(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    job.apply()
    assert_exact(trace, range(100))
    job.commit()
    job.apply()
    assert_exact(trace, range(100))


def test_a_plan_that_was_saved_is_enough_to_go_on_elsewhere(table: Table, trace: Trace) -> None:
    job = Stations.begin(table, shard_size=2)
    storage = table.location.checkpoints.folder("jobs", job.plan.spec.job_id)
    saved = load_plan(storage, job.saved.fingerprint)
    results = []
    for index in (1, 0):
        shard = saved.load_shard(storage, index)
        apply_inline(table.location, saved.spec, shard, Udfs({saved.spec.column: triple}))
        results.append(PlannedJob(table.location, saved).commit(shard))
    result = PlannedJob(table.location, saved).finish(results)
    assert_honest(result, table, rows_run=100)
    assert_right(table, "y", tripled)


def test_a_shard_that_is_missing_fails_the_job_and_keeps_what_is_there(table: Table, trace: Trace) -> None:
    job = Stations.begin(table, shard_size=2)
    first = job.plan.shards[0]
    apply_inline(table.location, job.plan.spec, first, Udfs({job.plan.spec.column: triple}))
    result = PlannedJob(table.location, job.saved).finish([PlannedJob(table.location, job.saved).commit(first)])
    assert (result.state, result.rows_computed, result.rows_left) == ("FAILED", 50, 50)
    assert_right(table, "y", tripled, where="id < 50")


def test_nothing_applied_is_nothing_committed(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    version = table.version
    result = job.commit()
    assert (result.state, result.rows_left, table.version) == ("PARTIAL", 100, version)
    finish_the_rest(table, trace, result)


def staged_files(table: Table, before: set[Path]) -> list[Path]:
    return sorted(set(Path(table.uri, "data").iterdir()) - before)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "something else": lambda path: path.write_bytes(b"x" * path.stat().st_size),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_staged_file_is_never_committed(table: Table, trace: Trace, damage: str) -> None:
    before = set(Path(table.uri, "data").iterdir())
    job = Stations.begin(table)
    job.apply()
    DAMAGES[damage](staged_files(table, before)[0])
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 75, 25)
    finish_the_rest(table, trace, result)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_staged_file_is_rebuilt_from_checkpoints(table: Table, trace: Trace, damage: str) -> None:
    before = set(Path(table.uri, "data").iterdir())
    job = Stations.begin(table)
    job.apply_without_staging()
    job.apply()
    DAMAGES[damage](staged_files(table, before)[0])
    result = job.commit()
    assert (result.state, result.rows_computed) == ("DONE", 100)
    assert_exact(trace, range(100))
    finish_the_rest(table, trace, result)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_costs_its_own_rows_only(table: Table, trace: Trace, damage: str) -> None:
    job = Stations.begin(table, checkpoint_size=10)
    job.apply_without_staging()
    checkpoints = sorted(Path(table.location.checkpoints.root).rglob("range-10-20.lance"))
    DAMAGES[damage](checkpoints[0])
    result = job.commit()
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 75, 25)
    trace.clear()
    finish_the_rest(table, trace, result)
    assert len(trace) == 10


def test_everything_below_the_checkpoints_may_vanish(table: Table, trace: Trace) -> None:
    job = Stations.begin(table)
    job.apply()
    for path in Path(table.location.checkpoints.root).rglob("*.lance"):
        path.unlink()
    result = job.commit()
    assert (result.state, result.rows_left) == ("PARTIAL", 100)
    finish_the_rest(table, trace, result)


def test_staged_fragments_of_an_earlier_job_are_committed_by_the_next(table: Table, trace: Trace) -> None:
    Stations.begin(table).apply()
    result = table.backfill("y", runner="inline")
    assert (result.rows_computed, result.rows_reused) == (0, 100)
    assert_exact(trace, range(100))
    finish_the_rest(table, trace, result)


def test_two_jobs_on_one_column_do_not_undo_each_other(table: Table, trace: Trace) -> None:
    one, two = Stations.begin(table), Stations.begin(table)
    one.apply_without_staging()
    table.lance.delete("id % 10 = 7")
    three = Stations.begin(table)
    two.apply()
    three.apply()
    results = [job.commit() for job in (one, three, two)]
    assert sum(len(result.commits) for result in results) == 1
    finish_the_rest(table, trace, results[0])


def test_checkpoints_replaced_by_another_job_while_they_are_read_are_not_mixed_up(
    make_table: MakeTable, trace: Trace
) -> None:
    """Two jobs, planned before and after a delete, write the same key with different rows in it."""
    table = make_table(100, per_fragment=100)
    table.add_columns({"y": triple})
    one = Stations.begin(table, batch_size=1_000)
    table.lance.delete("id IN (5, 6)")
    two = Stations.begin(table, batch_size=1_000)
    one.apply_without_staging()
    (checkpoint,) = Path(table.location.checkpoints.root).rglob("range-0-100.lance")
    of_one = checkpoint.read_bytes()
    checkpoint.unlink()
    two.apply_without_staging()
    bench = ColumnTarget.at(table.location, two.plan.spec)
    (task,) = two.plan.fragments
    held = bench.held(task, bench.index(task), task.due)
    checkpoint.write_bytes(of_one)
    with pytest.raises(BrokenFile):
        bench.stage(task, held)
    assert stage_computed(bench, task, task.due, held) is not None
    assert two.commit().state == "DONE"
    assert_right(table, "y", tripled)


def test_rows_between_rows_that_run_again_are_not_computed_again(make_table: MakeTable, trace: Trace) -> None:
    """Two jobs have a checkpoint from row 0 to row 99, one of them with the two rows that failed in the other."""
    table, failing = make_table(100, per_fragment=100), [0, 99]

    @udf(data_type=pa.int64(), name="some", version="1", on_error="skip")
    def some(x: int) -> int:
        leave_trace([x])
        if x in failing:
            raise ValueError(x)
        return x

    table.add_columns({"y": some})
    Stations.begin(table, some).apply_without_staging()
    failing.clear()
    trace.clear()
    result = table.backfill("y", udf=some, runner="inline")
    assert (result.state, result.rows_failed, sorted(trace.rows())) == ("DONE", 0, [0, 99])
    assert_right(table, "y", lambda x: x)


@pytest.mark.parametrize("removed", [1, 100])
def test_rows_whose_checkpoint_others_remove_are_computed_again_but_not_without_end(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    table = make_table(100, per_fragment=100)
    table.add_columns({"y": triple})
    table.backfill("y", where="id < 1", runner="inline")
    trace.clear()
    found, rounds = ColumnTarget.index, list[int]()

    def index(target: ColumnTarget, fragment: Any, again: bool = False) -> CheckpointIndex:
        """Another job acts before a task looks for what it has just computed."""
        if again and len(trace) > 99 * len(rounds):
            rounds.append(len(trace))
            if len(rounds) <= removed:
                for checkpoint in Path(table.location.checkpoints.root).rglob("range-*.lance"):
                    checkpoint.unlink()
        return found(target, fragment, again)

    monkeypatch.setattr(ColumnTarget, "index", index)
    monkeypatch.setattr("airflow_geneva.engine.run.units._WAIT_SECONDS", 0.01)
    if removed == 1:
        assert table.backfill("y", runner="inline").rows_computed == 99
        assert rounds == [99, 198]
    else:
        with pytest.raises(JobFailed, match="by other jobs of this column"):
            table.backfill("y", runner="inline")
        assert len(rounds) <= 6
    assert set(trace.rows()) == set(range(1, 100))


def test_a_table_that_never_rests_ends_in_a_conflict_and_loses_nothing(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENEVA_VERSION_CONFLICT_MAX_RETRIES", "2")
    job = Stations.begin(table)
    job.apply()
    commit = lance.LanceDataset.commit

    def busy(*args: object, **more: object) -> object:
        table.location.open().delete("false")
        table.location.open(table.version).restore()
        return commit(*args, **more)

    monkeypatch.setattr(lance.LanceDataset, "commit", busy)
    with pytest.raises(CommitConflict, match=r"at every one of 3 tries.*Nothing is lost"):
        job.commit()
    monkeypatch.setattr(lance.LanceDataset, "commit", commit)
    assert job.commit().rows_computed == 100
    assert_exact(trace, range(100))
    assert_right(table, "y", tripled)


BACKFILL = """
import sys
from airflow_geneva import connect
print(connect(sys.argv[1]).open_table("docs").backfill(sys.argv[2], runner="inline", commit_granularity=1).state)
"""


@pytest.mark.slow
def test_two_columns_at_once_in_two_processes_while_rows_arrive(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(2_000, per_fragment=100)
    table.add_columns({"y": triple, "w": double})
    defined = table.version
    command = [sys.executable, "-c", BACKFILL, str(Path(table.uri).parent)]
    running = [
        subprocess.Popen([*command, column], stdout=subprocess.PIPE, text=True, env=os.environ) for column in ("y", "w")
    ]
    arrived = 0
    while any(process.poll() is None for process in running) and arrived < 50:
        table.add([{"id": 10_000 + arrived, "x": 10_000 + arrived}])
        arrived += 1
    ends = [(process.communicate()[0].strip(), process.returncode) for process in running]
    assert {code for _, code in ends} == {0}
    assert arrived > 0
    for column, expected in (("y", tripled), ("w", doubled)):
        assert_right(table, column, expected, where="id < 2000")
        assert_whole_commits(table, column, expected, since=defined)
        assert_honest(table.backfill(column, runner="inline"), table)
        assert_right(table, column, expected)
    assert_exact(trace, [*range(2_000), *range(10_000, 10_000 + arrived)] * 2)


@pytest.mark.parametrize("answers", [True, False])
def test_the_outcome_of_a_commit_that_the_store_answered_with_an_error_is_looked_up(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """It may have landed: credentials can end between the request and its answer."""
    table = make_table(20)
    table.add_columns({"y": triple})
    commit, opened = lance.LanceDataset.commit, TableLocation.open

    def refused(*given: Any, **named: Any) -> lance.LanceDataset:
        commit(*given, **named)
        if not answers:
            monkeypatch.setattr(TableLocation, "open", closed)
        raise OSError("The operation lacked the necessary privileges: 403 Forbidden: ExpiredToken")

    def closed(location: TableLocation, version: int | None = None) -> lance.LanceDataset:
        raise InvalidInput("The table cannot be opened: 403 Forbidden.")

    monkeypatch.setattr(lance.LanceDataset, "commit", refused)
    if answers:
        result = table.backfill("y", runner="inline")
        assert (result.state, result.rows_computed, result.commits) == ("DONE", 20, (result.version,))
    else:
        with pytest.raises(GenevaError, match=r"may have landed: .* ExpiredToken.* run again"):
            table.backfill("y", runner="inline")
        monkeypatch.setattr(TableLocation, "open", opened)
        monkeypatch.setattr(lance.LanceDataset, "commit", commit)
        assert (table.plan_backfill("y").rows_pending, table.count_rows("y IS NULL")) == (0, 0)


@pytest.mark.parametrize("earlier", [False, True])
def test_values_of_replaced_inputs_whose_commit_landed_without_an_answer_stop_no_later_run(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    table, replace_inputs = with_computed_input(make_table)
    if earlier:
        table.backfill("y", where="id >= 90", runner="inline")
    commit, calls = lance.LanceDataset.commit, list[int]()

    def answered(*given: Any, **named: Any) -> lance.LanceDataset:
        calls.append(len(calls))
        if calls[-1]:
            return commit(*given, **named)
        replace_inputs()
        commit(*given, **named)
        raise OSError("503 Service Unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(lance.LanceDataset, "commit", answered)
        assert table.backfill("y", runner="inline").state == "PARTIAL"
    assert table.backfill("y", runner="inline").state == "DONE"
    assert_right(table, "y", tripled, inputs=("a",))


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize(
    "answer", [OSError("503 Service Unavailable"), lance.commit.CommitConflictError("Retryable commit conflict")]
)
def test_a_commit_that_landed_and_was_answered_with_an_outage_or_a_conflict_is_told(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, answer: Exception, lost: int
) -> None:
    """An object store may write a file and lose the answer; then the client's own retry finds the file there."""
    table = make_table(30, per_fragment=10)
    table.add_columns({"y": triple})
    commit, calls = lance.LanceDataset.commit, list[int]()

    def answered(*given: Any, **named: Any) -> lance.LanceDataset:
        calls.append(len(calls) + 1)
        committed = commit(*given, **named)
        if calls[-1] == lost:
            raise answer
        return committed

    monkeypatch.setattr(lance.LanceDataset, "commit", answered)
    result = table.backfill("y", runner="inline", commit_granularity=1)
    assert (result.rows_computed, len(result.commits), result.version) == (30, 3, table.version)
    assert_honest(result, table)
