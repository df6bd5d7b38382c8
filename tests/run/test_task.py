"""A task reads rows ahead of the function and keeps its results behind it; neither takes more than its budget."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import Table, udf
from airflow_geneva.engine.apply import reader
from airflow_geneva.engine.apply.applier import Applier
from airflow_geneva.engine.apply.queues import Acknowledgments, ByteBudget, Queue, Unkept
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.speed import UdfSpeed
from airflow_geneva.engine.lance_io.data_file import DataFileWriter
from airflow_geneva.engine.lance_io.fragments import FragmentFiles
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.run import units
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs, prepare
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import JobFailed, StorageError
from tests.support.counting import Trace, leave_trace, triple, tripled
from tests.support.invariants import assert_exact, assert_right

MakeTable = Callable[..., Table]
SECONDS = 60.0
"""No test waits that long: it is what ends a wait that would have no end."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, threading.Event]]:
    """Events by fragment: its last row was read."""
    events = {number: threading.Event() for number in range(10)}
    original = reader.read_rows

    def noting(dataset: Any, files: FragmentFiles, *more: Any) -> Iterator[Any]:
        yield from original(dataset, files, *more)
        events[files.id].set()

    monkeypatch.setattr(reader, "read_rows", noting)
    return events


def test_the_next_fragments_are_read_while_the_function_runs(
    make_table: MakeTable, read: dict[int, threading.Event]
) -> None:
    ahead: list[bool] = []

    @udf(data_type=pa.int64(), version="1")
    def function(x: pa.Int64Array) -> pa.Int64Array:
        number = x[0].as_py() // 10
        ahead.append(number == 3 or read[number + 1].wait(SECONDS))
        return x

    table = make_table(40, per_fragment=10)
    table.add_columns({"y": function})
    assert table.backfill("y", udf=function, runner="inline").rows_computed == 40
    assert ahead == [True] * 4


def test_further_units_are_read_before_the_function_waits_for_them(
    make_table: MakeTable, read: dict[int, threading.Event]
) -> None:
    ahead: list[tuple[int, bool]] = []
    asked: list[int] = []

    @udf(data_type=pa.int64(), version="1", batch_size=2)
    def function(x: pa.Int64Array) -> pa.Int64Array:
        fragment, row = divmod(x[0].as_py(), 10)
        if row == 8 and fragment < 3:
            ahead.append((fragment, read[fragment + 1].wait(SECONDS)))
        return x

    table = make_table(40, per_fragment=10)
    table.add_columns({"y": function})
    plan = table.plan_backfill("y", udf=function)
    record_plan(plan, table.location)
    first, *rest = map(units.whole_unit, plan.shards[0].to_apply[:])

    def more() -> list[units.Unit]:
        asked.append(len(ahead))
        return [rest.pop(0)] if rest else []

    with prepare(table.location, plan.spec, Udfs({"y": function}), {}, Meter()) as runner:
        reports = runner.run([first], more=more)
    assert sum(report.staged for report in reports) == 4
    assert ahead == [(0, True), (1, True), (2, True)]
    assert len(asked) == 4


def test_an_error_in_the_search_for_further_units_ends_the_task(make_table: MakeTable) -> None:
    table = make_table(20, per_fragment=10)
    table.add_columns({"y": triple})
    plan = table.plan_backfill("y", udf=triple)
    record_plan(plan, table.location)

    def more() -> list[units.Unit]:
        raise StorageError("the store is away")

    first = units.whole_unit(plan.shards[0].to_apply[0])
    with (
        pytest.raises(StorageError, match="the store is away"),
        prepare(table.location, plan.spec, Udfs({"y": triple}), {}, Meter()) as runner,
    ):
        runner.run([first], more=more)
    assert table.plan_backfill("y", udf=triple).rows_to_run == 10, "what was computed before is kept"


def test_wide_rows_of_small_files_are_read_ahead_one_fragment_at_a_time(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are compressed, so their size does not tell how many fragments fit into memory."""
    read: list[tuple[int, int]] = []
    original = reader.read_rows

    def noting(dataset: Any, files: FragmentFiles, *more: Any) -> Iterator[Any]:
        read.append((files.id, 0))
        for rows in original(dataset, files, *more):
            read.append((files.id, len(rows.offsets)))
            yield rows

    @udf(data_type=pa.int64(), version="1")
    def width(text: pa.Array) -> pa.Int64Array:
        return pc.cast(pc.utf8_length(text), pa.int64())

    table = make_table(120, per_fragment=40, text=["wide " * 20_000] * 120)
    table.add_columns({"y": (width, ["text"])})
    monkeypatch.setattr(reader, "read_rows", noting)
    monkeypatch.setenv("GENEVA_TASK_MEMORY_BYTES", str(4 << 20))
    assert table.backfill("y", runner="inline").rows_computed == 120
    for later in (1, 2):
        before = read[: read.index((later, 0))]
        assert sum(rows for fragment, rows in before if fragment == later - 1) >= 20, read


@pytest.mark.parametrize("kind", ["column", "view"])
def test_a_data_file_is_written_while_the_function_goes_on(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    called = {number: threading.Event() for number in range(5)}
    behind: list[bool] = []
    finish = DataFileWriter.finish

    def finishing(writer: DataFileWriter) -> str:
        behind.append(called[3].wait(SECONDS))
        return finish(writer)

    @udf(data_type=pa.int64(), version="1")
    def function(x: pa.Int64Array) -> pa.Int64Array:
        called[x[0].as_py() // 10].set()
        return x

    table = make_table(40, per_fragment=10)
    if kind == "column":
        table.add_columns({"y": function})
        monkeypatch.setattr(DataFileWriter, "finish", finishing)
        result = table.backfill("y", udf=function, runner="inline")
    else:
        view = table.query().select({"id": "id", "y": (function, ["x"])}).create_materialized_view(name="v")
        monkeypatch.setattr(DataFileWriter, "finish", finishing)
        result = view.refresh(runner="inline")
    assert (result.rows_computed, behind) == (40, [True] * 4)


def test_a_range_checkpoint_is_written_while_the_function_goes_on(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an interval is written while the other half is computed."""
    calls, written = threading.Semaphore(0), list[bool]()
    write = units.CheckpointStore.__setitem__

    def writing(store: Any, key: str, batch: pa.RecordBatch) -> None:
        if "_range-" in key and not written:
            written.append(calls.acquire(timeout=SECONDS))
        write(store, key, batch)

    @udf(data_type=pa.int64(), version="1", batch_size=10)
    def function(x: pa.Int64Array) -> pa.Int64Array:
        if x[0].as_py() >= 20:
            calls.release()
        return x

    table = make_table(40, per_fragment=40)
    table.add_columns({"y": function})
    monkeypatch.setattr(units.CheckpointStore, "__setitem__", writing)
    monkeypatch.setattr(
        "airflow_geneva.engine.apply.applier.Applier._is_checkpoint_due", lambda self, calls: calls.unkept.rows >= 20
    )
    assert table.backfill("y", udf=function, runner="inline").rows_computed == 40
    assert written == [True]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_write_that_fails_ends_the_task_and_what_was_kept_before_is_not_run_again(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    table = make_table(60, per_fragment=10)
    table.add_columns({"y": triple})
    finish, count = DataFileWriter.finish, iter(range(100))

    def failing(writer: DataFileWriter) -> str:
        if next(count) >= 2:
            raise StorageError("the disk is full")
        return finish(writer)

    settings: dict[str, Any] = {"runner": "inline", "intra_applier_concurrency": threads, "checkpoint_interval": 0.0}
    with monkeypatch.context() as patched:
        patched.setattr(DataFileWriter, "finish", failing)
        with pytest.raises(JobFailed, match="the disk is full") as failed:
            table.backfill("y", **settings)
    assert "in failing" in "".join(traceback.format_exception(failed.value))
    before = set(trace.rows())
    trace.clear()
    table.backfill("y", **settings)
    assert_right(table, "y", tripled)
    assert not set(trace.rows()) & before, "each step had its checkpoint"


def _fails_at(fragment: int, read_rows: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def failing(dataset: Any, files: FragmentFiles, *more: Any) -> Iterator[Any]:
        if files.id == fragment:
            raise StorageError("the store is away")
        return read_rows(dataset, files, *more)

    return failing


def test_a_read_that_fails_ends_the_task_when_the_rows_before_it_are_kept(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(60, per_fragment=10)
    table.add_columns({"y": triple})
    with monkeypatch.context() as patched:
        patched.setattr(reader, "read_rows", _fails_at(3, reader.read_rows))
        with pytest.raises(JobFailed, match="the store is away") as failed:
            table.backfill("y", runner="inline")
    assert "in failing" in "".join(traceback.format_exception(failed.value))
    assert_exact(trace, range(30))
    table.backfill("y", runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, range(60))


def test_a_fragment_that_is_staged_already_does_not_hold_up_the_function(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that keeps it may be done before the thread that computes finds that it has no rows."""
    table = make_table(60, per_fragment=10)
    table.add_columns({"y": triple})
    plan = table.plan_backfill("y", checkpoint_interval=0.0)
    job, (shard,) = PlannedJob(table.location, record_plan(plan, table.location)), plan.shards
    with monkeypatch.context() as patched:
        patched.setattr(reader, "read_rows", _fails_at(4, reader.read_rows))
        with pytest.raises(StorageError, match="the store is away"):
            job.apply(shard, Udfs({"y": triple}))
    kept, compute, acknowledge = threading.Semaphore(0), Applier.compute, Acknowledgments.kept

    def acknowledging(acknowledged: Acknowledgments, rows: Unkept) -> None:
        acknowledge(acknowledged, rows)
        kept.release()

    def computing(applier: Applier, fragment: Any, run: Ranges, *more: Any) -> None:
        compute(applier, fragment, run, *more)
        assert run or kept.acquire(timeout=SECONDS)

    monkeypatch.setattr(Acknowledgments, "kept", acknowledging)
    monkeypatch.setattr(Applier, "compute", computing)
    again = threading.Thread(target=job.apply, args=(shard, Udfs({"y": triple})), daemon=True)
    again.start()
    again.join(SECONDS)
    assert not again.is_alive()
    job.finish([job.commit(shard)])
    assert_right(table, "y", tripled)
    assert_exact(trace, range(60))


def test_the_result_says_how_busy_the_function_was_and_what_it_waited_for(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(100.0, 97.0, reading=2.0, writing=0.2) + Busy(100.0, 89.0, preprocessing=8.0)
    assert str(busy) == "function busy 93 %, waited 1 % for reading, waited 4 % for preprocessing"
    assert UdfSpeed.from_json(UdfSpeed(busy=busy).to_json()).busy == busy
    assert str(Busy(9.0, 1.0)) == "", "too short to say much"
    original = reader.read_rows

    def slow(*arguments: Any) -> Iterator[Any]:
        time.sleep(0.2)
        return original(*arguments)

    monkeypatch.setattr(reader, "read_rows", slow)
    monkeypatch.setattr("airflow_geneva.engine.run.task._READERS", 1)
    monkeypatch.setattr("airflow_geneva.engine.job.busy._TELLING_SECONDS", 1e-9)
    table = make_table(30, per_fragment=10)
    table.add_columns({"y": triple})
    (note,) = [note for note in table.backfill("y", runner="inline").notes if note.startswith("function busy")]
    assert "for reading" in note


def test_no_thread_outlives_a_task(make_table: MakeTable) -> None:
    @udf(data_type=pa.int64(), version="1")
    def function(x: int) -> int:
        leave_trace([x])
        if x == 25:
            raise ValueError(x)
        return x

    table = make_table(60, per_fragment=10)
    table.add_columns({"y": function})
    with pytest.raises(JobFailed):
        table.backfill("y", udf=function, runner="inline")
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"geneva-read", "geneva-keep", "geneva-progress"}


def test_queues_hold_no_more_bytes_than_their_room() -> None:
    budget = ByteBudget(100)
    queues = [Queue[int](budget) for _ in range(3)]

    def give(queue: Queue[int]) -> None:
        queue.reserve(30)
        for item in range(50):
            queue.put(item, 25)
        queue.end()

    threads = [threading.Thread(target=give, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    assert [list(queue) for queue in queues] == [list(range(50))] * 3
    for thread in threads:
        thread.join(SECONDS)
    # The first item for a taker that waits need not fit.
    assert budget.most_used <= 100 + 30 + 25
    assert budget.used == 0


def test_an_item_of_any_size_passes_to_a_taker_that_waits() -> None:
    budget = ByteBudget(10)
    first, second = Queue[str](budget), Queue[str](budget)

    def give() -> None:
        second.put("small", 10)
        first.put("large", 1_000)
        first.end()

    thread = threading.Thread(target=give)
    thread.start()
    assert list(first) == ["large"]
    thread.join(SECONDS)
    assert next(second) == "small"


def test_an_earlier_queue_gets_room_before_a_later_one() -> None:
    budget = ByteBudget(10)
    full, first, second = (Queue[str](budget) for _ in range(3))
    full.put("all", 10)
    order: list[str] = []

    def give(queue: Queue[str], name: str) -> None:
        queue.put(name, 10)
        order.append(name)

    threads = [threading.Thread(target=give, args=pair) for pair in ((second, "second"), (first, "first"))]
    for number, thread in enumerate(threads):
        thread.start()
        while len(budget.waiting) <= number:
            time.sleep(0.001)
    assert next(full) == "all"
    threads[1].join(SECONDS)
    assert order == ["first"]
    assert next(first) == "first"
    threads[0].join(SECONDS)
    assert order == ["first", "second"]


def test_a_stopped_room_wakes_giver_and_taker_and_keeps_what_was_handed_over() -> None:
    budget = ByteBudget(10)
    queue, other = Queue[int](budget), Queue[int](budget)
    queue.put(1, 10)
    failure = ValueError("stopped")
    threading.Timer(0.05, budget.stop, [failure]).start()
    with pytest.raises(ValueError, match="stopped"):
        other.put(2, 5)
    assert (next(queue), next(other)) == (1, 2)
    with pytest.raises(ValueError, match="stopped"):
        next(other)
    patient = Queue[int](ByteBudget(10, takers_stop=False))
    patient.budget.stop(failure)
    threading.Timer(0.05, patient.end).start()
    assert list(patient) == []


@pytest.mark.parametrize(("seconds", "most", "waits"), [(0.0, None, True), (1e9, 29, True), (1e9, 30, False)])
def test_rows_that_are_not_kept_yet_hold_up_the_function_only_beyond_an_interval(
    seconds: float, most: int | None, waits: bool
) -> None:
    acknowledged = Acknowledgments(ByteBudget(100), seconds, most)
    rows, more = Unkept(0.0, 10), Unkept(0.0, 10)
    passed = threading.Event()

    def compute() -> None:
        acknowledged._waiting.append(rows)
        acknowledged.wait(more)
        passed.set()

    thread = threading.Thread(target=compute)
    thread.start()
    if waits:
        assert not passed.wait(0.05)
    else:
        assert passed.wait(SECONDS)
    acknowledged.kept(rows)
    acknowledged.kept(more)
    thread.join(SECONDS)
    assert passed.is_set()
