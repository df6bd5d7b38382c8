"""Adaptive checkpoint sizes: start small, follow the clock, stay within bounds."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.apply.reader import FIRST_ROWS, CheckpointSizer, fixed_width
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.plan.request import check_sizing
from airflow_geneva.errors import InvalidInput

SIZES = st.integers(1, 10_000)
SECONDS = st.just(0.0) | st.floats(1e-9, 100)
STEPS = st.lists(st.tuples(st.integers(0, 5_000), SECONDS), max_size=20)


def test_it_starts_with_the_seeds_hundred_rows() -> None:
    assert CheckpointSizer(2.5).rows == FIRST_ROWS == 100


def test_fast_steps_make_it_grow_tenfold_at_most() -> None:
    sizer = CheckpointSizer(2.5)
    sizer.record(100, 0.000001)
    assert sizer.rows == 1_000
    sizer.record(1_000, 0.0)
    assert sizer.rows == 10_000


def test_slow_steps_make_it_shrink_to_what_fits() -> None:
    sizer = CheckpointSizer(2.0)
    sizer.record(100, 20.0)
    assert sizer.rows == 10


def test_a_short_last_step_does_not_make_it_small() -> None:
    sizer = CheckpointSizer(2.0, rows=5_000)
    sizer.record(1, 0.0001)
    assert sizer.rows == 5_000


def test_steps_without_rows_teach_it_nothing() -> None:
    sizer = CheckpointSizer(2.0)
    sizer.record(0, 1.0)
    assert sizer.rows == FIRST_ROWS


@given(SIZES, SIZES, STEPS)
def test_it_never_leaves_its_bounds(first: int, second: int, steps: list[tuple[int, float]]) -> None:
    least, most = sorted((first, second))
    sizer = CheckpointSizer(1.0, least, most)
    for rows, seconds in steps:
        sizer.record(rows, seconds)
        assert least <= sizer.rows <= most


@given(SIZES, STEPS)
def test_equal_bounds_switch_it_off(size: int, steps: list[tuple[int, float]]) -> None:
    sizer = CheckpointSizer(1.0, size, size)
    for rows, seconds in steps:
        sizer.record(rows, seconds)
    assert sizer.rows == size


@given(st.none() | SIZES, st.none() | SIZES, st.none() | SIZES)
def test_the_smallest_cap_wins_and_the_floor_never_exceeds_it(
    checkpoint_size: int | None, least: int | None, most: int | None
) -> None:
    sizer = CheckpointSizer.of(checkpoint_size, least, most, 10.0)
    cap = sizer.most
    caps = [size for size in (checkpoint_size, most) if size is not None]
    assert cap == (min(caps) if caps else None)
    assert sizer.least <= (cap or sizer.least)
    assert cap is None or sizer.rows <= cap


def test_a_step_is_a_quarter_of_the_interval_so_that_a_checkpoint_is_hardly_late() -> None:
    sizer = CheckpointSizer.of(None, None, None, 10.0)
    assert sizer.seconds == 2.5


def test_rows_of_unknown_width_are_few_until_some_were_seen() -> None:
    fitting = RowsPerBudget(1_000)
    assert fitting.rows == 4
    fitting.record(4, 4)
    assert fitting.rows == 64
    fitting.record(64, 64 * 500)
    assert fitting.rows == 2


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 10_000)), max_size=20))
def test_one_row_always_fits_and_no_more_than_the_last_ones_say(seen: list[tuple[int, int]]) -> None:
    fitting = RowsPerBudget(1_000)
    for rows, size in seen:
        fitting.record(rows, size)
        assert fitting.rows >= 1
        if rows:
            assert fitting.rows == 1 or fitting.rows * size <= 1_000 * rows


@pytest.mark.parametrize(
    ("data_type", "width"),
    [
        (pa.int64(), 8),
        (pa.bool_(), 0.125),
        (pa.decimal128(10, 2), 16),
        (pa.list_(pa.float32(), 384), 1_536),
        (pa.struct({"a": pa.int8(), "b": pa.binary(3)}), 4),
        (pa.uuid(), 16),
        (pa.null(), 0),
        (pa.string(), None),
        (pa.list_(pa.string(), 2), None),
        (pa.dictionary(pa.int8(), pa.string()), None),
        (pa.struct({"a": pa.int8(), "b": pa.list_(pa.int8())}), None),
    ],
    ids=str,
)
def test_types_tell_how_wide_a_value_is_where_all_are_alike(data_type: pa.DataType, width: float | None) -> None:
    assert fixed_width(data_type) == width


def test_the_memory_of_a_task_slot_is_given_or_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_sizing({}).task_memory_bytes == 128 << 20
    monkeypatch.setenv("GENEVA_TASK_MEMORY_BYTES", "5000")
    assert check_sizing({}).task_memory_bytes == 5_000
    assert check_sizing({"task_memory_bytes": 6_000}).task_memory_bytes == 6_000
    with pytest.raises(InvalidInput, match="task_memory_bytes=7 is not valid"):
        check_sizing({"task_memory_bytes": 7})
    monkeypatch.setenv("GENEVA_TASK_MEMORY_BYTES", "128m")
    with pytest.raises(InvalidInput, match="GENEVA_TASK_MEMORY_BYTES='128m' is not a number of bytes"):
        check_sizing({})
