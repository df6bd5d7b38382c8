"""Random histories in which a table changes inside of runs: rows that others only move become visible all the same."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from airflow_geneva import connect, faults
from airflow_geneva.job.result import BackfillResult
from tests.support.forge import forge
from tests.support.harness import (
    CHECKPOINT,
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
from tests.udfs_for_tests.histories import is_bad

pytestmark = pytest.mark.crash

HISTORIES = int(os.environ.get("GENEVA_WITHIN_HISTORIES", "12"))
SOAK_SECONDS = float(os.environ.get("GENEVA_SOAK_SECONDS", "1800"))


def upsert_the_other_column(world: World, dice: random.Random) -> None:
    """Rows of a `merge_insert` that changes a column which the function does not read."""
    rows = world.table.lance.to_table(filter=f"id IN ({', '.join(map(str, pick(world, dice)))})")
    world.table.lance.merge_insert("id").when_matched_update_all().execute(rows)
    world.spare += rows.num_rows


def restore_the_newest(world: World, dice: random.Random) -> None:
    """A restore to the version before, and back."""
    newest = world.table.version
    world.table.location.open(max(newest - 1, world.marks[0])).restore()
    world.table.location.open(newest).restore()


MOVES: list[Change] = [
    compact, compact, touch, upsert_the_other_column, restore_the_newest, delete, append, fill_another_column,
]  # fmt: skip
CHANGES: list[Change] = [*MOVES, update, upsert, upsert_in_place, write_the_column, restore]
MOST_MOVED = 2 * 9
"""Rows that the changes of a run that is killed move without changing them."""
KINDS = ["plain", "plain", "where", "where", "skip", "async", "dedup", "indexed"]


@contextmanager
def changing(world: World, dice: random.Random, acts: list[tuple[int, Callable[[], Any]]]) -> Iterator[None]:
    """Have something done each time that a number of fault points was passed since the last time."""
    todo = list(acts)

    def arm() -> None:
        faults._hits = 0
        faults._ARMED = f"any:{todo[0][0]}" if todo else ""

    def act(pid: int, number: int) -> None:
        _, done = todo.pop(0)
        faults._ARMED = ""
        done()
        arm()

    with patch.object(faults, "os", SimpleNamespace(kill=act, getpid=os.getpid)):
        arm()
        try:
            yield
        finally:
            faults._ARMED = ""


def some_acts(world: World, dice: random.Random, possible: list[Change], most: int) -> list[tuple[int, Any]]:
    acts = []
    for _ in range(dice.randint(1, most)):
        change = dice.choice(possible)
        acts.append((dice.randint(1, 25), lambda change=change: do(world, dice, change)))
    return acts


def do(world: World, dice: random.Random, change: Change) -> None:
    world.steps += 1
    with open(world.folder / "changes", "a") as log:
        log.write(f"{change.__name__} at version {world.table.version}\n")
    change(world, dice)


def run_change_and_die(folder: str, kind: str, run: str | None, seed: str, moves: bool, next_id: int) -> None:
    """A run in this process, in which the table changes, and which does not end; called in a forked one."""
    dice = random.Random(seed)
    world = World(Path(folder), connect(Path(folder) / "db").open_table("docs"), next_id, steps=next_id)
    world.marks.append(world.table.version)
    acts = some_acts(world, dice, MOVES if moves else CHANGES, 2)
    acts.append((dice.randint(1, 25), lambda: os.kill(os.getpid(), signal.SIGKILL)))
    with changing(world, dice, acts):
        carry_out(world, Job(kind, run is not None), run)


def due_rows(world: World, job: Job) -> dict[int, int]:
    """Ids and inputs of the rows that a run has to compute."""
    rows = (row for row in world.rows() if job.selects(row["id"]) and row["y"] not in job.values(row["x"]))
    return {row["id"]: row["x"] for row in rows}


def assert_nothing_left(world: World, job: Job, due: dict[int, int], result: BackfillResult, moves: bool) -> None:
    """Rows that are as they were when they were planned have their values; only others may be left."""
    now = {row["id"]: row for row in world.rows()}
    same = {row: now[row] for row, x in due.items() if row in now and now[row]["x"] == x}
    wrong = [row for row in same.values() if row["y"] not in job.values(row["x"]) and row["y"] != FOREIGN]
    if moves:
        assert not wrong, f"{len(wrong)} rows that were only moved are wrong, such as {wrong[:3]}"
        assert (result.state, result.rows_left) == ("DONE", 0)
        failed = sum(is_bad(row["x"]) for row in same.values()) if job.fails else 0
        visible = result.rows_computed + result.rows_reused
        assert visible >= len(same) - failed, f"{visible} rows are said to be visible, and {len(same) - failed} are"


def live(seed: int, folder: Path) -> int:
    dice = random.Random(f"within-{seed}")
    job = Job(dice.choice(KINDS), dice.random() < 0.5)
    world, kills = World.make(folder, job), 0
    os.environ.update(world.environment)
    for number in range(dice.randint(1, 3)):
        run, moves = f"round-{number}" if job.as_tasks else None, dice.random() < 0.6
        for change in dice.choices([append, update, upsert, compact], k=dice.randint(0, 2)):
            do(world, dice, change)
        world.marks[:] = [world.table.version]
        world.checked = world.table.version
        bad = sum(is_bad(row["x"]) for row in world.rows()) if job.fails else 0
        due, before, killed, more, runs = due_rows(world, job), len(world.trace), 0, 0, 1
        if dice.random() < 0.5:
            world.next_id += 10_000
            arguments = {
                "folder": str(folder), "kind": job.kind, "run": run, "seed": f"{seed}-{number}", "moves": moves,
                "next_id": world.next_id,
            }  # fmt: skip
            where = "tests.promises.test_changes_within_runs:run_change_and_die"
            code = forge().run(where, arguments, world.environment)
            assert code in (0, -signal.SIGKILL)
            killed, runs = code != 0, 2
            assert_durable(world, job, whole=False)
            now = due_rows(world, job)
            more = len(now.keys() - due.keys())
            if not job.as_tasks:
                # The next call plans again. What only ranges of a fragment held is lost of rows that were updated.
                due, more = now, len(due.keys() - now.keys()) + MOST_MOVED * killed
            world.next_id += 10_000
        with changing(world, dice, some_acts(world, dice, MOVES if moves else CHANGES, 3)):
            result = carry_out(world, job, run)
        assert_nothing_left(world, job, due if not killed else {}, result, moves)
        assert_durable(world, job, whole=False)
        kills += killed
        if moves:
            interval = CHECKPOINT + (4 * IN_FLIGHT if job.kind == "async" else 0)
            ran, most = len(world.trace) - before, len(due) + more + bad * runs + interval * (1 + killed)
            assert ran <= most, f"{ran} rows ran, and {len(due)} were due, and {more} others"
    assert run_call(world.table, job).state == "DONE"
    assert_durable(world, job, whole=False)
    assert_complete(world, job)
    return kills


def check(seed: int, folder: Path) -> int:
    try:
        with patch.dict(os.environ):
            return live(seed, folder)
    except BaseException as error:
        changes = folder / "changes"
        told = f"seed {seed}: {changes.read_text() if changes.exists() else 'no change'}"
        error.add_note(told) if hasattr(error, "add_note") else print(told)
        raise


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_rows_that_move_within_a_run_become_visible_in_it(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path / "world")


@pytest.mark.soak
def test_a_thousand_histories_with_changes_within_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    until, seed, kills = time.monotonic() + SOAK_SECONDS, 10_000, 0
    while time.monotonic() < until and seed < 11_000:
        kills += check(seed, tmp_path / str(seed))
        seed += 1
    with capsys.disabled():
        print(f"\n{seed - 10_000:,} histories, {kills:,} kills")
