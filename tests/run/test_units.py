"""Tasks: every missing row in exactly one unit, in pieces of about the size asked for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.lance_io.fragments import FragmentFiles
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.run.units import Unit, split_fragments, split_into_tasks, tasks_per_slot


def task(fragment: int, due: Ranges, missing: Ranges) -> FragmentTask:
    files = FragmentFiles(fragment, 1_000, "", 0, (), (), (), 0)
    return FragmentTask(files, "never computed", due, missing, len(due))


OFFSETS = st.sets(st.integers(0, 200), min_size=1, max_size=120).map(lambda found: Ranges.from_offsets(sorted(found)))
WORKS = st.lists(st.tuples(OFFSETS, OFFSETS), min_size=1, max_size=12).map(
    lambda pairs: [task(at, due, due & missing) for at, (due, missing) in enumerate(pairs)]
)


@given(WORKS, st.none() | st.integers(1, 150), st.integers(1, 8), st.none() | st.integers(1, 5))
def test_every_missing_row_is_in_exactly_one_unit(
    fragments: list[FragmentTask], task_size: int | None, slots: int, diversity: int | None
) -> None:
    tasks = split_into_tasks(fragments, Sizing(task_size=task_size, task_shuffle_diversity=diversity), slots)
    by_fragment: dict[int, list[Unit]] = {}
    for unit in (unit for task in tasks for unit in task):
        by_fragment.setdefault(unit.task.id, []).append(unit)
    assert set(by_fragment) == {item.id for item in fragments}
    for item in fragments:
        units = by_fragment[item.id]
        if units[0].whole:
            assert [unit.run for unit in units] == [item.due]
        else:
            rows = [offset for unit in units for offset in unit.run.offsets().tolist()]
            assert sorted(rows) == item.missing.offsets().tolist()
    assert [item.id for item in split_fragments(tasks)] == sorted(
        fragment for fragment, units in by_fragment.items() if not units[0].whole
    )


@given(WORKS, st.integers(1, 150))
def test_no_task_is_much_larger_than_asked_for(fragments: list[FragmentTask], task_size: int) -> None:
    for task in split_into_tasks(fragments, Sizing(task_size=task_size), 2):
        rows = sum(len(unit.run if not unit.whole else unit.task.missing) for unit in task)
        assert rows <= 2 * task_size


def test_a_fragment_that_fits_is_not_split() -> None:
    rows = Ranges.of(0, 1_000)
    tasks = split_into_tasks([task(at, rows, rows) for at in range(16)], Sizing(), 2)
    assert all(unit.whole for task in tasks for unit in task)
    assert len(tasks) == 4


@pytest.mark.parametrize(("fragments", "slots"), [(6, 2), (20, 2), (10, 2), (18, 4), (6, 4), (9, 3)])
def test_no_slot_gets_more_fragments_than_its_share(fragments: int, slots: int) -> None:
    rows = Ranges.of(0, 40)
    tasks = split_into_tasks([task(at, rows, rows) for at in range(fragments)], Sizing(), slots)
    most = max(-(-fragments // slots), 1)
    assert idle_share(tasks, np.ones((fragments, 40)), slots) <= 1 - fragments / slots / most + 1e-9


def test_one_large_fragment_is_spread_over_the_slots() -> None:
    rows = Ranges.of(0, 1_000)
    tasks = split_into_tasks([task(0, rows, rows)], Sizing(), 4)
    assert len(tasks) == 8
    assert len(split_fragments(tasks)) == 1


def test_diversity_deals_neighbouring_tasks_from_different_stretches_of_the_table() -> None:
    rows = Ranges.of(0, 10)
    tasks = split_into_tasks(
        [task(at, rows, rows) for at in range(9)], Sizing(task_size=10, task_shuffle_diversity=3), 2
    )
    assert [task[0].task.id for task in tasks] == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_fragments_of_which_only_the_commit_is_left_still_get_a_unit() -> None:
    tasks = split_into_tasks([task(0, Ranges.of(0, 10), Ranges.empty())], Sizing(), 2)
    assert [[unit.whole for unit in task] for task in tasks] == [[True]]


def idle_share(tasks: Sequence[Sequence[Unit]], costs: np.ndarray, slots: int) -> float:
    """The share of the slots' seconds that they are idle when each takes the next task as soon as it is free."""
    free = [0.0] * slots
    for task in tasks:
        cost = sum(costs[unit.task.id][unit.run.offsets()].sum() for unit in task)
        heapq.heappush(free, heapq.heappop(free) + cost)
    return 1 - costs.sum() / slots / max(free)


@pytest.mark.parametrize("fragments", [64, 8, 1])
@pytest.mark.parametrize("skew", ["ascending", "descending", "heavy end", "heavy begin", "random rows"])
def test_slots_are_not_idle_at_the_end_of_a_long_job_whatever_its_rows_cost(fragments: int, skew: str) -> None:
    rows = 16_000
    costs = {
        "ascending": np.linspace(1, 20, rows),
        "descending": np.linspace(20, 1, rows),
        "heavy end": np.where(np.arange(rows) >= rows * 7 // 8, 10.0, 1.0),
        "heavy begin": np.where(np.arange(rows) < rows // 8, 10.0, 1.0),
        "random rows": np.random.default_rng(0).lognormal(0, 1, rows),
    }[skew].reshape(fragments, -1)
    of_fragment = Ranges.of(0, rows // fragments)
    tasks = [task(at, of_fragment, of_fragment) for at in range(fragments)]
    long: Any = SimpleNamespace(slot_seconds=4 * 100.0, rows=rows, num_gpus=None)
    per_slot = tasks_per_slot(long, SimpleNamespace(rows_to_run=rows), 4)  # type: ignore[arg-type]
    assert idle_share(split_into_tasks(tasks, Sizing(), 4, per_slot), costs, 4) <= 0.1


@pytest.mark.parametrize(
    ("seconds", "gpus", "expected"),
    [(None, None, 2), (None, 0.5, 16), (8.0, 1, 2), (160.0, None, 10), (9_999.0, 1, 16)],
)
def test_a_job_has_more_tasks_if_it_takes_long_or_needs_a_gpu(
    seconds: float | None, gpus: float | None, expected: int
) -> None:
    job: Any = SimpleNamespace(slot_seconds=seconds, rows=100, num_gpus=gpus)
    assert tasks_per_slot(job, SimpleNamespace(rows_to_run=100), 4) == expected  # type: ignore[arg-type]


def test_no_work_is_no_task() -> None:
    assert split_into_tasks([], Sizing(), 2) == []
