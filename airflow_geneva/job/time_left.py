"""How long a job that runs will still take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_geneva.display import counted
from airflow_geneva.job.shard_status import FAILED, QUEUED, STARTING, WAITING, ShardStatus
from airflow_geneva.job.trend import rest_of

SPARK_START = 10.0
"""Seconds to start Spark for one shard, while no shard of this job or of an earlier one says more."""

_EXPECTED_SHARE = 0.5
"""What earlier jobs took counts as much as this share of a shard's rows would."""


@dataclass(frozen=True)
class TimeLeft:
    """An estimate of the seconds until a job ends.

    Args:
        seconds: with all that is known; at least so many if something is `unknown`.
        unknown: what is not known, as the end of a sentence; "" if nothing.
        waits: whether nothing computes until a person approves it, or a service answers.
    """

    seconds: float
    unknown: str = ""
    waits: bool = False

    def __str__(self) -> str:
        if not self.unknown:
            if self.seconds < 0.5:
                return "almost done"
            return f"about {format_duration(self.seconds)} left"
        begin = f"at least {format_duration(self.seconds)} left, then " if self.seconds >= 1 else ""
        return f"{begin}{self.unknown}"


def estimate_time_left(
    shards: Sequence[ShardStatus], expected: Mapping[str, Any], on_spark: bool, now: float
) -> TimeLeft:
    """Estimate how long a job still takes that has not ended.

    A shard that computes goes on as its rows did, and in part as those of earlier jobs. One that has not begun starts
    Spark first, which takes as long as for the job's other shards or for earlier jobs; its rows take what they take in
    the other shards or took in earlier jobs. As many shards run at once as do now.

    Args:
        expected: of earlier jobs with the same code: ``start_seconds`` of a shard, and ``rows_per_second`` of one; they
            may be missing.
        now: seconds since the epoch.
    """
    start = _mean([shard.start_seconds for shard in shards if shard.start_seconds is not None])
    if start is None:
        start = float(expected.get("start_seconds", SPARK_START if on_spark else 0.0))
    before = float(expected.get("rows_per_second", 0.0))
    speeds = [shard.rows_per_second or shard.applied_per_second for shard in shards]
    speed = _mean([speed for speed in speeds if speed > 0]) or before
    at_work, queued, unmeasured = [0.0], 0.0, 0
    for shard in shards:
        if shard.stage not in (WAITING, STARTING, QUEUED, FAILED, "applying"):
            continue
        rows = max(shard.rows - shard.rows_checkpointed - shard.rows_failed, 0)
        own, seconds = shard.seconds_left, rows / speed if speed else 0.0
        if shard.stage in (WAITING, FAILED):
            seconds += start
        elif not shard.rows_computed + shard.rows_failed:
            seconds += rest_of(start, max(now - shard.since, 0.0)) if shard.since is not None else 0.0
        else:
            seconds = seconds if own is None else own * _slower(shard, before)
            if seconds and shard.seen is not None:
                seconds = rest_of(seconds, max(now - shard.seen, 0.0))
        if rows and own is None and not speed:
            unmeasured += rows
        if shard.stage in (STARTING, QUEUED, "applying"):
            at_work.append(seconds)
        else:
            queued += seconds
    width = max(len(at_work) - 1, 1)
    unknown = f"{counted(unmeasured, 'row')}, and how long one takes is not known yet" if unmeasured else ""
    if any(shard.stage == QUEUED for shard in shards):
        unknown = "an unknown wait for a Spark executor"
    if submitted := sum(shard.rows_submitted for shard in shards):
        unknown = f"{counted(submitted, 'row')} with the service, which says when it answers"
    works = [shard for shard in shards if shard.stage in (STARTING, QUEUED, "applying", "committing")]
    waits = bool(submitted) and all(shard.rows_submitted for shard in works)
    return TimeLeft(max(max(at_work), (sum(at_work) + queued) / width), unknown, waits)


def _slower(shard: ShardStatus, before: float) -> float:
    """Return how much longer rows take than until now, if in part they are as in earlier jobs."""
    if not before or not shard.rows_per_second:
        return 1.0
    done, expected = shard.rows_computed + shard.rows_failed, _EXPECTED_SHARE * shard.rows
    return (done + expected * shard.rows_per_second / before) / (done + expected)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"
