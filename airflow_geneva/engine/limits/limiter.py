"""Reserve intervals of a budget for the next calls of this process, and wait until they start."""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from airflow_geneva.engine.limits.budget import (
    LATENESS,
    SEAT_SECONDS,
    TICK_SECONDS,
    TURN_SECONDS,
    Budget,
    Held,
    TableClock,
    seconds_each,
)
from airflow_geneva.engine.limits.rate_limit import RateLimit
from airflow_geneva.engine.limits.store import BudgetTable, Found
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.runtime import random, threading, time, uuid
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import GenevaError, StorageError

logger = logging.getLogger("airflow_geneva.limits")

_GROWTH = 1.5
_SEAT_POLL = 0.5
_MOST_TRIES = 200
_SETTLE_TRIES = 20
_LEAVE_SECONDS = 5.0


@dataclass
class Pass:
    """A call's reservation: whether it has a seat, and its start, None before it has one; void once `ended`."""

    tokens: float
    seated: bool = False
    begin: float | None = None
    ended: bool = False


class TokenGuess:
    """Estimates the tokens of a call by the length of its texts and the tokens that earlier calls reported."""

    def __init__(self) -> None:
        self.per_text: float | None = None
        self.mean: float | None = None

    def of(self, by_text: float) -> float:
        return by_text * (self.per_text or 1.0) if by_text else self.mean or 0.0

    def learn(self, by_text: float, tokens: float) -> None:
        self.mean = _running(self.mean, tokens)
        if by_text:
            self.per_text = _running(self.per_text, tokens / by_text)


def _running(mean: float | None, value: float) -> float:
    return value if mean is None else 0.8 * mean + 0.2 * value


class Limiter:
    """Starts calls of this process when the budget allows them; threads and coroutines may share it.

    `step` returns the seconds to wait before the next `step` of a call, which may read and write the table; the call
    may start when it returns 0 or less. `done` ends the call.
    """

    def __init__(self, table: BudgetTable, limit: RateLimit, clock: TableClock | None = None) -> None:
        self.limit = limit
        self.table = table
        self.name = uuid.uuid4().hex[:16]
        self.clock = clock or TableClock()
        self._request_seconds = seconds_each(limit.requests_per_minute)
        self._token_seconds = seconds_each(limit.tokens_per_minute)
        self.guesses: dict[str, TokenGuess] = {}
        self._lock = threading.RLock()
        self._held = self._reserved = Held()
        self._paused = 0.0
        # The last read of the table, its version then, and the time at which that version was first read.
        self._read_at: float | None = None
        self._version, self._changed_at = 0, 0.0
        # Durations of the last two writes: both are long on a slow store; after a suspension only one is.
        self._write_seconds = deque([0.0, 0.0], maxlen=2)
        # Number of calls to reserve for, calls started since the last reservation, and tokens per call.
        self._calls, self._passed, self._tokens = 1.0, 0, 0.0
        # Requests and tokens of finished calls beyond their reservations, until written; unused tokens are negative.
        self._debt_requests = self._debt_tokens = 0.0
        self._ended = deque[tuple[Pass, int, float]]()
        self._seats, self._seated_since, self._seats_until = 0, 0.0, 0.0
        self._under_way = self._wanting = 0
        self._others_wait = False
        self._stepped_at = 0.0
        self._keeper = threading.Thread(target=self._keep_up, name="geneva-limit", daemon=True)
        self._warned = False

    def step(self, call: Pass) -> float:
        with self._lock:
            if call.ended:
                return 0.0
            self._settle()
            self._stepped_at = self.clock.own()
            if self._read_at is None:
                self._look()
                self._keeper.start()
            if not call.seated and not self._sit(call):
                return _SEAT_POLL * random.uniform(0.5, 1.5)
            now = self.clock.now()
            if self._age > 2 * TICK_SECONDS:
                self._look()
                now = self.clock.now()
            if now >= self._paused and (call.begin is None or now > call.begin + LATENESS):
                call.begin = self._spend(call.tokens)
                now = self.clock.now()
            # The clock may be advanced while the call waits.
            return min(max(call.begin or 0.0, self._paused) - now, 2 * TICK_SECONDS)

    def done(self, call: Pass, requests: int = 1, tokens: float | None = None) -> None:
        """Record the end of a call, also of one that did not start; `tokens` is None if it reported none.

        This method does not block, because event loops call it. A thread may still be in the `step` of a canceled call.
        """
        call.ended = True
        more = 0.0 if tokens is None else tokens - call.tokens
        self._ended.append((call, max(requests - 1, 0), more))

    def settle(self) -> None:
        """Write what finished calls used beyond their estimates, now if it is large, else with the next write.

        This method waits for the table. If the write fails, the next one includes the usage.
        """
        with self._lock, suppress(GenevaError):
            self._settle()
            if max(self._owed) >= LATENESS:
                self._change(lambda budget: budget, tries=_SETTLE_TRIES)

    @property
    def _owed(self) -> tuple[float, float]:
        """Seconds of requests and of tokens that finished calls used beyond their reservations."""
        return self._debt_requests * self._request_seconds, max(self._debt_tokens, 0.0) * self._token_seconds

    def _settle(self) -> None:
        while self._ended:
            call, requests, tokens = self._ended.popleft()
            self._under_way -= call.seated
            self._debt_requests += requests
            self._debt_tokens += tokens

    def pause(self, seconds: float) -> None:
        """Start no call of any process for a number of seconds."""
        with self._lock:
            self._change(lambda budget: budget.pause(seconds))

    def leave(self) -> None:
        """Release unused reservations when the process exits; reservations that cannot be released expire."""
        if not self._lock.acquire(timeout=_LEAVE_SECONDS):  # another thread waits for the store
            return
        try:
            self.table = self.table.at_exit()
            with suppress(GenevaError):
                self._settle()
                if self._age < SEAT_SECONDS or any(self._owed):
                    self._change(lambda budget: budget.without(self.name, self._held))
                    self._held, self._seats = Held(), 0
        finally:
            self._lock.release()

    def _spend(self, tokens: float) -> float:
        """Use intervals for one call, after reserving more if they do not suffice; return when the call may start."""
        due, requests = max(tokens + min(self._debt_tokens, 0.0), 0.0), self._request_seconds
        self._tokens = due if not self._tokens else 0.9 * self._tokens + 0.1 * due
        while (spent := self._held.spend(requests, due * self._token_seconds, self.clock.now())) is None:
            self._reserve(requests, due * self._token_seconds)
        self._held, begin = spent
        self._debt_tokens += tokens - due
        self._passed += 1
        return max(begin, self.clock.now() - LATENESS)

    def _reserve(self, requests: float, tokens: float) -> None:
        """Reserve for the number of calls since the last reservation, or for more if no interval has expired."""
        passed, self._passed = self._passed, 0
        if self._held.lost:
            self._calls = max(passed, 1)
        else:
            self._calls = max(self._calls, passed) * _GROWTH if passed else self._calls
        each = max(self._request_seconds, self._tokens * self._token_seconds, 1e-9)

        def more(budget: Budget) -> Budget:
            calls = max(min(self._calls, budget.room / each), 1.0)
            # Intervals that expire before they are written would be reserved again and again.
            later = min(self._write_seconds)
            held = self._held.usable(budget.clock + later)
            of_requests, of_tokens = held.seconds
            wanted = max(calls * self._request_seconds, requests) - of_requests
            wanted_tokens = max(calls * self._tokens * self._token_seconds, tokens) - of_tokens
            after, *pieces = budget.reserve(max(wanted, 0.0), max(wanted_tokens, 0.0), later)
            self._reserved = replace(held, lost=0.0).add(*pieces)
            return after

        self._change(more)
        self._held = self._reserved

    def _sit(self, call: Pass) -> bool:
        """Take a seat for a call; return False if this process has none and gets none."""
        most = self.limit.concurrent
        if most is None:
            call.seated = True
            self._under_way += 1
            return True
        now = self.clock.now()
        others_first = self._others_wait and now > self._seated_since + TURN_SECONDS
        if self._under_way >= self._seats_at(now) or others_first:
            self._wanting += 1
            try:
                self._ask_for_seats(others_first)
            finally:
                self._wanting -= 1
        if self._under_way >= self._seats_at(self.clock.now()):
            return False
        call.seated = True
        self._under_way += 1
        return True

    def _seats_at(self, now: float) -> int:
        return self._seats if now < self._seats_until - 2 * TICK_SECONDS else 0

    def _ask_for_seats(self, others_first: bool = False) -> None:
        had, most = self._seats, self.limit.concurrent or 0
        wanted, used = self._under_way + self._wanting, self._under_way
        after = self._change(lambda budget: budget.lease(self.name, wanted, used, most, others_first))
        self._seats, self._seats_until = after.seats.get(self.name, (0, 0.0))
        if others_first or not had:
            self._seated_since = self.clock.now()

    def tick(self) -> None:
        """While this process makes calls, read the budget, write its clock if no other process did, and renew seats."""
        with self._lock:
            self._settle()
            owes = any(self._owed)
            if not (owes or self._under_way) and self.clock.own() - self._stepped_at > 2 * TICK_SECONDS:
                return
            self._look()
            if self._seats and self.clock.now() > self._seats_until - SEAT_SECONDS * 2 / 3:
                self._ask_for_seats()
            elif owes or self.clock.own() - self._changed_at >= TICK_SECONDS:
                self._change(lambda budget: budget, tries=1)

    def _keep_up(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            try:
                self.tick()
            except GenevaError as error:
                logger.info("Cannot keep up with the limit %r: %s", self.limit.key, error)

    @property
    def _age(self) -> float:
        """Seconds since the table was read."""
        return float("inf") if self._read_at is None else self.clock.own() - self._read_at

    def _look(self) -> Found:
        found = self.table.read()
        others = found.version != self._version
        self.clock.see(found.budget.clock, forget=others and self._age > 2 * TICK_SECONDS)
        if others:
            self._version, self._changed_at = found.version, self.clock.own()
        self._paused = max(self._paused, found.budget.paused)
        self._others_wait = bool(found.budget.waiting.keys() - {self.name})
        self._read_at = self.clock.own()
        return found

    def _change(self, change: Callable[[Budget], Budget], tries: int = _MOST_TRIES) -> Budget:
        """Apply a function to the newest budget and write it; with fewer `tries`, the write may fail silently."""
        after = Budget()
        for number in range(tries):
            found, began = self._look(), self.clock.own()
            owed, requests, tokens = self._owed, self._debt_requests, max(self._debt_tokens, 0.0)
            after = change(found.budget.at(self.clock.now(), self.name, self.limit).owe(*owed))
            if self.table.write(after, found):
                self._debt_requests -= requests
                self._debt_tokens -= tokens
                self._version, self._changed_at = found.version + 1, self.clock.own()
                self._write_seconds.append(self._changed_at - began)
                self._warn_of_other_limits(found.budget, after)
                self._paused = max(self._paused, after.paused)
                return after
            time.sleep(random.uniform(0, min(0.01 * 2 ** min(number, 5), 0.2)))
        if tries < _MOST_TRIES:
            return after
        raise StorageError(
            f"The limit {self.limit.key!r} at {self.table.uri} could not be written in {_MOST_TRIES} tries, because "
            "other processes write it all the time. Run the task again with fewer processes."
        )

    def _warn_of_other_limits(self, before: Budget, after: Budget) -> None:
        if before.limits and before.limits != after.limits and not self._warned:
            self._warned = True
            logger.warning(
                "The limit %r was %s, and is %s here. Processes with the earlier limits continue to use them.",
                self.limit.key, before.limits, after.limits,
            )  # fmt: skip


_limiters: ProcessMemo[tuple[int, Storage, RateLimit], Limiter] = ProcessMemo()
"""One for each limit and database: the calls of all jobs of this process share what it reserves."""


def limiter_of(storage: Storage, limit: RateLimit) -> Limiter:
    """Return this process's limiter for a limit whose budget is in `storage`."""

    def make() -> Limiter:
        made = Limiter(BudgetTable(storage, limit.key), limit)
        atexit.register(made.leave)
        return made

    return _limiters.once((os.getpid(), storage, limit), make)
