"""Shards: as few as possible, never more than Airflow can map."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from airflow_geneva.engine.lance_io.fragments import FragmentFiles
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks, Shard, cut_shards, fragments_per_commit
from airflow_geneva.errors import InvalidInput

ROWS = Ranges.of(0, 10)


def task(fragment: int) -> FragmentTask:
    return FragmentTask(FragmentFiles(fragment, 10, "", 0, (), (), (), 0), "never computed", ROWS, ROWS, 10)


def assert_partition(shards: tuple[Shard, ...], fragments: int) -> None:
    assert [part.id for shard in shards for part in shard.fragments] == list(range(fragments))
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(shard.fragments for shard in shards)


@pytest.mark.parametrize(
    ("fragments", "shards", "commits"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (4_000, 1, 63),
        (4_096, 1, 64),
        (4_097, 2, 100),
        (100_000, 25, 100),
        pytest.param(300_000, 64, 100, marks=pytest.mark.slow),
    ],
)
def test_unasked_there_are_few_shards_and_about_a_hundred_commits(fragments: int, shards: int, commits: int) -> None:
    made = cut_shards(FragmentTasks(task(at) for at in range(fragments)), None)
    assert len(made) == shards
    assert_partition(made, fragments)
    assert fewest_commits(made) <= commits


@pytest.mark.parametrize(("fragments", "size", "shards"), [(10, 3, 4), (10, 100, 1), (1_024, 1, 1_024), (0, 1, 0)])
def test_a_size_that_was_asked_for_is_kept(fragments: int, size: int, shards: int) -> None:
    made = cut_shards(FragmentTasks(task(at) for at in range(fragments)), size)
    assert len(made) == shards
    assert_partition(made, fragments)


def test_fragments_come_in_order_whatever_the_order_of_the_plan() -> None:
    assert_partition(cut_shards(FragmentTasks(task(at) for at in reversed(range(9))), 2), 9)


def test_more_shards_than_airflow_maps_are_refused_with_the_size_that_fits() -> None:
    with pytest.raises(InvalidInput, match="Use shard_size=2 or more"):
        cut_shards(FragmentTasks(task(at) for at in range(1_025)), 1)
    assert len(cut_shards(FragmentTasks(task(at) for at in range(1_025)), 2)) == 513


def test_of_many_small_shards_each_is_a_commit() -> None:
    assert fewest_commits(cut_shards(FragmentTasks(task(at) for at in range(50_000)), 100)) == 500


def fewest_commits(shards: Sequence[Shard]) -> int:
    counts = [len(shard.fragments) for shard in shards]
    return sum(-(-count // fragments_per_commit(count, len(shards))) for count in counts)


def test_a_commit_covers_64_fragments_where_there_are_few() -> None:
    assert fragments_per_commit(10, 1) == fragments_per_commit(6_400, 1) == 64
