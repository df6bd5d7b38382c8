"""Units of work, and how a shard is split into tasks: whole fragments if possible, parts of large fragments if not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import Sizing
from airflow_geneva.plan.shard import FragmentWork


@dataclass(frozen=True)
class Unit:
    """Work on one fragment within a task.

    Args:
        work: the fragment.
        run: physical offsets that this unit computes.
        whole: whether it also stages the fragment's data file.
    """

    work: FragmentWork
    run: Ranges
    whole: bool

    @property
    def rows(self) -> int:
        return len(self.run)


@dataclass(frozen=True)
class UnitReport:
    """The result of a unit.

    Args:
        fragment: fragment id.
        rows_run: number of rows that the UDF ran on.
        staged: whether the fragment's data file is staged.
    """

    fragment: int
    rows_run: int
    staged: bool


RunUnit: TypeAlias = Callable[[Unit, Callable[[int], None]], UnitReport]
"""Runs one unit, and reports rows as they are computed."""


@dataclass
class RowCount:
    """Counts the computed rows of a unit, and passes the count on."""

    on_rows: Callable[[int], None]
    rows: int = 0

    def __call__(self, rows: int) -> None:
        self.rows += rows
        self.on_rows(rows)


def whole_unit(work: FragmentWork) -> Unit:
    return Unit(work, work.due, True)


def split_into_tasks(works: Sequence[FragmentWork], sizing: Sizing, slots: int) -> list[tuple[Unit, ...]]:
    """Group fragments into tasks of about ``task_size`` rows, and split fragments that are much larger.

    Args:
        works: fragments that need computing.
        slots: number of tasks that run at the same time.
    """
    if not works:
        return []
    rows = sum(len(work.missing) for work in works)
    size = sizing.task_size or max(rows // max(slots, 1) // 2, 1)
    # Splitting costs a second pass over the fragment, so some imbalance is cheaper unless the user set a size.
    splits_above = size if sizing.task_size else 2 * size
    tasks: list[tuple[Unit, ...]] = []
    group: list[Unit] = []
    grouped = 0
    for work in _shuffled(works, sizing.task_shuffle_diversity):
        if len(work.missing) > splits_above:
            tasks.extend((part,) for part in _split(work, size))
            continue
        group.append(whole_unit(work))
        grouped += max(len(work.missing), 1)
        if grouped >= size:
            tasks.append(tuple(group))
            group, grouped = [], 0
    if group:
        tasks.append(tuple(group))
    return tasks


def split_fragments(tasks: Sequence[Sequence[Unit]]) -> list[FragmentWork]:
    """Return the fragments that were split over several units, and still have to be staged."""
    found = {unit.work.id: unit.work for task in tasks for unit in task if not unit.whole}
    return [found[key] for key in sorted(found)]


def _split(work: FragmentWork, size: int) -> list[Unit]:
    parts = -(-len(work.missing) // size)
    step = -(-len(work.missing) // parts)
    offsets = work.missing.offsets()
    has_limit = [int(offsets[i]) for i in range(0, len(offsets), step)] + [int(offsets[-1]) + 1]
    return [Unit(work, work.missing.within(a, b), False) for a, b in pairwise(has_limit)]


def _shuffled(works: Sequence[FragmentWork], diversity: int | None) -> list[FragmentWork]:
    """Take fragments from ``diversity`` stretches of the table in turn, so that slow ones are not in one task."""
    if not diversity or diversity <= 1:
        return list(works)
    length = -(-len(works) // diversity)
    stretches = [works[at : at + length] for at in range(0, len(works), length)]
    return [stretch[i] for i in range(length) for stretch in stretches if i < len(stretch)]
