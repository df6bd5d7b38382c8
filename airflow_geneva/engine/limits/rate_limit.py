"""`RateLimit` of a UDF, and what a UDF reports: `RateLimited`, and the usage of its calls with `report`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from functools import partial

from airflow_geneva.engine.counts import Usage
from airflow_geneva.engine.runtime import threading
from airflow_geneva.engine.storage.uri import is_name
from airflow_geneva.errors import GenevaError, InvalidInput


@dataclass(frozen=True)
class RateLimit:
    """The limits of a service: one budget for all calls with the same key on this database.

    A UDF with a limit makes one request per call. Processes with different limits for one key share its budget, and
    each keeps its own limits.

    Args:
        key: name of the budget, for example of the provider and the account; a valid file name.
        requests_per_minute: maximum number of requests in any minute; None: no limit.
        tokens_per_minute: maximum number of tokens in any minute, as calls `report` them; None: no limit.
        concurrent: maximum number of concurrent requests; None: no limit.
    """

    key: str
    _: KW_ONLY
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not is_name(self.key):
            raise InvalidInput(
                f"RateLimit(key={self.key!r}) cannot name a file. Use letters, digits, '_', '-' and '.', at most 200, "
                'such as "openai-research".'
            )
        for name in ("requests_per_minute", "tokens_per_minute"):
            rate = getattr(self, name)
            if rate is not None and not (_is_number(rate) and rate > 0):
                raise InvalidInput(f"RateLimit({name}={rate!r}): give a number above 0, or None for no limit.")
        at_once = self.concurrent
        if at_once is not None and not (type(at_once) is int and at_once >= 1):
            raise InvalidInput(f"RateLimit(concurrent={at_once!r}): give a whole number of at least 1, or None.")
        if self.requests_per_minute is self.tokens_per_minute is at_once is None:
            raise InvalidInput(
                f"RateLimit(key={self.key!r}) limits nothing. Give requests_per_minute, tokens_per_minute or "
                "concurrent."
            )


def check_limit(value: object) -> RateLimit | None:
    if value is None or isinstance(value, RateLimit):
        return value
    raise InvalidInput(f'limit={value!r}: give a RateLimit, such as RateLimit("openai", requests_per_minute=500).')


class RateLimited(GenevaError):
    """Raised by a UDF with a limit when the service refuses a request because of too many requests.

    All processes that share the limit then wait, and the call is repeated.

    Args:
        retry_after: seconds to wait; None: 1 second, doubled each time.
    """

    def __init__(self, message: str = "too many requests", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Meter:
    """Adds up the usage of calls.

    Args:
        most_cost: returns the maximum total cost, as currently known.
        go_on: called before a call is repeated, in the thread of the call or in one beside an event loop. It returns
            when the job may continue, and raises StopComputing if it may not.
    """

    def __init__(
        self, most_cost: Callable[[], float] = lambda: math.inf, go_on: Callable[[], None] = lambda: None
    ) -> None:
        self.usage = Usage()
        self.most_cost = most_cost
        self.go_on = go_on
        self._rows_in_flight = 0
        self._price = 0.0
        self._lock = threading.Lock()

    def add(self, usage: Usage) -> None:
        with self._lock:
            self.usage += usage

    def begin(self, rows: int, declared: float) -> bool:
        """Count a call as started if the remaining cost covers it and the calls in flight; one call may always start.

        Args:
            declared: cost of a row until calls have reported one; 0: unknown.
        """
        with self._lock:
            if self.usage.rows and (paid := self.usage.paid):
                self._price = paid / self.usage.rows
            price, flying = self._price or declared, self._rows_in_flight
            left = self.most_cost() - self.usage.paid
            may = not flying or left == math.inf or 0 < price * (flying + rows) <= left
            self._rows_in_flight += rows if may else 0
            return may

    def end(self, rows: int) -> None:
        """Count a call as ended, after its usage was added."""
        with self._lock:
            self._rows_in_flight -= rows

    def take(self) -> Usage:
        """Return the usage since the last call of this method."""
        with self._lock:
            taken, self.usage = self.usage, Usage()
            return taken


_meter: ContextVar[Meter | None] = ContextVar("geneva_usage", default=None)


def report(*, tokens: float = 0, cost: float = 0.0, requests: int = 1) -> None:
    """Report the usage of a call to a service, inside a UDF; outside of a job this function does nothing.

    Args:
        tokens: number of tokens of the prompt and the answer.
        cost: amount of money, in the currency of `udf(cost=)`.
        requests: number of requests.
    """
    for name, value in {"tokens": tokens, "cost": cost, "requests": requests}.items():
        if not _is_number(value) or value < 0:
            raise InvalidInput(f"report({name}={value!r}): give a number of at least 0.")
    meter = _meter.get()
    if meter is not None:
        meter.add(Usage(int(requests), tokens, cost))


@contextmanager
def metered(meter: Meter | None = None) -> Iterator[Meter]:
    """Count the usage of the block with its own meter, and not with the enclosing one."""
    meter = meter or Meter()
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


def used_so_far() -> Usage:
    """Return the usage counted by the enclosing meter."""
    meter = _meter.get()
    return Usage() if meter is None else meter.usage


def is_used_up() -> bool:
    """Whether the calls have reached the maximum cost, as far as this process knows."""
    meter = _meter.get()
    return meter is not None and 0 < meter.usage.paid >= meter.most_cost()


def may_go_on() -> None:
    """Wait until another call may be made; StopComputing if the job has reached a cap."""
    meter = _meter.get()
    if meter is not None:
        meter.go_on()


def begin_call(rows: int, declared: float | None) -> Callable[[], None] | None:
    """Start a call if the remaining cost covers it; return a function that ends it, or None if it has to wait."""
    meter = _meter.get()
    if meter is None:
        return lambda: None
    return partial(meter.end, rows) if meter.begin(rows, declared or 0.0) else None


def affordable_rows(computed: int, threads: int, attempts: int) -> float:
    """Return the number of further rows that the cap on the cost allows; at least 1.

    Each row is assumed to cost as much as a `computed` row, times the attempts of its call. Several threads that share
    a meter with a cap get 1, because none of them knows the cost of the others' calls.
    """
    meter = _meter.get()
    if meter is None or not (cost := meter.usage.paid) or (left := meter.most_cost() - cost) == math.inf:
        return math.inf
    return max(left * computed / cost / attempts, 1) if threads == 1 else 1


def count(usage: Usage) -> None:
    """Add usage to the enclosing meter, if there is one."""
    meter = _meter.get()
    if meter is not None:
        meter.add(usage)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
