"""What a user is told when a job fails."""

from __future__ import annotations

from airflow_geneva.errors import ExpectationFailed, TableRemade, UdfError
from airflow_geneva.plan.model import JobSpec, RefreshSpec


def failure_message(work: JobSpec, error: BaseException) -> str:
    kept = "\nComputed rows are kept in checkpoints"
    if isinstance(error, TableRemade):
        kept = ""  # of a table that was created again, no checkpoint is left
    elif isinstance(error, ExpectationFailed):
        kept = ""  # the error says so
    elif isinstance(error, UdfError) and (error.row_index is not None or error.call is not None):
        kept += "."  # the error says when to run it again
    else:
        kept += "; run it again to continue from there."
    return f"{what_failed(work)}: {error}{kept}"


def what_failed(work: JobSpec) -> str:
    what = f"Refresh of view {work.target!r}" if isinstance(work, RefreshSpec) else f"Backfill of {work.target}"
    return f"{what} failed (job {work.job_id})"
