"""Slow counts: each runs once for all requests, and a page waits for it only for a limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from airflow_geneva.storage.timeouts import StoreThreads

_T = TypeVar("_T")

_AT_ONCE = 2
_MOST_ASKED = 8
_KEPT_SECONDS = 5.0
_Key = tuple[Hashable, Hashable]


class CountCache:
    """Runs counts in threads, a few at a time per store, so that a store that hangs blocks no other.

    Results are cached for a few seconds, so that a page that polls for several counts gets each of them.

    Args:
        at_once: maximum number of threads per store.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._threads = StoreThreads("geneva-count", at_once)
        self._lock = threading.Lock()
        self._asked: dict[_Key, Future[Any]] = {}
        self._ended: dict[_Key, float] = {}

    def get(self, store: Hashable, name: Hashable, count: Callable[[], _T], until: float) -> _T | None:
        """Return the result of a count; None if it is not ready in time; then ask again.

        Args:
            store: key of the store that the count reads.
            name: key of the count; requests for the same key share one thread.
            count: the function that counts.
            until: deadline of the wait, by ``time.monotonic``.

        Raises:
            Exception: any exception of the count; a panic of pylance as a StorageError.
        """
        future = self._start((store, name), count)
        if future is None:
            return None
        try:
            found: _T = future.result(max(until - time.monotonic(), 0.0))
        except NotYet:
            if not future.done():
                return None
            raise
        return found

    def _start(self, key: _Key, count: Callable[[], _T]) -> Future[_T] | None:
        now = time.monotonic()
        with self._lock:
            for old, ended in list(self._ended.items()):
                if now - ended > _KEPT_SECONDS:
                    del self._ended[old], self._asked[old]
            if key not in self._asked:
                if sum(one[0] == key[0] and one not in self._ended for one in self._asked) >= _MOST_ASKED:
                    # A table that changes constantly gives new keys faster than the counts finish.
                    return None
                self._asked[key] = self._threads.submit(key[0], lambda: self._make(key, count))
            return self._asked[key]

    def _make(self, key: _Key, count: Callable[[], _T]) -> _T:
        try:
            found = count()
        except BaseException:
            with self._lock:
                del self._asked[key]
            raise
        with self._lock:
            self._ended[key] = time.monotonic()
        return found
