"""``python -m tests.model.traces --traces 100 --of view``: paths of a model, taken by the real engine.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.model import column, events, view
from tests.simulation import chance

MOST_KILLS, MOST_STEPS = 3, 120
WITHOUT_A_WRITE = ("kill", "replace", "apply.step", "clear", "give up")
Way = list[tuple[str, str, Any]]


@dataclass(frozen=True)
class Traced:
    """A machine whose paths the engine takes.

    Args:
        make: the call that makes the table.
        jobs: the calls of each job, one after the other.
        moves: whether the engine passes a fault point in a step from one state to another, given the point before.
        can_be_taken: whether worlds can take a step, given the point before.
        point: the point that the engine is run to for an action; "" for the end of its process.
        in_words: what `observe` of the actors sees of a state.
        rare_first: the power of the number of times that a step was taken, by which others come before it.
        drawn: the points at which paths are to have an action, of which each path draws one; "" for any.
    """

    machine: Any
    start: Any
    make: str
    jobs: Mapping[str, tuple[str, ...]]
    moves: Callable[[str, str, Any, Any], bool]
    can_be_taken: Callable[[str, str], bool]
    point: Callable[[str], str]
    in_words: Callable[[Any], Any]
    drawn: Mapping[str, tuple[str, ...]]
    rare_first: float = 2.0


def column_can_take(before: str, action: str) -> bool:
    """Whether worlds can take a step: at an interval of 0 rows are kept first, and plans are of a task of their own."""
    if action in ("kill", "replace"):
        here = before not in {*column.READS, "verified", "looked", "unsure"}
        return here and (action == "kill" or before != "plan.saved")
    return "unsure" not in (before, action) and (before, action) != ("apply.step", "staged.written")


def column_in_words(state: column.State) -> Any:
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


def view_can_take(before: str, action: str) -> bool:
    if action in ("kill", "replace"):
        return before not in {*view.READS, "looked", "unsure"} and (action == "kill" or before != "plan.saved")
    return "unsure" not in (before, action)


def view_moves(before: str, action: str, state: view.State, after: view.State) -> bool:
    """The engine passes no fault point if the metadata name the newest swap already; else, both at once here."""
    return action not in (*view.READS, "mirror.write") and (
        action != "mirror.written" or state.history != after.history
    )


def view_in_words(state: view.State) -> Any:
    machine = TRACED["view"].machine
    newest = machine.newest(state)
    note = state.note if state.note is not None and state.note[0] == newest.snapshot else None
    return {
        "content": state.content,
        "newest": None if newest.snapshot is None else newest.snapshot.source,
        "snapshot": newest.snapshot in state.snapshots,
        "mirrored": None if state.mirrored is None else state.mirrored.source,
        "note": None if note is None else note[1].source,
        "intents of others": bool(state.intents - {newest.snapshot}),
        "its intent": newest.snapshot in state.intents,
    }


def events_in_words(state: events.State) -> Any:
    return {
        "versions": state.versions,
        "marks": dict(state.marks),
        "events": state.events,
        "ended": sorted(state.ended),
    }


COLUMN_SCOPE = column.Scope(two_jobs=True, changes=True, intervals=True, orphan=True)
VIEW_SCOPE = view.Scope(two_jobs=True, changes=True, notes=True, orphan=True)
_LATE = ("commit.before", "commit.after", "checkpoint.written (mark)")
_SWAP = ("snapshot.written", "swap.before", "swap.after", "mirror.write", "file.removed", "advance.written")
TRACED = {
    "column": Traced(
        column.Column(COLUMN_SCOPE),
        column.start(COLUMN_SCOPE),
        "make_column",
        {"A": ("plan_column", "go_on"), "B": ("backfill",)},
        lambda before, action, state, after: action not in column.READS,
        column_can_take,
        lambda action: {"finish.end": ""}.get(action, action.partition(" (")[0]),
        column_in_words,
        {
            # Otherwise the writer would seldom come between a verification and its commit.
            "change": ("", "commit.before"),
            "kill": ("", "applied", *_LATE),
            "replace": ("", "", "applied", "never", "checkpoint.written (rows)", *_LATE),
        },
    ),
    "view": Traced(
        view.View(VIEW_SCOPE),
        view.start(VIEW_SCOPE),
        "make_view",
        {"A": ("plan_view", "go_on"), "B": ("refresh",)},
        view_moves,
        view_can_take,
        lambda action: {"checkpoint.written (file)": "finish.begin", "finish.end": ""}.get(action, action),
        view_in_words,
        {"change": ("", "swap.before"), "kill": ("", *_SWAP), "replace": ("", "", "never", *_SWAP)},
    ),
    "events": Traced(
        events.Events(),
        events.start(),
        "make_events",
        dict.fromkeys("ABC", ("plan_run", "commit_run", "finish_run")),
        lambda before, action, state, after: True,
        lambda before, action: (before, action) != ("plan.saved", "kill") and action != "replace",
        lambda action: {"file.removed (mark)": "event", "event": ""}.get(action, action),
        events_in_words,
        # Otherwise few runs would come to their end.
        {
            "kill": ("never", "", *events.FINISHING),
            "give up": ("never", "never", "start", "plan.saved", *events.FINISHING),
            "clear": ("never", ""),
        },
        rare_first=0.5,
    ),
}


@dataclass
class Walks:
    """Draws paths of a model; `taken` counts, by the point before, how often each step was taken."""

    of: str = "column"
    taken: Counter[tuple[str, str]] = field(default_factory=Counter)

    def draw(self, dice: random.Random) -> Way:
        traced = TRACED[self.of]
        state, way, kills, held = traced.start, Way(), 0, ""
        at = {action: dice.choice(points) for action, points in traced.drawn.items()}
        planned_at = dict[str, Any]()
        while len(way) < MOST_STEPS:
            steps = []
            for step in traced.machine.steps(state):
                process = next((one for one in state.processes if one.name == step.actor), None)
                before = process.at if process is not None else ""
                where = {one.at for one in state.processes} if step.action == "change" else {before}
                if at.get(step.action) and at[step.action] not in where:
                    continue
                if step.action in ("kill", "replace") and (held or kills == MOST_KILLS):
                    continue
                if (step.actor, before, step.action) == ("A", "plan.saved", "kill"):
                    continue  # its plan task would plan again
                planned = before == "start" and saved_plan(state, step.actor) is not None
                if planned and (step.action == "resume") != (step.actor == "A"):
                    continue  # A goes on as a task of Airflow does, and B plans again as a script does
                if step.actor == "B" and process and not as_listed(process, step, state, planned_at.get("B")):
                    continue
                if held in ("", step.actor) and traced.can_be_taken(before, step.action) and step.actor != "quiet":
                    steps.append((step.actor, step.action, step.state, before))
            if not steps:
                return way
            weights = [self._weight(at, action) for _, action, _, at in steps]
            actor, action, after, before = dice.choices(steps, weights)[0]
            self.taken[before, action] += 1
            kills += action == "kill"
            if action in ("plan", "verify"):
                planned_at[actor] = after if action == "plan" else None
            held = "" if traced.moves(before, action, state, after) else actor
            way.append((actor, action if not held else f"({action})", after))
            state = after
        return way

    def _weight(self, before: str, action: str) -> float:
        taken = self.taken[before, action]
        # Otherwise all processes would be killed at their first points.
        return (0.05 if action == "kill" and taken else 1.0) / (1 + taken) ** TRACED[self.of].rare_first


def as_listed(process: Any, step: Any, state: Any, then: Any) -> bool:
    """Whether a script would take a step: it lists checkpoints when it plans, and the model reads them later."""
    if then is None or step.action not in ("open", "apply.step") or not isinstance(state, column.State):
        return True
    before = state._replace(rows=then.rows, staged=then.staged)
    ((action, after),) = TRACED["column"].machine.apply(before, process)
    now = next(one for one in step.state.processes if one.name == process.name)
    return (action, next(one for one in after.processes if one.name == process.name)) == (step.action, now)


def saved_plan(state: Any, job: str) -> object:
    if isinstance(state, events.State):
        return None
    return dict(state.plans)[job] if isinstance(state, view.State) else state.job(job).plan


def follow(of: str, way: Way, seed: int, folder: Path) -> tuple[str, int]:  # noqa: C901
    """Let the engine take a path; return where it differs from the model, or "", and the number of compared states."""
    from tests.simulation.world import Dice, Failed, Job, Move, Scenario, Stage, World

    traced = TRACED[of]
    jobs = {name: Job(name, tuple(Stage(call) for call in calls)) for name, calls in traced.jobs.items()}
    writers = {call: Job(call, (Stage(f"{call}_{of}"),), faulty=False) for call in ("change", "note")}
    world = World(Scenario("model", "", lambda _: [*jobs.values()], "no_judge"), seed, folder, Dice(0))
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
        run_to("observer", "seen")
        return json.loads(Path(folder, "seen").read_text())

    try:
        for name, job in jobs.items():
            world.start(job, 0, name, 0)
        world.start(Job("observer", (Stage("observe"),), faulty=False), 0, of, 0)
        for actor, action, state in way:
            said.append(f"  {actor:8} {action}")
            if action.startswith("("):
                continue
            compared += action not in WITHOUT_A_WRITE
            if action in ("clear", "give up"):
                standing.pop(name_of(actor), None)
                world.end(world.processes[name_of(actor)], kill=True)
                if action == "clear":
                    world.start(jobs[actor], 0, actor, 0)
            elif action == "kill":
                standing.pop(name_of(actor), None)
                world.take(Move("kill", name_of(actor), 0, ""))
            elif action in writers:
                world.start(writers[action], 0, None, 0)
                run_to(action, "")
            elif action == "replace":
                orphan = name_of("A")
                world.take(Move("stop", orphan, 0, ""))
            else:
                run_to(actor, traced.point(action))
            if action in WITHOUT_A_WRITE:
                continue
            engine, model = seen(), json.loads(json.dumps(traced.in_words(state)))
            while action == "file.removed" and engine != model:  # the engine removes one file after another
                run_to(actor, action)
                engine = seen()
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
    parser.add_argument("--of", default="column", choices=TRACED, help="the machine")
    parser.add_argument("--first", type=int, default=0, help="number of the first path")
    parser.add_argument("--mutant", default="", help="take them with a defect of tests/simulation/mutants.py")
    options = parser.parse_args(arguments)
    from tests.simulation import __main__ as simulation, world
    from tests.simulation.mutants import mutate

    world.ACTORS = "tests.model.actors"
    began, bad, walks, steps = time.monotonic(), 0, Walks(options.of), 0
    with world.scratch() as folder:
        if options.mutant:
            sys.path.insert(0, str(mutate(options.mutant, folder)))
        simulation.prepare(folder)
        __import__(world.ACTORS, fromlist=["no_judge"])
        stage = world.Stage(TRACED[options.of].make)
        scenario = world.Scenario("model", "", lambda _: [world.Job("make", (stage,), False, False)], "no_judge")
        if wrong := world.World(scenario, 0, folder, world.Dice(0)).run():
            sys.exit(f"the table cannot be made: {wrong}")
        shutil.copytree(folder / "db", folder / "new")
        for number in range(options.first + options.traces):
            way = walks.draw(random.Random(f"trace {number}"))
            if number < options.first:
                continue
            shutil.rmtree(folder / "db")
            shutil.copytree(folder / "new", folder / "db")
            differs, compared = follow(options.of, way, number, folder)
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
