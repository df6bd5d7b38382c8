"""The caps on the seconds and the cost of a job, watched while its shards are computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from airflow_geneva.apply.applier import StopComputing
from airflow_geneva.job.shard_status import usage_of
from airflow_geneva.limits.rate_limit import used_so_far
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.run.units import UnitReport


class CapReached(StopComputing):
    """A job has spent as much as it may; `reports` are those of the units that were complete."""

    reports: Sequence[UnitReport] = ()


@dataclass
class Caps:
    """What a job may spend, and what it has spent.

    Args:
        seconds, slot_seconds, rows: what the other shards took until now.
        reported: what calls of the other shards, and of earlier tries of this one, reported that they cost.
        computed, own_reported: rows that this shard has computed, and what its calls reported that they cost.
    """

    work: JobSpec
    seconds: float = 0.0
    slot_seconds: float = 0.0
    rows: int = 0
    reported: float = 0.0
    computed: int = 0
    own_reported: float = 0.0
    own_slot_seconds: float | None = None
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @staticmethod
    def after(work: JobSpec, shard: int, statuses: Sequence[Mapping[str, Any]]) -> Caps:
        """Return the caps for a shard, after what the status of each shard says; its own has earlier tries."""
        caps = Caps(work, reported=usage_of(statuses).cost)
        for status in (*statuses[:shard], *statuses[shard + 1 :]):
            applied, applying = status.get("applied") or {}, status.get("applying") or {}
            seconds = float(applied.get("seconds") or applying.get("seconds") or 0.0)
            seconds -= float(applied.get("start_seconds") or 0.0)
            caps.seconds += seconds
            caps.slot_seconds += float(applied.get("slot_seconds") or seconds)
            caps.rows += int(max(applied.get("rows_run") or 0, applying.get("rows_done") or 0))
        return caps

    def add(self, rows: int) -> None:
        """Count computed rows of this process, and stop if that is enough."""
        with self._lock:  # else a thread could put back what another has seen
            self.computed += rows
            self.own_reported = used_so_far().cost
            self.check()

    def see(self, rows: int, slot_seconds: float, reported: float = 0.0) -> None:
        """Take over what all tasks of the shard report, and stop if that is enough."""
        self.computed, self.own_slot_seconds, self.own_reported = rows, slot_seconds, reported
        self.check()

    @property
    def spent_seconds(self) -> float:
        return self.seconds + time.monotonic() - self._began

    @property
    def shard_slot_seconds(self) -> float:
        if self.own_slot_seconds is not None:
            return self.own_slot_seconds
        return (time.monotonic() - self._began) * self.work.sizing.intra_applier_concurrency

    @property
    def cost(self) -> float:
        price = self.work.sizing.price_per_slot_hour or 0.0
        slot_seconds = self.slot_seconds + self.shard_slot_seconds
        by_rows = (self.rows + self.computed) * self.work.cost_per_row
        return slot_seconds / 3600 * price + (self.reported + self.own_reported or by_rows)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the cap on them; None: there is none."""
        most = self.work.sizing.max_seconds
        return None if most is None else most - self.spent_seconds

    @property
    def cost_left(self) -> float | None:
        """What may still be spent; None: there is no cap on it."""
        most = self.work.sizing.max_cost
        return None if most is None else most - self.cost

    @property
    def most_reported(self) -> float:
        """What calls of this shard may report in all that they cost."""
        return inf if self.cost_left is None else self.cost_left + self.own_reported

    def check(self) -> None:
        """Raise CapReached if the job has spent as much as it may."""
        sizing = self.work.sizing
        if sizing.max_seconds is not None and self.spent_seconds >= sizing.max_seconds:
            raise CapReached(f"stopped at its cap of {sizing.max_seconds:g} seconds (max_seconds)")
        priced = sizing.price_per_slot_hour or self.reported or self.own_reported
        if sizing.max_cost is not None and priced and self.cost >= sizing.max_cost:
            raise CapReached(f"stopped at its cap of {sizing.max_cost:g} (max_cost)")
