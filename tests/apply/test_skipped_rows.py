"""Rows that a UDF fails on: what is stored, what is told, and when they are tried again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import UDF, Fail, Retry, Skip, udf
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.status import Job, read_job
from airflow_geneva.errors import CodeChanged, JobFailed
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact, assert_honest, assert_nothing_to_do_is_free, assert_right
from tests.support.tables import MakeTable

BAD = (3, 30, 77)


def picky(
    bad: Sequence[int] = BAD, version: str = "1", form: str = "scalar", on_error: Any = "skip", **settings: Any
) -> UDF:  # fmt: skip
    """A UDF that raises on some inputs; its trace has every row it was asked about."""

    def row(x: int) -> int:
        leave_trace([x])
        if x in bad:
            raise ValueError(f"cannot do {x}")
        return 3 * x

    def array(x: pa.Int64Array) -> pa.Int64Array:
        leave_trace(x)
        found = [value for value in x.to_pylist() if value in bad]
        if found:
            raise ValueError(f"cannot do {found[0]}")
        return pa.array([3 * value for value in x.to_pylist()], pa.int64())

    function: Callable[..., Any] = row if form == "scalar" else array
    return udf(data_type=pa.int64(), name="picky", version=version, on_error=on_error, **settings)(function)


def expected(bad: Sequence[int] = BAD) -> Callable[[int], int | None]:
    return lambda x: None if x in bad else 3 * x


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    made = make_table(100)
    made.add_columns({"y": picky()})
    return made


def run(table: Table, function: UDF, **arguments: Any) -> Any:
    return table.backfill("y", udf=function, runner="inline", **arguments)


def job_of(table: Table, result: Any) -> Job:
    job = read_job(JobFolder.of(table.location.checkpoints, result.job_id))
    assert job is not None
    return job


@pytest.mark.parametrize("form", ["scalar", "array"])
def test_skipped_rows_are_null_counted_and_listed(table: Table, trace: Trace, form: str) -> None:
    result = run(table, picky(form=form))
    assert (result.state, result.rows_computed, result.rows_failed, result.rows_left) == ("DONE", 97, 3, 0)
    assert_honest(result, table)
    assert_right(table, "y", expected())
    if form == "scalar":
        assert_exact(trace, range(100))
    records = table.get_errors(result.job_id, "y")
    assert {(r.row_address >> 32) * 25 + (r.row_address & 0xFFFFFFFF) for r in records} == set(BAD)
    ids = dict(zip(*table.lance.to_table(columns=["id"], with_row_id=True).to_pydict().values(), strict=True))
    for record in records:
        assert (record.column, record.udf, record.exception, record.attempt) == ("y", "picky", "builtins.ValueError", 1)
        assert record.row_id == ids[int(record.message.removeprefix("cannot do "))]
        assert "raise ValueError" in record.traceback
    assert table.get_failed_row_addresses(result.job_id) == sorted(r.row_address for r in records)
    assert table.get_failed_row_addresses(column_name="y") == sorted(r.row_address for r in records)


@pytest.mark.parametrize("form", ["scalar", "array"])
def test_failed_rows_are_tried_in_three_runs_and_then_only_listed(table: Table, trace: Trace, form: str) -> None:
    for attempt in (1, 2, 3):
        trace.clear()
        result = run(table, picky(form=form))
        assert result.rows_failed == 3
        if attempt > 1 or form == "scalar":
            assert set(trace.counts()) == set(BAD if attempt > 1 else range(100))
        assert {record.attempt for record in table.get_errors(result.job_id)} == {attempt}
    assert_right(table, "y", expected())
    plan = table.plan_backfill("y", udf=picky(form=form))
    assert "given up after 3 runs: 3 rows" in str(plan)
    assert "failed in 3 runs" in {tally.reason for tally in plan.reason_counts}
    (group,) = table.group_errors()
    assert "<b>3 rows of y: ValueError: cannot do ..." in group._repr_html_()
    assert repr(group.example).startswith("<row address ")
    other = udf(data_type=pa.int64(), name="other")(lambda x: x)
    notes = table.plan_backfill("y", udf=other, errors_only=True).notes
    assert any("until table.alter_columns({'y': other})" in note for note in notes)
    assert_nothing_to_do_is_free(table, "y", trace, udf=picky(form=form))
    assert len(table.get_failed_row_addresses()) == 3
    trace.clear()
    result = run(table, picky(form=form), errors_only=True)
    assert (set(trace.counts()), result.rows_failed) == (set(BAD), 3)
    assert_nothing_to_do_is_free(table, "y", trace, udf=picky(form=form))


def test_a_run_in_which_everything_fails_again_writes_no_version(table: Table, trace: Trace) -> None:
    run(table, picky())
    version, files = table.version, set(Path(table.uri, "data").iterdir())
    for attempt in (2, 3):
        result = run(table, picky())
        assert (result.rows_failed, result.commits, table.version) == (3, (), version)
        assert {record.attempt for record in table.get_errors(result.job_id)} == {attempt}
        job = job_of(table, result)
        assert (job.rows_computed, job.rows_committed, job.rows_failed, job.rows_left) == (0, 0, 3, 0)
        assert {(shard.rows_ready, shard.rows_committed) for shard in job.shards} == {(0, 0)}
        assert sum(shard.rows_failed for shard in job.shards) == 3
        assert "3 of 100 rows due: 0 checkpointed, 0 ready to commit, 0 committed, 3 failed, 0 left" in str(job)
    assert_nothing_to_do_is_free(table, "y", trace, udf=picky())
    assert len(set(Path(table.uri, "data").iterdir()) - files) <= 6
    assert_right(table, "y", expected())


def test_a_row_that_succeeds_in_a_later_run_is_failed_no_more(table: Table, trace: Trace) -> None:
    run(table, picky())
    trace.clear()
    result = run(table, picky(bad=(3,)))
    assert_exact(trace, BAD)
    assert (result.rows_computed, result.rows_failed, result.rows_skipped) == (2, 1, 97)
    assert_right(table, "y", expected((3,)))
    assert table.get_failed_row_addresses(column_name="y") == [3]


def test_new_code_runs_just_the_failed_rows_when_asked_for_errors_only(table: Table, trace: Trace) -> None:
    for _ in range(3):
        run(table, picky())
    trace.clear()
    result = run(table, picky(bad=(), version="2"), errors_only=True)
    assert_exact(trace, BAD)
    assert (result.rows_computed, result.rows_failed) == (3, 0)
    assert_right(table, "y", expected(()))
    assert table.get_failed_row_addresses() == []
    assert table.get_errors() == []
    assert len(table.get_errors(history=True)) == 9


def test_the_next_run_goes_on_with_the_code_that_repaired_the_failed_rows(table: Table, trace: Trace) -> None:
    run(table, picky())
    repaired = picky(bad=(), version="2")
    with pytest.raises(CodeChanged):
        run(table, repaired)
    run(table, repaired, where="x = 3", errors_only=True)
    with pytest.raises(CodeChanged):
        run(table, repaired)
    run(table, repaired, errors_only=True)
    table.add([{"id": 100, "x": 100}])
    trace.clear()
    assert run(table, repaired).state == "DONE"
    assert_exact(trace, [100])
    assert "values of UDF version 1: 97 rows" in str(table.plan_backfill("y", udf=repaired))
    with pytest.raises(CodeChanged, match="changed behind column") as stopped:
        run(table, picky(bad=(), version="3"))
    assert "alter_columns" not in str(stopped.value)
    table.alter_columns({"y": picky()})
    own = (
        r"holds 4 rows of version 2\. Version 1 is the column's own code now\. .* table\.alter_columns\(\{'y': udf\}\)"
    )
    with pytest.raises(CodeChanged, match=own):
        table.backfill("y", runner="inline")
    # Without a failed row, nothing is repaired, and nothing is chosen.
    run(table, picky(bad=(), version="3"), errors_only=True)
    with pytest.raises(CodeChanged):
        run(table, picky(bad=(), version="3"))
    trace.clear()
    run(table, repaired, on_code_change="recompute")
    assert len(trace) == 97


def test_what_fails_now_is_listed_once_by_its_newest_record(table: Table, trace: Trace) -> None:
    for _ in range(2):
        run(table, picky())
    assert [(r.message, r.attempt) for r in table.get_errors()] == [(f"cannot do {x}", 2) for x in BAD[::-1]]
    assert len(table.get_errors(history=True)) == 6
    (group,) = table.group_errors()
    assert (group.column, group.exception, group.rows) == ("y", "builtins.ValueError", 3)
    assert group.example.message in {f"cannot do {x}" for x in BAD}
    assert str(group).startswith("3 rows of y: ValueError: cannot do ...\n  for example row address ")
    table.lance.delete("x = 3")
    table.lance.update({"x": "x + 1"}, where="x = 30")
    table.lance.optimize.compact_files()
    assert [r.message for r in table.get_errors(column_name="y")] == ["cannot do 77"]
    run(table, picky())
    assert [(r.message, r.attempt) for r in table.get_errors()] == [("cannot do 77", 3)]


@pytest.mark.slow
def test_what_ended_the_last_job_is_listed_until_a_later_one_ends_well(table: Table, trace: Trace) -> None:
    with pytest.raises(JobFailed):
        run(table, picky(on_error=[Skip(ValueError, max_count=1)]), batch_size=10)
    assert [r.message for r in table.get_errors()] == ["cannot do 30", "cannot do 3"]
    with pytest.raises(JobFailed):
        run(table, picky(bad=(77,), on_error="fail"))
    assert [r.message.splitlines()[0] for r in table.get_errors()] == ["cannot do 77"]
    run(table, picky(bad=()))
    assert table.get_errors() == []


def test_no_row_of_a_dropped_column_fails_now(table: Table, trace: Trace) -> None:
    with pytest.raises(JobFailed):
        run(table, picky(on_error="fail"))
    assert table.get_errors()
    table.drop_columns(["y"])
    assert table.get_errors() == []
    assert table.get_errors(history=True)


@udf(data_type=pa.struct([("low", pa.int64()), ("high", pa.int64())]), version="1", on_error="skip")
def around(x: int) -> dict[str, int]:
    if x in BAD:
        raise ValueError(f"cannot do {x}")
    return {"low": x - 1, "high": x + 1}


def test_of_columns_that_one_call_fills_the_failed_rows_stay_known_without_the_first(make_table: MakeTable) -> None:
    table = make_table(100)
    table.add_columns({("low", "high"): around})
    table.backfill("low", runner="inline")
    table.drop_columns(["low"])
    assert {record.column for record in table.get_errors()} == {"high"}
    assert sorted(record.row_address for record in table.get_errors()) == table.get_failed_row_addresses()


@pytest.mark.slow
def test_a_failed_row_whose_input_changes_starts_anew(table: Table, trace: Trace) -> None:
    for _ in range(3):
        run(table, picky())
    table.lance.update({"x": "x + 1"}, where="id = 3")
    trace.clear()
    result = run(table, picky())
    assert_exact(trace, [4])
    assert result.rows_failed == 0
    assert_right(table, "y", expected())


def test_runs_are_counted_through_compaction_and_unrelated_updates(table: Table, trace: Trace) -> None:
    table.lance.add_columns({"other": "id"})
    run(table, picky())
    table.lance.optimize.compact_files()
    run(table, picky())
    table.lance.update({"other": "0"}, where="id < 50")
    trace.clear()
    result = run(table, picky())
    assert_exact(trace, BAD)
    assert {record.attempt for record in table.get_errors(result.job_id)} == {3}
    table.lance.optimize.compact_files()
    table.lance.update({"other": "1"}, where="id = 30")
    assert_nothing_to_do_is_free(table, "y", trace, udf=picky())
    addresses = table.lance.to_table(columns=["x"], filter="x IN (3, 30, 77)", with_row_address=True)["_rowaddr"]
    assert table.get_failed_row_addresses() == sorted(addresses.to_pylist())


@pytest.mark.slow
def test_a_computed_row_whose_new_input_fails_loses_its_old_value(table: Table, trace: Trace) -> None:
    run(table, picky(bad=()))
    table.lance.update({"x": "30"}, where="id = 8")
    trace.clear()
    result = run(table, picky(bad=(30,)))
    assert_exact(trace, [30])
    assert result.rows_failed == 1
    assert dict(zip(*table.lance.to_table(columns=["id", "y"]).to_pydict().values(), strict=True))[8] is None


def test_failed_rows_of_a_filter_are_tried_again_under_it(table: Table, trace: Trace) -> None:
    run(table, picky(), where="x < 50")
    trace.clear()
    result = run(table, picky(), where="x < 50")
    assert_exact(trace, (3, 30))
    assert (result.rows_failed, result.rows_skipped) == (2, 98)
    trace.clear()
    run(table, picky())
    assert_exact(trace, [3, 30, *range(50, 100)])
    trace.clear()
    run(table, picky())
    assert_exact(trace, [77])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"max_count": 1}, {"max_fraction": 0.01}])
@pytest.mark.parametrize("form", ["scalar", "array"])
def test_more_skipped_rows_than_allowed_end_the_job_and_keep_what_was_computed(
    table: Table, trace: Trace, limit: dict[str, Any], form: str
) -> None:
    version = table.version
    strict = picky(form=form, on_error=[Skip(ValueError, **limit)])
    with pytest.raises(JobFailed, match=r"lets a job skip at most .* and 2 failed") as caught:
        run(table, strict, batch_size=10)
    assert caught.value.result is not None
    assert (caught.value.result.state, caught.value.result.rows_failed, caught.value.result.rows_left) == (
        "FAILED", 2, 98,
    )  # fmt: skip
    assert table.version == version
    assert len(table.get_errors(caught.value.result.job_id)) == 2
    trace.clear()
    result = run(table, picky(form=form, bad=()))
    assert (result.rows_computed + result.rows_reused, result.rows_failed) == (100, 0)
    assert set(trace.counts()) >= {3, 30, *range(50, 100)}
    assert not set(trace.counts()) & set(range(3))


@pytest.mark.parametrize(("limit", "allows"), [(2, "2"), (0.02, "0.02 of them")])
def test_more_failed_rows_than_max_failed_fail_the_job_and_values_are_visible(
    table: Table, trace: Trace, limit: float, allows: str
) -> None:
    told = rf"3 of 100 due rows failed, and max_failed allows {allows}\. What was computed is visible"
    with pytest.raises(JobFailed, match=told) as caught:
        run(table, picky(), max_failed=limit)
    result = caught.value.result
    assert result is not None
    assert (result.state, result.rows_computed, result.rows_failed, result.rows_left) == ("FAILED", 97, 3, 0)
    assert_right(table, "y", expected())
    job = job_of(table, result)
    assert (job.state, job.rows_committed, job.rows_failed) == ("FAILED", 97, 3)
    assert "errors_only=True" in str(job.error)
    trace.clear()
    assert run(table, picky(), max_failed=3).state == run(table, picky(), max_failed=1.0).state == "DONE"
    assert_exact(trace, [*BAD, *BAD])


def test_a_limit_that_holds_lets_the_job_pass(table: Table, trace: Trace) -> None:
    result = run(table, picky(on_error=[Skip(ValueError, max_count=3, max_fraction=0.03)]))
    assert (result.state, result.rows_failed) == ("DONE", 3)


@pytest.mark.parametrize("form", ["scalar", "array"])
def test_fail_names_the_row_and_keeps_what_came_before(table: Table, trace: Trace, form: str) -> None:
    with pytest.raises(JobFailed) as caught:
        run(table, picky(bad=(30,), form=form, on_error="fail"), batch_size=50)
    message = str(caught.value)
    assert f"row 5 of fragment 1 (row address {1 << 32 | 5})" in message
    assert "cannot do 30" in message
    assert "x: int64" in message
    assert "raise ValueError" in message
    assert caught.value.result is not None
    assert "1 failed, 99 left" in str(caught.value.result)
    job = job_of(table, caught.value.result)
    assert (job.rows_checkpointed, job.rows_failed, job.rows_left, job.shards[0].rows_failed) == (30, 1, 99, 1)
    (record,) = table.get_errors(caught.value.result.job_id)
    assert record.row_address == 1 << 32 | 5
    trace.clear()
    result = run(table, picky(bad=(), form=form, on_error="fail"))
    assert_exact(trace, range(30, 100))
    assert (result.rows_computed, result.rows_reused) == (70, 30)
    assert_right(table, "y", expected(()))


def test_rules_are_looked_at_in_order(table: Table, trace: Trace) -> None:
    rules = [Retry(ValueError, attempts=2, backoff=0.0), Skip(ValueError), Fail()]
    result = run(table, picky(on_error=rules))
    assert (result.rows_computed, result.rows_failed) == (97, 3)
    assert all(trace.counts()[x] == (2 if x in BAD else 1) for x in range(100))
    assert {record.calls for record in table.get_errors()} == {2}
    with pytest.raises(JobFailed, match="cannot do 3"):
        run(table, picky(version="2", on_error=[Skip(KeyError), Fail()]), on_code_change="recompute")


def test_a_row_that_takes_too_long_fails(make_table: MakeTable, trace: Trace) -> None:
    @udf(data_type=pa.int64(), version="1", on_error="skip", timeout=1.0)
    def stuck(x: int) -> int:
        leave_trace([x])
        while x == 7:
            pass
        return x

    table = make_table(30)
    table.add_columns({"y": stuck})
    result = table.backfill("y", udf=stuck, runner="inline")
    assert (result.rows_computed, result.rows_failed) == (29, 1)
    (record,) = table.get_errors()
    assert (record.exception, record.row_address) == ("builtins.TimeoutError", 7)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["scalar", "array"])
def test_a_udf_that_kills_its_process_on_3_rows_of_100_000_fails_on_these_rows_only(
    make_table: MakeTable, form: str
) -> None:
    bad = (5, 49_999, 77_777)

    def crash(found: bool) -> None:
        if found:
            os.kill(os.getpid(), signal.SIGSEGV)

    def row(x: int) -> int:
        crash(x in bad)
        return 3 * x

    def array(x: pa.Int64Array) -> pa.Int64Array:
        crash(any(value in bad for value in x.to_pylist()))
        return pa.array([3 * value for value in x.to_pylist()], pa.int64())

    deadly = udf(data_type=pa.int64(), version="1", on_error="skip")(row if form == "scalar" else array)
    table = make_table(100_000, per_fragment=10_000)
    table.add_columns({"y": deadly})
    result = table.backfill("y", udf=deadly, runner="inline")
    assert (result.rows_computed, result.rows_failed) == (99_997, 3)
    assert_right(table, "y", expected(bad))
    assert len(table.get_errors()) == 3
    assert {record.exception.rpartition(".")[2] for record in table.get_errors()} == {"UdfCrashed"}
