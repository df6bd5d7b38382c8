"""Long counts, made once for whoever asks for them, and not waited for longer than a page may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

_T = TypeVar("_T")

_AT_ONCE = 2
_MOST_ASKED = 8
_KEPT_SECONDS = 5.0


class Counts:
    """Counts that are being made, a few at once.

    Results are kept for a moment, so that a page that asks for several of them gets each, one after another.

    Args:
        at_once: threads to count in.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = threading.Semaphore(at_once)
        self._lock = threading.Lock()
        self._asked: dict[Hashable, Future[Any]] = {}
        self._ended: dict[Hashable, float] = {}

    def get(self, key: Hashable, count: Callable[[], _T], until: float) -> _T | None:
        """The result of a count; None when it is not there in time, and is to be asked for again.

        Args:
            key: names the count; who asks for the same one waits for the same thread.
            count: makes it.
            until: the time to wait for it to, by ``time.monotonic``.

        Raises:
            Exception: whatever the count raised.
        """
        future = self._start(key, count)
        if future is None:
            return None
        try:
            found: _T = future.result(max(until - time.monotonic(), 0.0))
        except NotYet:
            if not future.done():
                return None
            raise
        return found

    def _start(self, key: Hashable, count: Callable[[], _T]) -> Future[_T] | None:
        now = time.monotonic()
        with self._lock:
            for old, ended in list(self._ended.items()):
                if now - ended > _KEPT_SECONDS:
                    del self._ended[old], self._asked[old]
            if key not in self._asked:
                if len(self._asked) - len(self._ended) >= _MOST_ASKED:
                    # A table that changes all the time is asked about under new names, faster than is counted.
                    return None
                future = self._asked[key] = Future()
                # A daemon, so that a server that is told to stop does not wait for it.
                threading.Thread(target=self._make, args=(key, future, count), name="geneva-count", daemon=True).start()
            return self._asked[key]

    def _make(self, key: Hashable, future: Future[Any], count: Callable[[], Any]) -> None:
        with self._places:
            try:
                found = count()
            except BaseException as error:  # pylance's panics included: whoever waits is told
                with self._lock:
                    del self._asked[key]
                future.set_exception(error)
                return
        with self._lock:
            self._ended[key] = time.monotonic()
        future.set_result(found)
