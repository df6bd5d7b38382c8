"""The budget of one key: a timeline of reserved intervals for requests and tokens, and seats for concurrent requests.

One request of a `requests_per_minute` limit occupies an interval of its share of a minute. Intervals do not overlap, so
no two processes use the same one, and the intervals of a process that dies remain unused. An interval can be used from
its start until `LATENESS` seconds later. The requests of any minute therefore come from intervals that start within a
minute and a few seconds, and `seconds_each` makes intervals longer by that amount.

Tokens and requests that a call used beyond its reservation are reserved after the call, with the next write, so that
all processes wait for them. They are written immediately if they exceed what a process may lose when it dies.

The timeline has its own clock, which has no date. Every writer of the budget also stores its clock, and a reader
advances its clock to a stored time that is later. No clock therefore runs faster than real time, whatever the machines'
clocks say, and a clock lags behind another by the age of the newest write that it has not read. A process that makes
calls reads the budget every `TICK_SECONDS`, and writes it if no other process did. A process that has not read it for
longer replaces its clock by the stored one, so that it never advances the clock that the others used meanwhile. The
clock stops while no process makes calls.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from airflow_geneva.engine.limits.rate_limit import RateLimit
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.documents import parse, well_typed
from airflow_geneva.errors import InvalidInput

LATENESS = 1.5
"""Seconds after its start during which an interval can be used."""

TICK_SECONDS = 0.5
"""Seconds between two reads of the budget in a process that makes calls; clocks differ by at most twice this."""

PAST = 0.5
"""Seconds by which an interval may start in the past, so that no time is lost while a process reserves it."""

SEAT_SECONDS = 15.0
"""Seconds after which seats expire unless their process renews them."""

TURN_SECONDS = 5.0
"""Seconds for which a process keeps its seats while others wait for one."""

_FORMAT = 1
_PRESENT_SECONDS = 3 * LATENESS
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

Span: TypeAlias = tuple[float, float]
"""The start and the end of an interval on the timeline, in seconds."""


def seconds_each(per_minute: float | None) -> float:
    """Return the seconds of the timeline that one request, or token, of a limit per minute occupies."""
    return 0.0 if per_minute is None else (60.0 + LATENESS + 2 * TICK_SECONDS) / per_minute


def own_seconds() -> float:
    """Return the seconds of a monotonic clock that also counts while the machine is suspended."""
    return time.clock_gettime(_CLOCK)


class TableClock:
    """This process's copy of the timeline's clock."""

    def __init__(self, own: Callable[[], float] = own_seconds) -> None:
        self.own = own
        self._ahead: float | None = None

    def see(self, found: float, forget: bool = False) -> None:
        """Advance the clock to the time of a budget that was just read; with `forget`, set it to that time."""
        ahead = found - self.own()
        self._ahead = ahead if self._ahead is None or forget else max(self._ahead, ahead)

    def now(self) -> float:
        return self.own() + (self._ahead or 0.0)


@dataclass(frozen=True)
class Held:
    """The intervals for requests and tokens that a process has reserved and not used, and the seconds that expired."""

    requests: tuple[Span, ...] = ()
    tokens: tuple[Span, ...] = ()
    lost: float = 0.0

    def add(self, requests: Span, tokens: Span) -> Held:
        return replace(self, requests=_joined(self.requests, requests), tokens=_joined(self.tokens, tokens))

    def spend(self, requests: float, tokens: float, now: float) -> tuple[Held, float] | None:
        """Use seconds of both; return the remaining intervals and the earliest start, None if they do not suffice."""
        usable = self.usable(now)
        first, second = _cut(usable.requests, requests), _cut(usable.tokens, tokens)
        if first is None or second is None:
            return None
        return replace(usable, requests=first[0], tokens=second[0]), max(first[1], second[1])

    def usable(self, now: float) -> Held:
        """Return the intervals that have not expired."""
        left = Held(_usable(self.requests, now), _usable(self.tokens, now))
        return replace(left, lost=self.lost + max(map(operator.sub, self.seconds, left.seconds)))

    @property
    def seconds(self) -> tuple[float, float]:
        """The reserved seconds for requests and for tokens."""
        return sum(end - start for start, end in self.requests), sum(end - start for start, end in self.tokens)


def _usable(spans: Sequence[Span], now: float) -> tuple[Span, ...]:
    oldest = now - LATENESS
    return tuple((max(start, oldest), end) for start, end in spans if end > oldest)


def _cut(spans: Sequence[Span], seconds: float) -> tuple[tuple[Span, ...], float] | None:
    """Remove seconds from the front; return the remaining intervals, and the start of the last removed part."""
    begin = float("-inf")
    for at, (start, end) in enumerate(spans):
        if seconds <= 0:
            return tuple(spans[at:]), begin
        begin = start
        # After many small cuts the remainder may be short by a rounding error.
        if seconds <= (end - start) * (1 + 1e-9) + 1e-9:
            rest = ((start + seconds, end),) if end - start - seconds > 1e-9 else ()
            return (*rest, *spans[at + 1 :]), begin
        seconds -= end - start
    return ((), begin) if seconds <= 1e-9 else None


def _joined(spans: tuple[Span, ...], new: Span) -> tuple[Span, ...]:
    return (*spans, new) if new[1] > new[0] else spans


@dataclass(frozen=True)
class Budget:
    """The reservations of all processes that use one key.

    Args:
        clock: the timeline's time at the write.
        requests, tokens: end of the reserved part of the timeline.
        paused: time until which the service accepts no requests.
        present: the last read of each process.
        seats: number of concurrent requests that each process may make, and when they expire unless renewed.
        waiting: the time since which each process waits for a seat.
        limits: the limits that the last writer was given.
    """

    clock: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0
    paused: float = 0.0
    present: Mapping[str, float] = field(default_factory=dict)
    seats: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    waiting: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Budget:
        """Parse the output of `to_json`; `InvalidInput` if it is damaged, or of a later format."""
        try:
            values = parse(text)
            if (found := values.pop("format")) != _FORMAT:
                raise InvalidInput(
                    f"The budget of a limit has format {found!r}; this version of airflow-geneva reads format "
                    f"{_FORMAT}. Upgrade airflow-geneva."
                )
            values["seats"] = {name: (seats, until) for name, (seats, until) in values.get("seats", {}).items()}
            return well_typed(Budget(**values))
        except InvalidInput:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"The budget of a limit is damaged ({error!r:.200}): {text:.200}. Remove the table of the limit; the "
                "next job makes it again."
            ) from error

    def at(self, now: float, process: str, limit: RateLimit) -> Budget:
        """Return the budget at a time, without processes that no longer read it, and with the given process."""
        clock = max(self.clock, now)
        present = {name: seen for name, seen in self.present.items() if seen > clock - _PRESENT_SECONDS}
        seats = {name: seat for name, seat in self.seats.items() if seat[1] > clock}
        waiting = {name: since for name, since in self.waiting.items() if name in present or name == process}
        limits = {name: value for name, value in asdict(limit).items() if value is not None and name != "key"}
        present[process] = clock
        return replace(self, clock=clock, present=present, seats=seats, waiting=waiting, limits=limits)

    @property
    def start(self) -> float:
        """Start of the next reservation: after all others, and not before the end of a pause."""
        return max(self.requests, self.tokens, self.paused, self.clock - PAST)

    @property
    def room(self) -> float:
        """Seconds of the timeline that a process may reserve in one write.

        They are an equal share of `LATENESS`, or more while few seconds are reserved.
        """
        lead = max(self.start - self.clock, 0.0)
        return max(LATENESS / max(len(self.present), 1), LATENESS / 2 - lead)

    def reserve(self, requests: float, tokens: float, later: float = 0.0) -> tuple[Budget, Span, Span]:
        """Reserve seconds for requests and for tokens, from the same start.

        Args:
            later: seconds that the write of this reservation takes.
        """
        start = max(self.start, self.clock - PAST + later)
        of_requests = (start, start + requests)
        of_tokens = (start, start + tokens)
        after = replace(
            self,
            requests=of_requests[1] if requests else self.requests,
            tokens=of_tokens[1] if tokens else self.tokens,
        )
        return after, of_requests, of_tokens

    def owe(self, requests: float, tokens: float) -> Budget:
        """Reserve seconds for requests and tokens that calls have already used."""
        start = self.clock - PAST
        return replace(
            self,
            requests=max(self.requests, start) + requests if requests else self.requests,
            tokens=max(self.tokens, start) + tokens if tokens else self.tokens,
        )

    def pause(self, seconds: float) -> Budget:
        return replace(self, paused=max(self.paused, self.clock + seconds))

    def lease(self, process: str, wanted: int, used: int, most: int, others_first: bool) -> Budget:
        """Give a process up to `wanted` seats, or add it to those that wait.

        Args:
            used: requests in flight, whose seats the process keeps.
            most: total number of seats.
            others_first: processes that wait go first, because this process has had its seats for `TURN_SECONDS`.
        """
        others = sum(count for name, (count, _) in self.seats.items() if name != process)
        own = (self.waiting.get(process, float("inf")), process)
        before = [name for name, since in self.waiting.items() if name != process and (since, name) < own]
        fair = max(most // max(len(self.present), 1), 1)
        wanted = min(wanted, fair) if self.waiting.keys() - {process} else wanted
        if before and others_first:
            count = used
        else:
            has = max(self.seats.get(process, (0, 0.0))[0], used)
            free = most - others - has
            count = max(used, min(wanted, has + max(free - len(before), 0)))
        seats = {name: seat for name, seat in self.seats.items() if name != process}
        waiting = {name: since for name, since in self.waiting.items() if name != process}
        if count:
            seats[process] = (count, self.clock + SEAT_SECONDS)
        elif wanted:
            waiting[process] = self.waiting.get(process, self.clock)
        return replace(self, seats=seats, waiting=waiting)

    def without(self, process: str, held: Held) -> Budget:
        """Return the budget without the seats of a process, and without its last intervals if none follows them."""

        def gone(from_: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in from_.items() if name != process}

        def returned(reserved: float, spans: Sequence[Span]) -> float:
            return spans[-1][0] if spans and spans[-1][1] == reserved else reserved

        return replace(
            self,
            requests=returned(self.requests, held.requests),
            tokens=returned(self.tokens, held.tokens),
            present=gone(self.present),
            seats=gone(self.seats),
            waiting=gone(self.waiting),
        )
