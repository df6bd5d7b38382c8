"""Traps: when an actor stands at a step that matters, another one acts, and then something happens to the first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import Job

_ALWAYS = ("plan.saved", "staged.written", "checkpoint.written", "finish.begin", "fold.written", "/ledger.")
_COMMITS = ("commit.before", "commit t.lance", "commit t.lance", "commit t.lance", "commit.after", "commit.after")
_SWAPS = (
    "snapshot.written",
    "swap.before",
    "commit v.lance",
    "commit v.lance",
    "commit v.lance",
    "swap.after",
    "mirror.write",
)
_CLEANUPS = ("cleanup begins", "list ", "open ", "delete ", "write ", "cleanup.removed")


@dataclass
class Trap:
    """What happens when an actor is about to take a step.

    Args:
        actor: the name of its job.
        step: a part of the step's name; "": any.
        times: it happens when the actor comes to such a step for that time.
        other: the job that goes on meanwhile; "": none does.
        points: the number of fault points, or changes, that this one passes meanwhile.
        then: the kind of the actor's move, as in `Move`.
        held: the other one takes no step before.
        after: what happens at the actor's next step.
    """

    actor: str
    step: str
    times: int
    other: str
    points: int
    then: str
    held: bool
    after: Trap | None = None

    def meets(self, actor: str, step: str) -> bool:
        """Tell whether an actor's step sets the trap off."""
        if actor != self.actor or self.step not in step:
            return False
        self.times -= 1
        return self.times <= 0


def draw(
    seed: int, jobs: Sequence[Job], commit_fails: Sequence[str], places: Sequence[tuple[str, str]] = ()
) -> list[Trap]:
    """Return the traps of a seed; every fourth one has none.

    Args:
        places: where most traps are: names of jobs, each with a step.
    """
    dice = random.Random(f"traps {seed}")
    actors = [job for job in jobs if job.faulty]
    if not actors or dice.random() < 0.25:
        return []
    steps = {job.name: [step for name, step in places if name == job.name] for job in actors}
    actors = [job for job in actors if steps[job.name]] or actors
    number = dice.choice([1, 1, 2])
    return [_one(dice, one := dice.choice(actors), jobs, commit_fails, steps[one.name]) for _ in range(number)]


def _one(
    dice: random.Random,
    actor: Job,
    jobs: Sequence[Job],
    commit_fails: Sequence[str],
    steps: Sequence[str],
    after: bool = True,
) -> Trap:
    cleans = actor.stages[0].call == "clean"
    step = dice.choice(_steps_of(actor) if cleans or dice.random() < 0.8 else _ALWAYS)
    step = dice.choice(steps) if steps and dice.random() < 0.8 else step
    others = [job.name for job in jobs if job is not actor]
    # What others do to the tables matters more often than what a second job does.
    chosen = step in steps
    others += [name for name in others if name == "others"] * (1 if chosen else 2)
    other = dice.choice(others) if others and dice.random() < 0.9 else ""
    commits = step.startswith("commit ") and after
    ends = ["go"] * 6 + ["stop", *commit_fails] if commits else ["go", "kill", "kill", "stop"]
    then = dice.choice(ends if commits or not chosen else ["go", *ends])
    times = dice.choice([1, 2, 5, 8, 13, 21] if cleans and not chosen else [1, 1, 1, 2, 3])
    points = dice.choice([1, 2, 4, 1_000] if chosen else [1, 1, 2, 4, 1_000])
    trap = Trap(actor.name, step, times, other, points, then, dice.random() < 0.9)
    if (commits or (after and steps)) and dice.random() < 0.5:
        trap.after = _one(dice, actor, jobs, commit_fails, steps, after=False)
        trap.after.step, trap.after.times = "", 1
    return trap


def _steps_of(job: Job) -> Sequence[str]:
    first = job.stages[0]
    if first.call == "clean":
        return _CLEANUPS
    return _SWAPS if first.call == "refresh" or first.given == "v" else _COMMITS
