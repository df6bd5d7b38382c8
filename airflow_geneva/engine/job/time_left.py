"""Estimate the remaining time of a running job from its rows and their speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_geneva.engine.display import counted, duration
from airflow_geneva.engine.job.shard_status import AT_WORK, FAILED, QUEUED, STARTING, WAITING, ShardStatus

_USUAL_SPARK_START = 10.0
"""Seconds to start Spark for one shard, until a shard of this job or an earlier job has measured them.

A plan states the interval `SPARK_START` of `estimate.py` instead.
"""

_EXPECTED_SHARE = 0.5
"""The speed of earlier jobs has the weight of this share of a shard's rows."""

_LATE = 0.2


@dataclass(frozen=True)
class TimeLeft:
    """An estimate of the seconds until a job ends.

    Args:
        seconds: the time that is known; a lower bound if something is `unknown`.
        unknown: the part that is not known, as the end of a sentence; "" if there is none.
        waits: whether nothing computes until a person approves it, or a service answers.
        doing: what happens before the first rows: Spark starts, or the function loads a model.
    """

    seconds: float
    unknown: str = ""
    waits: bool = False
    doing: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.doing, self.rest) if part)

    @property
    def rest(self) -> str:
        """The time left, without what it is spent on."""
        if self.doing and self.unknown:  # the time known is that of an unmeasured start
            return f"then {self.unknown}"
        if not self.unknown:
            return "almost done" if self.seconds < 0.5 else f"about {format_duration(self.seconds)} left"
        begin = f"at least {format_duration(self.seconds)} left, then " if self.seconds >= 1 else ""
        return f"{begin}{self.unknown}"


def estimate_time_left(
    shards: Sequence[ShardStatus], expected: Mapping[str, Any], on_spark: bool, now: float
) -> TimeLeft:
    """Add up the remaining time of each shard: its rows at their speed, and the start of Spark if it has not begun.

    A running shard is expected to continue at its speed so far, weighted with that of earlier jobs. For other shards,
    start and speed are the mean of the shards that have one, or those of earlier jobs. The number of shards that run at
    once is expected to stay.

    Args:
        expected: ``start_seconds`` and ``rows_per_second`` of a shard in earlier jobs with the same code; both may be
            missing.
        now: seconds since the epoch.
    """
    before = float(expected.get("rows_per_second", 0.0))
    default = float(expected.get("start_seconds", _USUAL_SPARK_START if on_spark else 0.0))
    start = _mean([shard.start_seconds for shard in shards if shard.start_seconds is not None], default)
    speeds = (shard.rows_per_second or shard.applied_per_second for shard in shards)
    speed = _mean([speed for speed in speeds if speed > 0], before)
    at_work, queued, unmeasured = [0.0], 0.0, 0
    for shard in shards:
        if shard.step not in (WAITING, FAILED, *AT_WORK):
            continue
        rows, done, own = shard.rows_to_compute, shard.rows_computed + shard.rows_failed, shard.rows_per_second
        seconds = rows / speed if speed else 0.0
        if own:
            share = _EXPECTED_SHARE * shard.rows if before else 0.0
            seconds = rows * (done / own + share / (before or 1.0)) / (done + share)
        elif not speed:
            unmeasured += rows
        if shard.step in (WAITING, FAILED):
            queued += seconds + start
        elif not done:
            at_work.append(seconds + (0.0 if shard.since is None else _rest(start, now - shard.since)))
        else:
            at_work.append(_rest(seconds, now - (shard.seen or now)) if seconds else 0.0)
    works = [shard for shard in shards if shard.step in (*AT_WORK, "committing")]
    unknown = f"{counted(unmeasured, 'row')}, and how long one takes is not known yet" if unmeasured else ""
    doing = _before_the_first_rows(works, on_spark, now)
    if any(shard.step == QUEUED for shard in shards):
        unknown = "an unknown wait for a Spark executor"
    if submitted := sum(shard.rows_submitted for shard in shards):
        unknown = f"{counted(submitted, 'row')} with the service, which says when it answers"
    waits = bool(submitted) and all(shard.rows_submitted for shard in works)
    return TimeLeft(max(*at_work, (sum(at_work) + queued) / max(len(at_work) - 1, 1)), unknown, waits, doing)


def _before_the_first_rows(works: Sequence[ShardStatus], on_spark: bool, now: float) -> str:
    """Say what the shards at work do and since when; "" once one of them has computed rows."""
    if not works or any(shard.rows_computed or shard.rows_failed for shard in works):
        return ""
    if on_spark and all(shard.step == STARTING for shard in works):
        began = min(shard.since or now for shard in works)
        return f"Spark is starting ({duration(max(now - began, 0.0))} so far)"
    if all(shard.step == "applying" and shard.samples and not shard.rows_submitted for shard in works):
        began = min(shard.samples[0][0] for shard in works)
        return f"loading the function ({duration(max(now - began, 0.0))} so far)"
    return ""


def _rest(expected: float, passed: float) -> float:
    """Return the rest of an expected time; late work is expected to take at least `_LATE` times the passed time."""
    return max(expected - max(passed, 0.0), _LATE * passed)


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"
