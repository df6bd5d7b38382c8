"""A backfill that goes on while its caller does something else."""

from __future__ import annotations

import concurrent.futures.thread
import logging
import threading
from typing import TYPE_CHECKING

from airflow_geneva.errors import InvalidInput
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.record import read_job
from airflow_geneva.job.result import BackfillResult
from airflow_geneva.job.status import Job
from airflow_geneva.location import TableLocation
from airflow_geneva.plan.values import Plan
from airflow_geneva.run.backfill import StartedBackfill, carry_out, start_backfill
from airflow_geneva.run.job import Stopwatch

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF

logger = logging.getLogger("airflow_geneva.run")

_REMIND_SECONDS = 60.0


class JobFuture:
    """A backfill that runs in a thread of this process.

    A process whose program has ended waits for its jobs, and says so on its log, at once and every minute; Ctrl-C ends
    it all the same. Nothing is half-written then, and running the backfill again goes on from its checkpoints.

    Args:
        started: the announced backfill.
    """

    def __init__(self, started: StartedBackfill) -> None:
        self._started = started
        self._outcome: concurrent.futures.Future[BackfillResult] = concurrent.futures.Future()

    @property
    def job_id(self) -> str:
        return self._started.plan.work.job_id

    def status(self) -> Job:
        """The job as it is now, read from its record.

        Raises:
            InvalidInput: the record was removed meanwhile.
        """
        location = self._started.location
        job = read_job(JobFolder.of(location.checkpoints, self.job_id))
        if job is None:
            raise InvalidInput(f"The record of job {self.job_id} in {location.uri} was removed while it was running.")
        return job

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> BackfillResult:
        """Wait for the end.

        Args:
            timeout: most seconds to wait.

        Raises:
            JobFailed: the job failed; ``.result`` says what was done all the same.
            TimeoutError: it is not done yet, and goes on.
        """
        try:
            return self._outcome.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self._outcome.done():
                raise
            raise TimeoutError(
                f"Job {self.job_id} is not done after {timeout:g} s, and goes on. Ask .status(), or wait for longer."
            ) from error

    def __repr__(self) -> str:
        work = self._started.plan.work
        state = "running" if not self.done() else "failed" if self._outcome.exception() else self.result().state
        return f"JobFuture({work.table_name}.{work.column}, job_id={self.job_id!r}, {state})"

    def run(self) -> None:
        """Do the job in the calling thread."""
        try:
            self._outcome.set_result(carry_out(self._started))
        except BaseException as error:
            self._outcome.set_exception(error)
            # Nobody may ask for the result.
            logger.error("%s", error)


def start_in_background(plan: Plan, location: TableLocation, udf: UDF, runner: str, watch: Stopwatch) -> JobFuture:
    """Announce a backfill, and carry it out in a thread.

    Raises:
        JavaNotFound: there is neither an active session nor a Java to start one.
        StorageError: the table's folder is read-only or unreachable.
    """
    future = JobFuture(start_backfill(plan, location, udf, runner, watch))
    # Not a daemon: native code that writes must not be torn down under its feet, and whoever starts a job at the end of
    # a script wants it done.
    worker = threading.Thread(target=future.run, name=f"geneva-{future.job_id}", daemon=False)
    worker.start()
    _running.append((worker, future))
    return future


_running: list[tuple[threading.Thread, JobFuture]] = []


def _wait_for_jobs() -> None:
    """At the end of the program: wait for what still runs, and say why the process seems to hang."""
    for worker, future in _running:
        while worker.is_alive():
            logger.warning("The program has ended, and this process waits for job %s. Ctrl-C ends it.", future.job_id)
            worker.join(_REMIND_SECONDS)


# Python closes all thread pools before it waits for threads, and a job cannot commit without them. What is registered
# here runs in front of that, because pools register when they are imported, which was above.
threading._register_atexit(_wait_for_jobs)  # type: ignore[attr-defined]
