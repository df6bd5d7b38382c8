"""When a task of this package is tried again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow_geneva.errors import CodeChanged, CommitConflict, InvalidInput

_SOON = timedelta(seconds=30)


def default_policy() -> Any:
    """Airflow's retry policy for these tasks; None before Airflow 3.3, where a task's own retries are all there is.

    A commit that others kept from being made is tried again soon, one of the task's retries all the same. What is wrong
    with the request, the schema or the code stays wrong, so the task fails at once.
    """
    try:
        from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule
    except ImportError:
        return None
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(CommitConflict, RetryAction.RETRY, _SOON, reason="others kept changing the table"),
            RetryRule([InvalidInput, CodeChanged], RetryAction.FAIL, reason="it would fail in the same way"),
        ]
    )


def with_retry_policy(given: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments, with the retry policy that was given or the default one."""
    policy = given or default_policy()
    return dict(arguments) if policy is None else {**arguments, "retry_policy": policy}
