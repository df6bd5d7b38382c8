"""A stage runs ahead of the calls of its task, also across fragments, in order and within its room."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import Table, udf
from airflow_geneva.engine.apply import reader
from airflow_geneva.engine.apply.isolation.process import POOL
from airflow_geneva.engine.apply.queues import ByteBudget
from airflow_geneva.engine.apply.stages import RowsAhead
from airflow_geneva.engine.lance_io.fragments import FragmentFiles
from airflow_geneva.errors import InvalidInput, JobFailed, StorageError
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_right
from tests.udfs_for_tests import staged
from tests.udfs_for_tests.failing import RAISE
from tests.udfs_for_tests.staged import FAILS_LATER

MakeTable = Callable[..., Table]
SECONDS = 60.0
"""No test waits that long: it is what ends a wait that would have no end."""


def compute(table: Table, kind: str, function: Any, **settings: Any) -> tuple[Any, list[Any], list[Any]]:
    """Compute a column of a table or of a view from `x`; return the result, the values by `id`, and the errors."""
    settings = {"runner": "inline", **settings}
    made: Any = table
    if kind == "column":
        table.add_columns({"y": function})
        result = table.backfill("y", udf=function, **settings)
    else:
        made = table.query().select({"id": "id", "y": (function, ["x"])}).create_materialized_view(name="v")
        result = made.refresh(**settings)
    return result, made.to_arrow().sort_by("id").column("y").to_pylist(), made.get_errors(result.job_id)


class Decoding:
    """A stage that says which rows it has begun."""

    def __init__(self, rows: int) -> None:
        self.begun = [threading.Event() for _ in range(rows)]

    def __call__(self, x: int) -> int:
        self.begun[x].set()
        return 10 * x


@pytest.mark.parametrize("kind", ["column", "view"])
@pytest.mark.parametrize("per_fragment", [40, 5])
def test_rows_are_preprocessed_while_the_function_runs_on_those_before(
    make_table: MakeTable, kind: str, per_fragment: int
) -> None:
    decoding, ahead = Decoding(40), list[bool]()

    @udf(data_type=pa.int64(), version="1", batch_size=5, preprocess=udf(data_type=pa.int64())(decoding))
    def function(ten: pa.Int64Array) -> pa.Int64Array:
        last = ten[-1].as_py() // 10
        ahead.append(last == 39 or decoding.begun[last + 1].wait(SECONDS))
        return pc.add(ten, 1)

    result, values, _ = compute(make_table(40, per_fragment=per_fragment), kind, function)
    assert (result.rows_computed, values) == (40, [10 * x + 1 for x in range(40)])
    assert ahead == [True] * 8
    assert threads_of_stages() == []


def threads_of_stages() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "geneva-stage"]


@pytest.mark.parametrize("kind", ["column", "view"])
@pytest.mark.parametrize("threads", [1, 3])
def test_calls_have_their_size_and_rows_their_order_whichever_part_ends_first(
    make_table: MakeTable, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, second = list[int](), threading.Event()

    def decode(x: int) -> int:
        # Of two parts at a time, the one that was taken first ends last.
        if threads > 1 and x == 0:
            second.wait(SECONDS)
        if x == 7:
            second.set()
        return 10 * x

    @udf(data_type=pa.int64(), version="1", batch_size=7, num_cpus=threads, preprocess=decode)
    def function(ten: pa.Int64Array) -> pa.Int64Array:
        sizes.append(len(ten))
        return pc.add(ten, 1)

    result, values, _ = compute(make_table(50, per_fragment=25), kind, function)
    assert (result.rows_computed, values) == (50, [10 * x + 1 for x in range(50)])
    assert sizes == [7, 7, 7, 4] * 2


def test_windows_that_are_cut_by_weight_are_as_long_as_without_a_stage(make_table: MakeTable) -> None:
    calls = list[list[int]]()

    @udf(version="1", batch_by="ten", batch_limit=5_000, preprocess=tens)
    def function(ten: pa.Int64Array) -> pa.Int64Array:
        calls.append(ten.to_pylist())
        return pc.add(ten, 1)

    rows = [row % 50 for row in range(100)]
    result, values, _ = compute(make_table(rows, per_fragment=100), "column", function)
    assert (result.rows_computed, values) == (100, [10 * x + 1 for x in rows])
    assert calls[0][:4] == [490, 490, 480, 480], "the first window has both halves"


@pytest.mark.slow
def test_only_rows_that_are_to_run_are_preprocessed(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(60, per_fragment=20)
    table.add_columns({"y": staged.plus_one})
    table.backfill("y", where="x % 3 = 0 AND x < 40", runner="inline")
    assert sorted(trace.rows()) == list(range(0, 40, 3))
    trace.clear()
    table.backfill("y", runner="inline")
    assert sorted(trace.rows()) == [x for x in range(60) if x % 3 or x >= 40]
    assert_right(table, "y", lambda x: 10 * x + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["column", "view"])
@pytest.mark.parametrize("function", [staged.scalar, staged.array], ids=lambda function: function.name)
def test_failures_of_a_stage_and_of_a_call_are_those_of_their_rows(
    make_table: MakeTable, kind: str, function: Any
) -> None:
    bad = {3: RAISE, 11: FAILS_LATER + RAISE, 12: RAISE, 29: FAILS_LATER + RAISE}
    table = make_table([bad.get(row, row) for row in range(30)], per_fragment=10)
    result, values, errors = compute(table, kind, function)
    assert (result.state, result.rows_failed) == ("DONE", 4)
    assert values == [None if row in bad else row + 1 for row in range(30)]
    assert sorted(error.row_address for error in errors) == [3, 1 << 32 | 1, 1 << 32 | 2, 2 << 32 | 9]
    assert {(error.column, error.udf, error.exception) for error in errors} == {
        ("y", function.name, "tests.udfs_for_tests.failing.Unlucky")
    }


@pytest.mark.parametrize("kind", ["column", "view"])
@pytest.mark.parametrize("where", [0, FAILS_LATER])
def test_a_row_that_fails_the_job_is_named_and_the_rows_before_it_are_kept(
    make_table: MakeTable, kind: str, where: int
) -> None:
    function = udf(name="f", version="1", preprocess=fails)(staged.call)
    table = make_table([where + RAISE if row == 17 else row for row in range(30)], per_fragment=10)
    with pytest.raises(JobFailed, match=r"row 7 of fragment 1.*row address 4294967303.*Unlucky"):
        compute(table, kind, function)
    assert threads_of_stages() == []


def fails(x: int) -> int:
    return staged.half(x)


@pytest.mark.parametrize("threads", [1, 3])
def test_several_calls_at_a_time_take_what_was_preprocessed(make_table: MakeTable, threads: int) -> None:
    function = udf(version="1", batch_size=3, num_cpus=2, preprocess=tens)(add_one)
    result, values, _ = compute(make_table(60, per_fragment=20), "column", function, intra_applier_concurrency=threads)
    assert (result.rows_computed, values) == (60, [10 * x + 1 for x in range(60)])


def tens(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 10)


def add_one(ten: pa.Int64Array) -> pa.Int64Array:
    return pc.add(ten, 1)


def test_a_view_preprocesses_for_several_columns_and_for_one_of_another_column(make_table: MakeTable) -> None:
    first = udf(name="first", version="1", preprocess=tens)(add_one)
    second = udf(name="second", version="1", num_cpus=2, preprocess=tens)(add_one)
    third = udf(name="third", version="1", preprocess=tens)(add_one)
    columns = {"id": "id", "a": (first, ["x"]), "b": (second, ["id"]), "c": (third, ["a"])}
    view = make_table(40, per_fragment=10).query().select(columns).create_materialized_view(name="v")
    assert view.refresh(runner="inline").rows_computed == 40
    rows = view.to_arrow().sort_by("id").to_pylist()
    ten = [10 * x + 1 for x in range(40)]
    assert [(row["a"], row["b"]) for row in rows] == list(zip(ten, ten, strict=True))
    assert [row["c"] for row in rows] == [10 * x + 1 for x in ten]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_read_that_fails_ends_the_task_when_the_rows_before_it_are_kept(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    original = reader.read_rows

    def failing(dataset: Any, files: FragmentFiles, *more: Any) -> Any:
        if files.id == 3:
            raise StorageError("the store is away")
        return original(dataset, files, *more)

    @udf(version="1", num_cpus=threads, preprocess=tens)
    def function(ten: pa.Int64Array) -> pa.Int64Array:
        leave_trace(ten)
        return pc.add(ten, 1)

    table = make_table(60, per_fragment=10)
    table.add_columns({"y": function})
    with monkeypatch.context() as patched:
        patched.setattr(reader, "read_rows", failing)
        with pytest.raises(JobFailed, match="the store is away"):
            table.backfill("y", udf=function, runner="inline")
    assert sorted(trace.rows()) == [10 * x for x in range(30)]
    trace.clear()
    table.backfill("y", udf=function, runner="inline")
    assert sorted(trace.rows()) == [10 * x for x in range(30, 60)]
    assert threads_of_stages() == []


def test_what_breaks_in_the_stage_itself_ends_the_task(make_table: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ahead: RowsAhead, *_: Any) -> Any:
        raise MemoryError("no memory to preprocess")

    table = make_table(40, per_fragment=10)
    function = udf(version="1", preprocess=tens)(add_one)
    table.add_columns({"y": function})
    monkeypatch.setattr(RowsAhead, "prepare", broken)
    with pytest.raises(JobFailed, match="no memory to preprocess"):
        table.backfill("y", udf=function, runner="inline")
    assert threads_of_stages() == []


def test_preprocessed_rows_take_no_more_than_their_room(make_table: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets, limit = list[ByteBudget](), 1 << 20
    original = ByteBudget.__init__

    def noting(budget: ByteBudget, limit: int, **options: bool) -> None:
        original(budget, limit, **options)
        budgets.append(budget)

    def widened(x: int) -> bytes:
        return bytes([x % 256]) * 10_000

    @udf(version="1", preprocess=widened, batch_size=4)
    def function(wide: pa.BinaryArray) -> pa.Int64Array:
        return pa.array([value[0] for value in wide.to_pylist()], pa.int64())

    monkeypatch.setattr(ByteBudget, "__init__", noting)
    monkeypatch.setenv("GENEVA_TASK_MEMORY_BYTES", str(limit))
    result, values, _ = compute(make_table(250, per_fragment=50), "column", function)
    assert (result.rows_computed, values) == (250, list(range(250)))
    # Each holds what fits, or one item.
    assert max(budget.most_used for budget in budgets) <= max(limit // 16, 4 * 10_200)


@pytest.mark.slow
def test_workers_are_kept_for_the_next_job_and_given_back(make_table: MakeTable) -> None:
    table = make_table(40, per_fragment=10)
    table.add_columns({"y": staged.InProcesses})
    table.backfill("y", runner="inline")
    pids = {row["stage"] for row in table.to_arrow().column("y").to_pylist()}
    assert 1 <= len(pids) <= 2
    assert pids <= {child.process.pid for child in POOL.idle}


def test_an_estimate_by_a_sample_a_query_and_a_comparison_preprocess_too(make_table: MakeTable) -> None:
    function = udf(version="1", preprocess=tens)(add_one)
    table = make_table(40, per_fragment=10)
    table.add_columns({"y": function})
    plan = table.plan_backfill("y", udf=function)
    assert plan.estimate(sample=5).rows == 40
    rows = table.query().select({"id": "id", "y": (function, ["x"])}).limit(3).to_arrow()
    assert rows.column("y").to_pylist() == [1, 11, 21]


def test_a_column_that_the_stage_cannot_take_is_refused_before_anything_is_added(make_table: MakeTable) -> None:
    def decode(image: bytes) -> int:
        return len(image)

    function = udf(data_type=pa.int64(), name="f", preprocess=decode)(staged.call)
    table = make_table(10)
    with pytest.raises(InvalidInput, match=r"column 'x' of table 'docs': it is int64, and UDF 'f.decode' takes bytes"):
        table.add_columns({"y": (function, ["x"])})
    with pytest.raises(InvalidInput, match=r"expects input columns \['image'\]"):
        table.add_columns({"y": function})
    assert table.lance.schema.names == ["id", "x"]
