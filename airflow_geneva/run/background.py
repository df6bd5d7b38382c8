"""Run a backfill in a background thread."""

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
from airflow_geneva.plan.model import Plan
from airflow_geneva.run.backfill import PreparedBackfill, prepare_backfill, run_prepared
from airflow_geneva.run.column_stages import Stopwatch
from airflow_geneva.storage.location import TableLocation

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF

logger = logging.getLogger("airflow_geneva.run")

_REMIND_SECONDS = 60.0


class JobFuture:
    """A backfill that runs in a thread of this process.

    At the end of the program the process waits for its jobs, and logs that at once and every minute. Ctrl-C ends it;
    nothing is half-written then, and the next backfill continues from the checkpoints.

    Args:
        started: the started backfill.
    """

    def __init__(self, started: PreparedBackfill) -> None:
        self._started = started
        self._outcome: concurrent.futures.Future[BackfillResult] = concurrent.futures.Future()

    @property
    def job_id(self) -> str:
        return self._started.plan.work.job_id

    def status(self) -> Job:
        """Read the current status of the job.

        Raises:
            InvalidInput: the record was removed meanwhile.
        """
        location = self._started.location
        job = read_job(JobFolder.of(location.checkpoints, self.job_id))
        if job is None:
            raise InvalidInput(f"The record of job {self.job_id} in {location.uri} was removed while it was running.")
        return job

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> BackfillResult:
        """Wait for the end.

        Args:
            timeout: maximum seconds to wait.

        Raises:
            JobFailed: the job failed; ``.result`` says what was completed before.
            TimeoutError: the job is still running, and continues.
        """
        try:
            return self._outcome.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self._outcome.done():
                raise
            raise TimeoutError(
                f"Job {self.job_id} is not done after {timeout:g} s, and goes on. Call .status(), or wait longer."
            ) from error

    def __repr__(self) -> str:
        work = self._started.plan.work
        state = "running" if not self.done() else "failed" if self._outcome.exception() else self.result().state
        return f"JobFuture({work.target}, job_id={self.job_id!r}, {state})"

    def run(self) -> None:
        """Run the job in the calling thread."""
        try:
            self._outcome.set_result(run_prepared(self._started))
        except BaseException as error:
            self._outcome.set_exception(error)
            # The caller may never ask for the result, so log the error.
            logger.error("%s", error)


def start_in_background(plan: Plan, location: TableLocation, udf: UDF, runner: str, watch: Stopwatch) -> JobFuture:
    """Write a job's record and plan, and run it in a thread.

    Raises:
        JavaNotFound: there is no active session, and no Java to start one.
        StorageError: the table's folder is read-only or unreachable.
    """
    future = JobFuture(prepare_backfill(plan, location, udf, runner, watch))
    # Not a daemon: the process must not exit while native code writes, and a job that is started at the end of a script
    # should finish.
    worker = threading.Thread(target=future.run, name=f"geneva-{future.job_id}", daemon=False)
    worker.start()
    _running.append((worker, future))
    return future


_running: list[tuple[threading.Thread, JobFuture]] = []


def _wait_for_jobs() -> None:
    """At the end of the program, wait for running jobs, and log why the process seems to hang."""
    for worker, future in _running:
        while worker.is_alive():
            logger.warning("The program has ended, and this process waits for job %s. Ctrl-C ends it.", future.job_id)
            worker.join(_REMIND_SECONDS)


# At exit Python closes all thread pools before it waits for threads, and a job cannot commit without them. This handler
# runs before that: exit handlers run in reverse order, and the pools registered theirs when they were imported above.
threading._register_atexit(_wait_for_jobs)  # type: ignore[attr-defined]
