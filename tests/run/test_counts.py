"""Counts of a job: rows that functions were called on, told apart from those that became visible."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.udf import UDF, Retry, Skip
from airflow_geneva.table import Table
from tests.support.counting import TRACE, Trace, double, leave_trace, triple, triple_row, tripled

MakeTable = Callable[..., Table]


@udf(data_type=pa.int64(), on_error=[Retry(ConnectionError, attempts=3, backoff=0.0), Skip(ValueError)])
def fickle(x: int) -> int:
    leave_trace([x])
    if x == 3:
        raise ValueError(x)
    if x == 5 and Trace(Path(os.environ[TRACE])).counts()[5] < 3:
        raise ConnectionError(x)
    return tripled(x)


@udf(data_type=pa.int64(), on_error="skip")
def fickle_batch(x: pa.Int64Array) -> pa.Int64Array:
    leave_trace(x)
    if 3 in x.to_pylist():
        raise ValueError(x)
    return pa.array([tripled(value) for value in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), on_error=[Retry(ConnectionError, attempts=2, backoff=0.0)])
async def fickle_call(x: int) -> int:
    leave_trace([x])
    if x == 5 and Trace(Path(os.environ[TRACE])).counts()[5] < 2:
        raise ConnectionError(x)
    return tripled(x)


@pytest.mark.slow
@pytest.mark.parametrize("function", [triple, triple_row, fickle, fickle_batch, fickle_call])
def test_rows_run_are_those_of_every_call_of_the_function(make_table: MakeTable, trace: Trace, function: UDF) -> None:
    table = make_table(20, per_fragment=10)
    table.add_columns({"y": function})
    result = table.backfill("y", udf=function, runner="inline")
    assert result.rows_run == len(trace)
    assert result.rows_computed + result.rows_failed == 20
    assert table.backfill("y", udf=function, runner="inline", where="x != 3").rows_run == 0


def test_rows_run_are_told_apart_from_those_that_became_visible(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": triple})
    plan = table.plan_backfill("y", udf=triple)
    job = PlannedJob(table.location, record_plan(plan, table.location))
    job.apply(plan.shards[0], Udfs({"y": triple}))
    table.lance.update({"x": "x + 1000"}, where="id < 25")
    result = job.finish([job.commit(plan.shards[0])])
    assert (result.state, result.rows_run, result.rows_left) == ("PARTIAL", 100, 25)
    assert result.rows_computed == 75
    assert "\n  100 rows run, table version " in str(result)
    found = connect(table.location.database_uri).job(result.job_id)
    assert (found.rows_run, found.rows_computed) == (100, 75)
    assert "100 rows run, 75 computed" in str(found)


def test_rows_run_of_all_tries_of_a_shard_add_up(make_table: MakeTable, trace: Trace) -> None:
    class Killed(BaseException):
        pass

    table = make_table(100, per_fragment=100)
    table.add_columns({"y": triple_row})
    plan = table.plan_backfill("y", udf=triple_row, checkpoint_interval=1_000.0, checkpoint_size=10)
    job = PlannedJob(table.location, record_plan(plan, table.location))

    def kill(_rows: int) -> None:
        if len(trace) >= 35:
            raise Killed

    with pytest.raises(Killed):
        job.apply(plan.shards[0], Udfs({"y": triple_row}), kill)
    shutil.rmtree(next(Path(table.uri, "_checkpoints").glob("udf-*")))
    tried = len(trace)
    assert connect(table.location.database_uri).job(job.folder.job_id).rows_run == tried
    job.apply(plan.shards[0], Udfs({"y": triple_row}))
    result = job.finish([job.commit(plan.shards[0])])
    assert (result.rows_run, result.rows_computed) == (tried + 100, 100)
    assert len(trace) == tried + 100
    # A cleared shard is found staged, and runs nothing.
    job.apply(plan.shards[0], Udfs({"y": triple_row}))
    assert job.finish([job.commit(plan.shards[0])]).rows_run == tried + 100


def test_calls_that_dedup_saved_count_also_if_rows_are_computed_again_within_a_run(
    make_table: MakeTable, trace: Trace
) -> None:
    @udf(data_type=pa.int64(), dedup=True, deterministic=True)
    def once(digit: int) -> int:
        leave_trace([digit])
        return tripled(digit)

    table = make_table(100, per_fragment=50)
    table.lance.add_columns({"digit": "x % 10"})
    table.add_columns({"y": once})
    plan = table.plan_backfill("y", udf=once)
    job, (shard,) = PlannedJob(table.location, record_plan(plan, table.location)), plan.shards
    job.apply(shard, Udfs({"y": once}))
    max(Path(table.uri, "data").iterdir(), key=lambda path: path.stat().st_mtime_ns).unlink()
    assert job.commit(shard).rows_left == 50
    job.apply_uncomputed(shard, Udfs({"y": once}), lambda rows: None)
    result = job.finish([job.commit(shard)])
    assert (result.rows_computed, result.rows_run) == (100, len(trace))


def test_rows_run_of_a_view_are_those_of_all_its_functions(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(20, per_fragment=10)
    database = connect(table.location.database_uri)
    two = table.query().add_columns({"y": (triple, ["x"]), "z": (double, ["x"])})
    result = two.create_materialized_view(database, "two").refresh(runner="inline")
    assert (result.rows_run, result.rows_computed) == (40, 20)
    none = table.query().select({"big": "x * 2"}).create_materialized_view(database, "none").refresh(runner="inline")
    assert (none.rows_run, none.rows_computed) == (0, 20)
