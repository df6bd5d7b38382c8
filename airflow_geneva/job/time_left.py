"""How long a job that runs will still take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_geneva.job.shard_status import FAILED, STARTING, WAITING, ShardStatus

SPARK_START = 10.0
"""Seconds to start Spark for one shard, while no shard of this job or of an earlier one says more."""

_LATE = 0.2
_MOST_UNSEEN = 30.0


@dataclass(frozen=True)
class TimeLeft:
    """An estimate of the seconds until a job ends.

    Args:
        seconds: with all that is known; at least so many if something is `unknown`.
        unknown: what is not known, as the end of a sentence; "" if nothing.
    """

    seconds: float
    unknown: str = ""

    def __str__(self) -> str:
        if not self.unknown:
            return f"about {format_duration(self.seconds)} left"
        begin = f"at least {format_duration(self.seconds)} left, then " if self.seconds >= 1 else ""
        return f"{begin}{self.unknown}"


def estimate_time_left(
    shards: Sequence[ShardStatus], expected: Mapping[str, Any], on_spark: bool, now: float
) -> TimeLeft:
    """Estimate how long a job still takes that has not ended.

    A shard that computes goes on at its speed. One that has not begun starts Spark first, which takes as long as for
    the job's other shards or for earlier jobs; its rows take what they take in the other shards or took in earlier
    jobs. As many shards run at once as do now.

    Args:
        expected: of earlier jobs with the same code: ``start_seconds`` of a shard, and ``rows_per_second`` of one; they
            may be missing.
        now: seconds since the epoch.
    """
    start = _mean([shard.start_seconds for shard in shards if shard.start_seconds is not None])
    if start is None:
        start = float(expected.get("start_seconds", SPARK_START if on_spark else 0.0))
    running = [shard.rows_per_second for shard in shards if shard.rows_per_second > 0]
    done = [shard.applied_per_second for shard in shards if shard.applied_per_second > 0]
    speed = _mean(running) or _mean(done) or float(expected.get("rows_per_second", 0.0))
    at_work, queued, unmeasured = [0.0], 0.0, 0
    for shard in shards:
        if shard.stage not in (WAITING, STARTING, FAILED, "applying"):
            continue
        rows = max(shard.rows - shard.rows_checkpointed - shard.rows_failed, 0)
        own, seen, begin = shard.rows_per_second or speed, 0.0, start
        if shard.stage == STARTING and shard.since is not None:
            waited = max(now - shard.since, 0.0)
            # What takes longer than expected is not expected to end at once.
            begin = max(start - waited, _LATE * waited)
        elif shard.stage == "applying":
            begin = 0.0
            if shard.rows_per_second and shard.seen is not None:
                seen = min(max(now - shard.seen, 0.0), _MOST_UNSEEN)
        if rows and not own:
            unmeasured += rows
        seconds = begin + (max(rows / own - seen, 0.0) if own else 0.0)
        if shard.stage in (STARTING, "applying"):
            at_work.append(seconds)
        else:
            queued += seconds
    width = max(len(at_work) - 1, 1)
    unknown = f"{unmeasured:,} rows, and how long one takes is not known yet" if unmeasured else ""
    return TimeLeft(max(max(at_work), (sum(at_work) + queued) / width), unknown)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"
