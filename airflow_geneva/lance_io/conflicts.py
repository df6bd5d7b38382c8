"""Retry a Lance commit that lost against another writer's commit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from airflow_geneva.errors import InvalidInput

VARIABLE = "GENEVA_VERSION_CONFLICT_MAX_RETRIES"
MORE_RETRIES = f"raise {VARIABLE} (in Airflow: [geneva] version_conflict_max_retries)"

_SIGNS = ("commit conflict", "Incompatible transaction", "Commit conflict")
_retries = ContextVar("version_conflict_max_retries", default=10)


def is_conflict(error: OSError) -> bool:
    """Whether a commit failed because another writer committed first."""
    return any(sign in str(error) for sign in _SIGNS)


def max_retries() -> int:
    """Return how often to retry a commit.

    ``GENEVA_VERSION_CONFLICT_MAX_RETRIES`` wins over `conflict_retries`.

    Raises:
        InvalidInput: the variable is not a whole number of 0 or more.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return _retries.get()
    if not text.isdecimal():
        raise InvalidInput(f"{VARIABLE}={text!r} is not valid: set it to a whole number of 0 or more, or unset it.")
    return int(text)


@contextmanager
def conflict_retries(most: int) -> Iterator[None]:
    """Set how often commits in this block are retried; the environment variable wins."""
    token = _retries.set(most)
    try:
        yield
    finally:
        _retries.reset(token)
