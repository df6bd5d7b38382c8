"""``python -m tests.model.traces --traces 100``: paths of the model of a column, taken by the real engine.

Each path is drawn so that steps that were taken seldom come first. After each step that passes a fault point the state
on disk is compared with that of the model. Only paths in which nobody comes between a read and the next fault point of
the same process can be compared, because a process can be held at a fault point only.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.model import column
from tests.simulation import chance

SCOPE = column.Scope(two_jobs=True, changes=True, intervals=True, orphan=True)
MOST_KILLS, MOST_STEPS = 3, 120
REPLACED_LATE = ("checkpoint.written (rows)", "checkpoint.written (mark)")
Way = list[tuple[str, str, column.State]]


@dataclass
class Walks:
    """Draws paths of the model; `taken` counts, by the point before, how often each step was taken."""

    taken: Counter[tuple[str, str]] = field(default_factory=Counter)

    def draw(self, dice: random.Random) -> Way:
        machine = column.Column(SCOPE)
        state, way, kills, held = column.start(SCOPE), Way(), 0, ""
        # Otherwise the writer would seldom come between a verification and its commit.
        change_at = dice.choice(["", "commit.before"])
        kills_from = dice.choice(["", "applied", "commit.before", "commit.after", "checkpoint.written (mark)"])
        replaced_at = dice.choice(["", "", "applied", "commit.before", "commit.after", "never", *REPLACED_LATE])
        while len(way) < MOST_STEPS:
            steps = []
            for step in machine.steps(state):
                process = next((one for one in state.processes if one.name == step.actor), None)
                before = process.at if process is not None else ""
                if step.action == "kill" and (kills == MOST_KILLS or held or kills_from not in ("", before)):
                    continue
                if step.action == "change" and change_at not in ("", *(one.at for one in state.processes)):
                    continue
                if step.action == "replace" and (held or replaced_at not in ("", before)):
                    continue
                planned = before == "start" and state.job(step.actor).plan is not None
                if planned and (step.action == "resume") != (step.actor == "A"):
                    continue  # A goes on as a task of Airflow does, and B plans again as a script does
                if held in ("", step.actor) and can_be_taken(before, step.action) and step.actor != "quiet":
                    steps.append((step.actor, step.action, step.state, before))
            if not steps:
                return way
            weights = [self._weight(at, action) for _, action, _, at in steps]
            actor, action, state, before = dice.choices(steps, weights)[0]
            self.taken[before, action] += 1
            kills += action == "kill"
            held = actor if action in column.READS else ""
            way.append((actor, action, state))
        return way

    def _weight(self, before: str, action: str) -> float:
        taken = self.taken[before, action]
        # Otherwise all processes would be killed at their first points.
        return (0.05 if action == "kill" and taken else 1.0) / (1 + taken) ** 2


def can_be_taken(before: str, action: str) -> bool:
    """Whether worlds can take a step: at an interval of 0 rows are kept first, and plans are of a task of their own."""
    if action in ("kill", "replace"):
        here = before not in {*column.READS, "verified", "looked", "unsure"}
        return here and (action == "kill" or before != "plan.saved")
    return "unsure" not in (before, action) and (before, action) != ("apply.step", "staged.written")


def in_words(state: column.State) -> Any:
    """Return of a state what `observe` sees."""
    table, facts = state.table, state.facts
    rows = Counter(row for row, _ in state.rows)
    staged = Counter(one.fragment for one in {(one.fragment, one.inputs): one for one in state.staged}.values())
    return {
        "table": [[row, one.input(row), one.value(row)] for one in table for row in column.ROWS[one.id]],
        "known": [one.id for one in table if any(fact.about == one.signature and fact.rows for fact in facts)],
        "stale": [one.id for one in table if any(fact.about == one.signature and not fact.rows for fact in facts)],
        "rows": [list(pair) for pair in sorted(rows.items())],
        "staged": [list(pair) for pair in sorted(staged.items())],
    }


def follow(way: Way, seed: int, folder: Path) -> tuple[str, int]:  # noqa: C901
    """Let the engine take a path; return where it differs from the model, or "", and the number of compared states."""
    from tests.simulation.world import Dice, Failed, Job, Move, Scenario, Stage, World

    jobs = [
        Job("A", (Stage("plan"), Stage("go_on"))),
        Job("B", (Stage("backfill"),)),
        Job("writer", (Stage("change"),), faulty=False),
    ]
    world = World(Scenario("model", "make", lambda _: jobs, "no_judge"), seed, folder, Dice(0))
    said, compared, orphan = list[str](), 0, ""

    def name_of(actor: str) -> str:
        if actor == "orphan":
            return orphan
        number = world.started[actor]
        return actor if number == 1 else f"{actor}.{number}"

    def grant(name: str, thread: int | None = None) -> None:
        process = world.processes[name]
        if not process.points:
            world.take(Move("time", name))
            return
        at = next((point for point in process.points if point[0] == thread), process.points[0])
        world.take(Move("go", name, at[0], at[2]))

    standing: dict[str, int | None] = {}

    def run_to(actor: str, point: str) -> None:
        name = name_of(actor)
        if name not in world.processes:
            raise Failed(f"{actor} has ended, and not come to {point}")
        grant(name, standing.pop(name, None))
        while (name := name_of(actor)) in world.processes:
            found = [at for at in world.processes[name].points if at[2] == point]
            if found:
                standing[name] = found[0][0]
                return
            grant(name)
        if point:
            raise Failed(f"{actor} ended without passing {point}")

    def seen() -> Any:
        world.start(Job("observer", (Stage("observe"),), False, False), 0, None, 0)
        name = name_of("observer")
        while name in world.processes:
            grant(name)
        return json.loads(json.dumps(world.results.pop()[1]))

    try:
        for job in jobs:
            world.start(job, 0, None, 0)
        for actor, action, state in way:
            said.append(f"  {actor:8} {action}")
            if action in column.READS:
                continue
            compared += action not in ("kill", "replace", "apply.step")
            if action == "kill":
                standing.pop(name_of(actor), None)
                world.take(Move("kill", name_of(actor), 0, ""))
            elif action == "change":
                run_to("writer", "")
            elif action == "replace":
                orphan = name_of("A")
                world.take(Move("stop", orphan, 0, ""))
            else:
                run_to(actor, action.partition(" (")[0])
            if action == "finish.end":
                run_to(actor, "")
            if action in ("kill", "replace", "apply.step"):
                continue  # nothing is written
            engine, model = seen(), json.loads(json.dumps(in_words(state)))
            if engine != model:
                differs = [
                    f"{key}: engine {engine[key]}, model {model[key]}" for key in model if engine[key] != model[key]
                ]
                return "\n".join([*said, f"  differs: {'; '.join(differs)}"]), compared
    except Failed as failed:
        return "\n".join([*said, f"  {failed}", *world.trace[-12:]]), compared
    finally:
        for process in list(world.processes.values()):
            world.end(process, kill=True)
    return "", compared


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model.traces", description=__doc__)
    parser.add_argument("--traces", type=int, default=100, help="number of paths")
    parser.add_argument("--first", type=int, default=0, help="number of the first path")
    parser.add_argument("--mutant", default="", help="take them with a defect of tests/simulation/mutants.py")
    options = parser.parse_args(arguments)
    from tests.simulation import __main__ as simulation, world
    from tests.simulation.mutants import mutate

    world.ACTORS = "tests.model.actors"
    began, bad, walks, steps = time.monotonic(), 0, Walks(), 0
    with world.scratch() as folder:
        if options.mutant:
            sys.path.insert(0, str(mutate(options.mutant, folder)))
        simulation.prepare(folder)
        __import__(world.ACTORS, fromlist=["make"])
        scenario = world.Scenario(
            "model", "make", lambda _: [world.Job("make", (world.Stage("make"),), False, False)], "no_judge"
        )
        if wrong := world.World(scenario, 0, folder, world.Dice(0)).run():
            sys.exit(f"the table cannot be made: {wrong}")
        shutil.copytree(folder / "db", folder / "new")
        for number in range(options.first + options.traces):
            way = walks.draw(random.Random(f"trace {number}"))
            if number < options.first:
                continue
            shutil.rmtree(folder / "db")
            shutil.copytree(folder / "new", folder / "db")
            differs, compared = follow(way, number, folder)
            steps += compared
            if differs:
                bad += 1
                print(f"Trace {number} differs:\n{differs}\n", flush=True)
    kinds = len(walks.taken)
    print(
        f"{options.traces} traces, {steps} compared states, {kinds} kinds of steps, {bad} differ, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    chance.preload("tests.model.traces")
    sys.exit(main(sys.argv[1:]))
