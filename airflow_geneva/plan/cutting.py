"""Cut a plan into shards, and a shard into commits."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_geneva.errors import InvalidInput
from airflow_geneva.plan.shard import FragmentWork, Shard

FRAGMENTS_PER_SHARD = 4_096
SHARDS_UNASKED = 64
MOST_SHARDS = 1_024
COMMITS_UNASKED = 100
FRAGMENTS_PER_COMMIT = 64


def cut_shards(works: Sequence[FragmentWork], shard_size: int | None) -> tuple[Shard, ...]:
    """Group fragments into shards.

    Args:
        shard_size: fragments per shard; None: as few shards as possible, because each costs a spark-submit.

    Raises:
        InvalidInput: the shard size would need more shards than Airflow can map.
    """
    ordered = sorted(works, key=lambda work: work.id)
    size = shard_size
    if size is None:
        size = max(FRAGMENTS_PER_SHARD, -(-len(ordered) // SHARDS_UNASKED))
    elif -(-len(ordered) // size) > MOST_SHARDS:
        least = -(-len(ordered) // MOST_SHARDS)
        raise InvalidInput(
            f"shard_size={size} would cut {len(ordered):,} fragments into more than {MOST_SHARDS:,} shards, which is "
            f"as many mapped tasks as Airflow allows. Use shard_size={least} or more, or leave it out."
        )
    return tuple(Shard(i, tuple(ordered[at : at + size])) for i, at in enumerate(range(0, len(ordered), size)))


def fragments_per_commit(fragments: int, shards: int) -> int:
    """Return the default for the fewest fragments per commit, except a shard's last commit.

    Every commit rewrites the whole manifest. With this default, a backfill makes at most about 100 commits, or one per
    shard.

    Args:
        fragments: number of fragments of the shard.
        shards: number of shards of the plan.
    """
    return max(FRAGMENTS_PER_COMMIT, -(-fragments // max(COMMITS_UNASKED // shards, 1)))
