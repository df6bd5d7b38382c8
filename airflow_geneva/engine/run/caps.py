"""The caps on the seconds and the cost of a job, watched while its shards are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import inf

from airflow_geneva.engine.apply.batch_mapper import StopComputing
from airflow_geneva.engine.counts import Sums
from airflow_geneva.engine.job.folder import APPLIED, SPENT, STATUS, JobFolder, shard_name
from airflow_geneva.engine.limits.rate_limit import used_so_far
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.run.units import UnitReport
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.files import in_parallel
from airflow_geneva.errors import StorageError

LOOK_SECONDS = 1.0
"""Seconds between two polls of the spending of the other shards, in a job with a cap."""
_LOOKS_SHARE = 10.0
"""Poll less often when polling is slow: wait this many times the duration of the last poll."""


class CapReached(StopComputing):
    """A job has reached a cap; `reports` are the reports of the completed units."""

    reports: Sequence[UnitReport] = ()


class Canceled(CapReached):
    """A person has canceled the job."""


def stop_if_canceled(folder: JobFolder) -> None:
    """Raise Canceled if the job was canceled since it was planned or resumed."""
    if by := folder.canceled_by():
        raise Canceled(f"canceled by {by}")


@dataclass(frozen=True)
class Spent(Sums):
    """What shards have spent in all attempts: seconds and slot-seconds of computing, rows, and the cost of calls."""

    seconds: float = 0.0
    slot_seconds: float = 0.0
    rows: int = 0
    reported: float = 0.0


@dataclass
class Caps:
    """The caps of a job, and what it has spent.

    Args:
        keep: stores what this shard has spent.
        look: returns what the other shards have spent. It is called repeatedly while this shard is computed, because
            they may be computed at the same time.
        before: what earlier attempts of this shard have spent.
        others: what the other shards have spent until now.
        computed, reported: rows that this attempt has computed, and the cost of its calls: the reported cost, or the
            declared one if no call reported a cost.
        task_seconds: seconds of all Spark tasks of this attempt together; None if it computes in this process.
    """

    spec: JobSpec
    keep: Callable[[Spent], None] = field(default=lambda own: None, repr=False)
    look: Callable[[], Spent] = field(default=Spent, repr=False)
    before: Spent = field(default_factory=Spent)
    others: Spent = field(default_factory=Spent)
    computed: int = 0
    reported: float = 0.0
    task_seconds: float | None = None
    _began: float = field(default_factory=time.monotonic)
    _look_at: float = -inf
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @staticmethod
    def of(spec: JobSpec, folder: JobFolder, plan: str, shard: int, shards: int, ended: dict[int, Spent]) -> Caps:
        """Return the caps for a shard of a job.

        Args:
            plan: fingerprint of the plan.
            ended: what the computed shards have spent, by shard; polls add newly computed shards.
        """
        if not spec.sizing.watched:
            return Caps(spec)

        def read(other: int) -> Spent:
            if other in ended:
                return ended[other]
            status = folder.read_shard(plan, other)
            spent = Spent(**status.get(SPENT) or {})
            if status.get(APPLIED) and other != shard:
                ended[other] = spent
            return spent

        def keep(own: Spent) -> None:
            with suppress(StorageError):
                folder.update_shard(plan, shard, spent=asdict(own))

        def look() -> Spent:
            names = frozenset(folder.storage.list_folder()[1])
            begun = [at for at in range(shards) if at != shard and shard_name(STATUS, plan, at) in names]
            return sum(in_parallel(read, begun, folder.storage.local), Spent())

        ended.pop(shard, None)
        return Caps(spec, keep, look, read(shard))

    @property
    def own(self) -> Spent:
        """What this shard has spent."""
        seconds = time.monotonic() - self._began
        in_slots = seconds * self.spec.sizing.intra_applier_concurrency
        now = Spent(seconds, in_slots if self.task_seconds is None else self.task_seconds, self.computed, self.reported)
        return self.before + now

    @property
    def spent(self) -> Spent:
        return self.others + self.own

    def add(self, rows: int) -> None:
        """Count rows that this process computed, and stop at a cap."""
        with self._lock:  # otherwise a thread could overwrite a newer cost with an older one
            self.computed += rows
            self.reported = used_so_far().paid
            self.check()

    def watching(self, on_rows: Callable[[int], None]) -> Callable[[int], None]:
        """Return a callback that calls ``on_rows`` with computed rows and then counts them."""

        def both(rows: int) -> None:
            on_rows(rows)
            self.add(rows)

        return both

    def see(self, rows: int, task_seconds: float, reported: float = 0.0) -> None:
        """Take over the reports of all tasks of the shard, and stop at a cap."""
        self.computed, self.task_seconds, self.reported = rows, task_seconds, reported
        self.check()

    def around(self, wait: Callable[[Mapping[str, int]], None]) -> Callable[[Mapping[str, int]], None]:
        """Wrap a wait for a service, so that its time does not count; a new round begins after it."""

        def waiting(batches: Mapping[str, int]) -> None:
            began = time.monotonic()
            try:
                wait(batches)
            finally:
                self._began += time.monotonic() - began
                self.begin_round()

        return waiting

    def begin_round(self) -> None:
        """Keep what Spark's tasks have spent; those of the next round count from 0."""
        if self.task_seconds is not None:
            self.before += Spent(0.0, self.task_seconds, self.computed)
            self.computed, self.task_seconds = 0, 0.0

    @property
    def cost(self) -> float:
        price, spent = self.spec.sizing.price_per_slot_hour or 0.0, self.spent
        return spent.slot_seconds / 3600 * price + spent.reported

    @property
    def seconds_left(self) -> float | None:
        """Seconds that are left until the cap; None: no cap on seconds."""
        most = self.spec.sizing.max_seconds
        return None if most is None else most - self.spent.seconds

    @property
    def cost_left(self) -> float | None:
        """Cost that is left until the cap; None: no cap on the cost."""
        most = self.spec.sizing.max_cost
        return None if most is None else most - self.cost

    @property
    def most_reported(self) -> float:
        """The most that all calls of this attempt may cost."""
        return inf if self.cost_left is None else self.cost_left + self.reported

    def check(self) -> None:
        """Raise CapReached if the job has reached a cap."""
        sizing = self.spec.sizing
        if (began := time.monotonic()) >= self._look_at:
            self.keep(self.own)
            self.others = self.look()
            self._look_at = time.monotonic() + max(LOOK_SECONDS, _LOOKS_SHARE * (time.monotonic() - began))
        if self.seconds_left is not None and self.seconds_left <= 0:
            raise CapReached(f"stopped at its cap of {sizing.max_seconds:g} seconds (max_seconds)")
        cost_left = self.cost_left
        if cost_left is not None and cost_left <= 0 and (sizing.price_per_slot_hour or self.spent.reported):
            raise CapReached(f"stopped at its cap of {sizing.max_cost:g} (max_cost)")
