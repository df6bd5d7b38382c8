"""The event loop of async calls: a call is cancelled at its timeout, and if it does not end, its loop is abandoned."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_geneva.engine.runtime import Future, threading, time

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF

Result = TypeVar("Result")

GRACE_SECONDS = 5.0
"""Seconds within which a cancelled call must end."""
POLL_SECONDS = 1.0
"""Seconds after which a thread that waits for calls checks again whether one of them blocks the loop."""


class CallLoop:
    """An event loop in a thread of its own. `blocked_by` is the task whose call blocks that thread permanently."""

    def __init__(self) -> None:
        self.blocked_by: asyncio.Task[Any] | None = None
        self.set_ups = 0
        # For each call with a timeout: its deadline, and the task that awaits it.
        self.calls: dict[asyncio.Task[Any], tuple[float, asyncio.Task[Any] | None]] = {}
        self._gates: dict[tuple[str, str, int | None], asyncio.Semaphore] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="geneva-event-loop", daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the loop; cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def gate(self, udf: UDF) -> asyncio.Semaphore:
        """Return the semaphore that admits `max_in_flight` calls of a UDF at a time, in the order of their arrival."""
        key = (udf.name, udf.code_version, udf.max_in_flight)
        with self._lock:
            return self._gates.setdefault(key, asyncio.Semaphore(udf.max_in_flight or 1))

    def is_blocked(self) -> bool:
        """Whether a call still blocks the loop's thread two grace periods after its timeout; then abandon the loop."""
        with self._lock:
            if self.blocked_by is None and not self.set_ups and (found := self._find_blocking()):
                self.blocked_by = found
                LOOP.leave(self)
                # If the thread continues later, the results of the loop's other calls are dropped.
                self._loop.call_soon_threadsafe(self._cancel_all)
        return self.blocked_by is not None

    def _find_blocking(self) -> asyncio.Task[Any] | None:
        now, calls = time.monotonic(), dict(self.calls)
        overdue = {task: found for task, found in calls.items() if found[0] + 2 * GRACE_SECONDS < now}
        running = asyncio.current_task(self._loop)
        if running is None or not overdue or (running in calls and running not in overdue):
            return None
        # Tasks that a call started are unknown here: if one blocks, the call with the earliest deadline is blamed.
        blocking = running if running in overdue else min(overdue, key=lambda task: overdue[task][0])
        return overdue[blocking][1] or blocking

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        _here.loop = self
        while True:
            # If a task that a UDF started raises one of these, it also stops the loop itself.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()


class CurrentLoop:
    """The loop of this process for new calls; only one, because a client such as `httpx.AsyncClient` belongs to one."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the state; a forked process needs this, because it has no copy of the thread that runs the loop."""
        self.ended = 0
        self._call_ended = threading.Condition()
        self._lock = threading.Lock()
        self._current: CallLoop | None = None

    def current(self) -> CallLoop:
        with self._lock:
            self._current = self._current or CallLoop()
            return self._current

    def leave(self, loop: CallLoop) -> None:
        """Start no new calls in this loop; its calls in flight continue."""
        with self._lock:
            if self._current is loop:
                self._current = None

    def count_ended(self) -> None:
        """Report that a call or a batch has ended."""
        with self._call_ended:
            self.ended += 1
            self._call_ended.notify_all()

    def wait_for_call(self, ended: int) -> None:
        """Wait until more than `ended` calls have ended, at most until the loop should be checked again."""
        with self._call_ended:
            self._call_ended.wait_for(lambda: self.ended > ended, POLL_SECONDS)


_here = threading.local()
LOOP = CurrentLoop()


os.register_at_fork(after_in_child=LOOP.forget)


async def call_within(function: Callable[..., Awaitable[Any]], timeout: float | None, *arguments: Any) -> Any:
    """Call a function, and cancel the call at its timeout. If it does not end then, abandon it with its loop.

    Raises:
        TimeoutError: the call took longer, even if it returned a value after it was cancelled.
    """
    loop: CallLoop = _here.loop
    call = asyncio.ensure_future(_guarded(function, arguments))
    call.add_done_callback(see_exception)
    if timeout is not None:
        loop.calls[call] = (time.monotonic() + timeout, asyncio.current_task())
        call.add_done_callback(lambda call: loop.calls.pop(call, None))
    try:
        done, _ = await asyncio.wait([call], timeout=timeout)
    except asyncio.CancelledError:
        # A call that has just ended may have been paid for: its value is kept.
        if not call.done():
            call.cancel()
            await asyncio.wait([call], timeout=GRACE_SECONDS)
            raise
        done = {call}
    if not done:
        call.cancel()
        ended, _ = await asyncio.wait([call], timeout=GRACE_SECONDS)
        if not ended:
            LOOP.leave(loop)
        raise timed_out(timeout, "was cancelled" if ended else "did not end when it was cancelled")
    if not call.cancelled() and isinstance(error := call.exception(), GeneratorExit):
        raise RuntimeError(f"The function raised {error!r}.") from error
    return call.result()


def timed_out(timeout: float | None, ending: str) -> TimeoutError:
    return TimeoutError(f"The call took longer than {timeout:g} seconds and {ending}.")


async def _guarded(function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
    """Call a function; exceptions that would stop the event loop become a RuntimeError."""
    try:
        return await function(*arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"The function raised {error!r}.") from error


def see_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task that nothing awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
