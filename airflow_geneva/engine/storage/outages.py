"""Wait out an outage of an object store: repeat requests until the store answers again or the patience ends.

The patience is a storage option of our own, so that it travels wherever the other options do: to Spark's driver and to
its executors. pylance ignores an option that it does not know.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

from airflow_geneva.engine.lance_io.engine_errors import is_failure, is_outage
from airflow_geneva.engine.storage.uri import is_local

_T = TypeVar("_T")
StorageOptions = tuple[tuple[str, str], ...]

logger = logging.getLogger("airflow_geneva.storage")

PATIENCE = "geneva_store_patience"
"""The storage option that says for how many seconds of an outage requests are repeated."""
STORE_PATIENCE = 300
_NO_LIMIT = "1000000"
# When the retries of a request end, pylance 14 starts it again: four times for most requests, eight times for a
# listing, 19 times in a scan. A commit is not started again.
_STARTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_SLOW_SECONDS = 10.0

_lock = threading.Lock()
_outages: dict[str, float] = {}
"""By store, when it was first seen not to answer; removed when it answers."""


def with_patience(uri: str, options: StorageOptions, seconds: int = STORE_PATIENCE) -> StorageOptions:
    """Return storage options with a patience, unless they have one; a local disk has no outages."""
    if is_local(uri) or PATIENCE in dict(options):
        return options
    return tuple(sorted([*options, (PATIENCE, str(seconds))]))


def pylance_options(options: StorageOptions) -> dict[str, str] | None:
    """Return storage options for pylance: its own retries last as long as the patience where the user set none."""
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
    """Make a request, which may be made twice, and repeat it for the rest of the patience while the store is away.

    A task that was asked to end, and what cleans up after it, does not wait.
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
    """Whether the request was made while an exception that asks this process to stop was handled."""
    while error is not None:
        # pylance turns what a signal handler raises during a scan into an error with the exception's name in its text.
        if not is_failure(error) or "AirflowTaskTimeout" in str(error):
            return True
        error = error.__context__
    return False


@contextmanager
def _reporting_silence(store: str, seconds: float) -> Iterator[None]:
    """Say that the store does not answer while pylance waits for it in this block."""
    timer = threading.Timer(_SLOW_SECONDS, _begin, (store, seconds, _SLOW_SECONDS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _begin(store: str, seconds: float, ago: float = 0.0) -> float:
    """Return when the outage of a store began; the first call logs it."""
    now = time.monotonic()
    with _lock:
        began = _outages.setdefault(store, now - ago)
        if began == now - ago:
            logger.warning(
                "%s does not answer. Waiting for it, for at most %g seconds (in Airflow: [geneva] store_patience).",
                store,
                seconds,
            )
    return began


def _end(store: str) -> None:
    with _lock:
        began = _outages.pop(store, None)
    if began is not None:
        logger.warning("%s answers again, after %.0f seconds.", store, time.monotonic() - began)
