"""`preprocess=`: what the stage returns is what the function takes, and a row fails alike in either."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva.engine.apply.dedup import KnownValues
from airflow_geneva.engine.apply.isolation.process import POOL
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.reader import RowBatch
from airflow_geneva.engine.apply.stages import STATE, VALUE, RowsAhead
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.code_hash.hasher import code_version
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.limits.rate_limit import Meter, metered, report
from airflow_geneva.engine.udf import UDF, udf
from airflow_geneva.errors import DeviceFailed, InvalidInput, UdfError
from tests.udfs_for_tests import staged
from tests.udfs_for_tests.failing import EXIT, OTHER, RAISE, SLEEP
from tests.udfs_for_tests.staged import FAILS_LATER

VECTOR = pa.list_(pa.float32(), 2)


@pytest.fixture(autouse=True, scope="module")
def _dismissed() -> Iterator[None]:
    yield
    for child in list(POOL.idle):
        child.close()


def run(function: UDF, values: Any, ahead: bool = True, known: KnownValues | None = None) -> MappedBatch:
    """Map a batch, of which the stage has run ahead or not."""
    batch = values if isinstance(values, pa.RecordBatch) else pa.record_batch({"x": pa.array(values, pa.int64())})
    with open_batch_mapper(function, batch.schema.names, known) as mapper:
        prepared = mapper.prepare(batch) if ahead else batch
        assert (VALUE in prepared.schema.names) is ahead
        return mapper(prepared)


def vector(x: int) -> npt.NDArray[np.float32]:
    return np.array([x, x + 1], np.float32)


def length(vector: npt.NDArray[np.float32]) -> float:
    assert isinstance(vector, np.ndarray)
    return float(vector.sum())


def tens(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 10)


def structs(batch: pa.RecordBatch) -> pa.Array:
    fields = [pc.multiply(batch.column(0), 10), batch.column(0)]
    return pa.StructArray.from_arrays(fields, ["ten", "x"])


def of_batch(batch: pa.RecordBatch) -> pa.Int64Array:
    assert batch.schema.names == ["ten", "x"]
    return pc.add(batch.column("ten"), batch.column("x"))


PAIR = pa.struct({"ten": pa.int64(), "x": pa.int64()})


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (udf(preprocess=udf(data_type=VECTOR)(vector))(length), [3.0, 5.0, 7.0]),
        (udf(data_type=pa.int64(), name="f", preprocess=tens)(lambda ten: ten + 1), [11, 21, 31]),
        (udf(preprocess=udf(data_type=PAIR)(structs))(of_batch), [11, 22, 33]),
        (
            udf(data_type=pa.int64(), name="f", preprocess=udf(data_type=PAIR)(structs))(lambda both: both["x"]),
            [1, 2, 3],
        ),
    ],
)
def test_the_function_takes_what_its_stage_returns(ahead: bool, function: UDF, expected: list[Any]) -> None:
    mapped = run(function, [1, 2, 3], ahead)
    assert (mapped.values.to_pylist(), mapped.failures, mapped.values.type) == (expected, (), function.data_type)
    assert run(function, [], ahead=False).values.to_pylist() == []


def test_a_stage_gets_all_input_columns_in_their_order_and_its_null_is_passed_on() -> None:
    @udf(data_type=pa.string(), name="f", version="1", preprocess=lambda_of("a", "b"))
    def function(joined: str | None) -> str:
        return f"<{joined}>"

    batch = pa.record_batch({"other": [0, 0], "second": ["p", None], "first": ["q", "r"]})
    with open_batch_mapper(function, ["first", "second"]) as mapper:
        assert mapper(mapper.prepare(batch)).values.to_pylist() == ["<qp>", "<None>"]
    assert function.resolve_inputs() == ("a", "b")
    assert function.definition(["first", "second"]).input_columns == ("first", "second")


def lambda_of(*_names: str) -> Callable[..., Any]:
    def join(a: str, b: str | None) -> str:
        return None if b is None else a + b  # type: ignore[return-value]

    return join


# Failures


WAYS = [staged.scalar, staged.array]
FAILING = [1, RAISE, 3, FAILS_LATER + RAISE, 5, EXIT, FAILS_LATER + OTHER, FAILS_LATER + EXIT, 9]
EXCEPTIONS = {
    1: "tests.udfs_for_tests.failing.Unlucky",
    3: "tests.udfs_for_tests.failing.Unlucky",
    5: "airflow_geneva.errors.UdfCrashed",
    6: "builtins.KeyError",
    7: "airflow_geneva.errors.UdfCrashed",
}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("function", WAYS, ids=lambda function: function.name)
def test_under_a_policy_a_row_fails_in_its_stage_as_it_does_in_its_call(function: UDF, ahead: bool) -> None:
    mapped = run(function, FAILING, ahead)
    assert mapped.values.to_pylist() == [None if at in EXCEPTIONS else x + 1 for at, x in enumerate(FAILING)]
    assert {failure.index: failure.exception for failure in mapped.failures} == EXCEPTIONS
    assert [failure.index for failure in mapped.failures] == sorted(EXCEPTIONS)
    assert all(failure.calls >= 1 for failure in mapped.failures)
    assert "half" in mapped.failures[0].traceback


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, FAILS_LATER])
def test_a_timeout_holds_for_a_stage_as_it_does_for_a_call(where: int) -> None:
    mapped = run(staged.timed, [1, where + SLEEP, 3])
    assert mapped.values.to_pylist() == [2, None, 4]
    assert [(one.index, one.exception) for one in mapped.failures] == [(1, "builtins.TimeoutError")]


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, FAILS_LATER])
def test_a_rule_retries_a_stage_as_often_as_a_call(where: int) -> None:
    (failure,) = run(staged.retried, [1, where + RAISE, 3]).failures
    assert (failure.index, failure.calls, failure.rule) == (1, 3, 1)


def failing(x: int) -> int:
    return staged.half(x)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("where", [0, FAILS_LATER])
def test_without_a_policy_the_first_failing_row_fails_with_the_values_before_it(where: int, ahead: bool) -> None:
    function = udf(name="f", version="1", preprocess=failing)(staged.call)
    with pytest.raises(UdfError, match="Unlucky on row 2 of a batch of") as failed:
        run(function, [1, 2, where + RAISE, FAILS_LATER + OTHER, OTHER], ahead)
    error = failed.value
    assert (error.row_index, error.computed.to_pylist(), error.failures) == (2, [2, 3], ())  # type: ignore[union-attr]
    assert error.call is not None
    assert error.call.exception == "tests.udfs_for_tests.failing.Unlucky"


def test_a_call_that_fails_the_job_before_a_row_whose_stage_does_is_the_one_that_counts() -> None:
    function = udf(name="f", version="1", preprocess=failing)(staged.call)
    with pytest.raises(UdfError, match="KeyError") as failed:
        run(function, [1, FAILS_LATER + OTHER, RAISE])
    assert failed.value.row_index == 1


@pytest.mark.slow
def test_a_value_of_another_type_fails_its_row() -> None:
    @udf(data_type=pa.int64(), on_error="skip", version="1", name="f", preprocess=wrong_at_2)
    def function(x: int) -> int:
        return x

    mapped = run(function, [1, 2, 3])
    assert mapped.values.to_pylist() == [1, None, 3]
    assert "failed with type error" in mapped.failures[0].message


def wrong_at_2(x: int) -> int:
    return "two" if x == 2 else x  # type: ignore[return-value]


class CannotLoad:
    def __init__(self) -> None:
        raise OSError("no such model")

    def __call__(self, x: int) -> int:
        return x


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 1])
def test_a_stage_that_cannot_be_set_up_is_no_matter_of_rows(workers: int | None) -> None:
    function = udf(name="f", version="1", preprocess=CannotLoad, preprocess_workers=workers)(staged.call)
    with open_batch_mapper(function) as mapper:
        batch = pa.record_batch({"x": [1]})
        assert mapper.prepare(batch) is batch
        begun = mapper.begin(batch)
        with pytest.raises(UdfError, match=r"'f.CannotLoad' could not be set up: .*no such model") as failed:
            begun.result()
    assert failed.value.row_index is None


# Where it runs


@pytest.mark.parametrize("ahead", [True, False])
def test_workers_run_the_stage_and_load_no_model(ahead: bool) -> None:
    rows = run(staged.InProcesses, [1, 2], ahead).values.to_pylist()
    assert {row["call"] for row in rows} == {row["loads"] for row in rows} == {os.getpid()}
    assert os.getpid() not in {row["stage"] for row in rows}


def test_as_many_parts_are_preprocessed_at_a_time_as_there_are_workers() -> None:
    with open_batch_mapper(staged.InProcesses) as mapper:
        assert mapper.prepares_at_a_time == 2
        threads, made, together = list[threading.Thread](), list[int](), threading.Barrier(2, timeout=60)

        def prepare() -> None:
            batch = mapper.prepare(pa.record_batch({"x": [1]}))
            together.wait()
            made.append(batch.column(VALUE)[0]["pid"].as_py())
            mapper.prepare(batch)

        for _ in range(2):
            threads.append(threading.Thread(target=prepare))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert len(made) == 2


def test_threads_are_as_many_as_cpus() -> None:
    for cpus, threads in ((None, 1), (3, 3), (0.5, 1)):
        with open_batch_mapper(udf(num_cpus=cpus, preprocess=tens)(staged.calls)) as mapper:
            assert mapper.prepares_at_a_time == threads
    with open_batch_mapper(udf(staged.calls)) as mapper:
        assert mapper.prepares_at_a_time == 0


def test_equal_inputs_are_called_once_and_their_failures_are_their_own() -> None:
    called, decoded = list[int](), list[int]()

    def failing(x: int) -> int:
        decoded.append(x)
        return staged.half(x)

    @udf(data_type=pa.int64(), version="1", deterministic=True, dedup=True, preprocess=failing)
    def function(half: int) -> int:
        called.append(half)
        return half

    known = KnownValues(None, 1 << 20)
    assert run(function, [1, 2, 1, 3, 2], known=known).values.to_pylist() == [10, 20, 10, 30, 20]
    assert (called, decoded) == ([10, 20, 30], [1, 2, 3])
    with open_batch_mapper(function, ["x"], known) as mapper:
        batch = pa.record_batch({"x": [1, 3]})
        assert mapper.prepare(batch) is batch, "what is known is not preprocessed"
        assert mapper(batch).values.to_pylist() == [10, 30]
    with pytest.raises(UdfError) as failed:
        run(function, [3, 4, RAISE, 5], known=known)
    assert (failed.value.row_index, failed.value.computed.to_pylist(), called[3:]) == (2, [30, 40], [40])  # type: ignore[union-attr]
    assert decoded[3:] == [4, RAISE]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_calls_of_an_async_function_take_what_the_stage_returned(ahead: bool) -> None:
    @udf(on_error="skip", version="1", max_in_flight=3, preprocess=failing)
    async def function(half: int) -> int:
        await asyncio.sleep(0)
        return staged.call(half)

    mapped = run(function, [1, RAISE, 3, FAILS_LATER + RAISE, 5], ahead)
    assert mapped.values.to_pylist() == [2, None, 4, None, 6]
    assert [failure.index for failure in mapped.failures] == [1, 3]


class OfMethods:
    loads = 0

    def __init__(self) -> None:
        type(self).loads += 1
        self.factor = 10

    def scaled(self, x: int) -> int:
        return x * self.factor

    @udf(data_type=VECTOR)
    def typed(self, x: int) -> Any:
        return [x, self.factor]

    @staticmethod
    def ten(x: int) -> int:
        return x * 10

    @classmethod
    def of_class(cls, x: int) -> int:
        return x * 10

    def __call__(self, scaled: Any) -> int:
        return int(np.sum(scaled))


@pytest.mark.parametrize(
    ("method", "expected"), [("scaled", [10, 20]), ("typed", [11, 12]), ("ten", [10, 20]), ("of_class", [10, 20])]
)
def test_a_method_may_be_the_stage_and_shares_the_instance(method: str, expected: list[int]) -> None:
    before = OfMethods.loads
    function = udf(data_type=pa.int64(), preprocess=method)(OfMethods)
    assert run(function, [1, 2]).values.to_pylist() == expected
    assert OfMethods.loads - before <= 1
    instance = udf(data_type=pa.int64(), preprocess="ten")(OfMethods())
    assert run(instance, [1, 2]).values.to_pylist() == [10, 20]


def test_rows_are_counted_once_and_what_a_stage_reports_is_added() -> None:
    def paid(x: int) -> int:
        report(cost=0.5)
        return x

    function = udf(name="f", version="1", cost=1.0, preprocess=paid)(staged.call)
    with metered(Meter()) as meter:
        run(function, [10, 20])
    assert (meter.usage.rows, meter.usage.declared, meter.usage.cost) == (2, 2.0, 1.0)


def test_batches_are_cut_by_what_the_stage_returned() -> None:
    sizes = list[list[int]]()

    @udf(version="1", preprocess=tens, batch_by="ten", batch_limit=120)
    def function(ten: pa.Int64Array) -> pa.Int64Array:
        sizes.append(ten.to_pylist())
        return pc.add(ten, 1)

    assert run(function, [1, 6, 2, 5, 3]).values.to_pylist() == [11, 61, 21, 51, 31]
    assert sizes == [[60, 50], [30, 20, 10]]


def test_a_device_that_fails_in_a_stage_ends_the_process_as_one_that_fails_in_a_call() -> None:
    def decode(x: pa.Int64Array) -> pa.Int64Array:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with open_batch_mapper(udf(name="f", version="1", preprocess=decode)(staged.calls)) as mapper:
        batch = pa.record_batch({"x": [1]})
        begun = mapper.begin(mapper.prepare(batch))
        with pytest.raises(DeviceFailed):
            begun.result()


# What it belongs to


def test_called_by_hand_it_is_the_function_and_the_stage_is_called_by_itself() -> None:
    assert staged.scalar(10) == 2
    assert staged.scalar.preprocess is not None
    assert staged.scalar.preprocess(1) == 10


def test_the_stage_belongs_to_the_version() -> None:
    def version(preprocess: Any = None, **more: Any) -> str:
        return udf(data_type=pa.int64(), name="f", preprocess=preprocess, **more)(staged.call).code_version

    def half(x: int) -> int:
        return x // 2

    plain = code_version(staged.call)
    found = [
        version(),
        version(half),
        version(failing),
        version(udf(data_type=pa.int32())(half)),
        version(udf(data_type=pa.int64(), version="2")(half)),
        version(udf(data_type=pa.int64(), deps=["weights-3"])(half)),
    ]
    assert found[0] == plain, "a function without a stage has the version that it had"
    assert len(set(found)) == len(found)
    assert version(half) == version(udf(data_type=pa.int64(), name="other")(half)) == found[1]
    assert version(half, version="mine") == "mine"
    methods = {udf(preprocess=name)(OfMethods).code_version for name in ("ten", "of_class", "scaled", "typed")}
    assert len(methods) == 4


def test_it_travels_with_its_function() -> None:
    def local(x: int) -> int:
        return x * 10

    made = udf(data_type=pa.int64(), name="f", version="1", preprocess=local, preprocess_workers=1)
    function = made(lambda ten: ten + 1)
    sent = cloudpickle.loads(cloudpickle.dumps(function))
    assert run(sent, [1, 2]).values.to_pylist() == [11, 21]


# What is refused


def two(a: int, b: int) -> int:
    return a + b


async def later(x: int) -> int:
    return x


def untyped(x: int):
    return x


@pytest.mark.parametrize(
    ("settings", "function", "says"),
    [
        ({"preprocess": "half"}, staged.call, "preprocess='half'. Give a function of the input columns"),
        ({"preprocess": "missing"}, OfMethods, "preprocess='missing'. Give a function"),
        ({"preprocess": 3}, staged.call, "preprocess=3. Give a function"),
        ({"preprocess": later, "preprocess_workers": 2}, staged.call, "and preprocess=f.later is async"),
        ({"preprocess": untyped}, staged.call, "UDF 'f.untyped' needs an output type"),
        ({"preprocess": vector}, staged.call, "UDF 'f.vector' needs an output type"),
        ({"preprocess": tens}, two, "takes ['a', 'b'], and has preprocess=f.tens, whose value is its only input"),
        ({"preprocess": tens}, of_batch, "Return a struct"),
        ({"preprocess": lambda_of()}, staged.call, "Type mismatch for UDF 'f': its preprocess=f.join gives string"),
        ({"preprocess": staged.scalar}, staged.call, "which has on_error, preprocess of its own"),
        ({"preprocess": udf(num_cpus=2)(staged.half)}, staged.call, "which has num_cpus of its own"),
        ({"preprocess_workers": 2}, staged.call, "preprocess_workers=2, and no stage"),
        ({"preprocess": tens, "preprocess_workers": 0}, staged.call, "preprocess_workers=0: give a number"),
        ({"preprocess": tens, "preprocess_workers": True}, staged.call, "preprocess_workers=True: give a number"),
        (
            {"preprocess": tens, "preprocess_workers": 4, "num_cpus": 2},
            staged.call,
            "and num_cpus=2, which do not cover",
        ),
        ({"preprocess": "scaled", "preprocess_workers": 2}, OfMethods, "preprocess_workers=2, with which they do not"),
        ({"preprocess": "scaled", "on_error": "skip"}, OfMethods, "a method of its instance, and on_error"),
        ({"preprocess": "scaled", "timeout": 3}, OfMethods, "a method of its instance, and timeout=3"),
        ({"preprocess": "scaled", "setup_timeout": 3}, OfMethods, "a method of its instance, and setup_timeout=3"),
        ({"preprocess": tens, "batch_by": "x"}, staged.calls, "batch_by='x', which is none of its inputs ['half']"),
        ({"preprocess": tens, "input_columns": ["a", "b"]}, staged.call, "UDF 'f.tens' takes the parameters ['x']"),
    ],
)
def test_bad_stages_are_refused_where_they_are_written(settings: dict[str, Any], function: Any, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        udf(data_type=pa.int64(), name="f", **settings)(function)
    assert says in str(refused.value)


def test_processes_of_a_stage_are_covered_by_the_cpus() -> None:
    function = udf(preprocess=tens, preprocess_workers=4)(staged.calls)
    assert (function.num_cpus, function.definition().num_cpus) == (4.0, 4.0)
    assert udf(preprocess=tens, preprocess_workers=4, num_cpus=5)(staged.calls).num_cpus == 5


# Rows ahead


def rows_of(start: int, count: int, selected: Sequence[bool] | None = None) -> RowBatch:
    numbers = np.arange(start, start + count)
    columns = pa.record_batch({"x": numbers})
    mask = None if selected is None else np.array(selected)
    return RowBatch(start, start + count, numbers.astype(np.uint64), numbers.astype(np.uint64), columns, mask)


def test_parts_make_up_the_rows_of_calls_and_leave_out_what_is_not_to_run() -> None:
    run, even = Ranges.union([Ranges.of(0, 30), Ranges.of(100, 140)]), [row % 2 == 0 for row in range(40)]
    batches = [rows_of(0, 25), rows_of(25, 15), rows_of(100, 40, even)]
    with open_batch_mapper(udf(version="1", preprocess=tens)(staged.calls)) as mapper:
        ahead = RowsAhead(mapper, lambda: 10, 1 << 20)
        parts = list(ahead.parts(iter(batches), run))
        made = [ahead.prepare(part.rows, run) for part in parts]
    assert [int(row) for part in parts for row in part.rows.offsets] == [*range(40), *range(100, 140)]
    assert all(one.rows.end in (other.rows.start, 40) for one, other in pairwise(parts))
    calls, values = [0], list[int]()
    for part, rows in zip(parts, made, strict=True):
        found = [] if STATE not in rows.columns.schema.names else rows.columns.column(STATE).to_pylist()
        values += [rows.columns.column(VALUE)[row].as_py() for row, state in enumerate(found) if state is not None]
        calls[-1] += len(found) - found.count(None)
        calls += [0] if part.ends else []
    assert values == [*range(0, 300, 10), *range(1_000, 1_400, 20)]
    assert calls == [10, 10, 10, 10, 10, 0]
