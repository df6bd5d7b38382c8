"""What a plan says it will cost: by earlier jobs, by a sample, in money; and that only a sample calls the UDF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import report, udf
from airflow_geneva.engine.job.estimate import Call, Estimate, Interval, Size
from airflow_geneva.engine.job.speed import PastJob, UdfSpeed
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark.runner import SparkRunner
from airflow_geneva.table import Table
from tests.support.counting import Trace, triple, triple_row

MakeTable = Callable[..., Table]
HOUR = UdfSpeed(1_000, 3_600, 3.6, 1, 8_000, 1, 3_600)


def grown(make_table: MakeTable, function: Any = triple) -> Table:
    table = make_table(20)
    table.add_columns({"y": function})
    table.backfill("y", udf=function, runner="inline")
    table.add([{"x": row} for row in range(50)])
    return table


def test_a_plan_is_estimated_by_earlier_jobs_and_calls_nothing(make_table: MakeTable, trace: Trace) -> None:
    table = grown(make_table)
    trace.clear()
    plan = table.plan_backfill("y", udf=triple)
    found = plan.estimate()
    assert found.rows == 50
    assert found.seconds is not None
    assert found.slot_seconds is not None
    assert 0 < found.slot_seconds.low < found.slot_seconds.high
    assert found.cost is None
    assert f"Estimate: {found}" in str(plan)
    assert "by an earlier job of this version" in str(found)
    assert not len(trace)


def test_without_a_history_the_time_is_unknown_and_the_udfs_own_cost_is_not(make_table: MakeTable) -> None:
    table = make_table(20)
    paid = udf(data_type=pa.int64(), version="1", name="paid", cost=0.5)(lambda x: x)
    table.add_columns({"y": paid, "z": triple})
    found = table.plan_backfill("y", udf=paid).estimate()
    assert (found.seconds, found.slot_seconds, found.cost) == (None, None, (10.0, 10.0))
    assert "time unknown" in repr(found)
    assert "sample=20" in repr(found)
    plan = table.plan_backfill("z", udf=triple)
    assert plan.estimate().cost is None
    assert "Estimate" not in str(plan)


def test_a_sample_shows_inputs_values_and_errors_and_keeps_nothing(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(20, per_fragment=5)
    table.add_columns({"y": triple_row})
    before = table.version
    plan = table.plan_backfill("y", udf=triple_row, price_per_slot_hour=36.0)
    found = plan.estimate(sample=7)
    assert len(trace) == 7
    assert found.sample is not None
    assert found.sample.column_names == ["x", "y", "error"]
    assert all(row["y"] == 3 * row["x"] + 1 and row["error"] is None for row in found.sample.to_pylist())
    assert found.slot_seconds is not None
    assert found.cost == found.slot_seconds.times(0.01)
    assert "x=0, y=1" in str(found)
    assert "x=0" not in repr(found)
    assert table.version == before
    assert table.plan_backfill("y", udf=triple_row).rows_to_run == 20


def picky(x: int) -> int:
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_rows_of_a_sample_that_fail_are_shown_with_their_error(make_table: MakeTable, policy: str) -> None:
    table = make_table(10)
    function = udf(data_type=pa.int64(), version="1", name="picky", on_error=policy)(picky)
    table.add_columns({"y": function})
    found = table.plan_backfill("y", udf=function).estimate(sample=6).sample
    assert found is not None
    assert found.column("y").to_pylist() == [0, None, 2, None, 4, None]
    errors = found.column("error").to_pylist()
    assert [error is not None for error in errors] == [False, True] * 3
    assert errors[3].endswith("3 is odd")
    assert "builtins" not in errors[3]


def test_a_sample_under_a_filter_has_rows_that_it_selects(make_table: MakeTable) -> None:
    table = make_table(3_000)
    table.add_columns({"y": triple})
    found = table.plan_backfill("y", udf=triple, where="x > 2990").estimate(sample=4).sample
    assert found is not None
    assert found.column("x").to_pylist() == [2991, 2992, 2993, 2994]


def test_a_view_is_sampled_with_its_own_columns(make_table: MakeTable) -> None:
    table = make_table(10)
    from airflow_geneva import connect

    database = connect(table.location.database_uri)
    view = table.query().where("x > 3").select(["x"]).add_columns({"y": (triple, ["x"])})
    made = view.create_materialized_view(database, "v")
    found = made.plan_refresh().estimate(sample=3).sample
    assert found is not None
    assert found.select(["x", "y"]).to_pylist() == [{"x": x, "y": 3 * x + 1} for x in (4, 5, 6)]
    made.refresh(runner="inline")
    assert made.plan_refresh().estimate().seconds == (0, 0)


def test_money_is_slot_hours_and_the_udfs_own_cost() -> None:
    size = Size(1_000, 1, "spark", slots=8, price_per_slot_hour=2.0, cost_per_row=0.001)
    found = Estimate.by_history(size, [PastJob(HOUR, 3_700, "spark", slots=1)])
    assert found.slot_seconds is not None
    assert found.cost is not None
    assert found.seconds is not None
    assert found.slot_seconds.covers(3_600)
    assert found.cost.covers(2.0 + 1.0)
    assert found.seconds.covers(3_600 / 8)
    assert found.to_json()["cost"] == pytest.approx(list(found.cost), abs=1e-4)


def test_money_is_what_the_calls_of_earlier_jobs_cost(make_table: MakeTable) -> None:
    def reporting(x: int) -> int:
        report(cost=0.25)
        return x

    reported = udf(data_type=pa.int64(), version="1", cost=9.0)(reporting)
    table = grown(make_table, reported)
    assert table.plan_backfill("y", udf=reported).estimate().cost == (12.5, 12.5)
    once = udf(data_type=pa.int64(), version="1", name="once", cost=1.0, deterministic=True, dedup=True)(lambda x: x)
    table.add_columns({"z": (once, ["x"])})
    found = table.backfill("z", udf=once, runner="inline")
    assert (found.rows_computed, found.rows_deduplicated) == (70, 20)
    table.add([{"x": row} for row in range(50)])
    assert table.plan_backfill("z", udf=once).estimate().cost == pytest.approx((50 * 50 / 70, 50 * 50 / 70))


def test_what_an_earlier_job_on_spark_took_beside_its_rows_tells_how_long_spark_takes_to_start() -> None:
    earlier = PastJob(UdfSpeed(1_000, 40.0, 0.1, 10, 0, 1, 40.0), 140.0, "spark", shards=3, slots=2)
    found = Estimate.by_history(Size(1_000, 1, "spark", slots=8, shards=2), [earlier]).seconds
    assert found is not None
    assert found.covers(40 / 8 + 2 * 40)
    assert found.high <= 3 * found.low
    unknown = Estimate.by_history(Size(1_000, 1, "spark", slots=8, shards=2), [replace(earlier, slots=0)]).seconds
    assert unknown is not None
    assert unknown.covers(40 / 8 + 2 * 10)


def test_a_repeat_in_a_session_that_is_up_does_not_count_the_start_of_spark() -> None:
    """The first job started Spark, the second one did not: the third is known well, in this session or a new one."""
    speed = UdfSpeed(1_000, 4.0, 0.1, 10, 0, 1, 4.0)
    first = PastJob(speed, 23.0, "spark", start_seconds=19.0, slots=2)
    second = PastJob(speed, 4.5, "spark", start_seconds=0.001, slots=2)
    for jobs in ([first], [second, first]):
        size = Size(1_000, 1, "spark", slots=2)
        for now, seconds in ((size, 23.0), (replace(size, session_is_up=True), 4.2)):
            found = Estimate.by_history(now, jobs)
            assert found.seconds is not None
            assert found.seconds.covers(seconds)
            assert found.seconds.high <= 3.5 * found.seconds.low
    assert Estimate.by_history(replace(size, session_is_up=True), [first]).start_seconds == 0.0
    assert Estimate.by_history(size, [second, first]).start_seconds == 19.0


def test_a_plan_says_where_it_would_be_computed_and_why_and_warns_of_spark_for_a_few_rows(
    make_table: MakeTable,
) -> None:
    table = make_table(300)
    table.add_columns({"y": triple_row})
    why = "no earlier job tells how long UDF version"
    assert f'\n  runner="auto" computes it in this process: {why}' in str(table.plan_backfill("y"))
    assert "Spark is started" not in str(table.plan_backfill("y"))
    view = table.query().select(["x"]).create_materialized_view(name="plain")
    assert "in this process: no earlier job tells how long it takes" in str(view.plan_refresh())
    heavy = udf(data_type=pa.int64(), version="1", memory="2g", name="heavy")(lambda x: x)
    table.add_columns({"z": (heavy, ["x"])})
    said = str(table.plan_backfill("z"))
    assert (
        '\n  runner="auto" computes it on Spark: only Spark provides what was asked for: 2.1 GB for a call (memory)'
        in said
    )
    assert "\n  Note: Spark is started for 300 rows, which takes about 6 to 20 s." in said


def test_spark_that_is_asked_for_a_few_rows_is_warned_of_before_it_starts(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def started(_: int) -> None:
        raise AssertionError("\n".join(caplog.messages))

    monkeypatch.setattr("airflow_geneva.spark.local.open_session", started)
    monkeypatch.setattr(SparkRunner, "is_up", lambda self: False)
    table = make_table(300)
    table.add_columns({"y": triple_row})
    with pytest.raises(AssertionError, match=r'Spark is started for 300 rows.* runner="inline" computes them'):
        table.backfill("y", runner="spark")


def test_several_jobs_tell_how_far_they_differ_and_one_odd_one_does_not_count() -> None:
    size = Size(1_000, 1)
    jobs = [PastJob(UdfSpeed(1_000, seconds, 0.0, 1, 0, 1, seconds), seconds) for seconds in (10, 11, 12, 500)]
    found = Estimate.by_history(size, jobs).slot_seconds
    assert found is not None
    assert found.covers(10)
    assert found.covers(12)
    assert not found.covers(500)


def test_a_sample_does_not_take_the_price_of_a_call_for_that_of_its_rows() -> None:
    size = Size(1_000_000, 1)
    found = Estimate.by_sample(size, [Call(1, 0.5), Call(4, 0.00008), Call(4, 0.00008)], pa.table({})).slot_seconds
    assert found is not None
    assert found.covers(1.0)


def test_a_wrong_sample_is_refused(make_table: MakeTable) -> None:
    table = grown(make_table)
    with pytest.raises(InvalidInput, match="sample=0"):
        table.plan_backfill("y", udf=triple).estimate(sample=0)
    assert str(Interval(1, 1)) == "1"
    assert str(Interval(0.012345, 1234.5)) == "0.012 to 1,234"
