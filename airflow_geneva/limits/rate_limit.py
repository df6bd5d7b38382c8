"""What a user says about limits: `RateLimit` on a UDF, `RateLimited` and `report` inside of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass, replace
from functools import partial

from airflow_geneva.display import counted
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.storage.uri import is_name


@dataclass(frozen=True)
class RateLimit:
    """What a service allows: one budget for all calls that name its key on this database.

    A UDF with a limit makes one request per call. Processes that give the key other limits each keep their own, as a
    part of the same minute.

    Args:
        key: names the budget, such as the provider and the account; a file name.
        requests_per_minute: most requests in any minute; None: no limit.
        tokens_per_minute: most tokens in any minute, as `report` says them; None: no limit.
        concurrent: most requests at a time; None: no limit.
    """

    key: str
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None

    def __init__(
        self,
        key: str,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        concurrent: int | None = None,
    ) -> None:
        if not isinstance(key, str) or not is_name(key):
            raise InvalidInput(
                f"RateLimit(key={key!r}) cannot name a file. Use letters, digits, '_', '-' and '.', at most 200, such "
                'as "openai-research".'
            )
        rates = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        for name, rate in rates.items():
            if rate is not None and not (_is_number(rate) and rate > 0):
                raise InvalidInput(f"RateLimit({name}={rate!r}): give a number above 0, or None for no limit.")
        if concurrent is not None and not (type(concurrent) is int and concurrent >= 1):
            raise InvalidInput(f"RateLimit(concurrent={concurrent!r}): give a whole number of at least 1, or None.")
        if requests_per_minute is tokens_per_minute is concurrent is None:
            raise InvalidInput(
                f"RateLimit(key={key!r}) limits nothing. Give requests_per_minute, tokens_per_minute or concurrent."
            )
        for name, value in {"key": key, **rates, "concurrent": concurrent}.items():
            object.__setattr__(self, name, value)


def check_limit(value: object) -> RateLimit | None:
    if value is None or isinstance(value, RateLimit):
        return value
    raise InvalidInput(f'limit={value!r}: give a RateLimit, such as RateLimit("openai", requests_per_minute=500).')


class RateLimited(GenevaError):
    """Raise it in a UDF with a limit when the service says that there were too many requests.

    All processes that share the limit then wait, and the call is made again.

    Args:
        retry_after: seconds to wait; None: 1 second, doubled each time.
    """

    def __init__(self, message: str = "too many requests", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Usage:
    """What calls used: requests, and the tokens and money that they reported.

    Args:
        rows: rows that functions were called on; a row counts once for each call.
        declared: what these calls cost by `udf(cost=)`.
    """

    calls: int = 0
    tokens: float = 0
    cost: float = 0.0
    rows: int = 0
    declared: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        ours, theirs = astuple(self), astuple(other)
        return Usage(*(one + more for one, more in zip(ours, theirs, strict=True)))

    def __bool__(self) -> bool:
        """Whether calls reported anything."""
        return bool(self.calls or self.tokens or self.cost)

    @property
    def reported(self) -> Usage:
        """What calls reported, and nothing else."""
        return replace(self, rows=0, declared=0.0)

    @property
    def paid(self) -> float:
        """What calls cost: as they reported, or if none did, as declared."""
        return self.cost or self.declared

    def __str__(self) -> str:
        cost = f", cost {self.cost:,.6g}" if self.cost else ""
        tokens = f", {self.tokens:,.0f} tokens" if self.tokens else ""
        return f"{counted(self.calls, 'call')} of a service{tokens}{cost}"

    @staticmethod
    def from_json(document: object) -> Usage:
        """Read what a document says; nothing if it says nothing, or if it is damaged."""
        if not isinstance(document, Mapping):
            return Usage()
        try:
            reported = int(document["calls"]), float(document["tokens"]), float(document["cost"])
            return Usage(*reported, int(document.get("rows", 0)), float(document.get("declared", 0.0)))
        except (LookupError, TypeError, ValueError):
            return Usage()


class Meter:
    """Adds up what calls used.

    Args:
        most_cost: returns what they may cost in all, as it is known now.
        go_on: called before a call is made again, in the thread that makes it or beside an event loop. It returns when
            the job may go on, and raises StopComputing if it may not.
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
        """Count a call on rows as begun, if what is left pays for it beside those in flight; one may always begin.

        Args:
            declared: cost of a row until calls said what they cost; 0: it is not known.
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
        """Count a call as ended, after what it used was added."""
        with self._lock:
            self._rows_in_flight -= rows

    def take(self) -> Usage:
        """Return the usage since the last time, and begin again."""
        with self._lock:
            taken, self.usage = self.usage, Usage()
            return taken


_meter: ContextVar[Meter | None] = ContextVar("geneva_usage", default=None)


def report(*, tokens: float = 0, cost: float = 0.0, requests: int = 1) -> None:
    """Say inside a UDF what a call to a service used; outside of a job it does nothing.

    Args:
        tokens: tokens, of the prompt and of the answer.
        cost: money, in the currency of `udf(cost=)`.
        requests: how many requests it was.
    """
    for name, value in {"tokens": tokens, "cost": cost, "requests": requests}.items():
        if not _is_number(value) or value < 0:
            raise InvalidInput(f"report({name}={value!r}): give a number of at least 0.")
    meter = _meter.get()
    if meter is not None:
        meter.add(Usage(int(requests), tokens, cost))


@contextmanager
def metered(meter: Meter | None = None) -> Iterator[Meter]:
    """Give the block a meter; what it counts, the meter around it does not."""
    meter = meter or Meter()
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


def used_so_far() -> Usage:
    """Return what the meter around the caller says."""
    meter = _meter.get()
    return Usage() if meter is None else meter.usage


def is_used_up() -> bool:
    """Whether calls cost as much as they may, as far as it is known here."""
    meter = _meter.get()
    return meter is not None and 0 < meter.usage.paid >= meter.most_cost()


def may_go_on() -> None:
    """Return when another call may be made; StopComputing if the job has reached a cap."""
    meter = _meter.get()
    if meter is not None:
        meter.go_on()


def begin_call(rows: int, declared: float | None) -> Callable[[], None] | None:
    """Begin a call on rows if its cost is left; return what says that it has ended, None if it must wait."""
    meter = _meter.get()
    if meter is None:
        return lambda: None
    return partial(meter.end, rows) if meter.begin(rows, declared or 0.0) else None


def affordable_rows(computed: int, threads: int, attempts: int) -> float:
    """Return the number of further rows that the cap on the cost allows; at least 1.

    Each row may cost as much as a `computed` row, times the attempts of its call. It is 1 if several threads share a
    meter with a cap: none knows what the calls of the others will cost.
    """
    meter = _meter.get()
    if meter is None or not (cost := meter.usage.paid) or (left := meter.most_cost() - cost) == math.inf:
        return math.inf
    return max(left * computed / cost / attempts, 1) if threads == 1 else 1


def count(usage: Usage) -> None:
    """Add to the meter around the caller, if there is one."""
    meter = _meter.get()
    if meter is not None:
        meter.add(usage)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
