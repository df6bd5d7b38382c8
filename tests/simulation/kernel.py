"""Threads, locks, queues, futures and time of one actor: one thread runs at a time, and a coordinator decides which.

`install` puts them into the engine's `runtime` before anything else of the engine is imported. Locks and threads are
simulated here; what the standard library builds of them (conditions, events, semaphores, queues, futures, pools) is its
own source, run on them.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import concurrent.futures.thread
import functools
import inspect
import queue
import random
import sys
import threading
import types
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

START = 1_900_000_000.0
"""When each world begins, in seconds since the epoch."""


class Stopped(SystemError):
    """The world has ended while this thread waited."""


@dataclass(eq=False)
class Task:
    """A thread: `point` is the step that it takes next, if that is one of those between which a coordinator chooses."""

    number: int
    name: str
    baton: Any = field(default_factory=_thread.allocate_lock)
    waits_for: object = None
    until: float | None = None
    point: str | None = None
    outcome: str = "go"
    ended: bool = False

    def __post_init__(self) -> None:
        self.baton.acquire()

    @property
    def ready(self) -> bool:
        return self.waits_for is None and not self.ended


@dataclass(frozen=True)
class Grant:
    """What a coordinator lets an actor do: one of its threads goes on, or only time passes (`task` is None)."""

    task: int | None
    outcome: str
    now: float
    wall: float


class Coordinator(Protocol):
    def ask(self, points: list[tuple[int, str, str]], until: float | None) -> Grant: ...


class Kernel:
    """The threads of one process; the one that runs decides who runs next, when it waits."""

    def __init__(self) -> None:
        self.tasks: dict[int, Task] = {}
        self.numbers = count()
        self.coordinator: Coordinator | None = None
        self.now, self.wall = 0.0, START
        self.dice = random.Random(0)
        self.current = self.add("main")

    def begin(self, coordinator: Coordinator, seed: str) -> None:
        """Begin to schedule; the calling thread is the first."""
        self.tasks.clear()
        self.numbers = count()
        self.current = self.add("main")
        self.dice = random.Random(seed)
        self.coordinator = coordinator

    def add(self, name: str) -> Task:
        task = Task(next(self.numbers), name)
        self.tasks[task.number] = task
        return task

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def time(self) -> float:
        self.now += 1e-6
        return self.wall + self.now

    def start(self, name: str, run: Callable[[], None]) -> Task:
        task = self.add(name)

        def body() -> None:
            task.baton.acquire()
            try:
                run()
            finally:
                self.end(task)

        _thread.start_new_thread(body, ())
        return task

    def end(self, task: Task) -> None:
        task.ended = True
        del self.tasks[task.number]
        self.wake(task)
        self.pass_on()

    def wake(self, what: object) -> None:
        for task in self.tasks.values():
            if task.waits_for is what:
                task.waits_for = None

    def block(self, what: object, until: float | None = None) -> bool:
        """Wait until `what` wakes this thread, or until a time; False if the time came first."""
        if self.coordinator is None:
            raise Stopped(f"nothing schedules, and a thread waits for {what}")
        mine = self.current
        mine.waits_for, mine.until = what, until
        self.switch(mine)
        in_time, mine.until = mine.until is not None or until is None, None
        return in_time

    def step(self, point: str) -> str:
        """Wait for the turn of this thread at a point, and return what is to happen there."""
        if self.coordinator is None:
            return "go"
        mine = self.current
        mine.point = point
        self.switch(mine)
        return mine.outcome

    def sleep(self, seconds: float) -> None:
        if self.coordinator is not None:
            self.block(object(), self.now + max(seconds, 0.0))

    def switch(self, mine: Task) -> None:
        chosen = self.choose()
        if chosen is mine:
            return
        self.current = chosen
        chosen.baton.release()
        mine.baton.acquire()

    def pass_on(self) -> None:
        chosen = self.choose()
        self.current = chosen
        chosen.baton.release()

    def choose(self) -> Task:
        """Return who runs next: threads within the process by dice, and at points whom the coordinator names."""
        assert self.coordinator is not None
        while True:
            ready = [task for task in self.tasks.values() if task.ready]
            inner = [task for task in ready if task.point is None]
            if inner:
                return inner[0] if len(inner) == 1 else self.dice.choice(inner)
            times = [task.until for task in self.tasks.values() if not task.ready and task.until is not None]
            points = [(task.number, task.name, task.point or "") for task in ready]
            grant = self.coordinator.ask(points, min(times, default=None))
            self.now, self.wall = max(self.now, grant.now), grant.wall
            for task in self.tasks.values():
                if not task.ready and task.until is not None and task.until <= self.now:
                    task.waits_for, task.until = None, None
            if grant.task is not None:
                task = self.tasks[grant.task]
                task.point, task.outcome = None, grant.outcome
                return task


KERNEL = Kernel()


class Lock:
    """A lock; may be released by another thread."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        until = None if timeout is None or timeout < 0 else KERNEL.now + timeout
        while self._held:
            if not blocking or not KERNEL.block(self, until):
                return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        KERNEL.wake(self)

    def locked(self) -> bool:
        return self._held

    def _at_fork_reinit(self) -> None:
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """A thread, with what the engine uses of `threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or "thread", bool(daemon)
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        self._task = KERNEL.start(self.name, self._run)
        ALIVE[self._task.number] = self

    def _run(self) -> None:
        try:
            self.run()
        except SystemExit:
            pass
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            ALIVE.pop(self.ident or 0, None)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        until = None if timeout is None else KERNEL.now + max(timeout, 0.0)
        while self._task is not None and not self._task.ended:
            if not KERNEL.block(self._task, until):
                return


MAIN = Thread(name="MainThread")
ALIVE: dict[int, Thread] = {}


def current_thread() -> Thread:
    return ALIVE.get(KERNEL.current.number, MAIN)


def make_threading() -> types.ModuleType:
    """Return a module like `threading`: its classes in their own source, on the lock and the thread above."""
    made = types.ModuleType("simulated_threading")
    names: dict[str, Any] = made.__dict__
    names.update(
        Lock=Lock,
        Thread=Thread,
        local=threading.local,
        current_thread=current_thread,
        main_thread=lambda: MAIN,
        enumerate=lambda: [MAIN, *ALIVE.values()],
        get_ident=lambda: KERNEL.current.number,
        TIMEOUT_MAX=threading.TIMEOUT_MAX,
        ThreadError=RuntimeError,
        _register_atexit=lambda *_: None,
        _allocate_lock=Lock,
        _time=KERNEL.monotonic,
        _deque=deque,
        _count=count,
        __builtins__=__builtins__,
    )
    # RLock in Python: the usual one is C. A condition takes it by this name.
    exec(inspect.getsource(threading._RLock), names)  # type: ignore[attr-defined]
    names["RLock"] = names["_RLock"]
    for name in ("Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "Timer"):
        exec(inspect.getsource(getattr(threading, name)), names)
    return made


THREADING: Any = make_threading()


class Chance:
    """The module `random`, of the actor's own dice."""

    Random = random.Random

    class SystemRandom:
        def __getattr__(self, name: str) -> Any:
            return getattr(KERNEL.dice, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(KERNEL.dice, name)


def make_futures() -> dict[str, Any]:
    """Return the classes of `concurrent.futures` on simulated threads."""
    names = dict(vars(concurrent.futures._base))
    source = inspect.getsource(concurrent.futures._base)
    exec(compile(source, "simulated_futures", "exec"), names)
    base = types.ModuleType("simulated_base")
    names.update(threading=THREADING, time=TIME)
    base.__dict__.update(names)
    pool: dict[str, Any] = {"__name__": "simulated_pool"}
    source = inspect.getsource(concurrent.futures.thread)
    for real, ours in (
        ("from concurrent.futures import _base", ""),
        ("import threading\n", ""),
        ("import queue\n", ""),
        ("os.register_at_fork", "(lambda **_: None)"),
    ):
        source = source.replace(real, ours)
    pool.update(_base=base, threading=THREADING, queue=QUEUE)
    exec(compile(source, "simulated_pool", "exec"), pool)
    return {**names, "ThreadPoolExecutor": pool["ThreadPoolExecutor"]}


def make_queue() -> Any:
    names: dict[str, Any] = {"threading": THREADING, "deque": deque, "Empty": queue.Empty, "types": types}
    exec(inspect.getsource(queue._PySimpleQueue), names)  # type: ignore[attr-defined]
    return types.SimpleNamespace(SimpleQueue=names["_PySimpleQueue"], Empty=queue.Empty)


class Loop(asyncio.BaseEventLoop):
    """An event loop without sockets, which waits as any thread does; `asyncio.to_thread` is not simulated."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self

    def time(self) -> float:
        return KERNEL.monotonic()

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None or timeout > 0:
            KERNEL.block(self, None if timeout is None else KERNEL.now + timeout)
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None:
        KERNEL.wake(self)


TIME = types.SimpleNamespace(
    monotonic=KERNEL.monotonic,
    perf_counter=KERNEL.monotonic,
    time=KERNEL.time,
    time_ns=lambda: int(KERNEL.time() * 1e9),
    sleep=KERNEL.sleep,
    CLOCK_MONOTONIC=1,
    CLOCK_BOOTTIME=7,
    clock_gettime=lambda _: START + KERNEL.monotonic(),
    process_time=KERNEL.monotonic,
)
QUEUE = make_queue()
IDS = types.SimpleNamespace(
    UUID=uuid.UUID,
    uuid4=lambda: uuid.UUID(int=KERNEL.dice.getrandbits(128), version=4),
    uuid5=uuid.uuid5,
    NAMESPACE_URL=uuid.NAMESPACE_URL,
)


def install() -> None:
    """Replace what the engine takes from its runtime, and the fault points; nothing of it may have been imported."""
    from airflow_geneva.engine import faults, runtime

    late = [name for name in sys.modules if name.startswith("airflow_geneva.engine.") and name.count(".") > 2]
    if late:
        raise AssertionError(f"imported before the simulation: {late}")
    futures = make_futures()
    given: dict[str, Any] = {"threading": THREADING, "time": TIME, "random": Chance(), "uuid": IDS}
    given["SimpleQueue"] = QUEUE.SimpleQueue
    given |= {name: futures[name] for name in ("Future", "CancelledError", "ThreadPoolExecutor", "wait")}
    given["FutureTimeout"] = futures["TimeoutError"]
    for name, value in given.items():
        setattr(runtime, name, value)
    functools.RLock = THREADING.RLock  # type: ignore[attr-defined]  # of cached properties, until Python 3.12
    asyncio.new_event_loop = Loop  # type: ignore[assignment]
    faults.fault_point = reach  # type: ignore[assignment]


def reach(point: str) -> None:
    KERNEL.step(point)
