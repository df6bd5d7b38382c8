"""Retry a Lance commit that lost against another writer's commit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from airflow_geneva.engine.runtime import random, time
from airflow_geneva.engine.storage.engine_errors import is_outage
from airflow_geneva.errors import CommitConflict, InvalidInput

VARIABLE = "GENEVA_VERSION_CONFLICT_MAX_RETRIES"

logger = logging.getLogger("airflow_geneva.lance_io")

_Made = TypeVar("_Made")
_SIGNS = ("commit conflict", "Incompatible transaction", "Commit conflict")
_EXISTS = "Dataset already exists"
_retries = ContextVar("version_conflict_max_retries", default=10)


def is_conflict(error: Exception) -> bool:
    """Whether a commit failed because another writer committed first."""
    return any(sign in str(error) for sign in _SIGNS)


def is_undecided(error: Exception) -> bool:
    """Whether to read the newest version and commit the changes that it lacks again.

    Either another writer committed first, or the store failed during the commit, which may have succeeded.
    """
    return is_conflict(error) or is_outage(error)


def commit_tries(changed: str, commit: str) -> Iterator[int]:
    """Yield the 0-based number of each attempt to commit, and wait between two attempts.

    Args:
        changed: what other writers change, for the message.
        commit: what the caller commits, for the message.

    Raises:
        CommitConflict: the last attempt conflicted with another writer, too.
    """
    tries = max_retries() + 1
    for number in range(tries):
        if number:
            logger.info("Commit conflict with another writer, try %s of %s.", number, tries)
            time.sleep(min(0.05 * 2 ** (number - 1), 5.0) * random.uniform(0.5, 1.5))
        yield number
    raise CommitConflict(
        f"Other writers changed {changed} at every one of {tries} tries to {commit}. Nothing is lost: run the task "
        f"again at a quieter time, or raise {VARIABLE} (in Airflow: [geneva] version_conflict_max_retries)."
    )


def create_new(what: str, create: Callable[[], _Made], exists: Callable[[], bool]) -> _Made | None:
    """Create a table, and return what `create` returns; None if another writer has created it.

    S3 also refuses a conditional write, with status 409, while another write of the same object is in progress, which
    may fail. pylance reports both as a table that exists, so `create` is called again unless `exists`.

    Args:
        what: the table, for the message.

    Raises:
        CommitConflict: the store refused every attempt, and there is no table.
    """
    for _ in commit_tries(what, "create it"):
        try:
            return create()
        except OSError as error:
            if _EXISTS not in str(error):
                raise
        if exists():
            return None
    raise AssertionError("commit_tries raises after its last try")


def max_retries() -> int:
    """Return how often to retry a commit: ``GENEVA_VERSION_CONFLICT_MAX_RETRIES``, or else `conflict_retries`."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return _retries.get()
    if not text.isdecimal():
        raise InvalidInput(f"{VARIABLE}={text!r} is not valid: set it to a whole number of 0 or more, or unset it.")
    return int(text)


@contextmanager
def conflict_retries(most: int) -> Iterator[None]:
    """Set how often commits in this block are retried; the environment variable wins, or is refused: InvalidInput."""
    token = _retries.set(most)
    try:
        max_retries()
        yield
    finally:
        _retries.reset(token)
