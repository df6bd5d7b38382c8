"""The speed of a job over time, as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from airflow_geneva.job.shard_status import ShardStatus

_STEPS = 60
WIDTH, HEIGHT = 600, 80


@dataclass(frozen=True)
class SpeedChart:
    """Rows per second of all shards together, over the time from `began` to `ended`."""

    began: float
    ended: float
    speeds: tuple[float, ...]

    @cached_property
    def most(self) -> float:
        return max(self.speeds)

    @property
    def outline(self) -> str:
        """The points of an SVG polygon; each speed is as wide as its part of the time."""
        step = WIDTH / len(self.speeds)
        tops = [(i, HEIGHT * (1 - speed / (self.most or 1.0))) for i, speed in enumerate(self.speeds)]
        points = [f"{x:.1f},{y:.1f}" for i, y in tops for x in (i * step, (i + 1) * step)]
        return " ".join([f"0,{HEIGHT}", *points, f"{WIDTH},{HEIGHT}"])


def chart_speed(shards: Sequence[ShardStatus]) -> SpeedChart | None:
    """Add up the speeds of shards, which may run at the same time; None if too little is known."""
    known = [np.array(shard.samples).T for shard in shards if len(shard.samples) > 1]
    if not known:
        return None
    began, ended = min(times[0] for times, _ in known), max(times[-1] for times, _ in known)
    edges = np.linspace(began, ended, min(_STEPS, max(len(times) for times, _ in known)))
    if ended <= began or len(edges) < 3:
        return None
    done = sum(np.interp(edges, times, rows) for times, rows in known)
    speeds = np.maximum(np.diff(done) / np.diff(edges), 0.0)
    return SpeedChart(float(began), float(ended), tuple(speeds.tolist()))
