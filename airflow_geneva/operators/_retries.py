"""The retry policy of this package's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow_geneva.errors import CodeChanged, CommitConflict, InvalidInput

_SOON = timedelta(seconds=30)


def default_policy() -> Any:
    """Return the default retry policy; None before Airflow 3.3, which has only the number of retries.

    After a commit conflict the task is retried soon, as one of its retries. A retry cannot fix a wrong request, schema
    or UDF, so then the task fails at once.
    """
    try:
        from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule
    except ImportError:
        return None
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(CommitConflict, RetryAction.RETRY, _SOON, reason="other writers kept changing the table"),
            RetryRule([InvalidInput, CodeChanged], RetryAction.FAIL, reason="it would fail in the same way"),
        ]
    )


def with_retry_policy(given: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments with the given retry policy, or the default one."""
    policy = given or default_policy()
    return dict(arguments) if policy is None else {**arguments, "retry_policy": policy}
