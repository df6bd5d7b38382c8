"""Long counts, made once for whoever asks for them, and not waited for longer than a page may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from airflow_geneva.patience import Threads

_T = TypeVar("_T")

_AT_ONCE = 2
_MOST_ASKED = 8
_KEPT_SECONDS = 5.0
_Key = tuple[Hashable, Hashable]


class Counts:
    """Counts that are being made, a few at once for each store, so that one that hangs holds up no other.

    Results are kept for a moment, so that a page that asks for several of them gets each, one after another.

    Args:
        at_once: threads to count in, for a store.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._threads = Threads("geneva-count", at_once)
        self._lock = threading.Lock()
        self._asked: dict[_Key, Future[Any]] = {}
        self._ended: dict[_Key, float] = {}

    def get(self, store: Hashable, name: Hashable, count: Callable[[], _T], until: float) -> _T | None:
        """The result of a count; None when it is not there in time, and is to be asked for again.

        Args:
            store: names the store that is counted in.
            name: names the count; who asks for the same one waits for the same thread.
            count: makes it.
            until: the time to wait for it to, by ``time.monotonic``.

        Raises:
            Exception: whatever the count raised; a panic of pylance as a StorageError.
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
                    # A table that changes all the time is asked about under new names, faster than is counted.
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
