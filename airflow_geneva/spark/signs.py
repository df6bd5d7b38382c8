"""The signs of life that a driver writes for its tasks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from airflow_geneva.apply.applier import StopComputing
from airflow_geneva.storage.files import Storage

_SIGN_SECONDS = 15.0
_DRIVER_LOST_SECONDS = 120.0
_DRIVER = "driver.json"


class DriverLost(StopComputing):
    """Raised in a task whose driver was killed, or cannot reach the store."""


@dataclass
class DriverSigns:
    """The driver's signs of life, which it writes for its tasks: a Spark Connect server goes on when its client dies.

    A task compares what it reads with what it read before, because clocks differ between machines.
    """

    progress: Storage
    _written: float = float("-inf")
    _read: dict[str, Any] | None = None
    _changed: float = field(default_factory=time.monotonic)

    def write(self, stop: bool = False) -> None:
        """Write a sign if it is time; with `stop`, make all tasks checkpoint their rows and end."""
        if stop or time.monotonic() - self._written >= _SIGN_SECONDS:
            self._written = time.monotonic()
            self.progress.write_json(_DRIVER, {"stop": stop, "at": time.time()})

    def read(self) -> None:
        """Raise StopComputing if the driver stopped its tasks, `DriverLost` if it has given no sign for too long."""
        found = self.progress.read_document(_DRIVER) or self._read
        if found and found["stop"]:
            raise StopComputing
        if found != self._read:
            self._read, self._changed = found, time.monotonic()
        if time.monotonic() - self._changed > _DRIVER_LOST_SECONDS:
            raise DriverLost(
                f"The driver wrote no sign of life to {self.progress.path(_DRIVER)} for {_DRIVER_LOST_SECONDS:.0f} s: "
                "it was killed or suspended, or the store did not take it. What was checkpointed is kept; run it again."
            )
