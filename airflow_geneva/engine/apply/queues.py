"""Queues between two threads of a task: each keeps its order, and together they hold a bounded number of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from airflow_geneva.engine.runtime import threading, time

Item = TypeVar("Item")


class Stopped(BaseException):
    """Ends a thread whose queues were stopped because another thread of the task failed."""


class ByteBudget:
    """The number of bytes that several queues may hold together, and their common lock.

    Without `takers_stop`, consumers of a stopped budget continue until the producers have ended their queues.
    """

    def __init__(self, limit: int, takers_stop: bool = True) -> None:
        self.limit = limit
        self.takers_stop = takers_stop
        self.used = 0
        self.most_used = 0
        self.queues = 0
        self.waiting: list[int] = []
        self.changed = threading.Condition()
        self.stopped: BaseException | None = None

    def stop(self, error: BaseException | None = None) -> None:
        """Make every waiting thread raise the error; items that are in a queue can still be taken."""
        with self.changed:
            self.stopped = self.stopped or error or Stopped()
            self.changed.notify_all()

    def take(self, size: int) -> None:
        self.used += size
        self.most_used = max(self.most_used, self.used)

    def give(self, size: int) -> None:
        self.used -= size
        self.changed.notify_all()


class Queue(Generic[Item]):
    """Passes the items of one unit from one thread to another; the producer decides how iteration ends, with `end`.

    An item waits until it fits into the budget; queues created earlier have priority. If the consumer waits at an empty
    queue, one item of any size passes.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._number, budget.queues = budget.queues, budget.queues + 1
        self._items = deque[tuple[Item, int]]()
        self._expected = self._reserved = 0
        self._taking = self._ended = False
        self._error: BaseException | None = None

    def reserve(self, expected: int) -> None:
        """Wait for the expected bytes, at most three quarters of the budget, and reserve them for the next items."""
        size = min(expected, self.budget.limit * 3 // 4)
        with self.budget.changed:
            self._wait_for(size)
            self.budget.take(size)
            self._expected, self._reserved = expected, size

    def put(self, item: Item, size: int, wait: bool = True) -> None:
        """Add an item; if the budget was stopped, add it before raising the error: it may have been paid for."""
        with self.budget.changed:
            expected = max(self._expected - size, 0)
            covered = self._reserved - min(expected, self._reserved)
            try:
                if wait:
                    self._wait_for(size - covered)
            finally:
                self._items.append((item, size))
                self.budget.take(size - covered)
                self._expected, self._reserved = expected, self._reserved - covered
                self.budget.changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end of the items; the consumer raises `error` after the last item. Only the first call counts."""
        with self.budget.changed:
            if not self._ended:
                self._ended, self._error = True, error
            self.budget.give(self._reserved)
            self._reserved = 0

    def is_ready(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether an item is there, the queue has ended, or the budget was stopped."""
        with self.budget.changed:
            return self.budget.changed.wait_for(
                lambda: bool(self._items) or self._ended or self.budget.stopped is not None, seconds
            )

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self.budget.changed:
            self._taking = True
            self.budget.changed.notify_all()
            while not self._items and not self._ended:
                if self.budget.stopped is not None and self.budget.takers_stop:
                    raise self.budget.stopped
                self.budget.changed.wait()
            if self._items:
                item, size = self._items.popleft()
                self.budget.give(size)
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _wait_for(self, size: int) -> None:
        budget = self.budget
        budget.waiting.append(self._number)
        try:
            while budget.stopped is None:
                wanted = self._taking and not self._items
                fits = not budget.used or not size or budget.used + size <= budget.limit
                if wanted or (fits and self._number == min(budget.waiting)):
                    return
                budget.changed.wait()
            raise budget.stopped
        finally:
            budget.waiting.remove(self._number)
            budget.changed.notify_all()


class Turns:
    """Lets threads that took numbered items pass them on in the order of the numbers."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._next = 0

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait until all lower numbers have had their turn."""
        with self.budget.changed:
            while self._next != number:
                if self.budget.stopped is not None:
                    raise self.budget.stopped
                self.budget.changed.wait()
        yield
        with self.budget.changed:
            self._next += 1
            self.budget.changed.notify_all()


@dataclass(eq=False)
class Unkept:
    """Rows that were handed over since the time `since`, and that a kill loses until `is_kept`."""

    since: float
    rows: int = 0
    is_kept: bool = False


class Acknowledgments:
    """Blocks the computing thread while a kill would lose more than `seconds` of work or more than `most` rows."""

    def __init__(self, budget: ByteBudget, seconds: float, most: int | None) -> None:
        self.budget = budget
        self.seconds = seconds
        self.most = most
        self._waiting: list[Unkept] = []

    def kept(self, rows: Unkept) -> None:
        with self.budget.changed:
            rows.is_kept = True
            self.budget.changed.notify_all()

    def wait(self, rows: Unkept) -> None:
        """Add rows that are not stored yet; block while rows wait too long, or another batch of this size would be too
        many."""
        with self.budget.changed:
            self._waiting.append(rows)
            while self._is_too_much(rows.rows):
                if self.budget.stopped is not None:
                    raise self.budget.stopped
                self.budget.changed.wait()

    def _is_too_much(self, next_rows: int) -> bool:
        self._waiting = [rows for rows in self._waiting if not rows.is_kept]
        if not self._waiting:
            return False
        late = time.monotonic() - self._waiting[0].since >= self.seconds
        return late or (self.most is not None and sum(rows.rows for rows in self._waiting) + next_rows > self.most)
