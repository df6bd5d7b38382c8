"""Limiters that share a budget, in simulated time: they race, die, stall, come and go, each with a clock of its own."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.limits import limiter as limiter_module
from airflow_geneva.engine.limits.budget import TICK_SECONDS, Budget, TableClock
from airflow_geneva.engine.limits.limiter import Limiter, Pass
from airflow_geneva.engine.limits.rate_limit import RateLimit
from airflow_geneva.engine.limits.store import Found

MINUTE = 60.0


@dataclass
class World:
    """Simulated time, one budget, and what was called when: (time, tokens).

    Args:
        delay: seconds that a write takes at most.
        least: seconds that it takes at least.
    """

    limit: RateLimit
    random: random.Random
    delay: float = 0.0
    least: float = 0.0
    now: float = 0.0
    text: str = field(default_factory=lambda: Budget().to_json())
    version: int = 1
    writes: int = 0
    calls: list[tuple[float, float]] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    depth: int = 0

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, self.random.getrandbits(60), do))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            when, _, do = heapq.heappop(self.events)
            self.now = max(self.now, when)
            do()
        self.now = max(self.now, until)

    def at_exit(self) -> World:
        return self

    def read(self) -> Found:
        return Found(Budget.from_json(self.text), self.version, self.now)

    def write(self, budget: Budget, found: Found) -> bool:
        assert self.now < 60 * MINUTE, "reserved again and again"
        if self.depth < 3:
            # Others act while the commit is under way.
            self.depth += 1
            self.run(self.now + self.random.uniform(self.least, max(self.least, self.delay)))
            self.depth -= 1
        if self.version != found.version:
            return False
        self.text, self.version, self.writes = budget.to_json(), self.version + 1, self.writes + 1
        return True

    def most_in_a_minute(self, of: int = 0) -> float:
        """Return the most requests, or tokens without those of the first call, in any minute."""
        found = sorted(self.calls)
        most, end, total = 0.0, 0, 0.0
        for at, (start, tokens) in enumerate(found):
            while end < len(found) and found[end][0] < start + MINUTE - 1e-6:
                total += found[end][1] if of else 1
                end += 1
            most = max(most, total - (tokens if of else 0))
            total -= tokens if of else 1
            assert at < end
        return most


class Process:
    """Calls one after another, each for a while; may die, and then another takes its place."""

    def __init__(
        self, world: World, busy: float, mortal: float, idle: float = 0.0, tokens: float = 0.0, factor: float = 1.0
    ) -> None:
        self.world, self.busy, self.mortal, self.idle, self.tokens = world, busy, mortal, idle, tokens
        self.factor = factor
        self.running = self.locked = False
        self.start()

    def start(self) -> None:
        world = self.world
        offset, drift = world.random.uniform(-1e6, 1e6), world.random.uniform(-5e-5, 5e-5)
        clock = TableClock(lambda: offset + world.now * (1 + drift))
        self.limiter = Limiter(world, world.limit, clock)  # type: ignore[arg-type]
        if self.running:
            self.running = False
            world.under_way -= 1
        self.call = Pass(self.tokens * world.random.uniform(0.5, 1.5))
        self.later(0.0, self.step)
        self.later(TICK_SECONDS, self.tick)

    def tick(self) -> None:
        limiter = self.limiter
        if limiter._read_at is not None and not self.locked:
            self.locked = True
            limiter.tick()
            self.locked = False
        if limiter is self.limiter:
            self.later(TICK_SECONDS, self.tick)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        limiter = self.limiter
        self.world.at(self.world.now + seconds, lambda: do() if limiter is self.limiter else None)

    def step(self) -> None:
        world = self.world
        if self.locked:
            self.later(0.001, self.step)
            return
        if world.random.random() < self.mortal:
            self.start()
            return
        limiter = self.limiter
        if self.running:
            limiter.done(self.call, tokens=self.call.tokens * self.factor)
            self.locked = True
            limiter.settle()
            self.locked = False
            self.running = False
            world.under_way -= 1
            self.call = Pass(self.tokens * world.random.uniform(0.5, 1.5))
            if world.random.random() < self.idle:
                self.later(world.random.choice([3.0, 20.0, 90.0]), self.step)
                return
        self.locked = True
        pause = limiter.step(self.call)
        self.locked = False
        if pause > 0:
            # A process now and then wakes up late.
            self.later(pause + world.random.choice([0, 0, 0, 0.01, 0.3]), self.step)
            return
        world.calls.append((world.now, self.call.tokens))
        world.callers.append(limiter.name)
        self.running = True
        world.under_way += 1
        world.most_under_way = max(world.most_under_way, world.under_way)
        self.later(world.random.expovariate(1 / self.busy) if self.busy else 1e-4, self.step)


@pytest.fixture(autouse=True)
def _no_threads_and_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter_module.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(limiter_module.time, "sleep", lambda seconds: None)


@pytest.mark.slow
@given(
    st.integers(1, 400),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.sampled_from([0.0, 0.002, 0.05]),
    st.sampled_from([0.0, 0.01, 0.2]),
    st.sampled_from([0.0, 0.05, 0.4]),
    st.integers(0, 2**32),
)
def test_no_minute_has_more_than_the_limit_allows(
    most: int, processes: int, busy: float, mortal: float, idle: float, delay: float, seed: int
) -> None:
    world = World(RateLimit("k", requests_per_minute=most, tokens_per_minute=1000), random.Random(seed), delay)
    for at in range(processes):
        world.at(world.random.uniform(0, 30) if at else 0.0, lambda: Process(world, busy, mortal, idle, tokens=5))
    world.run(300)
    assert world.calls
    assert world.most_in_a_minute() <= most
    assert world.most_in_a_minute(of=1) <= 1000


@pytest.mark.slow
def test_sixteen_processes_that_die_use_most_of_what_a_limit_allows() -> None:
    world = World(RateLimit("k", requests_per_minute=3000), random.Random(1), delay=0.02)
    processes = [Process(world, busy=0.05, mortal=0.0) for _ in range(16)]
    for number in range(8):
        world.at(40 + 10.0 * number, processes[number].start)
    world.run(130)
    assert world.most_in_a_minute() <= 3000
    warm = [when for when, _ in world.calls if when >= 10]
    assert len(warm) / 120 * 60 >= 0.95 * 3000
    assert world.writes / 130 <= 16


@pytest.mark.slow
def test_processes_that_need_more_get_what_others_leave() -> None:
    world = World(RateLimit("k", requests_per_minute=6000), random.Random(2), delay=0.01)
    for number in range(8):
        Process(world, busy=0.02 if number else 2.0, mortal=0.0)
    world.run(60)
    assert len([when for when, _ in world.calls if when >= 10]) / 50 * 60 >= 0.9 * 6000


@pytest.mark.parametrize("per_minute", [10, 600, 60_000])
@pytest.mark.parametrize("seconds", [0.5, 1.1, 1.6, 3.0, 10.0])
def test_calls_begin_however_long_a_write_takes(per_minute: int, seconds: float) -> None:
    world = World(RateLimit("k", requests_per_minute=per_minute), random.Random(6), least=seconds)
    limiter = Limiter(world, world.limit, TableClock(lambda: world.now))  # type: ignore[arg-type]
    for _ in range(6):
        call = Pass(0.0)
        while (pause := limiter.step(call)) > 0:
            world.now += pause
        world.calls.append((world.now, 0.0))
        limiter.done(call)
    assert world.most_in_a_minute() <= per_minute
    assert world.writes <= 10
    assert world.now <= 6 * (60 / per_minute + 2 * seconds) + 2 * seconds


@pytest.mark.slow
@pytest.mark.parametrize("seats", [2, 5])
def test_seats_are_never_taken_twice_and_come_round(seats: int) -> None:
    world = World(RateLimit("k", concurrent=seats), random.Random(3))
    for _ in range(4):
        Process(world, busy=0.5, mortal=0.001)
    world.run(300)
    assert world.most_under_way <= seats
    by_name = Counter(world.callers)
    assert sorted(by_name.values())[-4] > 10
    assert len(world.calls) >= 0.7 * min(seats, 4) * 300 / 0.5


@pytest.mark.parametrize("when", ["before its step", "in its step"])
def test_a_call_that_is_cancelled_while_another_thread_steps_it_keeps_no_seat(when: str) -> None:
    world = World(RateLimit("k", concurrent=1), random.Random(4))
    limiter = Limiter(world, world.limit, TableClock(lambda: world.now))  # type: ignore[arg-type]
    cancelled, call = Pass(0.0), Pass(0.0)
    if when == "before its step":
        limiter.done(cancelled)
    else:
        world.at(0.0, lambda: limiter.done(cancelled))
    limiter.step(cancelled)
    assert limiter.step(call) <= 0


@pytest.mark.parametrize("ends", ["killed", "leaves", "ticks"])
def test_what_a_call_used_beyond_its_estimate_is_waited_for_by_the_next_process(ends: str) -> None:
    world = World(RateLimit("k", tokens_per_minute=1000), random.Random(5))
    begun: list[float] = []
    for _ in range(4):
        offset = world.random.uniform(-1e6, 1e6)
        limiter = Limiter(world, world.limit, TableClock(lambda offset=offset: offset + world.now))  # type: ignore[arg-type, misc]
        call = Pass(10.0)
        while (pause := limiter.step(call)) > 0:
            world.now += pause
        begun.append(world.now)
        limiter.done(call, tokens=5000)
        if ends == "killed":
            limiter.settle()
        elif ends == "leaves":
            limiter.leave()
        else:
            world.now += 30.0
            limiter.tick()
    assert all(later - sooner >= 5 * MINUTE for sooner, later in pairwise(begun))
    assert begun[-1] <= 3 * 6 * MINUTE


@pytest.mark.slow
@given(st.integers(1, 5), st.sampled_from([0.0, 0.01]), st.sampled_from([0.0, 0.05, 0.4]), st.integers(0, 2**32))
def test_tokens_beyond_the_estimates_hold_up_all_processes(
    processes: int, mortal: float, delay: float, seed: int
) -> None:
    world = World(RateLimit("k", tokens_per_minute=1000), random.Random(seed), delay)
    for _ in range(processes):
        Process(world, 0.05, mortal, tokens=5, factor=8)
    world.run(600)
    used = 8 * sum(tokens for _, tokens in world.calls)
    # Calls in flight, and less than one interval that each dead process had not written yet.
    slack = 8 * 7.5 * processes + (1000 / 60 * 1.5 + 60) * len(set(world.callers))
    assert used <= 1000 * 600 / 60 + slack
