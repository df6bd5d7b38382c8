"""Random histories in which a table changes during runs: inline, on Spark, or task by task in Airflow."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import pyarrow as pa

from airflow_geneva.engine import faults
from airflow_geneva.engine.results import BackfillResult
from tests.support.counting import TRACE, Stop, Trace
from tests.support.forge import forge
from tests.support.harness import (
    CHECKPOINT,
    FIELDS,
    FOREIGN,
    IN_FLIGHT,
    Change,
    Job,
    World,
    append,
    assert_complete,
    assert_durable,
    carry_out,
    compact,
    database_in,
    delete,
    fill_another_column,
    pick,
    restore,
    run_call,
    touch,
    update,
    upsert,
    upsert_in_place,
    write_the_column,
)
from tests.support.invariants import assert_honest
from tests.udfs_for_tests.histories import is_bad


def upsert_the_other_column(world: World, dice: random.Random) -> None:
    """Run a `merge_insert` that changes a column which the function does not read."""
    rows = world.table.lance.to_table(filter=f"id IN ({', '.join(map(str, pick(world, dice)))})")
    world.table.lance.merge_insert("id").when_matched_update_all().execute(rows)


def restore_the_newest(world: World, dice: random.Random) -> None:
    """Restore the previous version, and then the newest again."""
    newest = world.table.version
    world.table.location.open(max(newest - 1, world.marks[0])).restore()
    world.table.location.open(newest).restore()


def change_another_column(world: World, dice: random.Random) -> None:
    """Add, rename or drop a column that the function does not read."""
    names = world.table.schema.names
    if "other" in names:
        world.table.lance.alter_columns({"path": "other", "name": "renamed"})
    elif "renamed" in names:
        world.table.lance.drop_columns(["renamed"])
    else:
        world.table.lance.add_columns({"other": "id + 1"})


def change_the_struct(world: World, dice: random.Random) -> None:
    """Drop, add again, rename or swap fields of the struct that the function reads."""
    lance, world.reshaped = world.table.lance, True

    def rename(name: str, to: str) -> None:
        lance.alter_columns({"path": f"s.{name}", "name": to})

    there = [name for name in world.fields if name != "k"]
    gone = [name for name in FIELDS if name not in world.fields]
    possible: list[Callable[[], Any]] = []
    for name in there:
        possible.append(lambda name=name: lance.drop_columns([f"s.{name}"]))
    for name in gone:
        kind = pa.struct({name: pa.int64()})
        values = pa.array([{name: 1_000 * (world.steps + 1) + row} for row in range(lance.count_rows())], kind)
        filled = pa.RecordBatchReader.from_batches(pa.schema({"s": kind}), [pa.record_batch([values], names=["s"])])
        possible.append(lambda kind=kind: lance.add_columns(pa.schema({"s": kind})))
        possible.append(lambda filled=filled: lance.add_columns(filled))
        if "old" not in there:
            continue
        possible.append(lambda name=name: rename("old", name))
    if there and "old" not in there:
        possible.append(lambda: rename(there[-1], "old"))
    if len(there) == 2:
        possible.append(lambda: [rename(there[0], "swap"), rename(there[1], there[0]), rename("swap", there[1])])
    dice.choice(possible)()


MOVES: list[Change] = [
    compact, compact, touch, upsert_the_other_column, restore_the_newest, delete, append, fill_another_column,
    change_another_column,
]  # fmt: skip
CHANGES: list[Change] = [*MOVES, update, upsert, upsert_in_place, write_the_column, restore]
MOST_MOVED = 2 * 9
"""Return the rows that the changes during a killed run move without changing them."""
KINDS = ["plain", "plain", "where", "where", "skip", "async", "dedup", "indexed", "nested"]


Act = tuple[int, Callable[[], Any]]


class _Acts:
    """Actions between the fault points of a run, one at a time, whichever of its threads passes the point."""

    def __init__(self, acts: list[Act]) -> None:
        self._lock = threading.Condition()
        self._todo, self._left, self._busy = list(acts), acts[0][0] if acts else 0, False

    def pass_point(self, _pid: int, _signal: int) -> None:
        with self._lock:
            if self._busy or not self._todo:
                return
            self._left -= 1
            if self._left:
                return
            _, done = self._todo.pop(0)
            self._busy = True
        try:
            done()
        finally:
            with self._lock:
                self._busy, self._left = False, self._todo[0][0] if self._todo else 0
                self._lock.notify_all()

    def end(self) -> None:
        """Start no further action, and wait for one that a thread of the run is still carrying out."""
        with self._lock:
            self._todo.clear()
            self._lock.wait_for(lambda: not self._busy)


@contextmanager
def changing(acts: list[Act]) -> Iterator[None]:
    """Run an action each time a number of fault points has been passed since the last action."""
    running = _Acts(acts)
    # Threads that outlive the run may be at a fault point when this ends: in this process, it never kills again.
    faults.os = SimpleNamespace(kill=running.pass_point, getpid=os.getpid)  # type: ignore[assignment]
    faults._ARMED = "any"
    try:
        yield
    finally:
        faults._ARMED = ""
        running.end()


def changes_of(job: Job, moves: bool) -> list[Change]:
    """Return the changes of the table that may happen during a run.

    Args:
        moves: only changes that leave the values of all rows unchanged.
    """
    if moves:
        return MOVES
    return [*CHANGES, *[change_the_struct] * 4] if job.kind == "nested" else CHANGES


def some_acts(world: World, dice: random.Random, possible: list[Change], most: int) -> list[Act]:
    acts = []
    for _ in range(dice.randint(1, most)):
        change = dice.choice(possible)
        acts.append((dice.randint(1, 25), lambda change=change: do(world, dice, change)))
    return acts


_one_at_a_time = threading.RLock()


def do(world: World, dice: random.Random, change: Change) -> None:
    with _one_at_a_time:
        world.steps += 1
        with open(world.folder / "changes", "a") as log:
            log.write(f"{change.__name__} at version {world.table.version}\n")
        change(world, dice)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def open_in_child(folder: str, next_id: int) -> World:
    """The world in a forked process, whose random changes differ from those of its parent process."""
    world = World(Path(folder), database_in(Path(folder)).open_table("docs"), next_id, steps=next_id)
    world.marks.append(world.table.version)
    return world


def run_change_and_die(folder: str, kind: str, run: str | None, seed: str, moves: bool, next_id: int) -> None:
    """Run in this process while the table changes, and die before the end; called in a forked process."""
    dice, world, job = random.Random(seed), open_in_child(folder, next_id), Job(kind, run is not None)
    acts = some_acts(world, dice, changes_of(job, moves), 2)
    with changing([*acts, (dice.randint(1, 25), die)]):
        carry_out(world, job, run)


class Way(Protocol):
    """The way in which runs are executed.

    Args:
        as_tasks: whether jobs may be calls (False) or tasks (True).
        slots: number of concurrent tasks, each of which may lose an interval.
        kills_tasks: whether single tasks are killed; else a process that runs the entire job is killed before this one.
    """

    as_tasks: tuple[bool, ...]
    slots: int
    kills_tasks: bool

    def environment(self, world: World) -> dict[str, str]:
        """Return environment variables of its processes, in addition to the trace."""

    def carry_out(self, world: World, job: Job, run: str | None, dice: random.Random, moves: bool) -> Outcome:
        """Execute a run to its end while the table changes."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Args:
        kills: number of processes that were killed during it.
        cleared: whether its plan task ran again, so that its counts belong to another plan.
    """

    result: BackfillResult
    kills: int = 0
    cleared: bool = False


class Inline:
    as_tasks = (False, True)
    slots = 1
    kills_tasks = False

    def environment(self, world: World) -> dict[str, str]:
        return {}

    def carry_out(self, world: World, job: Job, run: str | None, dice: random.Random, moves: bool) -> Outcome:
        with changing(some_acts(world, dice, changes_of(job, moves), 3)):
            return Outcome(carry_out(world, job, run))


@dataclass(frozen=True)
class OnSpark:
    """Run on the Spark session of this process; the table also changes while workers run, and workers are killed.

    Args:
        trace: the trace file of all histories.
    """

    trace: Trace
    as_tasks = (False,)
    slots = 2
    kills_tasks = False

    def environment(self, world: World) -> dict[str, str]:
        # Spark's workers keep the environment that they were started with.
        self.trace.clear()
        return {TRACE: str(self.trace.path)}

    def carry_out(self, world: World, job: Job, run: str | None, dice: random.Random, moves: bool) -> Outcome:
        possible, kills = changes_of(job, moves), list[int]()
        with ExitStack() as stack:
            stack.enter_context(changing(some_acts(world, dice, possible, 2)))
            acts: list[tuple[int, Any]] = [*some_acts(world, dice, possible, 2)]
            if dice.random() < 0.5:
                acts.insert(dice.randrange(len(acts) + 1), (dice.randint(1, 25), None))
            stack.enter_context(stopping_calls(world, acts, kills))
            result = world.table.backfill("y", udf=job.udf, runner="spark", **job.options)
        assert_honest(result, world.table)
        return Outcome(result, len(kills))


@contextmanager
def stopping_calls(world: World, acts: list[tuple[int, Any]], kills: list[int]) -> Iterator[None]:
    """Run an action in the call that reaches a number of rows since the last action; None kills its process."""
    stop, ended, errors = Stop(world.trace.path), threading.Event(), list[BaseException]()

    def serve() -> None:
        for rows, done in acts:
            stop.ask(rows, kill=done is None)
            while not stop.reached:
                if ended.wait(0.005):
                    return
            try:
                kills.append(1) if done is None else done()
            except BaseException as error:
                errors.append(error)
                return
            finally:
                stop.go_on()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        stop.go_on()
        if errors:
            raise errors[0]


def due_rows(world: World, job: Job) -> dict[int, int]:
    """Return ids and inputs of the rows that a run has to compute."""
    rows = (row for row in world.rows() if job.selects(row["id"]) and row["y"] not in job.values(row["x"]))
    return {row["id"]: row["x"] for row in rows}


def assert_nothing_left(world: World, job: Job, due: dict[int, int], result: BackfillResult, moves: bool) -> None:
    """Check that rows that are unchanged since the plan have their values; only other rows may be left."""
    now = {row["id"]: row for row in world.rows()}
    same = {row: now[row] for row, x in due.items() if row in now and now[row]["x"] == x}
    wrong = [row for row in same.values() if row["y"] not in job.values(row["x"]) and row["y"] != FOREIGN]
    if moves:
        assert not wrong, f"{len(wrong)} rows that were only moved are wrong, such as {wrong[:3]}"
        assert (result.state, result.rows_left) == ("DONE", 0)
        failed = sum(is_bad(row["x"]) for row in same.values()) if job.fails else 0
        visible = result.rows_computed + result.rows_reused
        assert visible >= len(same) - failed, f"{visible} rows are said to be visible, and {len(same) - failed} are"


def live(seed: int, folder: Path, way: Way) -> int:
    dice = random.Random(f"within-{seed}")
    job = Job(dice.choice(KINDS), dice.choice(way.as_tasks))
    world, kills = World.make(folder, job), 0
    world.more = way.environment(world)
    os.environ.update(world.environment)
    between: list[Change] = [append, update, upsert, compact, *[change_the_struct] * 2 * (job.kind == "nested")]
    for number in range(dice.randint(1, 3)):
        run, moves = f"round-{number}" if job.as_tasks else None, dice.random() < 0.6
        for change in dice.choices(between, k=dice.randint(0, 2)):
            do(world, dice, change)
        world.marks[:] = [world.table.version]
        world.checked = world.table.version
        bad = sum(is_bad(row["x"]) for row in world.rows()) if job.fails else 0
        due, before, ids, killed, more, runs = due_rows(world, job), len(world.trace), world.ids(), 0, 0, 1
        if dice.random() < 0.5 and not way.kills_tasks:
            world.next_id += 10_000
            arguments = {
                "folder": str(folder), "kind": job.kind, "run": run, "seed": f"{seed}-{number}", "moves": moves,
                "next_id": world.next_id,
            }  # fmt: skip
            code = forge().run("tests.support.within:run_change_and_die", arguments, world.environment)
            assert code in (0, -signal.SIGKILL)
            killed, runs = code != 0, 2
            assert_durable(world, job, whole=False)
            now = due_rows(world, job)
            more = len(now.keys() - due.keys())
            if not job.as_tasks:
                # The next call plans again. Range checkpoints of updated rows are lost.
                due, more = now, len(due.keys() - now.keys()) + MOST_MOVED * killed
            world.next_id += 10_000
        outcome = way.carry_out(world, job, run, dice, moves)
        runs += outcome.cleared
        if way.kills_tasks:
            # A retried or cleared plan task finds rows that were added since.
            more += len(set(world.ids()) - set(ids))
        if world.reshaped:
            more += len(ids) - len(due)
        counted = {} if killed or outcome.cleared else due
        assert_nothing_left(world, job, counted, outcome.result, moves)
        assert_durable(world, job, whole=False)
        kills += killed + outcome.kills
        if moves:
            interval = way.slots * (CHECKPOINT + (4 * IN_FLIGHT if job.kind == "async" else 0))
            ran, most = len(world.trace) - before, len(due) + more + bad * runs
            most += interval * (1 + killed + outcome.kills)
            assert ran <= most, f"{ran} rows ran, and {len(due)} were due, and {more} others"
        # The changes of a killed process are not known here.
        world.reshaped = job.kind == "nested" and not moves
    assert run_call(world.table, job).state == "DONE"
    assert_durable(world, job, whole=False)
    assert_complete(world, job)
    return kills


def check(seed: int, folder: Path, way: Way) -> int:
    """Run the history of a seed; return the number of killed processes."""
    try:
        with patch.dict(os.environ):
            return live(seed, folder, way)
    except BaseException as error:
        changes = folder / "changes"
        told = f"seed {seed}: {changes.read_text() if changes.exists() else 'no change'}"
        error.add_note(told) if hasattr(error, "add_note") else print(told)
        raise
