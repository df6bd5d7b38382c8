"""Where a job is computed: in this process or on Spark, by what the same UDF versions took in earlier jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import udf
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.speed import UdfSpeed, read_history
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.run import choice, pipeline
from airflow_geneva.engine.run.choice import Pace, RunnerChoice, TooSlow, choose_runner
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput, JobFailed, UdfError
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace, triple, triple_row, tripled
from tests.support.invariants import assert_exact, assert_right

MakeTable = Callable[..., Table]


def write_speed(table: Table, speed: UdfSpeed) -> None:
    """Say in the newest job's record that it took so long."""
    checkpoints = table.location.checkpoints
    folder = JobFolder.of(checkpoints, job_ids(checkpoints)[0])
    folder.write_result("DONE", {}, about={"speed": speed.to_json()})


def choose(table: Table, function: UDF = triple, seconds: float = 10, new: bool = False, **how: Any) -> RunnerChoice:
    plan = table.plan_backfill("y", udf=function, **how)
    return choose_runner(plan, Udfs({"y": function}), seconds, new)


def grown(make_table: MakeTable, function: UDF = triple, rows: int = 50) -> Table:
    """A table with a job in its past, and so many rows to compute."""
    table = make_table(20)
    table.add_columns({"y": function})
    table.backfill("y", udf=function, runner="inline")
    table.add([{"x": row} for row in range(rows)])
    return table


@pytest.mark.parametrize("function", [triple, triple_row])
def test_a_job_records_how_fast_its_udf_was(make_table: MakeTable, function: UDF) -> None:
    table = grown(make_table, function)
    described = table.plan_backfill("y", udf=function).spec.describe()
    (past,) = read_history(table.location.checkpoints, described).measured
    found = past.speed
    assert found.rows == 20
    assert 0 < found.first_seconds <= found.seconds
    assert found.bytes >= 20 * 8


def test_the_estimate_has_the_first_call_once_which_loads_a_model_and_the_other_rows() -> None:
    speed = UdfSpeed(rows=100, seconds=5.0, first_seconds=3.0, first_rows=20, bytes=800) + UdfSpeed(
        100, 5.0, 2.0, 20, 800
    )
    assert speed == UdfSpeed(200, 10.0, 3.0, 20, 1600)
    assert speed.seconds_for(10) == pytest.approx(3 - 20 * 7 / 180 + 10 * 7 / 180)
    assert speed.seconds_for(200) == 10.0
    assert speed.bytes_for(40) == 320


def test_of_a_single_call_all_may_be_the_loading_or_the_rows() -> None:
    speed = UdfSpeed(10, 3.1, 3.0, 10, 80)
    assert (speed.seconds_for(5), speed.parts_for(5)) == (3.0, (1.5, 1.5))
    assert (speed.seconds_for(100), speed.parts_for(100)) == (30.0, (0.0, 30.0))


@pytest.mark.parametrize("document", [None, "fast", {}, {"rows": "many"}, {"rows": 1, "seconds": None}])
def test_a_damaged_record_is_no_history(document: object) -> None:
    assert UdfSpeed.from_json(document) == UdfSpeed()


@pytest.mark.parametrize(
    ("speed", "runner", "why"),
    [
        (UdfSpeed(110, 1.5, 0.5, 10, 800), "inline", "about 0.5 s for 50 rows, by"),
        (UdfSpeed(110, 31.0, 30.0, 10, 800), "inline", "about 0.5 s for 50 rows besides 29.9 s of loading"),
        (UdfSpeed(500, 90.0, 90.0, 500, 800), "inline", "about 9.0 s for 50 rows besides 81.0 s of loading"),
        (UdfSpeed(110, 40.0, 10.0, 10, 800), "spark", "inline_below_seconds is 10"),
        (UdfSpeed(110, 101.0, 1.0, 10, 800), "spark", "about 50.0 s for 50 rows"),
        (UdfSpeed(100, 1.0, 0.5, 10, 100 * 2**22), "spark", "200 MiB of values"),
    ],
)
def test_the_estimate_decides(make_table: MakeTable, speed: UdfSpeed, runner: str, why: str) -> None:
    table = grown(make_table)
    write_speed(table, speed)
    chosen = choose(table)
    assert chosen.runner == runner
    assert why in str(chosen)


def test_another_version_of_the_code_has_no_history(make_table: MakeTable) -> None:
    table = grown(make_table)
    other = udf(data_type=pa.int64(), version="other", name="triple")(lambda x: x)
    assert choose(table).runner == "inline"
    assert choose(table, other, on_code_change="new_rows").runner == "spark"
    assert "no earlier job" in choose(table, other, on_code_change="new_rows").why
    assert choose(table, other, new=True, on_code_change="new_rows").runner == "inline"


def test_a_job_with_nothing_to_do_does_not_hide_the_history(make_table: MakeTable) -> None:
    table = make_table(20)
    table.add_columns({"y": triple})
    for _ in range(3):
        table.backfill("y", runner="inline")
    table.add([{"x": 1}])
    assert choose(table).runner == "inline"


@pytest.mark.parametrize("demand", [{"num_gpus": 1}, {"memory": "2g"}])
def test_what_only_spark_provides_goes_to_spark(make_table: MakeTable, demand: dict[str, Any]) -> None:
    function = udf(data_type=pa.int64(), version="1", name="same", **demand)(lambda x: x)
    table = grown(make_table, function)
    chosen = choose(table, function, new=True)
    assert chosen.runner == "spark"
    assert next(iter(demand)) in chosen.why


def test_zero_seconds_switch_it_off_and_nothing_to_do_needs_no_spark(make_table: MakeTable) -> None:
    table = grown(make_table)
    assert choose(table, seconds=0).runner == "spark"
    table.backfill("y", runner="inline")
    assert choose(table, seconds=0).runner == "inline"


def test_an_unknown_runner_is_refused_before_anything_is_read(make_table: MakeTable) -> None:
    table = make_table(1)
    with pytest.raises(InvalidInput, match=r"is unknown\. Use 'auto', 'inline' or 'spark'"):
        table.backfill("nothing", runner="ray")


def test_by_default_a_small_job_runs_in_this_process(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_geneva.spark.local.open_session", no_spark)
    table = make_table(100)
    table.add_columns({"y": triple})
    result = table.backfill("y")
    assert_right(table, "y", tripled)
    assert_exact(trace, range(100))
    record = (JobFolder.of(table.location.checkpoints, result.job_id).read("job.json") or {})["ended"]
    assert record["runner"] == "inline"
    assert "no earlier job" in record["runner_reason"]


def no_spark(*_: object) -> None:
    raise AssertionError("Spark was started")


def test_a_job_that_turns_out_slow_goes_on_with_spark_from_what_was_computed(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = [0.06]

    @udf(data_type=pa.int64(), version="1", batch_size=20)
    def slow(x: int) -> int:
        time.sleep(pause[0])
        leave_trace([x])
        return 3 * x

    monkeypatch.setattr("airflow_geneva.spark.local.open_session", no_spark)
    table = make_table(500, per_fragment=500)
    table.add_columns({"y": slow})
    with pytest.raises(JobFailed, match="Spark was started"):
        table.backfill("y", udf=slow)
    assert 0 < len(trace.rows()) < 200
    pause[0] = 0
    table.backfill("y", udf=slow, runner="inline")
    assert_right(table, "y", lambda x: 3 * x)
    assert_exact(trace, range(500))


def test_an_error_of_a_slow_udf_is_reported_and_not_taken_to_spark(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    @udf(data_type=pa.int64(), version="1")
    def fails(x: int) -> int:
        time.sleep(0.15)
        if x == 10:
            raise ValueError("ten")
        return x

    monkeypatch.setattr("airflow_geneva.spark.local.open_session", no_spark)
    table = make_table(500, per_fragment=500)
    table.add_columns({"y": fails})
    with pytest.raises(JobFailed, match="row 10 of fragment 0") as caught:
        table.backfill("y", udf=fails)
    assert isinstance(caught.value.__cause__, UdfError)


def test_the_pace_is_judged_after_a_second_by_what_is_left_without_the_first_call() -> None:
    before = time.monotonic() - 60
    Pace(1_000, 10.0)(1)
    loading = Pace(1_000, 10.0)
    loading(100)
    loading(100)
    pace = Pace(1_000, 10.0, 10, (10, before))
    pace(900)
    with pytest.raises(TooSlow, match=r"100 of 1,000 rows took 60\.0 s .* about 534 s"):
        Pace(1_000, 10.0, 10, (10, before))(100)


def test_a_udf_that_cannot_be_sent_any_more_after_a_call_was_sent_before(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[object] = []

    @udf(data_type=pa.int64(), version="1")
    def lazy(x: int) -> int:
        if not held:
            held.append(threading.Lock())
        return 3 * x

    monkeypatch.setattr("airflow_geneva.spark.local.open_session", lambda _: None)
    monkeypatch.setattr(choice, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "INLINE_BELOW_SECONDS", 1e-9)
    sent: list[Udfs] = []

    def on_spark(location: object, work: object, shard: object, udfs: Udfs, *others: object) -> UdfSpeed:
        sent.append(udfs.sent())
        raise UdfError("far enough")

    monkeypatch.setattr("airflow_geneva.spark.tasks.apply_in_session", on_spark)
    table = make_table(1_000, per_fragment=1_000)
    table.add_columns({"y": lazy})
    with pytest.raises(JobFailed, match="far enough"):
        table.backfill("y", udf=lazy, checkpoint_size=100)
    assert held
    assert len(sent) == 1


LOCK = threading.Lock()


def with_a_global() -> Any:
    namespace: dict[str, Any] = {"lock": LOCK, "__name__": "__main__"}
    exec("def guarded(x):\n    with lock:\n        return x\n\ndef add(x):\n    return guarded(x)", namespace)
    return namespace["add"]


def with_a_variable() -> Any:
    lock = threading.Lock()
    return lambda x: (lock, x)[1]


def with_an_attribute() -> Any:
    class Client:
        def __init__(self) -> None:
            self.inner = {"lock": threading.Lock()}

        def __call__(self, x: int) -> int:
            return x

    return Client()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (with_a_global, r"global 'lock' \(_thread.lock\)"),
        (with_a_variable, r"variable 'lock' of the function around it \(_thread.lock\)"),
        (with_an_attribute, r"attribute 'inner' \(builtins.dict\)"),
    ],
)
@pytest.mark.parametrize(("runner", "settings"), [("spark", {}), ("inline", {"on_error": "skip"})])
def test_what_cannot_be_pickled_is_named_before_a_process_is_started(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, make: Any, says: str, runner: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("airflow_geneva.spark.local.open_session", no_spark)
    function = udf(data_type=pa.int64(), version="1", name="add", input_columns=["x"], **settings)(make())
    table = make_table(3)
    table.add_columns({"y": function})
    with pytest.raises(InvalidInput, match=f"UDF 'add' cannot be sent to another process: {says}") as refused:
        table.backfill("y", runner=runner)
    assert "cannot pickle '_thread.lock' object" in str(refused.value)
    assert job_ids(table.location.checkpoints) == []


def test_a_slow_function_that_cannot_be_pickled_is_computed_here(make_table: MakeTable) -> None:
    function = udf(data_type=pa.int64(), version="1", input_columns=["x"])(with_a_variable())
    table = grown(make_table, function)
    write_speed(table, UdfSpeed(100, 1_000.0))
    found = choose(table, function)
    assert found.runner == "inline"
    assert "Spark cannot run it: UDF 'lambda' cannot be sent" in found.why
    assert found.below_seconds is None
