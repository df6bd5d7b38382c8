"""The caps on the seconds and the cost of a job, watched while its shards are computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from airflow_geneva.apply.applier import StopComputing
from airflow_geneva.job.folder import APPLIED, APPLYING
from airflow_geneva.job.shard_status import usage_of
from airflow_geneva.limits.rate_limit import used_so_far
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.run.units import UnitReport

LOOK_SECONDS = 1.0
"""How often shards with a cap that run at the same time see what the others spend."""


class CapReached(StopComputing):
    """A job has spent as much as it may; `reports` are those of the units that were complete."""

    reports: Sequence[UnitReport] = ()


@dataclass
class Caps:
    """What a job may spend, and what it has spent.

    Args:
        others: returns the status of the other shards. It is called again while this shard is computed: they may be
            computed at the same time.
        reported_before: what calls in earlier tries of this shard reported that they cost.
        seconds, slot_seconds, rows: what the other shards took until now.
        reported: what calls of the other shards, and of earlier tries of this one, reported that they cost.
        computed, own_reported: rows that this shard has computed, and what its calls reported that they cost.
    """

    work: JobSpec
    others: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    reported_before: float = 0.0
    seconds: float = 0.0
    slot_seconds: float = 0.0
    rows: int = 0
    reported: float = 0.0
    computed: int = 0
    own_reported: float = 0.0
    own_slot_seconds: float | None = None
    _began: float = field(default_factory=time.monotonic)
    _look_at: float = -inf
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @staticmethod
    def of(work: JobSpec, read: Callable[[int], Mapping[str, Any]], shards: int, shard: int) -> Caps:
        """Return the caps for a shard of a job.

        Args:
            read: returns the status of a shard.
        """
        if not work.sizing.watched:
            return Caps(work)
        done: dict[int, Mapping[str, Any]] = {}

        def others() -> Sequence[Mapping[str, Any]]:
            found = {at: done.get(at) or read(at) for at in range(shards) if at != shard}
            done.update({at: status for at, status in found.items() if APPLIED in status})
            return list(found.values())

        return Caps(work, others, usage_of([read(shard)]).cost)

    def _look(self) -> None:
        """Add up what the other shards took, if it is time."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        statuses = self.others()
        self.seconds, self.slot_seconds, self.rows = 0.0, 0.0, 0
        self.reported = self.reported_before + usage_of(statuses).cost
        for status in statuses:
            applied, applying = status.get(APPLIED) or {}, status.get(APPLYING) or {}
            seconds = float(applied.get("seconds") or applying.get("seconds") or 0.0)
            seconds -= float(applied.get("start_seconds") or 0.0)
            self.seconds += seconds
            self.slot_seconds += float(applied.get("slot_seconds") or seconds)
            self.rows += int(max(applied.get("rows_run") or 0, applying.get("rows_done") or 0))

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
        self._look()
        if sizing.max_seconds is not None and self.spent_seconds >= sizing.max_seconds:
            raise CapReached(f"stopped at its cap of {sizing.max_seconds:g} seconds (max_seconds)")
        priced = sizing.price_per_slot_hour or self.reported or self.own_reported
        if sizing.max_cost is not None and priced and self.cost >= sizing.max_cost:
            raise CapReached(f"stopped at its cap of {sizing.max_cost:g} (max_cost)")
