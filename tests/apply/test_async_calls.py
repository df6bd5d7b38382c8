"""Async UDFs: many calls in flight, each row's value where it belongs, and the error policies of plain functions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.apply import async_calls, event_loop
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.udf import UDF, Fail, Retry, Skip, udf
from airflow_geneva.errors import InvalidInput, JobFailed, UdfError
from tests.support.counting import Trace
from tests.support.tables import MakeTable

BAD, WRONG, SLOW, EXIT, CANCEL, CLOSE = -1, -2, -3, -4, -5, -6


async def do(x: int) -> int:
    """Give ten times what is asked, later for smaller numbers, or fail as it says."""
    if x == BAD:
        raise ValueError("no")
    if x == EXIT:
        raise SystemExit(3)
    if x == CANCEL:
        raise asyncio.CancelledError
    if x == CLOSE:
        raise GeneratorExit
    if x == SLOW:
        await asyncio.sleep(60)
    await asyncio.sleep(0.002 * (10 - x % 10))
    return "wrong" if x == WRONG else 10 * x  # type: ignore[return-value]


def scalar(**settings: Any) -> UDF:
    async def function(x: int) -> int:
        return await do(x)

    return udf(version="1", **settings)(function)


def array(**settings: Any) -> UDF:
    async def function(x: pa.Int64Array) -> pa.Int64Array:
        return pa.array(await asyncio.gather(*map(do, x.to_pylist())))

    return udf(version="1", **settings)(function)


def record_batch(**settings: Any) -> UDF:
    async def function(batch: pa.RecordBatch) -> pa.Array:
        return pa.array(await asyncio.gather(*map(do, batch.column("x").to_pylist())))

    return udf(version="1", data_type=pa.int64(), **settings)(function)


FORMS = [scalar, array, record_batch]
Make = Callable[..., UDF]


def run(function: UDF, values: list[int | None]) -> MappedBatch:
    with open_batch_mapper(function) as mapper:
        return mapper(pa.record_batch({"x": pa.array(values, pa.int64())}))


@pytest.mark.parametrize("make", FORMS)
def test_values_are_those_of_their_rows_whichever_call_ends_first(make: Make) -> None:
    assert run(make(), list(range(30))).values.to_pylist() == list(range(0, 300, 10))


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        (BAD, "ValueError"),
        (WRONG, "UdfError"),
        (SLOW, "TimeoutError"),
        (EXIT, "RuntimeError"),
        (CANCEL, "RuntimeError"),
        (CLOSE, "RuntimeError"),
    ],
)
def test_under_skip_exactly_the_failing_rows_are_null(make: Make, what: int, says: str) -> None:
    found = run(make(on_error="skip", timeout=1.0 if what == SLOW else 60.0), [1, what, 2, 3, what])
    assert found.values.to_pylist() == [10, None, 20, 30, None]
    assert [(failure.index, failure.exception.rpartition(".")[2]) for failure in found.failures] == [
        (1, says),
        (4, says),
    ]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (event_loop, async_calls):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
        monkeypatch.setattr(module, "POLL_SECONDS", 0.05)


async def until_cancelled(then: Callable[[], Any]) -> Any:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return then()


def test_a_value_returned_after_the_timeout_is_dropped() -> None:
    @udf(timeout=0.1, on_error="skip", version="late")
    async def late(x: int) -> int:
        return await until_cancelled(lambda: x) if x == 1 else x

    found = run(late, [0, 1, 2])
    assert found.values.to_pylist() == [0, None, 2]
    assert [failure.exception for failure in found.failures] == ["builtins.TimeoutError"]


def test_a_call_that_awaits_again_after_it_was_cancelled_is_given_up_with_its_loop(short_grace: None) -> None:
    loops, ended = dict[int, asyncio.AbstractEventLoop](), list[int]()

    @udf(timeout=0.1, on_error="skip", version="stubborn")
    async def stubborn(x: int) -> int:
        loops[x] = asyncio.get_running_loop()
        while x == 1 and not ended:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return x

    with open_batch_mapper(stubborn) as mapper:
        found = mapper(pa.record_batch({"x": pa.array([0, 1, 2])}))
        ended.append(1)
        assert mapper(pa.record_batch({"x": pa.array([3])})).values.to_pylist() == [3]
    assert found.values.to_pylist() == [0, None, 2]
    assert "did not end when it was cancelled" in found.failures[0].message
    assert loops[0] is loops[1] is loops[2] is not loops[3]


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize("tries", [1, 2])
def test_a_call_that_blocks_the_loop_is_given_up_and_the_others_begin_again(
    make: Make, tries: int, short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, blocked, ended, plain = threading.Event(), list[int](), list[int](), do

    async def block(x: int) -> int:
        if x == SLOW:
            blocked.append(x)
            free.wait()
            ended.append(x)
        return await plain(x)

    monkeypatch.setitem(globals(), "do", block)
    rules = [*([Retry(TimeoutError, attempts=tries, backoff=0)] if tries > 1 else []), Skip(TimeoutError)]
    with open_batch_mapper(make(timeout=0.5, on_error=rules)) as mapper:
        begun = [mapper.begin(pa.record_batch({"x": pa.array(x)})) for x in ([1, SLOW, 2], [3, 4])]
        found, other = [one.result() for one in begun]
    assert ended == []
    free.set()
    assert (found.values.to_pylist(), other.values.to_pylist()) == ([10, None, 20], [30, 40])
    assert [(failure.index, failure.exception) for failure in found.failures] == [(1, "builtins.TimeoutError")]
    assert len(blocked) == (tries if make is scalar else 2 * tries)


def test_a_call_that_blocks_within_its_timeout_is_left_alone(short_grace: None) -> None:
    @udf(timeout=5, version="busy")
    async def busy(x: int) -> int:
        time.sleep(0.8)
        return x

    @udf(timeout=0.1, on_error="skip", version="quick")
    async def quick(x: int) -> int:
        await asyncio.sleep(0)
        return x

    with open_batch_mapper(busy) as mapper, open_batch_mapper(quick) as other:
        begun = mapper.begin(pa.record_batch({"x": pa.array([1])})), other.begin(pa.record_batch({"x": pa.array([2])}))
        loop = event_loop.LOOP.current()
        assert begun[0].result().values.to_pylist() == [1]
        begun[1].result()
    assert event_loop.LOOP.current() is loop


@pytest.mark.parametrize("make", FORMS)
def test_under_fail_the_first_failing_row_fails_with_the_values_before_it(make: Make) -> None:
    with pytest.raises(UdfError, match="ValueError on row 2 of a batch of 5") as failed:
        run(make(), [1, 2, BAD, 3, BAD])
    assert failed.value.row_index == 2
    assert failed.value.computed.to_pylist() == [10, 20]
    assert isinstance(failed.value.__cause__, ValueError)
    assert "in do" in str(failed.value)
    assert "udf_call.py" not in str(failed.value)


@pytest.mark.parametrize("whole", [False, True])
def test_a_retried_call_waits_while_others_go_on(whole: bool) -> None:
    calls, ended = Counter[int](), list[int]()

    async def ask(x: int) -> int:
        calls[x] += 1
        if x == 0 and calls[x] < 3:
            raise ConnectionError("again")
        ended.append(x)
        return x

    async def ask_all(x: pa.Int64Array) -> pa.Int64Array:
        return pa.array([await ask(one) for one in x.to_pylist()])

    rules = [Retry(ConnectionError, attempts=3, backoff=0.05), Skip(ValueError), Fail()]
    function = udf(on_error=rules, version="1")(ask_all if whole else ask)
    with open_batch_mapper(function) as mapper:
        begun = [mapper.begin(pa.record_batch({"x": pa.array([x], pa.int64())})) for x in range(20)]
        assert [one.result().values.to_pylist() for one in begun] == [[x] for x in range(20)]
    assert (calls[0], ended[-1], len(ended)) == (3, 0, 20)


def test_no_more_calls_are_in_flight_than_may_be_in_all_batches_and_threads() -> None:
    now = most = 0

    async def ask(x: int) -> int:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0.005)
        now -= 1
        return x

    function = udf(max_in_flight=7, version="in-flight")(ask)
    threads = [threading.Thread(target=run, args=(function, list(range(40)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 7


@udf(data_type=pa.string(), version="1")
class Client:
    """Belongs to the loop in which it is made, as the clients of HTTP libraries do."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.lock = asyncio.Lock()
        self.loop = asyncio.get_running_loop()

    async def __call__(self, x: int) -> str:
        async with self.lock:
            assert asyncio.get_running_loop() is self.loop
        return f"{self.made} {threading.current_thread().name}"


def test_a_class_is_set_up_once_in_the_loop_of_its_calls_also_inside_of_another_loop() -> None:
    async def notebook() -> set[str]:
        return {value for _ in range(2) for value in run(Client, [1, 2]).values.to_pylist()}

    assert asyncio.run(notebook()) == {"1 geneva-event-loop"}


def test_called_by_hand_it_is_the_function() -> None:
    assert asyncio.run(scalar()(2)) == 20


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_in_flight": 0}, "at least 1"),
        ({"max_in_flight": True}, "at least 1"),
        ({"max_in_flight": 1.5}, "least 1"),
    ],
)
def test_a_bad_number_of_calls_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        scalar(**settings)


def test_a_plain_function_has_no_calls_in_flight() -> None:
    with pytest.raises(InvalidInput, match="plain function"):
        udf(max_in_flight=2, data_type=pa.int64())(lambda x: x)
    assert scalar().definition().max_in_flight == 16


@pytest.mark.parametrize("per_fragment", [60, 3])
def test_a_slow_call_does_not_hold_up_the_rows_behind_it(make_table: MakeTable, per_fragment: int) -> None:
    ended, enough = list[int](), asyncio.Event()

    @udf(max_in_flight=4, version="1")
    async def slow_first(x: int) -> int:
        if x == 0:
            await enough.wait()
        ended.append(x)
        if len(ended) == 30:
            enough.set()
        return x

    table = make_table(60, per_fragment=per_fragment)
    table.add_columns({"y": slow_first})
    table.backfill("y", runner="inline", max_checkpoint_size=7, min_checkpoint_size=1, batch_size=4)
    assert table.to_arrow().column("y").to_pylist() == list(range(60))
    assert ended.index(0) >= 29


@pytest.mark.parametrize("per_fragment", [50, 10])
def test_rows_that_ended_beyond_a_failing_one_are_not_called_again(make_table: MakeTable, per_fragment: int) -> None:
    """They are kept where the job fails; what was in flight, or had not begun, is called by the next one."""
    broken, ended = True, list[int]()

    @udf(max_in_flight=4, version="1")
    async def picky(x: int) -> int:
        if broken and x == 20:
            while len(ended) < 35:
                await asyncio.sleep(0.001)
            raise ValueError(x)
        ended.append(x)
        return x

    table = make_table(100, per_fragment=per_fragment)
    table.add_columns({"y": picky})
    with pytest.raises(JobFailed, match=rf"row {20 % per_fragment} of fragment {20 // per_fragment} "):
        table.backfill("y", runner="inline")
    before, broken = list(ended), False
    assert 35 <= len(before) < 100
    table.backfill("y", runner="inline")
    assert sorted(ended) == list(range(100))
    assert table.to_arrow().column("y").to_pylist() == list(range(100))


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_call_that_ended_just_before_it_is_cancelled_keeps_its_value(timeout: float | None) -> None:
    async def stop_when_it_ends() -> object:
        answered = asyncio.Event()

        async def ask(x: int) -> int:
            await answered.wait()
            return x

        task = asyncio.create_task(event_loop.call_within(ask, timeout, 7))
        await asyncio.sleep(0.01)
        answered.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert event_loop.LOOP.current().start(stop_when_it_ends()).result(5) == 7


def test_a_view_computes_async_columns_of_async_columns(make_table: MakeTable) -> None:
    first, second = scalar(on_error="skip"), array(name="second", on_error="skip", max_in_flight=2)
    table = make_table([1, 2, BAD, 4, None, 6], per_fragment=4)
    query = table.query().where("x IS NOT NULL").select({"x": "x", "y": first, "z": (second, ["y"])})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    view.refresh(runner="inline")
    rows = sorted(view.to_arrow().select(["x", "y", "z"]).to_pylist(), key=lambda row: row["x"])
    assert [(row["x"], row["y"]) for row in rows] == [(BAD, None), (1, 10), (2, 20), (4, 40), (6, 60)]
    assert [row["z"] for row in rows[1:]] == [100, 200, 400, 600]


@pytest.mark.parametrize("by_way_of", [None, "plain"])
def test_a_column_of_another_columns_values_waits_for_its_own_row_only(
    make_table: MakeTable, by_way_of: str | None
) -> None:
    """The first row's call ends when all other rows have passed both columns."""
    passed, enough = list[int](), asyncio.Event()

    @udf(version="1", max_in_flight=4)
    async def first(x: int) -> int:
        if x == 0:
            await enough.wait()
        return x + 1

    @udf(version="1")
    def plain(x: int) -> int:
        return x

    @udf(version="1", max_in_flight=4)
    async def second(x: int) -> int:
        passed.append(x - 1)
        if len(passed) == 39:
            enough.set()
        return 10 * x

    table = make_table(40, per_fragment=40)
    between = {"plain": (plain, ["y"])} if by_way_of else {}
    query = table.query().select({"x": "x", "y": first, **between, "z": (second, [by_way_of or "y"])})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    view.refresh(runner="inline")
    assert passed[-1] == 0
    assert sorted(view.to_arrow()["z"].to_pylist()) == [10 * (x + 1) for x in range(40)]


def test_a_failing_row_of_a_chain_keeps_the_rows_that_have_all_columns(make_table: MakeTable, trace: Trace) -> None:
    broken, calls = True, Counter[str]()

    @udf(version="1", max_in_flight=4)
    async def first(x: int) -> int:
        calls[f"first {x}"] += 1
        return x

    @udf(version="1", max_in_flight=4)
    async def second(x: int) -> int:
        if broken and x == 20:
            while calls["done"] < 26:
                await asyncio.sleep(0.001)
            raise ValueError(x)
        calls[f"second {x}"] += 1
        calls["done"] += 1
        return 10 * x

    table = make_table(60, per_fragment=60)
    query = table.query().select({"x": "x", "y": first, "z": (second, ["y"])})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    with pytest.raises(JobFailed, match=r"v\.z failed at row 20 of fragment 0"):
        view.refresh(runner="inline")
    assert {f"second {x}" for x in range(20)} <= calls.keys()
    before, broken = {name for name in calls if name.startswith("second")}, False
    assert len(before) >= 26
    view.refresh(runner="inline")
    assert {name: calls[name] for name in before if calls[name] > 1} == {}
    assert sorted(view.to_arrow()["z"].to_pylist()) == [10 * x for x in range(60)]


@pytest.mark.parametrize("failing", [("y", 3), ("z", 3), ("w", 3), ("w", 0)])
def test_of_several_columns_the_first_failing_row_fails_with_the_rows_before_it(
    make_table: MakeTable, failing: tuple[str, int]
) -> None:
    """Whatever column it is, and although a later row of the first column fails, too."""

    def named(name: str) -> UDF:
        async def function(x: int) -> int:
            if (name, x) == failing or (name, x) == ("y", 5):
                raise ValueError(x)
            return x

        return udf(version="1", name=name)(function)

    @udf(version="1", name="w")
    def plain(x: int) -> int:
        if ("w", x) == failing:
            raise ValueError(x)
        return x

    table = make_table(8, per_fragment=8)
    query = table.query().select({"x": "x", "y": named("y"), "z": (named("z"), ["y"]), "w": (plain, ["z"])})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    column, row = failing
    with pytest.raises(JobFailed, match=rf"v\.{column} failed at row {row} of fragment 0"):
        view.refresh(runner="inline")


def test_an_estimate_by_a_sample_and_a_query_call_it_too(make_table: MakeTable) -> None:
    table = make_table(20)
    table.add_columns({"y": scalar(cost=0.5)})
    assert table.plan_backfill("y").estimate(sample=10).cost.low == 10
    assert table.query().select({"y": scalar()}).to_arrow().column("y").to_pylist() == list(range(0, 200, 10))
