"""Windows of rows are cut into batches by weight; what a job computes and says does not depend on how."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, strategies as st

from airflow_geneva import Table, connect
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.udf import UDF, Skip, udf
from airflow_geneva.errors import InvalidInput, JobFailed, UdfError
from tests.support.processes import as_another_process
from tests.udfs_for_tests import heavy
from tests.udfs_for_tests.heavy import LIMIT, MEMORY, calls, padded

MakeTable = Callable[..., Table]
WEIGHTS = [7, 0, 31, 100, 3, 3, 250, 12, 48, 1, 9, 50]


@pytest.fixture(autouse=True)
def nothing_learned() -> None:
    as_another_process()


def run(function: UDF, values: Sequence[int | None], **columns: Sequence[Any]) -> MappedBatch:
    with open_batch_mapper(function) as mapper:
        return mapper(pa.record_batch({"x": pa.array(values, pa.int64()), **columns}))


def weights(rows: int, seed: int = 1) -> list[int]:
    """Weights of rows in no order, and most of them small."""
    pick = random.Random(seed)
    return [min(int(pick.expovariate(0.1)), LIMIT) for _ in range(rows)]


def model_of(seen: list[list[int]], **settings: Any) -> UDF:
    def function(x: pa.Int64Array) -> pa.Array:
        seen.append(x.to_pylist())
        return pc.multiply(x, 2)

    return udf(data_type=pa.int64(), name="model", version="1", **settings)(function)


# How a window is cut


def test_rows_of_similar_weight_are_called_together_and_results_are_in_the_order_of_the_rows() -> None:
    seen: list[list[int]] = []
    assert run(model_of(seen, batch_by="x", batch_limit=100), WEIGHTS).values.to_pylist() == [2 * x for x in WEIGHTS]
    assert seen == [[250], [100], [50, 48], [31, 12, 9], [7, 3, 3, 1, 0]]


def test_without_a_limit_a_call_is_a_sorted_window_and_batch_size_bounds_its_rows() -> None:
    seen: list[list[int]] = []
    model = model_of(seen, batch_by="x")
    assert run(model, WEIGHTS).values.to_pylist() == [2 * x for x in WEIGHTS]
    assert seen == [sorted(WEIGHTS, reverse=True)]
    with open_batch_mapper(model, batch_size=5) as mapper:
        mapper(pa.record_batch({"x": WEIGHTS}))
    assert [len(call) for call in seen[1:]] == [5, 5, 2]


@given(
    st.lists(st.integers(0, 300) | st.none(), max_size=60),
    st.none() | st.integers(1, 500),
    st.none() | st.integers(1, 20),
)
def test_every_row_is_called_once_and_no_call_is_padded_beyond_the_limit(
    values: list[int | None], limit: int | None, most: int | None
) -> None:
    seen: list[list[int | None]] = []
    with open_batch_mapper(model_of(seen, batch_by="x", batch_limit=limit), batch_size=most) as mapper:  # type: ignore[arg-type]
        mapped = mapper(pa.record_batch({"x": pa.array(values, pa.int64())}))
    assert mapped.values.to_pylist() == [None if x is None else 2 * x for x in values]
    assert mapped.rows_called == len(values)
    numbers = [[x or 0 for x in call] for call in seen]
    assert sorted(chain.from_iterable(numbers)) == sorted(x or 0 for x in values)
    assert all(len(call) == 1 or padded(call) <= (limit or 10**9) for call in numbers)
    assert all(len(call) <= (most or 10**9) for call in numbers)
    for call, after in pairwise(numbers):
        assert min(call) >= max(after)
        # A call is as large as it may be.
        assert len(call) == most or max(call) * (len(call) + 1) > (limit or 10**9)


def length(x: int) -> int:
    return x


def lengths(x: pa.Int64Array) -> pa.Array:
    return x


def lengths_of_batch(batch: pa.RecordBatch) -> pa.Array:
    return batch.column("x")


@pytest.mark.parametrize(
    "batch_by", [length, lengths, lengths_of_batch, "x", "weight"], ids=["value", "array", "batch", "input", "other"]
)
def test_a_weight_is_a_function_of_the_inputs_or_an_input(batch_by: Any) -> None:
    seen: list[list[int]] = []

    def of_arrays(weight: pa.Int64Array) -> pa.Array:
        seen.append(weight.to_pylist())
        return weight

    def of_batch(batch: pa.RecordBatch) -> pa.Array:
        seen.append(batch.column("x").to_pylist())
        return batch.column("x")

    settings = {"data_type": pa.int64(), "version": "1", "input_columns": ["x"], "batch_limit": 100}
    for function in [of_arrays, of_batch] if batch_by != "weight" else [of_arrays]:
        seen.clear()
        run(udf(batch_by=batch_by, name="f", **settings)(function), WEIGHTS)
        assert seen == [[250], [100], [50, 48], [31, 12, 9], [7, 3, 3, 1, 0]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_limit": 5}, "batch_by does not say"),
        ({"batch_by": "z"}, "none of its inputs"),
        ({"batch_by": 5}, "is no function"),
        ({"batch_by": lambda a, b: 1}, r"takes \['a', 'b'\]"),
        ({"batch_by": "x", "batch_limit": 0}, "batch_limit=0"),
        ({"out_of_memory": "MyError"}, "give an exception class"),
    ],
)
def test_what_cannot_be_a_weight_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        model_of([], **settings).resolve_inputs()


def test_a_function_of_one_row_has_no_batches() -> None:
    with pytest.raises(InvalidInput, match="is called on one row at a time"):
        udf(data_type=pa.int64(), batch_by="x", name="f")(lambda x: x)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_rows_are_weighed_by_what_their_stage_returns(policy: Any) -> None:
    seen: list[list[int]] = []

    def decode(text: str) -> int:
        return int(text)

    def function(x: pa.Int64Array) -> pa.Array:
        seen.append(x.to_pylist())
        return pc.multiply(x, 2)

    settings = {"data_type": pa.int64(), "name": f"f_{policy}", "version": "1", "batch_by": "x", "batch_limit": 100}
    model = udf(preprocess=decode, on_error=policy, **settings)(function)  # type: ignore[call-overload]
    texts = list(map(str, WEIGHTS))
    with open_batch_mapper(model) as mapper:
        if policy == "skip":
            texts[2] = "no number"
        mapped = mapper(pa.record_batch({"text": texts}))
    expected = [None if text == "no number" else 2 * int(text) for text in texts]
    assert mapped.values.to_pylist() == expected
    assert [failure.index for failure in mapped.failures] == ([2] if policy == "skip" else [])
    if policy == "fail":
        assert seen == [[250], [100], [50, 48], [31, 12, 9], [7, 3, 3, 1, 0]]
    with pytest.raises(InvalidInput, match="none of its inputs"):
        udf(preprocess=decode, **{**settings, "batch_by": "text"})(function).resolve_inputs()  # type: ignore[call-overload]


# Rows that fail


def failing_on(bad: set[int], on_error: Any, seen: list[list[int]]) -> UDF:
    def function(x: pa.Int64Array) -> pa.Array:
        seen.append(x.to_pylist())
        if bad & set(x.to_pylist()):
            raise ValueError("bad")
        return pc.multiply(x, 2)

    settings = {"batch_by": lambda x: x % 10, "batch_limit": 20, "on_error": on_error}
    return udf(data_type=pa.int64(), name="f", version="-".join(map(str, sorted(bad))), **settings)(function)


@given(st.sets(st.integers(0, 39), min_size=1, max_size=6))
def test_the_first_row_that_fails_fails_the_job_and_all_rows_before_it_are_computed(bad: set[int]) -> None:
    seen: list[list[int]] = []
    with pytest.raises(UdfError, match="bad") as failed:
        run(failing_on(bad, "fail", seen), range(40))
    first = min(bad)
    assert failed.value.row_index == first
    assert failed.value.computed is not None
    assert failed.value.computed.to_pylist() == [2 * x for x in range(first)]


def test_rows_that_fail_are_skipped_each_at_its_place() -> None:
    mapped = run(failing_on({5, 17, 39}, "skip", []), range(40))
    assert mapped.values.to_pylist() == [None if x in (5, 17, 39) else 2 * x for x in range(40)]
    assert [failure.index for failure in mapped.failures] == [5, 17, 39]


@pytest.mark.parametrize("policy", ["fail", "skip", [Skip(TypeError)]], ids=str)
def test_a_row_that_cannot_be_weighed_fails_as_if_the_function_had_raised(policy: Any) -> None:
    def weigh(x: int) -> int:
        if x == 7:
            raise ValueError("no weight")
        return x

    def function(x: pa.Int64Array) -> pa.Array:
        return pc.multiply(x, 2)

    model = udf(data_type=pa.int64(), name="f", version="1", batch_by=weigh, on_error=policy)(function)
    if policy == "skip":
        mapped = run(model, range(12))
        assert mapped.values.to_pylist() == [None if x == 7 else 2 * x for x in range(12)]
        assert [(one.index, one.exception) for one in mapped.failures] == [(7, "builtins.ValueError")]
    else:
        with pytest.raises(UdfError, match="raised ValueError on row 7 of a batch of 12: no weight") as failed:
            run(model, range(12))
        assert failed.value.row_index == 7
        assert failed.value.computed.to_pylist() == [2 * x for x in range(7)]  # type: ignore[union-attr]


# What does not fit into the device's memory


def test_what_does_not_fit_is_halved_once_and_the_next_calls_are_no_larger(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[list[int]] = []

    def function(x: pa.Int64Array) -> pa.Array:
        seen.append(x.to_pylist())
        if padded(x.to_pylist()) > MEMORY:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return pc.multiply(x, 2)

    model = udf(data_type=pa.int64(), name="model", version="1", batch_by="x", batch_limit=80)(function)
    assert run(model, [10] * 8 + [5] * 20).values.to_pylist() == [20] * 8 + [10] * 20
    assert seen == [[10] * 8, [10] * 4, [10] * 4, [5] * 8, [5] * 8, [5] * 4]
    assert "From now on this process calls it with at most a weight of 40." in caplog.text
    seen.clear()
    with pytest.raises(UdfError, match="on row 0 of a batch of 1: CUDA") as failed:
        run(model, [3, 99, 4])
    assert failed.value.row_index == 1
    seen.clear()
    run(model, [5] * 16)
    assert [len(call) for call in seen] == [8, 8], "a row that does not fit alone says nothing about others"


def test_a_function_names_what_its_device_raises() -> None:
    class NoRoom(Exception):
        pass

    seen: list[int] = []

    def function(x: pa.Int64Array) -> pa.Array:
        seen.append(len(x))
        if len(x) > 3:
            raise NoRoom
        return x

    model = udf(data_type=pa.int64(), name="model", version="1", out_of_memory=NoRoom)(function)
    assert run(model, range(8)).values.to_pylist() == list(range(8))
    assert run(model, range(6)).values.to_pylist() == list(range(6))
    assert seen == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2]


def test_what_a_failed_call_held_is_let_go_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        alive = 0

        def __init__(self) -> None:
            Tensor.alive += 1

        def __del__(self) -> None:
            Tensor.alive -= 1

    alive: list[int] = []

    def function(x: pa.Int64Array) -> pa.Array:
        alive.append(Tensor.alive)
        tensor = Tensor()
        if len(x) > 2:
            raise MemoryError(f"out of memory beside {tensor}")
        return x

    run(udf(data_type=pa.int64(), name="model", version="1")(function), range(8))
    assert set(alive) == {0}


# Jobs


def make_heavy(make_table: MakeTable, tmp_path: Path, rows: int, per_fragment: int) -> tuple[Table, Path]:
    log = tmp_path / "log"
    table = make_table(weights(rows), per_fragment, log=pa.array([str(log)] * rows))
    return table, log


def assert_doubled(table: Table) -> None:
    values = table.to_arrow()
    assert values.column("y").to_pylist() == [2 * x for x in values.column("x").to_pylist()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [heavy.by_column, heavy.in_a_worker, heavy.without_waiting],
    ids=["by_column", "in_a_worker", "without_waiting"],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_column_is_the_same_whatever_way_it_is_called(
    make_table: MakeTable, tmp_path: Path, function: UDF, threads: int
) -> None:
    table, log = make_heavy(make_table, tmp_path, 300, 100)
    table.add_columns({"y": function})
    result = table.backfill("y", runner="inline", intra_applier_concurrency=threads, batch_size=20)
    assert (result.state, result.rows_computed, result.rows_run) == ("DONE", 300, 300)
    assert_doubled(table)
    assert sorted(chain.from_iterable(calls(log))) == sorted(weights(300))
    assert all(padded(call) <= LIMIT and len(call) <= 20 for call in calls(log))
    # A fragment of 100 rows in their own order would take more calls.
    assert len(calls(log)) < 3 * len(plain_cuts(weights(100))) * 0.7


def plain_cuts(values: Sequence[int]) -> list[list[int]]:
    """What a loop makes that takes rows as they come, and pads each call to its heaviest row."""
    cuts: list[list[int]] = [[]]
    for value in values:
        if cuts[-1] and padded([*cuts[-1], value]) > LIMIT:
            cuts.append([])
        cuts[-1].append(value)
    return cuts


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["column", "view"])
def test_tasks_cut_batches_too(kind: str, spark: object, make_table: MakeTable, tmp_path: Path) -> None:
    table, log = make_heavy(make_table, tmp_path, 300, 100)
    if kind == "column":
        table.add_columns({"y": heavy.by_column})
        assert table.backfill("y", runner="spark").rows_computed == 300
        assert_doubled(table)
    else:
        query = table.query().select(["x"]).add_columns({"y": heavy.by_column})
        view = query.create_materialized_view(connect(tmp_path / "db"), "v")
        assert view.refresh(runner="spark").rows_computed == 300
        assert_doubled(view)  # type: ignore[arg-type]
    assert sorted(chain.from_iterable(calls(log))) == sorted(weights(300))
    assert all(padded(call) <= LIMIT for call in calls(log))


def test_a_view_sorts_for_one_function_and_keeps_the_batch_size_of_another(
    make_table: MakeTable, tmp_path: Path
) -> None:
    table, log = make_heavy(make_table, tmp_path, 300, 100)
    sizes: list[int] = []

    @udf(data_type=pa.int64(), version="1", batch_size=7)
    def other(x: pa.Int64Array) -> pa.Array:
        sizes.append(len(x))
        return x

    view = (
        table.query().select(["x"]).add_columns({"y": heavy.by_column, "z": other})
        .create_materialized_view(connect(tmp_path / "db"), "v")
    )  # fmt: skip
    assert view.refresh(runner="inline").rows_computed == 300
    assert_doubled(view)  # type: ignore[arg-type]
    assert all(padded(call) <= LIMIT for call in calls(log))
    assert (max(sizes), sum(sizes)) == (7, 300)


def test_a_job_learns_what_fits_from_the_jobs_before_it(make_table: MakeTable, tmp_path: Path) -> None:
    table, log = make_heavy(make_table, tmp_path, 200, 100)
    table.lance.update({"x": "x % 20"})
    table.add_columns({"y": heavy.SmallDevice})
    table.backfill("y", runner="inline", max_rows=100)
    assert [call for call in calls(log) if padded(call) > MEMORY]
    log.unlink()
    as_another_process()
    assert table.backfill("y", runner="inline").rows_computed == 100
    assert_doubled(table)
    assert all(padded(call) <= MEMORY for call in calls(log))


def test_a_failed_row_keeps_its_address_and_the_job_keeps_what_was_computed(
    make_table: MakeTable, tmp_path: Path
) -> None:
    table = make_table(100, per_fragment=50)
    seen: list[list[int]] = []
    table.add_columns({"y": failing_on({73}, "fail", seen)})
    with pytest.raises(JobFailed, match=r"failed at row 23 of fragment 1 \(row address 4294967319\)"):
        table.backfill("y", runner="inline")
    seen.clear()
    table.alter_columns({"y": failing_on({1000}, "fail", seen)})
    result = table.backfill("y", runner="inline", continue_from="73")
    assert result.rows_run == sum(map(len, seen)) <= 100 - 73
    assert table.to_arrow().column("y").to_pylist() == [2 * x for x in range(100)]
