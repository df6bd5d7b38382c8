"""The event loop of this process, in a thread of ours: the main thread of a notebook or a task may run one already."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF

Result = TypeVar("Result")


class EventLoop:
    """Runs the async calls of all UDFs of this process: a client such as `httpx.AsyncClient` belongs to one loop."""

    def __init__(self) -> None:
        self.ended = 0
        self._call_ended = threading.Condition()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gates: dict[tuple[str, str, int | None], asyncio.Semaphore] = {}

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the loop; to cancel the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def gate(self, udf: UDF) -> asyncio.Semaphore:
        """Return what lets `max_in_flight` calls of a UDF pass at a time, in the order in which they came."""
        key = (udf.name, udf.code_version, udf.max_in_flight)
        with self._lock:
            return self._gates.setdefault(key, asyncio.Semaphore(udf.max_in_flight or 1))

    def count_ended(self) -> None:
        """Say that a call has ended, or a batch."""
        with self._call_ended:
            self.ended += 1
            self._call_ended.notify_all()

    def wait_for_call(self, ended: int) -> None:
        """Wait until more calls than these have ended."""
        with self._call_ended:
            self._call_ended.wait_for(lambda: self.ended > ended)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(loop,), name="geneva-event-loop", daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # Of a task that a UDF starts, these end the loop besides being raised where the task is waited for.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


LOOP = EventLoop()


def _after_fork() -> None:
    """Begin anew: a forked process has no copy of the thread that runs the loop."""
    LOOP.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)
