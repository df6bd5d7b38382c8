"""Timeouts for object stores in processes that serve other requests meanwhile: the triggerer and the API server."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from airflow_geneva.engine.runtime import Future, threading
from airflow_geneva.engine.storage.engine_errors import is_panic
from airflow_geneva.engine.storage.uri import is_local
from airflow_geneva.errors import StorageError

_T = TypeVar("_T")

_SHORT_TIMEOUTS = {"connect_timeout": "5s", "timeout": "20s", "client_max_retries": "1", "client_retry_timeout": "20"}
_MOST_FOR_A_STORE = 8


def with_short_timeouts(uri: str, options: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return storage options with short timeouts; timeouts that the user set are kept."""
    return options if is_local(uri) else tuple(sorted({**_SHORT_TIMEOUTS, **dict(options)}.items()))


@contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Turn a panic in pylance's native code into a `StorageError`, which `except Exception` catches."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise StorageError(f"{what} cannot be read: {error}.") from error


class StoreThreads:
    """Threads for calls that may hang: a few per store, so that an unresponsive store does not block the others.

    The threads are daemons, so that a stopping server does not wait for them. They end when they are idle.
    """

    def __init__(self, name: str, most: int = _MOST_FOR_A_STORE) -> None:
        self._name = name
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._running: dict[Hashable, int] = {}

    async def run(self, store: Hashable, call: Callable[[], _T], seconds: float) -> _T:
        """Run a call in a thread of its store and return its result; `StorageError` if it times out or pylance panics.

        A call that times out keeps its thread until it returns; its result is dropped.
        """
        future = self.submit(store, call)
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait({answer}, timeout=seconds)
            if not answer.done():
                raise StorageError(f"The store has not answered for {seconds:g} seconds.")
            return answer.result()
        finally:
            answer.cancel()
            with self._lock, suppress(KeyError):  # cancel the call if it has not started
                waiting = self._waiting[store]
                self._waiting[store] = deque(entry for entry in waiting if entry[0] is not future)

    def submit(self, store: Hashable, call: Callable[[], _T]) -> Future[_T]:
        """Queue a call; it runs when its store has a free thread."""
        future: Future[_T] = Future()
        context = contextvars.copy_context()
        with self._lock:
            self._waiting.setdefault(store, deque()).append((future, lambda: context.run(call)))
            running = self._running.get(store, 0)
            if running < self._most:
                threading.Thread(target=self._work, args=(store,), name=self._name, daemon=True).start()
                self._running[store] = running + 1
        return future

    def _work(self, store: Hashable) -> None:
        while True:
            with self._lock:
                if not self._waiting[store]:
                    self._running[store] -= 1
                    if not self._running[store]:
                        del self._running[store], self._waiting[store]
                    return
                future, call = self._waiting[store].popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with panics_as_errors("What was asked for"):
                    found = call()
            except BaseException as error:  # passed on to the waiting caller
                future.set_exception(error)
            else:
                future.set_result(found)
