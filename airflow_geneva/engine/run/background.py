"""Run a backfill in a background thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from airflow_geneva.engine.job.meter import JobMeter, Stopwatch
from airflow_geneva.engine.job.status import Job, read_job
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.run.pipeline import PlannedJob, run, start
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.runner import Runner
from airflow_geneva.engine.runtime import Future, FutureTimeout, threading
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput

logger = logging.getLogger("airflow_geneva.run")

_REMIND_SECONDS = 60.0

ShowBar = Callable[[JobMeter], AbstractContextManager[object]]
"""Shows the progress bar of a job while a thread waits for the job."""


class JobFuture:
    """A backfill that runs in a thread of this process.

    When the program ends, the process waits for its jobs, and logs this at once and then every minute. Ctrl-C ends the
    process; nothing is half-written then, and the next backfill continues from the checkpoints.
    """

    def __init__(self, job: PlannedJob, meter: JobMeter, show: ShowBar) -> None:
        self._job = job
        self._meter = meter
        self._show = show
        self._outcome: Future[BackfillResult] = Future()

    @staticmethod
    def start(
        plan: Plan,
        location: TableLocation,
        udfs: Udfs,
        runner: str,
        watch: Stopwatch,
        show: ShowBar = nullcontext,
        cluster: Runner | None = None,
    ) -> JobFuture:
        """Write a job's record and plan as `pipeline.start` does, and run it in a thread."""
        meter = JobMeter(plan.spec.target)
        with meter.measuring():
            job = start(plan, location, udfs, runner, watch, cluster)
        future = JobFuture(job, meter, show)
        compute = partial(run, job, plan.shards, udfs, watch)
        # Not a daemon: the process must not exit while native code writes, and a job that is started at the end of a
        # script should finish.
        name = f"geneva-{future.job_id}"
        worker = threading.Thread(target=future._run, args=(compute,), name=name, daemon=False)
        worker.start()
        _running[:] = [(worker, future), *(one for one in _running if one[0].is_alive())]
        return future

    @property
    def job_id(self) -> str:
        return self._job.spec.job_id

    def status(self) -> Job:
        """Read the current status of the job.

        Raises:
            InvalidInput: the record was removed meanwhile.
        """
        job = read_job(self._job.folder)
        if job is None:
            uri = self._job.location.uri
            raise InvalidInput(f"The record of job {self.job_id} in {uri} was removed while it was running.")
        return job

    def cancel(self) -> None:
        """Ask the job to end, as PARTIAL, after the calls that run now; `result()` waits for that.

        What is computed is kept, and that of a column is committed. The next backfill or refresh goes on from there.
        """
        self._job.folder.cancel()

    def done(self) -> bool:
        """Whether the job has ended, successfully or not."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> BackfillResult:
        """Wait for the end, with a bar on a terminal or in a notebook.

        Args:
            timeout: maximum seconds to wait.

        Raises:
            JobFailed: the job failed; ``.result`` says what was completed before.
            TimeoutError: the job is still running, and continues.
        """
        try:
            with nullcontext() if self.done() else self._show(self._meter):
                return self._outcome.result(timeout)
        except FutureTimeout as error:
            if self._outcome.done():
                raise
            raise TimeoutError(
                f"Job {self.job_id} is not done after {timeout:g} s, and goes on. Call .status(), or wait longer."
            ) from error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._outcome.exception() else self.result().state
        return f"JobFuture({self._job.spec.target}, job_id={self.job_id!r}, {state})"

    def _run(self, job: Callable[[], BackfillResult]) -> None:
        """Run the job in the calling thread; only this call references its plan, which may be large."""
        try:
            with self._meter.measuring():
                result = job()
            self._outcome.set_result(result)
        except BaseException as error:
            self._outcome.set_exception(error)
            # The caller may never ask for the result, so log the error.
            logger.error("%s", error)


_running: list[tuple[threading.Thread, JobFuture]] = []


def _wait_for_jobs() -> None:
    """At the end of the program, wait for running jobs, and log why the process seems to hang."""
    for worker, future in _running:
        while worker.is_alive():
            if not future.done():  # otherwise the thread is just ending
                logger.warning(
                    "The program has ended, and this process waits for job %s. Ctrl-C ends it.", future.job_id
                )
            worker.join(_REMIND_SECONDS)


# At exit Python closes all thread pools before it waits for threads, and a job cannot commit without them. This handler
# runs before that: exit handlers run in reverse order, and the pools registered theirs when they were imported above.
threading._register_atexit(_wait_for_jobs)  # type: ignore[attr-defined]
