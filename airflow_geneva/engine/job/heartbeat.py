"""Heartbeats: each process that works on a job writes one every few seconds, to tell a dead job from a slow one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from airflow_geneva.engine.job.folder import COMMIT, FINISH, STATUS, JobFolder, shard_name
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.documents import check_time
from airflow_geneva.engine.storage.engine_errors import is_failure

logger = logging.getLogger("airflow_geneva.job")

EVERY_SECONDS = 15.0
_SILENT_SECONDS = 4 * EVERY_SECONDS
_BY = {"apply": STATUS, "commit": COMMIT, "finish": FINISH}

# The files of a dead job may be removed, so both limits are generous. A working process writes a heartbeat every 15
# seconds for as long as its step runs; one hour bridges a suspended machine or an unreachable store. A cleanup also
# checks the store's own file times, because clocks may differ by more.
RUNNING_TIMEOUT = 3600.0
# Between two Airflow tasks no process writes heartbeats: the next task may wait for its retry delay, a pool slot or the
# cluster, and a user may clear it the next morning. The same holds for a killed Airflow task that waits for its retry.
WAITING_TIMEOUT = 24 * 3600.0
APPROVAL = "approval"
"""Field of a job's record: why it needs an approval; in the plan's summary: the question to the approver."""
# A person who has to approve a plan may be on vacation.
APPROVAL_TIMEOUT = 30 * 24 * 3600.0


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a job, in seconds since the epoch; `over` if the step had ended, successfully or not."""

    at: float
    step: str
    over: bool = False

    def silent_for(self, now: float) -> float:
        """Return the seconds since this heartbeat if a working process should have written the next one, else 0."""
        silent = now - self.at
        return silent if not self.over and silent > _SILENT_SECONDS else 0.0

    @staticmethod
    def from_json(document: Mapping[str, Any] | None) -> Heartbeat | None:
        """Parse a heartbeat; None if there is none or it is damaged."""
        if not document:
            return None
        try:
            return Heartbeat(check_time(document["at"]), str(document["step"]), bool(document.get("over")))
        except (KeyError, TypeError, ValueError):
            return None


def heartbeat_timeout(heartbeat: Heartbeat | None, retried: bool, asked: bool = False) -> float:
    """Return the seconds after which an unfinished job counts as dead.

    Args:
        retried: Airflow may retry its tasks.
        asked: the job waits for an approval.
    """
    if asked:
        return APPROVAL_TIMEOUT
    working = heartbeat is not None and not heartbeat.over and not retried
    return RUNNING_TIMEOUT if working else WAITING_TIMEOUT


@contextmanager
def writing_heartbeats(
    folder: JobFolder, step: str, plan: str, shard: int = 0, by: str = "", every: float = EVERY_SECONDS
) -> Iterator[None]:
    """Write heartbeats while the block runs one step of a job; a failed write does not fail the job.

    Args:
        plan: fingerprint of the plan.
        by: the process whose document has the heartbeats; by default that of the step.
    """
    from airflow_geneva.engine.job.meter import JobMeter

    warned, by = False, by or _BY[step]
    JobMeter.current().enter(step)

    def beat(over: bool = False) -> None:
        nonlocal warned
        alive = {"at": time.time(), "step": step, "over": over}
        try:
            folder.update_shard(plan, shard, by, alive=alive)
        except BaseException as error:
            # Airflow stops a task, or times it out, with a BaseException.
            if not is_failure(error):
                raise
            if not warned:
                warned = True
                logger.warning("Cannot write the heartbeat of this job; the job goes on: %s", error)

    def beat_on() -> None:
        while not ended.wait(every):
            beat()

    with folder.working_on(shard_name(by, plan, shard)):
        beat()
        ended = threading.Event()
        thread = threading.Thread(target=beat_on, name="geneva-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            # A write that hangs because the store does not answer must not delay the job.
            thread.join(timeout=5.0)
            beat(over=True)
