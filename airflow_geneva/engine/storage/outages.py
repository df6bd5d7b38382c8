"""Wait out an outage of an object store: repeat requests until the store responds or the patience (maximum wait) ends.

The patience is a storage option of this package, so that it reaches Spark's driver and executors with the other
options. pylance ignores options that it does not know.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.runtime import random, threading, time
from airflow_geneva.engine.storage.engine_errors import is_failure, is_outage
from airflow_geneva.engine.storage.uri import is_local

_T = TypeVar("_T")
StorageOptions = tuple[tuple[str, str], ...]

logger = logging.getLogger("airflow_geneva.storage")

PATIENCE = "geneva_store_patience"
"""Storage option: the number of seconds for which requests are repeated during an outage."""
STORE_PATIENCE = 300
_NO_LIMIT = "1000000"
# When the retries of a request are exhausted, pylance 14 starts the request again: four times for most requests, eight
# times for a listing, 19 times in a scan. It does not start a commit again.
_STARTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_SLOW_SECONDS = 10.0

_outages: ProcessMemo[str, float] = ProcessMemo()
"""When each store was first seen not to respond (monotonic time); removed when it responds. It is the process's: an
outage is that of all its jobs, which wait together and log it once."""


def with_patience(uri: str, options: StorageOptions, seconds: int = STORE_PATIENCE) -> StorageOptions:
    """Return storage options with a patience, unless they have one; a local disk has no outages."""
    if is_local(uri) or PATIENCE in dict(options):
        return options
    return tuple(sorted([*options, (PATIENCE, str(seconds))]))


def pylance_options(options: StorageOptions) -> dict[str, str] | None:
    """Return storage options for pylance; its own retries last as long as the patience, unless the user set them."""
    seconds, found = _patience(options), dict(options)
    if seconds:
        given = {name.lower() for name in found}
        timeout = str(max(1, math.ceil(seconds / _STARTS)))
        for name, value in (("client_max_retries", _NO_LIMIT), ("client_retry_timeout", timeout)):
            variable = f"OBJECT_STORE_{name.upper()}"
            if name not in given and variable.lower() not in given and variable not in os.environ:
                found[name] = value
    return found or None


def wait_out(uri: str, options: StorageOptions, request: Callable[[], _T]) -> _T:
    """Send a request, and repeat it during an outage until the patience ends; the request must be idempotent.

    A process that is asked to stop does not wait, nor does its cleanup code.
    """
    seconds = _patience(options)
    if not seconds:
        return request()
    store, pause = f"{urlsplit(uri).scheme}://{urlsplit(uri).netloc}", _FIRST_PAUSE
    while True:
        try:
            with _reporting_silence(store, seconds):
                found = request()
        except Exception as error:
            if not is_outage(error):
                _end(store)
                raise
            left = _begin(store, seconds) + seconds - time.monotonic()
            if left <= 0 or asked_to_end(error):
                raise
            time.sleep(min(pause * random.uniform(0.5, 1.0), left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            _end(store)
            return found


def _patience(options: StorageOptions) -> float:
    return float(dict(options).get(PATIENCE, 0))


def asked_to_end(error: BaseException | None) -> bool:
    """Whether an exception, or one that was being handled when it was raised, asks this process to stop."""
    while error is not None:
        # pylance converts an exception of a signal handler during a scan to an error whose text holds its name.
        if not is_failure(error) or "AirflowTaskTimeout" in str(error):
            return True
        error = error.__context__
    return False


@contextmanager
def _reporting_silence(store: str, seconds: float) -> Iterator[None]:
    """Log that the store does not respond if this block waits for it for long."""
    timer = threading.Timer(_SLOW_SECONDS, _begin, (store, seconds, _SLOW_SECONDS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _begin(store: str, seconds: float, ago: float = 0.0) -> float:
    """Return when the outage of a store began; the first call logs it."""

    def first() -> float:
        logger.warning(
            "%s does not answer. Waiting for it, for at most %g seconds (in Airflow: [geneva] store_patience).",
            store, seconds,
        )  # fmt: skip
        return time.monotonic() - ago

    return _outages.once(store, first)


def _end(store: str) -> None:
    began = _outages.pop(store, None)
    if began is not None:
        logger.warning("%s answers again, after %.0f seconds.", store, time.monotonic() - began)
