"""The signs of life that a driver writes for its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_geneva.engine.apply.batch_mapper import StopComputing
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.files import Storage

_SIGN_SECONDS = 15.0
_DRIVER_LOST_SECONDS = 120.0
_DRIVER = "driver.json"


class DriverLost(StopComputing):
    """Raised in a task whose driver was killed, or cannot reach the store."""


@dataclass
class DriverSigns:
    """The driver's heartbeats for its tasks: a Spark Connect server continues when its client dies.

    A task compares each heartbeat with the previous one, not with its clock, because clocks differ between machines.
    """

    progress: Storage
    _written: float = float("-inf")
    _read: dict[str, Any] | None = None
    read_at: float = field(default_factory=time.monotonic)
    _overdue_at: float | None = None

    def write(
        self, stop: bool = False, allowed: Mapping[int, float] | None = None, seconds_left: float | None = None
    ) -> None:
        """Write a heartbeat if it is due or has new content; with `stop`, make all tasks checkpoint their rows and end.

        Args:
            allowed: the total cost allowed to each task, once calls report their cost.
            seconds_left: seconds for which tasks may continue.
        """
        more = allowed or seconds_left is not None
        if stop or more or time.monotonic() - self._written >= _SIGN_SECONDS:
            self._written = time.monotonic()
            said = {"stop": stop, "at": time.time(), "allowed": dict(allowed or {}), "seconds_left": seconds_left}
            self.progress.write_json(_DRIVER, said)

    @property
    def allowed(self) -> Mapping[str, float]:
        """The total cost allowed, by task; empty while no call has reported a cost."""
        return (self._read or {}).get("allowed") or {}

    @property
    def seconds_left(self) -> float | None:
        """Seconds that tasks may continue after `read_at`, or slightly fewer; None: the job has no such cap."""
        return (self._read or {}).get("seconds_left")

    def read(self) -> None:
        """Raise StopComputing if the driver stopped its tasks, `DriverLost` if it has given no sign for too long."""
        found = self.progress.read_document(_DRIVER) or self._read
        if found and found["stop"]:
            raise StopComputing
        if found != self._read:
            self._read, self.read_at, self._overdue_at = found, time.monotonic(), None
        now = time.monotonic()
        if now - self.read_at <= _DRIVER_LOST_SECONDS:
            return
        # After an outage of the store a task may read before the driver has written again.
        self._overdue_at = self._overdue_at or now
        if now - self._overdue_at > _DRIVER_LOST_SECONDS / 4:
            raise DriverLost(
                f"The driver wrote no sign of life to {self.progress.path(_DRIVER)} for {_DRIVER_LOST_SECONDS:.0f} s: "
                "it was killed or suspended, or the store did not take it. What was checkpointed is kept; run it again."
            )
