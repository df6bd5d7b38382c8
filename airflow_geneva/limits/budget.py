"""The budget of one key as a value: a time line that processes reserve pieces of, and seats.

A request takes up a piece of the time line as long as its part of a minute. Pieces follow one another, so no two
processes have the same one, and a process that dies only leaves its pieces unused. A piece may be used from its begin
until `LATENESS` seconds later. So the requests of any minute come from pieces that begin in a few seconds more than a
minute, and a piece is made that much longer.

What calls used beyond what was reserved for them is reserved when they have ended, with the next write, so all
processes wait for it. It is written at once if it is more than a process may lose when it dies.

The time line has a clock of its own, without the date: whoever writes the budget writes the time by its own clock, and
a process that reads a later time than it knows sets its clock forward. So no clock runs faster than time, whatever the
machines' clocks say, and one is behind another by as long as the newest write was not read. A process with calls reads
every `TICK_SECONDS`, and writes if nobody else did. One that did not read for longer forgets its time for that of the
table, so it never sets forward the clock that others went by meanwhile. When no process is there, it stands still.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from airflow_geneva.errors import InvalidInput
from airflow_geneva.limits.rate_limit import RateLimit

LATENESS = 1.5
"""Seconds after the begin of a piece until which it may be used."""

TICK_SECONDS = 0.5
"""Seconds after which a process with calls reads the budget again; clocks differ by up to twice as much."""

PAST = 0.5
"""Seconds by which a piece may begin in the past, so that no time is lost while a process reserves."""

SEAT_SECONDS = 15.0
"""Seconds after which the seats of a process that does not renew them are free."""

TURN_SECONDS = 5.0
"""Seconds for which a process keeps its seats while others wait for one."""

_FORMAT = 1
_PRESENT_SECONDS = 3 * LATENESS
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

Span: TypeAlias = tuple[float, float]
"""A piece of the time line, from its begin to its end."""


def seconds_each(per_minute: float | None) -> float:
    """Return how much of the time line one of so many per minute takes."""
    return 0.0 if per_minute is None else (60.0 + LATENESS + 2 * TICK_SECONDS) / per_minute


def own_seconds() -> float:
    """Seconds by the clock of this machine that nobody sets, and that counts while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


class TableClock:
    """The clock of the time line, as this process knows it."""

    def __init__(self, own: Callable[[], float] = own_seconds) -> None:
        self.own = own
        self._ahead: float | None = None

    def see(self, found: float, forget: bool = False) -> None:
        """Take over the time in a budget that was just read, if it is later, or to forget the own one."""
        ahead = found - self.own()
        self._ahead = ahead if self._ahead is None or forget else max(self._ahead, ahead)

    def now(self) -> float:
        return self.own() + (self._ahead or 0.0)


@dataclass(frozen=True)
class Held:
    """The pieces that a process has reserved and not used, of the requests and of the tokens, and how much was lost."""

    requests: tuple[Span, ...] = ()
    tokens: tuple[Span, ...] = ()
    lost: float = 0.0

    def add(self, requests: Span, tokens: Span) -> Held:
        return replace(self, requests=_joined(self.requests, requests), tokens=_joined(self.tokens, tokens))

    def spend(self, requests: float, tokens: float, now: float) -> tuple[Held, float] | None:
        """Use so many seconds of both; return the rest, and when the use may begin. None: there is not enough."""
        usable = self.usable(now)
        first, second = _cut(usable.requests, requests), _cut(usable.tokens, tokens)
        if first is None or second is None:
            return None
        return replace(usable, requests=first[0], tokens=second[0]), max(first[1], second[1])

    def usable(self, now: float) -> Held:
        """Return it without what was not used in time."""
        left = Held(_usable(self.requests, now), _usable(self.tokens, now))
        return replace(left, lost=self.lost + max(map(operator.sub, self.seconds, left.seconds)))

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of requests and of tokens."""
        return sum(end - start for start, end in self.requests), sum(end - start for start, end in self.tokens)


def _usable(spans: Sequence[Span], now: float) -> tuple[Span, ...]:
    oldest = now - LATENESS
    return tuple((max(start, oldest), end) for start, end in spans if end > oldest)


def _cut(spans: Sequence[Span], seconds: float) -> tuple[tuple[Span, ...], float] | None:
    """Cut seconds off the front; return the rest, and the begin of the last part that was cut off."""
    begin = float("-inf")
    for at, (start, end) in enumerate(spans):
        if seconds <= 0:
            return tuple(spans[at:]), begin
        begin = start
        # What is left after many small cuts may be short by a rounding error.
        if seconds <= (end - start) * (1 + 1e-9) + 1e-9:
            rest = ((start + seconds, end),) if end - start - seconds > 1e-9 else ()
            return (*rest, *spans[at + 1 :]), begin
        seconds -= end - start
    return ((), begin) if seconds <= 1e-9 else None


def _joined(spans: tuple[Span, ...], new: Span) -> tuple[Span, ...]:
    return (*spans, new) if new[1] > new[0] else spans


@dataclass(frozen=True)
class Budget:
    """What the processes of one key have reserved, at one time.

    Args:
        clock: the time by the clock of the process that wrote it.
        requests, tokens: until when the time line is reserved.
        paused: until when the service wants no requests.
        present: by process, when it was here last.
        seats: by process, how many requests it may have under way, and until when if it does not renew them.
        waiting: by process, since when it waits for a seat.
        limits: the limits that were given last.
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
        values = json.loads(text)
        if (found := values.pop("format")) != _FORMAT:
            raise InvalidInput(
                f"The budget of a limit has format {found!r}; this version of airflow-geneva reads format {_FORMAT}. "
                "Upgrade airflow-geneva."
            )
        return Budget(**values)

    def at(self, now: float, process: str, limit: RateLimit) -> Budget:
        """Return the budget as a process finds it now: without processes that are gone, and with this one."""
        clock = max(self.clock, now)
        present = {name: seen for name, seen in self.present.items() if seen > clock - _PRESENT_SECONDS}
        seats = {name: seat for name, seat in self.seats.items() if seat[1] > clock}
        waiting = {name: since for name, since in self.waiting.items() if name in present or name == process}
        limits = {name: value for name, value in asdict(limit).items() if value is not None and name != "key"}
        present[process] = clock
        return replace(self, clock=clock, present=present, seats=seats, waiting=waiting, limits=limits)

    @property
    def start(self) -> float:
        """Where the next reservation begins: behind all others, and not before the end of a pause."""
        return max(self.requests, self.tokens, self.paused, self.clock - PAST)

    @property
    def room(self) -> float:
        """Seconds of the time line that a process may take at once.

        It is a fair part of `LATENESS`, or more while little is reserved, so that whoever needs more gets it.
        """
        lead = max(self.start - self.clock, 0.0)
        return max(LATENESS / max(len(self.present), 1), LATENESS / 2 - lead)

    def reserve(self, requests: float, tokens: float, later: float = 0.0) -> tuple[Budget, Span, Span]:
        """Reserve seconds of the requests and of the tokens; both begin together.

        Args:
            later: seconds until the process can begin to use them, because its write takes so long.
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
        """Reserve seconds for requests and tokens that calls have used already."""
        start = self.clock - PAST
        return replace(
            self,
            requests=max(self.requests, start) + requests if requests else self.requests,
            tokens=max(self.tokens, start) + tokens if tokens else self.tokens,
        )

    def pause(self, seconds: float) -> Budget:
        return replace(self, paused=max(self.paused, self.clock + seconds))

    def sit(self, process: str, wanted: int, used: int, most: int, turn_over: bool) -> Budget:
        """Give a process seats for what it wants, or let it wait for one.

        Args:
            used: requests under way, whose seats it keeps.
            most: all seats.
            turn_over: it had its seats for so long that those who wait come first.
        """
        others = sum(count for name, (count, _) in self.seats.items() if name != process)
        own = (self.waiting.get(process, float("inf")), process)
        before = [name for name, since in self.waiting.items() if name != process and (since, name) < own]
        fair = max(most // max(len(self.present), 1), 1)
        wanted = min(wanted, fair) if self.waiting.keys() - {process} else wanted
        if before and turn_over:
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
        """Return the budget when a process leaves it: without its seats, and without the end of what it reserved."""

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
