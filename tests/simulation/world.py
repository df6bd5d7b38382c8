"""One world: actors that take steps in the order of a seed, are killed and stopped and start again, and a judge."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.simulation import chance, store, traps
from tests.simulation.kernel import KERNEL, START, Grant
from tests.simulation.releases import EARLIER, PRESENT, Release
from tests.simulation.traps import Trap

ACTORS = "tests.simulation.actors"
PATIENCE = 20.0
"""Real seconds after which an actor that does not come to its next step hangs."""
STEPS_OF_A_FILE = 100
"""How many steps each process may take for each data file from the last fault or change to its end; it takes 10-40."""
FAULTY_TRIES = 3
DISK_FAILS = ("eio", "eio!")
STORE_FAILS = ("503", "503!", "reset", "reset!", "timeout", "timeout!")
COMMIT_FAILS = (*STORE_FAILS, "409", "412", "412!")
TWO_DAYS = 172_800.0
USER_MUST_ACT = ("UnknownValues",)
"""Errors that no order explains, and no fault but a ledger that a disk cannot read, which counts as damaged."""
LATER = (30.0, 900.0, 4_000.0, 100_000.0)
JUMPS = (-90_000.0, -3_600.0, -20.0, 20.0, 3_600.0, 90_000.0)


@dataclass(frozen=True)
class Stage:
    """A call in a process of its own, as a task of Airflow; its result is given to the next one of its job.

    Args:
        release: the release of the package that runs it; "": in a world of two, the seed decides each time.
        since: it waits until the job of this name has come to this fault point, or is no longer there.
    """

    call: str
    given: Any = None
    release: str = ""
    since: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Job:
    """Stages of one name, one after the other. One that is killed or fails is started again, if it is retried."""

    name: str
    stages: tuple[Stage, ...]
    retried: bool = True
    faulty: bool = True


@dataclass(frozen=True)
class Scenario:
    """Who meets: the database that `make` leaves, the jobs, and what `judge` says of the end."""

    name: str
    make: str
    jobs: Callable[[random.Random], Sequence[Job]]
    judge: str
    far: bool = False
    begins: tuple[str, ...] = ("empty", "filled")
    """What it begins with: without values, with those of a run, or what a job left that died two days ago."""
    fold_after: int = 16
    """How many ledgers of a column are folded into one."""
    traps: tuple[tuple[str, str], ...] = ()
    """Where most traps are: names of jobs, each with a step; otherwise at commits, swaps and cleanups."""

    @property
    def scheme(self) -> str:
        return store.SCHEME if self.far else ""


@dataclass(frozen=True)
class Move:
    """What a seed decided: whose step is next and what happens at it. `time` lets an actor's next deadline pass."""

    kind: str
    """go, time, kill, stop or an answer of the store; "later N": the step begins N seconds later; "clock N": before it,
    the actor's time of day jumps by N seconds"""
    actor: str
    thread: int = 0
    point: str = ""


@dataclass
class Process:
    name: str
    job: Job
    stage: int
    given: Any
    pid: int
    pipe: Connection
    tries: int
    points: list[tuple[int, str, str]] = field(default_factory=list)
    until: float | None = None
    stopped: int = 0
    skew: float = 0.0
    orphan: bool = False
    release: str = PRESENT

    def wait(self) -> int | None:
        """Wait until it has ended; return its status, None of a process that is no child of this one."""
        if self.release == PRESENT:
            return os.waitpid(self.pid, 0)[1]
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self.pipe.recv()
        return None


class PipeToWorld:
    """The coordinator as an actor sees it."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def ask(self, points: list[tuple[int, str, str]], until: float | None) -> Grant:
        self.pipe.send(("at", points, until))
        task, outcome, now, wall = self.pipe.recv()
        return Grant(task, outcome, now, wall)


class Failed(Exception):
    """What a world found wrong."""


@dataclass
class Dice:
    """What the seed decides at each step, in one of four manners: anyone goes on, or one actor for a burst of steps, or
    until it is at a fault point, or the first by rank."""

    seed: int
    kills: float = 0.0
    stops: float = 0.0
    faults: float = 0.0
    later: float = 0.0
    skews: float = 0.0
    jumps: float = 0.0
    traps: bool = False

    @staticmethod
    def of(seed: int) -> Dice:
        """Return what a seed decides: most worlds have few kinds of faults, and some have none."""
        draw = random.Random(f"faults {seed}")
        rates = [draw.choice([0.0, 0.0, 0.005, 0.02]) for _ in range(2)]
        faults, later = draw.choice([0.0, 0.0, 0.01]), draw.choice([0.0, 0.0, 0.004])
        skews, jumps = draw.choice([0.0, 0.3]), draw.choice([0.0, 0.0, 0.004])
        return Dice(seed, *rates, faults, later, skews, jumps, traps=True)

    def __post_init__(self) -> None:
        self.random = random.Random(f"dice {self.seed}")
        self.manner = self.random.choice(["anyone", "bursts", "points", "points", "ranks"])
        self.left, self.favorite = 0, ""
        self.ranks: dict[str, float] = {}
        self.most = self.random.choice([4, 16, 64])

    def choose(self, processes: Sequence[Process]) -> Process:
        names = [process.name for process in processes]
        if self.manner == "bursts":
            if self.left <= 0 or self.favorite not in names:
                self.favorite, self.left = self.random.choice(names), self.random.randrange(1, self.most)
            self.left -= 1
            return processes[names.index(self.favorite)]
        if self.manner == "points":
            if self.favorite not in names or is_at_fault_point(processes[names.index(self.favorite)]):
                self.favorite = self.random.choice(names)
            return processes[names.index(self.favorite)]
        if self.manner == "ranks":
            for name in names:
                self.ranks.setdefault(name, self.random.random())
            first = max(names, key=lambda name: self.ranks[name])
            if self.random.random() < 1 / (4 * self.most):
                self.ranks[first] = self.random.random() - 1
            return processes[names.index(first)]
        return self.random.choice(processes)


def is_at_fault_point(process: Process) -> bool:
    return any(" " not in point for _, _, point in process.points)


class World:
    """Runs one seed of a scenario; `moves` replays what was decided before."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        folder: Path,
        dice: Dice,
        moves: Sequence[Move] | None = None,
        earlier: Release | None = None,
    ) -> None:
        self.scenario, self.seed, self.folder, self.dice, self.earlier = scenario, seed, folder, dice, earlier
        self.replayed = None if moves is None else list(moves)
        self.now = TWO_DAYS if scenario.begins == ("died",) else 0.0
        self.trace: list[str] = []
        self.moves: list[Move] = []
        self.processes: dict[str, Process] = {}
        self.results: list[tuple[str, Any]] = []
        self.started: dict[str, int] = {}
        self.tries = Counter[str]()
        self.steps = 0
        # Steps since the last fault or change, and the processes that were there then.
        self.calm, self.present = 0, 1
        self.pairs: set[tuple[str, str]] = set()
        self.canonical = store.Canonical()
        self.last: dict[str, str] = {}
        # The fault points that each job has come to.
        self.reached: set[tuple[str, str]] = set()
        self.traps: list[Trap] = []
        # The one that an actor stands in, and the move at which it does.
        self.sprung: tuple[Trap, Move] | None = None

    def run(self) -> str:
        """Run to the end; return what was wrong, or ""."""
        facts: Any = importlib.import_module("airflow_geneva.engine.checkpoint.facts")
        facts._FOLD_AFTER = self.scenario.fold_after
        try:
            jobs = self.scenario.jobs(random.Random(f"jobs {self.seed}"))
            if self.dice.traps:
                fails = COMMIT_FAILS if self.scenario.far else DISK_FAILS
                self.traps = traps.draw(self.seed, jobs, fails, self.scenario.traps)
            for job in jobs:
                self.start(job, 0, job.stages[0].given, 0)
            self.present = max(len(self.processes), 1)
            while self.processes:
                self.take(self.decide())
            self.judge()
        except Failed as failed:
            return str(failed)
        finally:
            for process in list(self.processes.values()):
                self.end(process, kill=True)
        return ""

    def start(self, job: Job, stage: int, given: Any, tries: int) -> None:
        self.tries[job.stages[stage].call] += 1
        number = self.started[job.name] = self.started.get(job.name, 0) + 1
        name = f"{job.name}" if number == 1 else f"{job.name}.{number}"
        process = self.fork(name, job, stage, given, tries)
        self.processes[name] = process
        by = f", {process.release}" if self.earlier else ""
        self.say(f"{name} starts {job.stages[stage].call}{by}")
        self.hear(process)

    def fork(self, name: str, job: Job, stage: int, given: Any, tries: int) -> Process:
        ours, theirs = Pipe()
        given_to_child = {
            "call": job.stages[stage].call,
            "folder": f"{self.scenario.scheme}{self.folder}/db",
            "given": given,
            "seed": f"{self.seed} {name} {stage}",
            "now": self.now,
            "said": str(self.folder / "said"),
        }
        release = self.release_of(job.stages[stage], name)
        if release == EARLIER:
            assert self.earlier is not None
            pid = self.earlier.fork(theirs, **given_to_child)
        else:
            pid = os.fork()
            if pid == 0:
                ours.close()
                for other in self.processes.values():
                    other.pipe.close()
                child(theirs, **given_to_child)
        theirs.close()
        draw = random.Random(f"skew {self.seed} {name}")
        skews = [-7200.0, -300.0, -5.0, 5.0, 300.0, 7200.0]
        skew = draw.choice(skews) if job.faulty and draw.random() < self.dice.skews else 0.0
        return Process(name, job, stage, given, pid, ours, tries, skew=skew, release=release)

    def release_of(self, stage: Stage, name: str) -> str:
        if self.earlier is None:
            return PRESENT
        return stage.release or random.Random(f"release {self.seed} {name}").choice([PRESENT, EARLIER])

    def hear(self, process: Process) -> None:
        """Wait for the next report of an actor."""
        if not process.pipe.poll(PATIENCE):
            os.kill(process.pid, signal.SIGUSR1)
            self.processes.pop(process.name, None)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed(f"{process.name} hangs after {self.last.get(process.name)}: {self.said()}")
        try:
            kind, *said = process.pipe.recv()
        except EOFError:
            self.processes.pop(process.name)
            raise Failed(f"{process.name} died with status {process.wait()}: {self.said()}") from None
        if kind == "at":
            process.points, process.until = said
            return
        self.end(process)
        if kind == "done":
            self.say(f"{process.name} is done")
            (result,) = said
            if process.orphan:
                return
            following = process.stage + 1
            if following < len(process.job.stages):
                self.start(process.job, following, result, 0)
            else:
                self.results.append((process.job.name, result))
            return
        error, about = said
        self.say(f"{process.name} fails: {error}")
        asks = error in USER_MUST_ACT and not any(move.kind in DISK_FAILS for move in self.moves)
        if asks or error == "AssertionError" or process.job.name == "judge":
            raise Failed(f"{process.name}: {about}")
        if not process.orphan:
            self.again(process, about)

    def again(self, process: Process, why: str) -> None:
        if not process.job.retried or process.tries >= 6:
            if process.job.retried:
                raise Failed(f"{process.name} failed {process.tries + 1} times, the last time: {why}")
            return
        if "Clear the plan task" in why:
            # A day after its plan, a cleanup may remove a job that has not gone on. The message says what a user does.
            self.start(process.job, 0, process.job.stages[0].given, process.tries + 1)
        else:
            self.start(process.job, process.stage, process.given, process.tries + 1)

    def said(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "said").read_text()[-3000:]
        return ""

    def end(self, process: Process, kill: bool = False) -> None:
        self.processes.pop(process.name, None)
        if kill:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.pipe.close()

    def say(self, line: str) -> None:
        self.trace.append(self.canonical(line))

    def decide(self) -> Move:
        if self.replayed is not None:
            return self.replay()
        if self.sprung is not None:
            return self.meanwhile(*self.sprung)
        move = self.draw()
        job = self.processes[move.actor].job.name
        for trap in self.traps:
            if move.kind != "time" and not self.processes[move.actor].orphan and trap.meets(job, move.point):
                self.traps.remove(trap)
                self.sprung = trap, move
                return self.meanwhile(trap, move)
        return move

    def meanwhile(self, trap: Trap, move: Move) -> Move:
        """Return the next step of the one that acts while another stands in a trap; then, what happens to that one."""
        for process in self.processes.values():
            mine = process.job.name == trap.other and not process.orphan
            # One that fails again and again may need the other to go on.
            if mine and process.points and process.tries < FAULTY_TRIES:
                thread, _, point = self.dice.random.choice(process.points)
                passes = " " not in point or point.startswith("others ")
                if trap.points > 0 or not passes:
                    trap.points -= passes
                    return Move("go", process.name, thread, point)
        self.sprung = None
        if trap.after is not None:
            self.traps.insert(0, trap.after)
        return replace(move, kind=trap.then)

    def draw(self) -> Move:
        """Return a move of somebody, and what happens at it."""
        dice = self.dice
        held = {trap.other for trap in self.traps if trap.held}
        held -= {trap.actor for trap in self.traps}
        held |= {
            process.job.name for process in self.processes.values() if self.waits(process.job.stages[process.stage])
        }
        going = [process for process in self.processes.values() if not process.stopped and process.job.name not in held]
        for process in self.processes.values():
            if process.stopped:
                process.stopped = 0 if not going else process.stopped - 1
        if not going:
            going = list(self.processes.values())
        able = [process for process in going if process.points]
        waiting = [process for process in going if process.until is not None]
        if not able or (waiting and dice.random.random() < 0.004):
            if not waiting:
                raise Failed(f"nobody can go on: {[(p.name, p.points) for p in going]}")
            first = min(waiting, key=lambda process: process.until or 0.0)
            return Move("time", first.name)
        process = dice.choose(able)
        thread, _, point = process.points[0] if len(process.points) == 1 else dice.random.choice(process.points)
        kind = "go"
        if process.job.faulty and process.tries < FAULTY_TRIES:
            # A job passes few fault points and commits, and many requests.
            rare = (" " not in point and dice.manner == "points") or point.startswith("commit ")
            drawn = dice.random.random() / (10 if rare else 1)
            if drawn < dice.kills:
                kind = "kill"
            elif drawn < dice.kills + dice.stops and not process.orphan:
                kind = "stop"
            elif drawn < dice.kills + dice.stops + dice.faults and point.split(" ")[0] in REQUESTS:
                fails = COMMIT_FAILS if point.startswith("commit") else STORE_FAILS
                kind = dice.random.choice(fails if self.scenario.far else DISK_FAILS)
            elif dice.random.random() < dice.later:
                kind = f"later {dice.random.choice(LATER)}"
            elif dice.jumps and dice.random.random() < dice.jumps:
                kind = f"clock {dice.random.choice(JUMPS)}"
        return Move(kind, process.name, thread, point)

    def waits(self, stage: Stage) -> bool:
        return stage.since not in self.reached and any(p.job.name == stage.since[0] for p in self.processes.values())

    def replay(self) -> Move:
        """Return the next decided move that is possible; when none is left, all go on in turn, without faults."""
        assert self.replayed is not None
        while self.replayed:
            move = self.replayed.pop(0)
            process = self.processes.get(move.actor)
            if process is None:
                continue
            if move.kind == "time" and process.until is not None:
                return move
            if move.kind != "time" and process.points:
                same = [(thread, point) for thread, _, point in process.points if thread == move.thread]
                thread, point = same[0] if same else (process.points[0][0], process.points[0][2])
                return replace(move, thread=thread, point=point)
        for process in self.processes.values():
            if process.points:
                thread, _, point = process.points[0]
                return Move("go", process.name, thread, point)
        first = min(self.processes.values(), key=lambda process: process.until or 0.0)
        return Move("time", first.name)

    def most_steps(self) -> int:
        """Return the number of steps in which all must end after the last fault or change."""
        files = sum(len(list((self.folder / "db").glob(f"{name}.lance/data/*"))) for name in ("t", "v"))
        return STEPS_OF_A_FILE * files * self.present

    def take(self, move: Move) -> None:
        process = self.processes[move.actor]
        point = self.canonical(move.point)
        self.moves.append(move)
        self.steps += 1
        self.calm += 1
        if move.kind not in ("go", "time") or process.job.name == "others":
            self.calm, self.present = 0, len(self.processes) + 1
        if self.calm % 500 == 0 and self.calm > self.most_steps():
            raise Failed(f"no end {self.calm} steps after the last fault or change")
        if move.kind == "time":
            self.now = max(self.now, process.until or 0.0)
            self.say(f"{move.actor} waits until {self.now:.1f}")
            self.grant(process, None, "go")
            return
        if " " not in point:
            self.pairs |= {(before, point) for other, before in self.last.items() if other != move.actor}
            self.last[move.actor] = point
            self.reached.add((process.job.name, point))
        self.say(f"{move.actor} {move.thread} {point}" + ("" if move.kind == "go" else f" -> {move.kind}"))
        self.tries["disk fails"] += move.kind in DISK_FAILS
        self.tries["late"] += move.kind.startswith(("later ", "clock "))
        self.tries["ledgers not read"] += move.kind in DISK_FAILS and point.startswith("read") and "/state/" in point
        if move.kind == "kill":
            self.end(process, kill=True)
            if process.job.retried and not process.orphan:
                self.start(process.job, process.stage, process.given, process.tries + 1)
        elif move.kind == "stop":
            # What runs it believes it dead, and starts it again; it goes on when the others have gone on for a while.
            process.stopped = self.dice.random.choice([5, 30, 100])
            if process.job.retried:
                self.tries["stopped"] += 1
                process.orphan = True
                self.start(process.job, process.stage, process.given, process.tries + 1)
        elif move.kind.startswith("later "):
            self.now += float(move.kind.removeprefix("later "))
            self.grant(process, move.thread, "go")
        elif move.kind.startswith("clock "):
            process.skew += float(move.kind.removeprefix("clock "))
            self.grant(process, move.thread, "go")
        else:
            self.grant(process, move.thread, move.kind)

    def grant(self, process: Process, thread: int | None, outcome: str) -> None:
        process.pipe.send((thread, outcome, self.now, START + process.skew))
        self.hear(process)

    def judge(self) -> None:
        """Let the judge, alone and without faults, look at what is left."""
        job = Job("judge", (Stage(self.scenario.judge, release=PRESENT),), retried=False, faulty=False)
        self.replayed = []
        self.calm, self.present = 0, 1
        self.start(job, 0, [*self.results, ("world", self.tries)], 0)
        while self.processes:
            self.take(self.replay())
        if not any(name == "judge" for name, _ in self.results):
            raise Failed(f"the judge failed: {self.said()}")


REQUESTS = {"read", "write", "list", "exists", "delete", "open", "commit"}


def child(pipe: Connection, call: str, folder: str, given: Any, seed: str, now: float, said: str) -> None:
    """Run an actor in a forked process, and end it."""
    try:
        log = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        gc.disable()
        KERNEL.begin(PipeToWorld(pipe), seed)
        chance.seed(KERNEL.dice.getrandbits(64))
        KERNEL.now = now
        try:
            found = getattr(importlib.import_module(ACTORS), call)(folder, given)
            pipe.send(("done", json.loads(json.dumps(found))))
        except BaseException as error:
            traceback.print_exc()
            at = traceback.extract_tb(error.__traceback__)[-1]
            pipe.send(("failed", type(error).__name__, f"{error!r:.2000}, {Path(at.filename).name}: {at.line}"))
    finally:
        os._exit(0)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory."""
    base = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(os.environ.get("TMPDIR", "/tmp"))
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make(scenario: Scenario, folder: Path, earlier: Release | None = None) -> None:
    """Make the databases of a scenario, which its seeds copy.

    Of two releases the earlier one makes that with values.
    """
    stages = {
        "empty": Stage(scenario.make, release=PRESENT),
        "filled": Stage("filled", scenario.make, release=EARLIER),
        "died": Stage("died", scenario.make, release=EARLIER),
    }
    for name in scenario.begins:
        stage = stages[name]
        shutil.rmtree(folder / "db", ignore_errors=True)
        making = replace(
            scenario, begins=(), jobs=lambda _, stage=stage: [Job("make", (stage,), False, False)], judge="no_judge"
        )  # type: ignore[misc]
        if said := World(making, 0, folder, Dice(0), earlier=earlier).run():
            sys.exit(f"the database of {scenario.name} cannot be made: {said}")
        shutil.copytree(folder / "db", folder / f"{name}-{scenario.name}")


def renew(scenario: Scenario, folder: Path, seed: int) -> None:
    """Copy the database with which a seed begins."""
    shutil.rmtree(folder / "db", ignore_errors=True)
    for name in ("said", "calls"):
        (folder / name).unlink(missing_ok=True)
    begins = random.Random(f"begins {seed}").choice(scenario.begins)
    shutil.copytree(folder / f"{begins}-{scenario.name}", folder / "db")
