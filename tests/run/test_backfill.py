"""Backfills in this process: what is computed, what is not, and what it costs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.fragment import write_fragments

from airflow_geneva import connect, udf
from airflow_geneva.engine.checkpoint.store import DelayedCheckpoints
from airflow_geneva.engine.lance_io.staged_files import StagedFiles
from airflow_geneva.engine.plan.freshness import FreshnessCount
from airflow_geneva.engine.run.peers import PEERS
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import CodeChanged, CommitConflict, InvalidInput, JobFailed, StorageError
from airflow_geneva.table import Table
from tests.support.counting import Trace, double, doubled, label, labelled, leave_trace, triple, triple_row, tripled
from tests.support.invariants import (
    assert_exact,
    assert_honest,
    assert_nothing_to_do_is_free,
    assert_right,
    assert_untouched,
    assert_whole_commits,
    values_of,
)

MakeTable = Callable[..., Table]


def of_version(version: str, factor: int = 1) -> UDF:
    """One UDF at some version of its code."""

    def scaled(x: int | None) -> int | None:
        leave_trace([x])
        return None if x is None else factor * x

    return udf(data_type=pa.int64(), version=version, name="scaled")(scaled)


@pytest.mark.parametrize("function", [triple, triple_row])
def test_a_backfill_computes_every_row_once_and_the_next_one_nothing(
    make_table: MakeTable, trace: Trace, function: UDF
) -> None:
    table = make_table([*range(60), None, None, *range(100, 138)])
    table.add_columns({"y": function})
    defined = table.version
    assert_untouched(table, "y", "true")
    result = table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, [*range(60), None, None, *range(100, 138)])
    assert_honest(result, table, rows_run=100)
    assert_whole_commits(table, "y", tripled, since=defined)
    assert len(result.commits) == 1
    assert_nothing_to_do_is_free(table, "y", trace)


def test_numpy_vectors_become_fixed_size_lists(make_table: MakeTable) -> None:
    @udf(data_type=pa.list_(pa.float32(), 8), version="1")
    def embed(x: int) -> np.ndarray:
        return np.full(8, x, np.float32)

    table = make_table(50, per_fragment=20)
    table.add_columns({"e": embed})
    table.backfill("e", udf=embed, runner="inline")
    assert_right(table, "e", lambda x: [float(x)] * 8)


def test_a_record_batch_udf_computes_several_outputs_at_once(make_table: MakeTable) -> None:
    kind = pa.struct({"sum": pa.int64(), "text": pa.string()})

    @udf(data_type=kind, version="1", input_columns=["id", "x"])
    def both(batch: pa.RecordBatch) -> pa.Array:
        rows = batch.to_pylist()
        return pa.array([{"sum": row["id"] + row["x"], "text": str(row["id"])} for row in rows], kind)

    table = make_table(50)
    table.add_columns({"s": both})
    table.backfill("s", udf=both, runner="inline")
    assert_right(table, "s", lambda number, x: {"sum": number + x, "text": str(number)}, inputs=("id", "x"))


def test_a_record_batch_udf_takes_the_columns_that_are_not_computed_or_those_that_are_named(
    make_table: MakeTable, trace: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    @udf(data_type=pa.int64(), version="1")
    def width(batch: pa.RecordBatch) -> pa.Array:
        leave_trace(batch.column("x"))
        return pa.array([batch.num_columns] * batch.num_rows, pa.int64())

    table = make_table(10)
    table.add_columns({"y": of_version("1"), "w": width, "named": (width, ["x", "y"])})
    assert table.definition("w").input_columns == ("id", "x")
    assert table.definition("named").input_columns == ("x", "y")
    assert "'w' of table 'docs' gets the columns ['id', 'x'], and not the computed ['y']" in caplog.text
    table.backfill("w", udf=width, runner="inline")
    table.backfill("y", udf=of_version("1"), runner="inline")
    assert_nothing_to_do_is_free(table, "w", trace, udf=width)
    other = udf(data_type=pa.int64(), name="other", version="2")(width.func)
    table.backfill("w", udf=other, on_code_change="recompute", runner="inline")
    assert table.to_arrow()["w"].to_pylist() == [2] * 10


def test_a_struct_and_a_list_can_be_inputs(make_table: MakeTable) -> None:
    structs = pa.array([{"a": at, "b": str(at)} if at % 3 else None for at in range(40)])
    lists = pa.array([[at, at] for at in range(40)], pa.list_(pa.int64()))

    @udf(data_type=pa.int64(), version="1")
    def total(s: dict[str, Any] | None, v: list[int]) -> int:
        return sum(v) + (s["a"] if s else 1_000)

    table = make_table(40, s=structs, v=lists)
    table.add_columns({"y": total})
    table.backfill("y", udf=total, runner="inline")
    assert_right(table, "y", lambda s, v: sum(v) + (s["a"] if s else 1_000), inputs=("s", "v"))


def test_a_class_is_set_up_once_for_all_fragments(make_table: MakeTable) -> None:
    class Model:
        made = 0

        def __init__(self) -> None:
            type(self).made += 1

        def __call__(self, x: int) -> int:
            return x + 7

    model = udf(data_type=pa.int64(), version="1")(Model)
    table = make_table(100, per_fragment=10)
    table.add_columns({"y": model})
    table.backfill("y", udf=model, runner="inline")
    assert_right(table, "y", lambda x: x + 7)
    assert Model.made == 1


def test_deleted_rows_and_rows_without_a_fragment_are_not_run(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    table.lance.delete("id < 25 OR id = 30 OR id = 99")
    result = table.backfill("y", runner="inline")
    alive = [at for at in range(25, 99) if at != 30]
    assert_exact(trace, alive)
    assert_honest(result, table, rows_run=len(alive))
    assert_right(table, "y", tripled)
    table.lance.delete("id = 40")
    assert_nothing_to_do_is_free(table, "y", trace)
    table.lance.delete("true")
    assert table.count_rows() == 0
    assert_nothing_to_do_is_free(table, "y", trace)


def test_an_empty_table_has_nothing_to_do_and_then_only_its_first_rows(tmp_path: Path, trace: Trace) -> None:
    table = connect(tmp_path / "db").create_table("docs", schema=pa.schema({"x": pa.int64()}))
    table.add_columns({"y": triple})
    assert_nothing_to_do_is_free(table, "y", trace)
    table.add([{"x": 4}, {"x": None}])
    assert_honest(table.backfill("y", runner="inline"), table, rows_run=2)
    assert_right(table, "y", tripled)


def test_appended_rows_are_all_that_is_computed(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    trace.clear()
    table.add([{"id": 500, "x": 500}, {"id": 501, "x": None}])
    table.add(pa.table({"id": pa.array([502], pa.int64()), "x": pa.array([502], pa.int64())}))
    result = table.backfill("y", runner="inline")
    assert_exact(trace, [500, None, 502])
    assert_honest(result, table, rows_run=3)
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_rows_appended_with_a_value_are_computed_unless_where_spares_them(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    trace.clear()
    table.add([{"id": 10, "x": 10, "y": -5}, {"id": 11, "x": 11, "y": None}])
    table.backfill("y", where="y IS NULL", runner="inline")
    assert_exact(trace, [11])
    assert values_of(table, "y", where="id >= 10") == [(10, -5), (11, 34)]
    table.backfill("y", runner="inline", on_unknown_values="recompute")
    assert_exact(trace, [11, 10])
    assert_right(table, "y", tripled)


def test_where_computes_what_it_selects_and_keeps_the_rest(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    result = table.backfill("y", where="id % 10 = 3", runner="inline")
    assert_exact(trace, range(3, 100, 10))
    assert_honest(result, table, rows_run=10)
    assert_right(table, "y", tripled, where="id % 10 = 3")
    assert_untouched(table, "y", "id % 10 <> 3")
    assert_nothing_to_do_is_free(table, "y", trace, where="id % 10 = 3")
    table.backfill("y", where="id % 10 < 5", runner="inline")
    assert len(trace) == 50
    table.backfill("y", runner="inline")
    assert_exact(trace, range(100))
    assert_right(table, "y", tripled)


def test_where_on_the_column_itself_ends(make_table: MakeTable, trace: Trace) -> None:
    table = make_table([1, 2, None, 4])
    nothing = of_version("1")
    table.add_columns({"n": nothing})
    table.backfill("n", udf=nothing, where="n IS NULL", runner="inline")
    assert_exact(trace, [1, 2, None, 4])
    assert_nothing_to_do_is_free(table, "n", trace, udf=nothing, where="n IS NULL")
    table.add([{"id": 9, "x": 9}])
    table.backfill("n", udf=nothing, where="n IS NULL", runner="inline")
    assert_exact(trace, [1, 2, None, 4, 9])


def test_a_sparse_filter_calls_the_udf_for_batches_not_for_single_rows(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40_000, per_fragment=40_000)
    table.add_columns({"y": triple})
    table.backfill("y", where="id % 100 = 0", runner="inline")
    assert_exact(trace, range(0, 40_000, 100))
    assert len(trace.calls()) < 10
    assert_right(table, "y", tripled, where="id % 100 = 0")


def test_a_filter_that_selects_nothing_is_free_and_remembered(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    assert_nothing_to_do_is_free(table, "y", trace, where="id > 1000")
    assert table.plan_backfill("y", where="id > 1000").reason_counts[0].reason == "computed or not selected by where"


def test_the_clock_in_a_filter_is_the_runs(make_table: MakeTable, trace: Trace) -> None:
    moment = datetime(2030, 1, 1, tzinfo=timezone.utc)
    stamps = pa.array([datetime(2029, 12, 31), datetime(2030, 1, 2), None], pa.timestamp("us"))
    table = make_table(3, ts=stamps)
    table.add_columns({"y": triple})
    table.backfill("y", where="ts < now()", run_after=moment, runner="inline")
    assert_exact(trace, [0])
    table.backfill("y", where="ts < now()", run_after=moment + timedelta(days=5), runner="inline")
    assert_exact(trace, [0, 1])


def test_read_version_takes_the_rows_of_then_with_the_values_of_now(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50)
    table.add_columns({"y": triple})
    then = table.version
    table.add([{"id": 500, "x": 500}])
    table.lance.update({"x": "x + 1000"}, where="id = 7")
    table.lance.optimize.compact_files()
    table.add([{"id": 501, "x": 501}])
    result = table.backfill("y", read_version=then, runner="inline")
    assert_exact(trace, [*range(7), *range(8, 50), 1007])
    assert_honest(result, table, rows_run=50)
    assert_right(table, "y", tripled, where="id < 50")
    assert_untouched(table, "y", "id >= 500")
    assert_nothing_to_do_is_free(table, "y", trace, read_version=then)
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert len(trace) == 52


@pytest.mark.parametrize("cleanup", [False, True])
def test_a_column_that_was_dropped_and_added_again_is_filled_again(
    make_table: MakeTable, trace: Trace, cleanup: bool
) -> None:
    table = make_table(100)
    table.add_columns({"y": label})
    table.backfill("y", runner="inline")
    table.lance.drop_columns(["y"])
    if cleanup:
        table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    table.add_columns({"y": label})
    assert_untouched(table, "y", "true")
    result = table.backfill("y", runner="inline")
    assert_right(table, "y", labelled)
    assert_honest(result, table)
    assert result.rows_computed + result.rows_reused == 100
    assert_nothing_to_do_is_free(table, "y", trace)


def test_range_checkpoints_survive_drop_and_re_add(make_table: MakeTable, trace: Trace) -> None:
    @udf(data_type=pa.int64(), version="1")
    def breaks(x: int) -> int:
        leave_trace([x])
        if x == 20 and len(trace) < 22:
            raise RuntimeError("not yet")
        return tripled(x)

    table = make_table(40, per_fragment=40)
    table.add_columns({"y": breaks})
    with pytest.raises(Exception, match="not yet"):
        table.backfill("y", udf=breaks, runner="inline", checkpoint_size=5)
    table.lance.drop_columns(["y"])
    table.add_columns({"y": breaks})
    leave_trace([-1])
    result = table.backfill("y", udf=breaks, runner="inline")
    assert_right(table, "y", tripled)
    assert (result.rows_reused, result.rows_computed) == (20, 20)


def test_range_checkpoints_of_another_type_are_not_used(make_table: MakeTable, trace: Trace) -> None:
    def fails_at_last(x):  # type: ignore[no-untyped-def]
        leave_trace([x])
        if x == 30 and len(trace) < 32:
            raise RuntimeError("not yet")
        return tripled(x)

    table = make_table(40, per_fragment=40)
    as_integers, as_floats = (
        udf(data_type=kind, version="1", name="f")(fails_at_last) for kind in (pa.int64(), pa.float64())
    )
    table.add_columns({"y": as_integers})
    with pytest.raises(Exception, match="not yet"):
        table.backfill("y", udf=as_integers, runner="inline", checkpoint_size=5)
    table.lance.drop_columns(["y"])
    table.add_columns({"y": as_floats})
    leave_trace([-1])
    result = table.backfill("y", udf=as_floats, runner="inline")
    assert_right(table, "y", tripled)
    assert (result.rows_reused, result.rows_computed) == (0, 40)


def test_a_re_added_column_of_another_type_is_computed_in_that_type(make_table: MakeTable) -> None:
    def pair(x):  # type: ignore[no-untyped-def]
        return [float(x), 1.0]

    table = make_table(40)
    for kind in (pa.list_(pa.float64()), pa.list_(pa.float32(), 2)):
        function = udf(data_type=kind, version="1", name="pair")(pair)
        table.add_columns({"y": function})
        table.backfill("y", udf=function, runner="inline")
        assert table.schema.field("y").type == kind
        assert_right(table, "y", pair)
        table.lance.drop_columns(["y"])


def test_other_columns_may_be_not_null(tmp_path: Path, trace: Trace) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("x", pa.int64(), nullable=False)])
    data = pa.table({"id": list(range(30)), "x": list(range(30))}, schema=schema)
    table = connect(tmp_path / "db").create_table("docs", data, max_rows_per_file=10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, range(30))


def test_a_table_without_stable_row_ids_falls_back_to_whole_fragments_and_says_so(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(100, stable=False)
    table.add_columns({"y": triple})
    assert "no stable row ids" in str(table.plan_backfill("y"))
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)
    table.add([{"id": 100, "x": 100}])
    table.lance.delete("id = 3")
    trace.clear()
    table.backfill("y", runner="inline")
    assert_exact(trace, [100])
    table.lance.update({"x": "x + 1000"}, where="id = 30")
    table.lance.optimize.compact_files()
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_alter_columns_changes_the_udf_and_keeps_the_values(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(20)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.alter_columns({"y": double})
    assert_right(table, "y", tripled)
    assert table.definition("y").name == "double"
    with pytest.raises(CodeChanged):
        table.backfill("y", runner="inline")
    table.backfill("y", on_code_change="recompute", runner="inline")
    assert_right(table, "y", doubled)
    assert_nothing_to_do_is_free(table, "y", trace)


def changed_code(make_table: MakeTable) -> Table:
    """Forty rows of version 1, and ten that nobody computed."""
    table = make_table(40)
    table.add_columns({"y": of_version("1")})
    table.backfill("y", udf=of_version("1"), runner="inline")
    table.add([{"id": at, "x": at} for at in range(40, 50)])
    return table


def test_changed_code_stops_and_names_versions_and_rows(make_table: MakeTable, trace: Trace) -> None:
    table = changed_code(make_table)
    trace.clear()
    version = table.version
    with pytest.raises(CodeChanged) as caught:
        table.backfill("y", udf=of_version("2", 5), runner="inline")
    for part in ("'scaled'", "version 2", "40 rows of version 1", 'on_code_change="recompute"', '"new_rows"'):
        assert part in str(caught.value)
    assert (len(trace), table.version) == (0, version)


def test_recompute_computes_everything_with_the_new_code(make_table: MakeTable, trace: Trace) -> None:
    table = changed_code(make_table)
    trace.clear()
    result = table.backfill("y", udf=of_version("2", 5), on_code_change="recompute", runner="inline")
    assert_exact(trace, range(50))
    assert_honest(result, table, rows_run=50)
    assert_right(table, "y", lambda x: 5 * x)
    assert_nothing_to_do_is_free(table, "y", trace, udf=of_version("2", 5))


def test_new_rows_leaves_the_old_ones(make_table: MakeTable, trace: Trace) -> None:
    table = changed_code(make_table)
    trace.clear()
    result = table.backfill("y", udf=of_version("2", 5), on_code_change="new_rows", runner="inline")
    assert_exact(trace, range(40, 50))
    assert_honest(result, table, rows_run=10)
    assert_right(table, "y", lambda x: x if x < 40 else 5 * x)
    assert_nothing_to_do_is_free(table, "y", trace, udf=of_version("2", 5), on_code_change="new_rows")
    assert "values of UDF version 1: 40 rows" in str(
        table.plan_backfill("y", udf=of_version("2", 5), on_code_change="new_rows")
    )


def test_a_filter_puts_only_the_rows_it_selects_at_stake(make_table: MakeTable, trace: Trace) -> None:
    table = changed_code(make_table)
    trace.clear()
    table.backfill("y", udf=of_version("2", 5), where="id >= 40", runner="inline")
    assert_exact(trace, range(40, 50))
    with pytest.raises(CodeChanged, match="holds 5 rows of version 1"):
        table.backfill("y", udf=of_version("2", 5), where="id >= 35", runner="inline")


def test_rows_that_a_filtered_recompute_left_are_still_at_stake(make_table: MakeTable, trace: Trace) -> None:
    table = changed_code(make_table)
    table.backfill("y", udf=of_version("2", 5), where="id = 3", on_code_change="recompute", runner="inline")
    assert values_of(table, "y", where="id IN (3, 4)") == [(3, 15), (4, 4)]
    with pytest.raises(CodeChanged, match="holds 39 rows of version 1"):
        table.backfill("y", udf=of_version("2", 5), runner="inline")


def test_going_back_to_the_old_code_finds_its_rows(make_table: MakeTable, trace: Trace) -> None:
    table = changed_code(make_table)
    table.backfill("y", udf=of_version("2", 5), on_code_change="new_rows", runner="inline")
    trace.clear()
    with pytest.raises(CodeChanged, match="10 rows of version 2"):
        table.backfill("y", udf=of_version("1"), runner="inline")
    table.backfill("y", udf=of_version("1"), on_code_change="recompute", runner="inline")
    assert_exact(trace, range(40, 50))
    assert_right(table, "y", lambda x: x)


def fails_once(trace: Trace, at: int) -> UDF:
    """Fails at one input the first time it sees it."""

    def brittle(x: int) -> int:
        seen = trace.counts()[x]
        leave_trace([x])
        if x == at and seen == 0:
            raise RuntimeError("first time")
        return tripled(x)

    return udf(data_type=pa.int64(), version="1", name="brittle")(brittle)


def test_a_failed_run_is_taken_up_where_it_stopped(make_table: MakeTable, trace: Trace) -> None:
    function = fails_once(trace, at=30)
    table = make_table(100)
    table.add_columns({"y": function})
    with pytest.raises(Exception, match="first time"):
        table.backfill("y", udf=function, runner="inline")
    assert_untouched(table, "y", "true")
    result = table.backfill("y", udf=function, runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, [*range(100), 30])
    assert (result.rows_computed, result.rows_reused) == (70, 30)
    assert_honest(result, table)


def test_what_cannot_be_kept_of_a_failed_run_does_not_hide_why_it_failed(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: DelayedCheckpoints) -> None:
        raise StorageError("the disk is full")

    function = fails_once(trace, at=30)
    table = make_table(100)
    table.add_columns({"y": function})
    with monkeypatch.context() as patched:
        patched.setattr(DelayedCheckpoints, "write", refuse)
        with pytest.raises(Exception, match="first time"):
            table.backfill("y", udf=function, runner="inline")
        with pytest.raises(JobFailed, match="the disk is full"):
            table.backfill("y", udf=function, runner="inline")
    table.backfill("y", udf=function, runner="inline")
    assert_right(table, "y", tripled)


def test_ignore_checkpoints_computes_what_was_not_committed_again(make_table: MakeTable, trace: Trace) -> None:
    function = fails_once(trace, at=30)
    table = make_table(100)
    table.add_columns({"y": function})
    with pytest.raises(Exception, match="first time"):
        table.backfill("y", udf=function, runner="inline")
    trace.clear()
    leave_trace([30])
    result = table.backfill("y", udf=function, ignore_checkpoints=True, runner="inline")
    assert_exact(trace, [*range(100), 30])
    assert (result.rows_computed, result.rows_reused) == (100, 0)
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace, udf=function, ignore_checkpoints=True)


def test_inputs_are_mapped_and_mapping_another_column_of_the_same_file_asks_first(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(20, z=pa.array(range(100, 120), pa.int64()))
    table.add_columns({"y": (triple, ["z"])})
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled, inputs=("z",))
    trace.clear()
    table.alter_columns({"y": (triple, ["id"])})
    with pytest.raises(CodeChanged, match=r"20 rows of version .* with other input columns"):
        table.backfill("y", runner="inline")
    assert_exact(trace, [])
    table.backfill("y", on_code_change="recompute", runner="inline")
    assert_exact(trace, range(20))
    assert_right(table, "y", tripled, inputs=("id",))


def test_one_column_may_feed_several_parameters(make_table: MakeTable) -> None:
    @udf(data_type=pa.int64(), version="1")
    def add(a: int, b: int) -> int:
        return a + 10 * b

    table = make_table(20, z=pa.array(range(20), pa.int64()))
    table.add_columns({"same": (add, ["x", "x"]), "there": (add, ["x", "z"]), "back": (add, ["z", "x"])})
    for column in ("same", "there", "back"):
        table.backfill(column, udf=add, runner="inline")
        table.backfill(column, udf=add, where="x > 3", runner="inline")
        assert_right(table, column, lambda x: 11 * x)


@pytest.mark.parametrize(
    "name", ["select", "Order By", "UPPER", "größe", "a-b", "with space", "quote'd", "per%cent", "x" * 180, "emoji 🙂"]
)
def test_columns_may_have_odd_names(make_table: MakeTable, trace: Trace, name: str) -> None:
    table = make_table(30, per_fragment=10, **{f"in {name}": pa.array(range(30), pa.int64())})
    table.add_columns({name: (triple, [f"in {name}"])})
    table.backfill(name, where=f"`in {name}` < 5 AND `{name}` IS NULL", runner="inline")
    assert_exact(trace, range(5))
    table.backfill(name, runner="inline")
    assert_right(table, name, tripled, inputs=(f"in {name}",))
    assert_exact(trace, range(30))
    assert_nothing_to_do_is_free(table, name, trace)


@pytest.mark.parametrize("all_columns", [False, True])
def test_an_input_with_a_backtick_in_its_name_is_refused_where_the_column_is_added(
    tmp_path: Path, all_columns: bool
) -> None:
    def of_batch(batch: pa.RecordBatch) -> pa.Array:
        return batch.column(0)

    table = connect(tmp_path).create_table("t", {"a`b": [1, 2]})
    function = udf(data_type=pa.int64())(of_batch)
    with pytest.raises(InvalidInput, match=r"backtick in its name.*table\.rename_column\('a`b', 'a_b'\)"):
        table.add_columns({"y": function if all_columns else (triple, ["a`b"])})
    table.rename_column("a`b", "a_b")
    table.add_columns({"y": function if all_columns else (triple, ["a_b"])})
    assert table.backfill("y", runner="inline").rows_computed == 2


def test_columns_that_differ_in_case_only_are_two_columns(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(10, X=pa.array(range(100, 110), pa.int64()))
    table.add_columns({"y": (triple, ["x"]), "Y": (triple, ["X"])})
    table.backfill("y", runner="inline")
    table.backfill("Y", where="`X` > 103", runner="inline")
    assert_right(table, "y", tripled)
    assert_right(table, "Y", tripled, inputs=("X",), where="`X` > 103")


def test_one_column_of_a_file_with_several_is_replaced_alone(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(30, per_fragment=10)
    table.add_columns({"y": triple, "w": double})
    table.add(pa.table({name: pa.array([1_000], pa.int64()) for name in ("id", "x", "y", "w")}))
    (fragment,) = [f for f in table.lance.get_fragments() if f.count_rows() == 1]
    assert len(fragment.data_files()) == 1
    table.backfill("y", runner="inline", on_unknown_values="recompute")
    assert_right(table, "y", tripled)
    assert values_of(table, "w", where="id = 1000") == [(1_000, 1_000)]
    trace.clear()
    table.backfill("w", runner="inline", on_unknown_values="recompute")
    assert_right(table, "w", doubled)
    assert_right(table, "y", tripled)
    assert_exact(trace, [*range(30), 1_000])


def test_compaction_and_other_columns_cost_nothing(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, per_fragment=10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    trace.clear()
    table.lance.optimize.compact_files(target_rows_per_fragment=30)
    assert_nothing_to_do_is_free(table, "y", trace)
    table.lance.add_columns({"other": "x * 2"})
    table.lance.delete("id = 5")
    assert_nothing_to_do_is_free(table, "y", trace)
    table.lance.optimize.compact_files()
    assert_nothing_to_do_is_free(table, "y", trace)


def test_a_renamed_input_is_the_same_input(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.lance.alter_columns({"path": "x", "name": "renamed"}, {"path": "y", "name": "tripled"})
    table.alter_columns({"tripled": (triple, ["renamed"])})
    assert_nothing_to_do_is_free(table, "tripled", trace)


def test_a_column_that_is_renamed_keeps_its_state_and_its_readers_follow(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50)
    table.add_columns({"y": triple, "z": (triple_row, ["y"])})
    table.backfill("y", runner="inline")
    table.backfill("z", runner="inline")
    trace.clear()
    table.rename_column("x", "an x")
    table.rename_column("y", "y2")
    table.rename_column("y2", "tripled")
    assert table.schema.names == ["id", "an x", "tripled", "z"]
    assert table.definition("tripled").input_columns == ("an x",)
    assert table.definition("z").input_columns == ("tripled",)
    for column in ("tripled", "z"):
        assert table.backfill(column, runner="inline").rows_skipped == 50
    assert trace.rows() == []
    table.add([{"id": 50, "an x": 50}])
    assert table.backfill("tripled", runner="inline").rows_computed == 1
    assert table.backfill("z", runner="inline").rows_computed == 1
    assert table.to_arrow(["z"])["z"].to_pylist() == [tripled(tripled(x)) for x in range(51)]


@pytest.mark.slow
def test_rows_that_failed_are_listed_under_the_new_name_of_their_column(make_table: MakeTable) -> None:
    @udf(data_type=pa.int64(), version="1", on_error="skip")
    def picky(x: int) -> int:
        if x == 3:
            raise ValueError("three")
        return x

    table = make_table(5)
    table.add_columns({"y": picky})
    table.backfill("y", runner="inline")
    table.rename_column("y", "z")
    for records in (table.get_errors(), table.get_errors(column_name="z"), table.get_errors(history=True)):
        assert [(record.column, record.row_address) for record in records] == [("z", 3)]
    assert table.get_failed_row_addresses(column_name="z") == [3]
    table.backfill("z", runner="inline")
    (failed,) = table.get_errors()
    assert (failed.column, failed.attempt) == ("z", 2)


def test_a_rename_that_was_killed_between_its_commits_is_completed_by_the_next(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(5)
    table.add_columns({"y": triple})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lance.LanceDataset, "alter_columns", killed)
        with pytest.raises(KeyboardInterrupt):
            table.rename_column("x", "new")
    table.rename_column("x", "new")
    assert table.backfill("y", runner="inline").rows_computed == 5


def test_columns_that_others_are_computed_from_are_not_dropped(make_table: MakeTable) -> None:
    table = make_table(5)
    table.add_columns({"y": triple, "z": (triple_row, ["y"])})
    with pytest.raises(InvalidInput, match=r"\['x'\] of table .* computed from them: 'y' \(from \['x'\]\)\."):
        table.drop_columns(["x"])
    with pytest.raises(InvalidInput, match=r"'z' \(from \['y'\]\).*table\.drop_columns\(\['x', 'y', 'z'\]\)"):
        table.drop_columns(["x", "y"])
    table.drop_columns(["z"])
    table.drop_columns(["y", "x", "y"])
    assert table.schema.names == ["id"]
    with pytest.raises(InvalidInput, match="a table needs one"):
        table.drop_columns("id")
    with pytest.raises(InvalidInput, match=r"has no columns \['nope'\]. It has: id"):
        table.drop_columns(["nope"])


@pytest.mark.parametrize(
    ("column", "to", "says"),
    [
        ("nope", "a", r"has no columns \['nope'\]"),
        ("x", "id", "there is such a column"),
        ("x", "a.b", "'a.b' cannot be the name of a column"),
        ("x", "_rowid", "'_rowid' cannot be the name of a column"),
    ],
)
def test_a_rename_that_is_not_possible_changes_nothing(make_table: MakeTable, column: str, to: str, says: str) -> None:
    table = make_table(5)
    with pytest.raises(InvalidInput, match=says):
        table.rename_column(column, to)
    assert table.version == 1
    view = table.query().select(["x"]).create_materialized_view(name="v")
    with pytest.raises(InvalidInput, match="cannot be renamed: other names would be read"):
        view.rename_column("x", "a")


def test_two_compactions_without_a_plan_in_between_cost_nothing(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, per_fragment=10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.lance.optimize.compact_files(target_rows_per_fragment=30)
    table.lance.optimize.compact_files()
    table.add([{"id": 500, "x": 500}])
    trace.clear()
    table.backfill("y", runner="inline")
    assert_exact(trace, [500])


@pytest.mark.parametrize(("where", "left"), [(None, []), ("id <> 7", [7])], ids=["whole fragments", "single rows"])
def test_a_row_updated_between_two_compactions_is_not_taken_for_computed(
    make_table: MakeTable, trace: Trace, where: str | None, left: list[int]
) -> None:
    """It lives on under its row id, so whoever follows ids alone believes its old value."""
    table = make_table(100)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline", where=where)
    table.lance.optimize.compact_files(target_rows_per_fragment=50)
    table.lance.update({"x": "x + 1000"}, where="id IN (3, 4)")
    table.lance.optimize.compact_files()
    table.add([{"id": 500, "x": 500}])
    trace.clear()
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, [1003, 1004, 500, *left])


def test_a_checkpoint_of_a_row_that_was_updated_before_a_compaction_is_not_used(
    make_table: MakeTable, trace: Trace
) -> None:
    function = fails_once(trace, at=49)
    table = make_table(100, per_fragment=50)
    table.add_columns({"y": function})
    with pytest.raises(Exception, match="first time"):
        table.backfill("y", udf=function, runner="inline", checkpoint_size=10)
    table.lance.update({"x": "x + 1000"}, where="id IN (3, 4)")
    table.lance.optimize.compact_files()
    trace.clear()
    leave_trace([49])
    table.backfill("y", udf=function, runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, [1003, 1004, *range(49, 100), 49])


def test_checkpoints_are_found_again_after_a_compaction(make_table: MakeTable, trace: Trace) -> None:
    function = fails_once(trace, at=70)
    table = make_table(100)
    table.add_columns({"y": function})
    with pytest.raises(Exception, match="first time"):
        table.backfill("y", udf=function, runner="inline")
    table.lance.delete("id IN (1, 60)")
    table.lance.optimize.compact_files()
    result = table.backfill("y", udf=function, runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, [*range(100), 70])
    assert_honest(result, table)


def test_a_restored_table_is_right_again_without_running_anything(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    full = table.version
    table.lance.update({"x": "x + 1000"}, where="id < 5")
    table.lance.delete("id > 90")
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    table.location.open(full).restore()
    trace.clear()
    assert_nothing_to_do_is_free(table, "y", trace)
    assert_right(table, "y", tripled)


def test_inputs_replaced_in_place_are_computed_again(make_table: MakeTable, trace: Trace) -> None:
    """A column computed from a column computed from a third: the chain's own way of replacing inputs."""
    table = make_table(50)
    first = of_version("1", 2)
    table.add_columns({"a": first})
    table.add_columns({"b": (triple, ["a"])})
    table.backfill("b", runner="inline")
    assert_right(table, "b", tripled, inputs=("a",))
    table.backfill("a", udf=first, runner="inline")
    table.backfill("b", runner="inline")
    assert_right(table, "b", tripled, inputs=("a",))
    table.backfill("a", udf=of_version("2", 3), on_code_change="recompute", runner="inline")
    table.backfill("b", runner="inline")
    assert_right(table, "b", tripled, inputs=("a",))
    assert_nothing_to_do_is_free(table, "b", trace)


def test_values_that_others_wrote_into_the_column_are_computed_again(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(50)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    trace.clear()
    table.lance.update({"y": "0"}, where="id = 30")
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, [30])


def test_values_that_others_wrote_into_a_compacted_fragment_are_computed_again(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.lance.optimize.compact_files(target_rows_per_fragment=50)
    dataset = table.lance
    fragment, _ = dataset.get_fragments()
    (theirs,) = write_fragments(pa.table({"y": pa.array([-1] * 50, pa.int64())}), dataset, mode="append")
    group = lance.LanceOperation.DataReplacementGroup(fragment.fragment_id, theirs.files[0])
    replaced = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
    lance.LanceDataset.commit(dataset.uri, replaced)
    trace.clear()
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, range(50))


@pytest.mark.parametrize("threads", [1, 4])
def test_several_threads_compute_the_same(make_table: MakeTable, trace: Trace, threads: int) -> None:
    table = make_table(200, per_fragment=10)
    table.add_columns({"y": label})
    result = table.backfill("y", runner="inline", intra_applier_concurrency=threads, commit_granularity=3)
    assert_right(table, "y", labelled)
    assert_exact(trace, range(200))
    assert_honest(result, table, rows_run=200)
    assert len(result.commits) == 7


def test_shards_and_commits_are_as_small_as_asked_for(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, per_fragment=10)
    table.add_columns({"y": triple})
    defined = table.version
    result = table.backfill("y", runner="inline", shard_size=4, commit_granularity=2)
    assert len(result.commits) == 5
    assert_honest(result, table, rows_run=100)
    assert_whole_commits(table, "y", tripled, since=defined)


@pytest.mark.parametrize(("seconds", "commits"), [(0.0, 3), (1e9, 2)])
def test_unasked_a_commit_covers_what_takes_some_seconds(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, seconds: float, commits: int
) -> None:
    monkeypatch.setattr("airflow_geneva.engine.commit.column.SECONDS_A_COMMIT", seconds)
    table = make_table(130, per_fragment=1)
    table.add_columns({"y": triple})
    assert len(table.backfill("y", runner="inline").commits) == commits
    assert_right(table, "y", tripled)


def test_a_group_that_others_disturb_is_committed_in_smaller_ones(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(130, per_fragment=1)
    table.add_columns({"y": triple})
    sizes = []
    commit = lance.LanceDataset.commit

    def conflicting(opened: Any, transaction: Any, **options: Any) -> Any:
        if getattr(opened, "uri", opened) == table.uri:  # a limit of an earlier test still commits
            sizes.append(len(transaction.operation.replacements))
            if sizes[-1] > 64:
                raise OSError("Retryable commit conflict for version 3")
        return commit(opened, transaction, **options)

    monkeypatch.setattr(lance.LanceDataset, "commit", staticmethod(conflicting))
    result = table.backfill("y", runner="inline")
    assert sizes == [64, 66, 33, 33]
    assert (result.state, result.rows_left, len(result.commits)) == ("DONE", 0, 3)
    assert_right(table, "y", tripled)


@pytest.mark.parametrize(("size", "most"), [(7, 7), (1, 1), (1_000, 100)])
def test_no_call_is_larger_than_the_batch_size(make_table: MakeTable, trace: Trace, size: int, most: int) -> None:
    table = make_table(100, per_fragment=100)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline", batch_size=size)
    assert max(trace.calls()) == most
    assert sum(trace.calls()) == 100


def test_a_blob_column_is_refused_where_lance_cannot_write_it(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("x", pa.int64())])
    table = connect(tmp_path / "db").create_table("docs", pa.table({"id": [1], "x": [1]}, schema=schema))

    @udf(data_type=lance.blob_field("y").type, version="1")
    def picture(x: int) -> bytes:
        return b"x"

    with pytest.raises(ValueError, match=r"cannot be a blob.*NOT NULL.*\['id'\]"):
        table.add_columns({"y": picture})
    assert table.schema.names == ["id", "x"]


def test_a_re_added_column_that_gets_the_field_id_of_a_dropped_one_starts_empty(
    make_table: MakeTable, trace: Trace
) -> None:
    """Lance gives a field id away again once compaction has removed every file that held it."""

    def field_id() -> int:
        return int(table.lance.lance_schema.field("y").id())

    table = make_table(40, per_fragment=10)
    table.add_columns({"y": triple})
    first = field_id()
    table.backfill("y", runner="inline")
    table.lance.optimize.compact_files(target_rows_per_fragment=20)
    # Its value was NULL, as all values of an empty column are.
    table.add([{"id": 500, "x": None}])
    table.backfill("y", runner="inline")
    table.lance.drop_columns(["y"])
    table.add_columns({"y": double})
    assert field_id() != first
    table.add([{"id": 501, "x": 501}])
    table.lance.optimize.compact_files()
    table.backfill("y", runner="inline")
    assert_right(table, "y", doubled)
    table.lance.drop_columns(["y"])
    table.add_columns({"y": of_version("5", 5)})
    assert field_id() == first
    table.backfill("y", udf=of_version("5", 5), runner="inline")
    assert_right(table, "y", lambda x: None if x is None else 5 * x)


def test_checkpoints_are_found_through_several_compactions_whatever_else_was_computed(
    make_table: MakeTable, trace: Trace
) -> None:
    function = fails_once(trace, at=30)
    table = make_table(60, per_fragment=10)
    table.add_columns({"y": function})
    with pytest.raises(Exception, match="first time"):
        table.backfill("y", udf=function, runner="inline", checkpoint_size=5)
    table.lance.optimize.compact_files(target_rows_per_fragment=20)
    table.backfill("y", udf=function, where="id >= 55", runner="inline")
    table.lance.optimize.compact_files()
    trace.clear()
    leave_trace([30])
    table.backfill("y", udf=function, runner="inline")
    assert_exact(trace, [*range(30, 55), 30])
    assert_right(table, "y", tripled)


def change_within(table: Table, change: Callable[[], object], after: int) -> UDF:
    """A function in whose call number `after` others change the table."""
    calls = list[int]()

    def tripled_meanwhile(x: pa.Int64Array) -> pa.Int64Array:
        calls.append(len(x))
        if len(calls) == after:
            change()
        leave_trace(x)
        return pa.array([tripled(value) for value in x.to_pylist()], pa.int64())

    return udf(data_type=pa.int64(), version="1", name="meanwhile")(tripled_meanwhile)


@pytest.mark.parametrize("shard_size", [None, 4])
def test_a_compaction_within_a_run_leaves_no_row(make_table: MakeTable, trace: Trace, shard_size: int | None) -> None:
    table = make_table(300, per_fragment=10)
    function = change_within(table, lambda: table.lance.optimize.compact_files(), after=10)
    table.add_columns({"y": function})
    result = table.backfill("y", udf=function, shard_size=shard_size, runner="inline")
    assert (result.state, result.rows_left) == ("DONE", 0)
    assert_honest(result, table, rows_run=300)
    assert_exact(trace, range(300))
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace, udf=function)


@pytest.mark.parametrize("described", [True, False], ids=["described before", "not yet described"])
@pytest.mark.parametrize("removed", ["first", "second"])
def test_staged_files_that_others_remove_within_a_run_are_computed_again(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, removed: str, described: bool
) -> None:
    table = make_table(40, per_fragment=20)
    table.add_columns({"y": triple})
    data_files = StagedFiles.data_files

    def remove_when_described(files: StagedFiles, dataset: lance.LanceDataset, names: Sequence[str]) -> Any:
        monkeypatch.setattr(StagedFiles, "data_files", data_files)
        found = data_files(files, dataset, names) if described else None
        Path(table.uri, "data", names[0 if removed == "first" else 1]).unlink()
        return found or data_files(files, dataset, names)

    monkeypatch.setattr(StagedFiles, "data_files", remove_when_described)
    monkeypatch.setattr(StagedFiles, "describe_ahead", lambda files, dataset, name: None)
    result = table.backfill("y", runner="inline")
    assert (result.state, result.rows_run, result.rows_computed) == ("DONE", 60, 40)
    assert_right(table, "y", tripled)


class Refused(Exception):
    """As a client of a service raises it."""

    status_code = 401


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ModuleNotFoundError("No module named 'sklearn'", name="sklearn"), False),
        (Refused("wrong key"), False),
        (TypeError("cannot pickle '_thread.lock' object"), False),
        (InvalidInput("no such thing"), False),
        (StorageError("LanceError(IO): 403 Forbidden: InvalidAccessKeyId"), False),
        (StorageError("The folder cannot be written: Permission denied (os error 13)"), False),
        (StorageError("LanceError(IO): HTTP error: error sending request"), True),
        (CommitConflict("others kept changing the table"), True),
        (TimeoutError("no answer"), True),
    ],
)
def test_only_what_may_pass_is_to_be_run_again_as_it_is(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, error: Exception, passes: bool
) -> None:
    table = make_table(3)
    table.add_columns({"y": triple})

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setitem(PEERS, "backfill", replace(PEERS["backfill"], inline=fail))
    with pytest.raises(JobFailed) as failed:
        table.backfill("y", runner="inline")
    assert ("run it again to continue" in str(failed.value)) is passes
    assert "kept in checkpoints" in str(failed.value)


@pytest.mark.parametrize("whole", [False, True])
def test_a_missing_package_is_one_traceback_and_says_how_to_install_it(make_table: MakeTable, whole: bool) -> None:
    @udf(data_type=pa.int64(), version="1")
    def score(x: int) -> int:
        raise ModuleNotFoundError("No module named 'cv2'", name="cv2")

    @udf(data_type=pa.int64(), version="1", name="score")
    def score_all(x: pa.Int64Array) -> pa.Int64Array:
        raise ModuleNotFoundError("No module named 'cv2'", name="cv2")

    table = make_table(3)
    table.add_columns({"y": score_all if whole else score})
    with pytest.raises(JobFailed, match=rf"'opencv-python' is not installed for {sys.executable}") as failed:
        table.backfill("y", runner="inline")
    assert f"{sys.executable} -m pip install opencv-python." in str(failed.value)
    assert "correct the function" not in str(failed.value)
    assert "".join(traceback.format_exception(failed.value)).count("Traceback (most recent call last)") == 1


def test_a_run_that_meets_a_data_file_that_is_gone_says_what_to_do(make_table: MakeTable) -> None:
    table = make_table(40, per_fragment=40)
    table.add_columns({"y": of_version("1")})
    before = set(Path(table.uri, "data").iterdir())
    table.backfill("y", udf=of_version("1"), runner="inline")
    (file,) = set(Path(table.uri, "data").iterdir()) - before
    file.unlink()
    options: dict[str, Any] = {"where": "id < 5", "on_code_change": "recompute", "runner": "inline"}
    with pytest.raises(JobFailed, match=rf"{file.name}, which does not exist: cleanup_old_versions"):
        table.backfill("y", udf=of_version("2", 3), **options)


def test_an_open_table_without_rows_is_not_opened_again(make_table: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def __bool__(dataset: lance.LanceDataset) -> bool:
        raise AssertionError("a dataset without rows is false: ask whether it is None")

    monkeypatch.setattr(lance.LanceDataset, "__bool__", __bool__, raising=False)
    table = make_table(6)
    table.add_columns({"y": triple})
    view = table.query().select(["id", "y"]).add_columns({"z": triple}).create_materialized_view(name="v")
    for _ in range(2):
        assert table.backfill("y", runner="inline", indexes="update").state == "DONE"
        assert view.refresh(runner="inline", indexes="update").state == "DONE"
    for count in (
        FreshnessCount.of_column(table.location, "y", opened=table.lance),
        FreshnessCount.of_view(view.location, opened=view.lance),
    ):
        assert count.count().rows == 6
    assert str(table)
    assert str(view)
