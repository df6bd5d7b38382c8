"""A job stops cleanly at its cap of rows, seconds or cost; what is done is visible, and the next run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, report, udf
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.results import DONE, PARTIAL
from airflow_geneva.engine.run import caps
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.udf import Retry
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace, leave_trace, triple, triple_row, tripled
from tests.support.invariants import assert_exact, assert_honest, assert_right

MakeTable = Callable[..., Table]


def defined(make_table: MakeTable, function: Any = triple_row, rows: int = 40, **how: Any) -> Table:
    table = make_table(rows, **how)
    table.add_columns({"y": function})
    return table


def values(table: Table) -> list[int]:
    return [value for value in table.to_arrow().column("y").to_pylist() if value is not None]


@pytest.mark.parametrize(("per_fragment", "shard_size"), [(40, None), (5, 3), (7, 1)])
def test_exactly_the_rows_of_the_cap_run_and_are_visible_and_the_next_run_goes_on(
    make_table: MakeTable, trace: Trace, per_fragment: int, shard_size: int | None
) -> None:
    table = defined(make_table, per_fragment=per_fragment)
    capped: Any = {"runner": "inline", "max_rows": 12, "shard_size": shard_size}
    for visible in (12, 24, 36):
        result = table.backfill("y", udf=triple_row, **capped)
        assert (result.state, result.rows_computed, result.rows_left) == (PARTIAL, 12, 40 - visible)
        assert any("stopped at its cap of 12 rows" in note for note in result.notes)
        assert len(values(table)) == len(trace) == visible
    result = table.backfill("y", udf=triple_row, **capped)
    assert (result.state, result.rows_computed, result.rows_left) == (DONE, 4, 0)
    assert_exact(trace, table.to_arrow().column("x").to_pylist())
    assert_right(table, "y", triple_row)


def test_the_plan_says_what_the_cap_leaves(make_table: MakeTable) -> None:
    plan = defined(make_table).plan_backfill("y", udf=triple_row, max_rows=12)
    assert (plan.rows_pending, plan.rows_to_run, plan.rows_skipped) == (40, 12, 0)
    assert "max_rows=12: 28 rows left for the next run" in str(plan)


def test_under_a_filter_the_rows_that_it_selects_count(make_table: MakeTable, trace: Trace) -> None:
    table = defined(make_table)
    for _ in range(2):
        result = table.backfill("y", udf=triple_row, where="x % 2 = 0", max_rows=8, runner="inline")
    assert (result.rows_computed, result.rows_left) == (8, 4)
    assert trace.rows() == list(range(0, 32, 2))


@udf(data_type=pa.list_(pa.int64()))
def listed(x: int) -> list[int]:
    leave_trace([x])
    return [x]


@pytest.mark.parametrize("explode", [False, True])
def test_a_view_keeps_what_is_computed_and_is_swapped_when_all_of_it_is(
    make_table: MakeTable, trace: Trace, explode: bool
) -> None:
    table = make_table(40, per_fragment=25)
    database = connect(table.location.database_uri)
    added = {"y": (listed, ["x"])} if explode else {"y": (triple_row, ["x"])}
    query = table.query().add_columns(added)
    view = (query.explode("y") if explode else query).create_materialized_view(database, "v")
    for left in (40, 40, 40):
        result = view.refresh(runner="inline", max_rows=12)
        assert (result.state, result.rows_left, view.count_rows()) == (PARTIAL, left, 0)
        assert any("stopped at its cap of 12 rows" in note for note in result.notes)
    result = view.refresh(runner="inline", max_rows=12)
    assert (result.state, view.count_rows(), len(trace)) == (DONE, 40, 40)


@udf(data_type=pa.int64(), cost=2.0)
def slow(x: int) -> int:
    leave_trace([x])
    time.sleep(0.02)
    return x


@pytest.mark.parametrize("how", [{"max_seconds": 0.1}, {"max_cost": 10.0}, {"max_cost": 1e-9, "price": 0.0001}])
def test_a_job_stops_between_two_calls_and_shows_what_it_has(
    make_table: MakeTable, trace: Trace, how: dict[str, Any]
) -> None:
    free = udf(data_type=pa.int64(), version="1", name="slow")(slow.func)
    function = free if "price" in how or "max_seconds" in how else slow
    table = defined(make_table, function, rows=60, per_fragment=20)
    price = {"price_per_slot_hour": how["price"]} if "price" in how else {}
    capped = {name: cap for name, cap in how.items() if name != "price"}
    result = table.backfill("y", udf=function, shard_size=1, runner="inline", **capped, **price)
    assert result.state == PARTIAL
    assert any("stopped at its cap of" in note for note in result.notes)
    assert 0 < result.rows_computed < 60
    assert result.rows_computed + result.rows_left == 60
    assert len(values(table)) == len(trace) == result.rows_computed
    assert_honest(result, table)
    if how.get("max_cost") == 10.0:
        assert len(trace) == 5
    assert table.backfill("y", udf=function, runner="inline").state == DONE
    assert_exact(trace, range(60))


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_that_report_their_cost_are_no_more_than_the_cap_pays(
    make_table: MakeTable, trace: Trace, threads: int
) -> None:
    def priced(x: int) -> int:
        leave_trace([x])
        report(cost=1.0)
        return x

    function = udf(data_type=pa.int64(), version="1", cost=0.001)(priced)
    table = defined(make_table, function, rows=3_000, per_fragment=20)
    capped: dict[str, Any] = {"max_cost": 50.0, "intra_applier_concurrency": threads}
    result = table.backfill("y", udf=function, runner="inline", **capped)
    assert (result.state, result.rows_computed, result.usage.cost) == (PARTIAL, len(trace), len(trace))
    assert 50 <= len(trace) < 50 + threads, "one call of each thread is in flight"


def test_shards_that_run_at_the_same_time_keep_a_cap_together(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caps, "LOOK_SECONDS", 0.05)

    def priced(x: int) -> int:
        leave_trace([x])
        time.sleep(0.005)
        report(cost=1.0)
        return x

    function = udf(data_type=pa.int64(), version="1", cost=0.001)(priced)
    table = defined(make_table, function, rows=2_000, per_fragment=1_000)
    plan = table.plan_backfill("y", udf=function, shard_size=1, max_cost=200.0)
    job = PlannedJob(table.location, record_plan(plan, table.location))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda shard: job.apply(shard, Udfs({"y": function})), plan.shards))
    # In 0.1 s until each has written and read what both spend, each makes 20 calls; alone, each would make all 200.
    assert 200 <= len(trace) < 400


class Killed(BaseException):
    pass


def test_what_earlier_tries_spent_counts(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(caps, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + len(trace)))

    @udf(data_type=pa.int64(), version="1")
    def of_a_second(x: int) -> int:
        leave_trace([x])
        return x

    table = defined(make_table, of_a_second, rows=200, per_fragment=200)
    plan = table.plan_backfill("y", udf=of_a_second, max_seconds=100.0, batch_size=5)
    job = PlannedJob(table.location, record_plan(plan, table.location))

    def kill(_rows: int) -> None:
        if len(trace) >= 25:
            raise Killed

    with pytest.raises(Killed):
        job.apply(plan.shards[0], Udfs({"y": of_a_second}), kill)
    job.apply(plan.shards[0], Udfs({"y": of_a_second}))
    (applied,) = job.applied
    assert "stopped at its cap of 100 seconds" in applied["stopped"]
    assert len(trace) <= 115, "a second try that forgot the first would compute 100 more"


def test_status_of_shards_that_are_computed_is_read_once(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, reads, read = defined(make_table, per_fragment=1), list[int](), JobFolder.read_shard
    table.add_columns({"z": triple_row})

    def counted(folder: JobFolder, plan: str, shard: int, by: str = "status") -> dict[str, Any]:
        reads.append(shard)
        return read(folder, plan, shard, by)

    monkeypatch.setattr(JobFolder, "read_shard", counted)
    table.backfill("y", udf=triple_row, runner="inline", shard_size=1)
    without = len(reads)
    table.backfill("z", udf=triple_row, runner="inline", shard_size=1, max_seconds=1_000.0)
    assert len(reads) - without < without + 40 * 5


def test_a_view_stops_at_seconds_and_goes_on(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(30, per_fragment=20)
    view = table.query().add_columns({"y": (slow, ["x"])}).create_materialized_view(
        connect(table.location.database_uri), "v"
    )  # fmt: skip
    result = view.refresh(runner="inline", max_seconds=0.1)
    assert (result.state, result.rows_left, view.count_rows()) == (PARTIAL, 30, 0)
    assert any("stopped at its cap of 0.1 seconds" in note for note in result.notes)
    assert isinstance(view, View)
    assert 0 < len(trace) < 30
    assert view.refresh(runner="inline").state == DONE
    assert_exact(trace, range(30))


def test_a_cost_without_a_price_and_a_wrong_cap_are_refused(make_table: MakeTable) -> None:
    table = defined(make_table, triple)
    with pytest.raises(InvalidInput, match="max_cost needs a price"):
        table.backfill("y", udf=triple, max_cost=1.0)
    table.alter_columns({"y": slow})
    with pytest.raises(InvalidInput, match=r"max_cost=1.9 does not pay for one row of docs.y, which costs 2 "):
        table.plan_backfill("y", max_cost=1.9)
    with pytest.raises(InvalidInput, match="max_rows=0"):
        table.backfill("y", udf=triple, max_rows=0)


def _tried(x: int) -> int:
    leave_trace([x])
    if Trace(Path(os.environ[TRACE])).counts()[x] % 5 and x > 2:
        raise ConnectionError(x)
    return x


def _tried_batch(x: pa.Array) -> pa.Array:
    leave_trace(x)
    raise ConnectionError(len(x))


async def _tried_call(x: int) -> int:
    return _tried(x)


@pytest.mark.slow
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize(("function", "threads"), [(_tried, 1), (_tried, 3), (_tried_batch, 1), (_tried_call, 1)])
def test_calls_that_are_made_again_count_for_the_cap(
    make_table: MakeTable, trace: Trace, function: Any, threads: int, reports: bool
) -> None:
    if reports and function is not _tried:
        pytest.skip("a report is counted in the same way")

    def reporting(x: int) -> int:
        report(cost=1.0)
        return _tried(x)

    policy = [Retry(ConnectionError, attempts=5, backoff=0.0)]
    how: dict[str, Any] = {"cost": 0.01 if reports else 1.0, "max_in_flight": 2 if function is _tried_call else None}
    tried = udf(data_type=pa.int64(), version="1", name="tried", on_error=policy, **how)(
        reporting if reports else function
    )
    table = defined(make_table, tried, rows=40, per_fragment=10)
    result = table.backfill("y", udf=tried, runner="inline", max_cost=20.0, intra_applier_concurrency=threads)
    assert (result.state, result.rows_run) == (PARTIAL, len(trace))
    assert len(trace) < 20 + max(threads, how["max_in_flight"] or 1)
    assert len(values(table)) == result.rows_computed
    if function is _tried and threads == 1:
        assert values(table)[:6] == [0, 1, 2, 3, 4, 5]
    assert_honest(result, table)


def test_what_a_step_has_when_no_call_may_be_made_again_is_kept(make_table: MakeTable, trace: Trace) -> None:
    """Rows that cost more than those before may stop a job in the middle of a step."""

    def costly(x: int) -> int:
        leave_trace([x])
        report(cost=0.001 if x < 30 else 50.0)
        if x == 35 and Trace(Path(os.environ[TRACE])).counts()[x] < 3:
            raise ConnectionError(x)
        return x

    policy = [Retry(ConnectionError, attempts=5, backoff=0.0)]
    function = udf(data_type=pa.int64(), version="1", cost=0.001, on_error=policy)(costly)
    table = defined(make_table, function, rows=40, per_fragment=40)
    result = table.backfill("y", udf=function, runner="inline", max_cost=100.0, batch_size=40)
    assert result.state == PARTIAL
    assert values(table) == list(range(35))
    assert trace.counts()[35] == 1


@pytest.mark.parametrize("form", ["row", "batch", "async"])
def test_a_cap_that_pays_for_all_rows_leaves_none(make_table: MakeTable, trace: Trace, form: str) -> None:
    async def later(x: int) -> int:
        return triple_row.func(x)  # type: ignore[no-any-return]

    function = {"row": triple_row.func, "batch": triple.func, "async": later}[form]
    priced = udf(data_type=pa.int64(), version="1", name="priced", cost=0.1)(function)
    table = defined(make_table, priced, rows=30, per_fragment=10)
    result = table.backfill("y", udf=priced, runner="inline", max_cost=3.0)
    assert (result.state, result.rows_run, result.rows_computed, result.notes) == (DONE, 30, 30, ())
    assert_right(table, "y", tripled)
    assert_exact(trace, range(30))
