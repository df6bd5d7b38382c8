"""Signs of life: whoever works for a job says so every few seconds, so that a dead job can be told from a slow one."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from airflow_geneva.lance_io.engine_errors import is_failure
from airflow_geneva.storage import Storage

logger = logging.getLogger("airflow_geneva.job")

EVERY_SECONDS = 15.0

# What is found dead may be cleaned away, so both limits err on the side of life. A process that works beats every 15
# seconds and never stops beating while its stage goes on; an hour bridges a suspended machine, or a store that was
# away. A cleanup also asks the store when it heard of the job, because clocks may differ by more.
SILENT_WHILE_WORKING = 3600.0
# Between two Airflow tasks nobody beats: the next one may wait for its retry delay, a pool slot or the cluster, and
# somebody may clear it the next morning. A task of Airflow that was killed is tried again in the same way.
SILENT_WHILE_WAITING = 24 * 3600.0

HEARTBEAT = "heartbeat.json"


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a job.

    Args:
        at: when, in seconds since the epoch.
        stage: what was worked on: ``plan``, ``apply``, ``commit`` or ``finish``.
        over: the stage had ended then, well or not; nobody has to beat until the next one begins.
        host, pid: the process.
    """

    at: float
    stage: str
    over: bool = False
    host: str = ""
    pid: int = 0

    @staticmethod
    def from_json(document: Mapping[str, Any] | None) -> Heartbeat | None:
        """None for none, and for one that cannot be read."""
        if document is None:
            return None
        try:
            at, stage = float(document["at"]), str(document["stage"])
            return Heartbeat(
                at, stage, bool(document.get("over")), str(document.get("host", "")), int(document.get("pid", 0))
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return None


def silence_allowed(heartbeat: Heartbeat | None, retried: bool) -> float:
    """Seconds without a sign of life after which an unfinished job counts as dead.

    Args:
        heartbeat: its last one; jobs of older versions of this package have none.
        retried: somebody, Airflow, may start what was killed again.
    """
    working = heartbeat is not None and not heartbeat.over and not retried
    return SILENT_WHILE_WORKING if working else SILENT_WHILE_WAITING


@contextmanager
def beating(job: Storage, stage: str, every: float = EVERY_SECONDS) -> Iterator[None]:
    """Show signs of life while the body runs; a store that does not take them disturbs nothing.

    Args:
        job: the job's folder.
        stage: what the body does.
        every: seconds between two signs.
    """
    pulse = _Pulse(job, stage)
    pulse.beat()
    over = threading.Event()

    def beat_on() -> None:
        while not over.wait(every):
            pulse.beat()

    thread = threading.Thread(target=beat_on, name="geneva-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # A beat that hangs in a store that does not answer must not hold the job up.
        thread.join(timeout=5.0)
        pulse.beat(over=True)


class _Pulse:
    def __init__(self, job: Storage, stage: str) -> None:
        self.job = job
        self.stage = stage
        self._complained = False

    def beat(self, over: bool = False) -> None:
        document = {
            "at": time.time(), "stage": self.stage, "over": over, "host": socket.gethostname(), "pid": os.getpid(),
        }  # fmt: skip
        try:
            self.job.write_json(HEARTBEAT, document)
        except BaseException as error:
            # A task that is told to stop, or exceeds its time, is told by a BaseException too.
            if not is_failure(error):
                raise
            if not self._complained:
                self._complained = True
                logger.warning("A sign of life of this job could not be written, the job goes on: %s", error)
