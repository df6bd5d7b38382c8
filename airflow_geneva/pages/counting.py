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
_KEPT_SECONDS = 60.0


class Counts:
    """Counts that are being made, a few at once.

    Args:
        at_once: threads to count in.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._places = threading.Semaphore(at_once)
        self._lock = threading.Lock()
        self._asked: dict[Hashable, tuple[Future[Any], float]] = {}

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
        try:
            found: _T = future.result(max(until - time.monotonic(), 0.0))
        except NotYet:
            if not future.done():
                return None
            raise
        finally:
            if future.done():
                with self._lock:
                    self._asked.pop(key, None)
        return found

    def _start(self, key: Hashable, count: Callable[[], _T]) -> Future[_T]:
        now = time.monotonic()
        with self._lock:
            # Nobody came back for those that ended long ago, and what they tell is old.
            for old, (future, since) in list(self._asked.items()):
                if future.done() and now - since > _KEPT_SECONDS:
                    del self._asked[old]
            if key not in self._asked:
                future = Future()
                # A daemon, so that a server that is told to stop does not wait for it.
                threading.Thread(target=self._make, args=(future, count), name="geneva-count", daemon=True).start()
                self._asked[key] = (future, now)
            return self._asked[key][0]

    def _make(self, future: Future[Any], count: Callable[[], Any]) -> None:
        with self._places:
            try:
                future.set_result(count())
            except BaseException as error:  # pylance's panics included: whoever waits is told
                future.set_exception(error)
