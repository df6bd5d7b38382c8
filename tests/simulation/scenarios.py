"""Who meets in a world."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.releases import EARLIER, PRESENT
from tests.simulation.world import Job, Scenario, Stage

CHANGES = ("append", "update", "touch", "upsert", "delete", "compact", "restore", "column")


def in_airflow(table: str) -> tuple[Stage, ...]:
    return (Stage("plan", table), Stage("apply"), Stage("commit"), Stage("finish"))


def others(dice: random.Random, most: int = 4, kinds: Sequence[str] = CHANGES) -> Job:
    chosen = [dice.choice(kinds) for _ in range(dice.randrange(1, most))]
    return Job("others", (Stage("change", {"seed": dice.random(), "kinds": chosen}),), faulty=False)


def backfill(name: str, dice: random.Random) -> Job:
    return Job(name, in_airflow("t") if dice.random() < 0.5 else (Stage("backfill"),))


def refresh(name: str, dice: random.Random) -> Job:
    return Job(name, in_airflow("v") if dice.random() < 0.5 else (Stage("refresh"),))


def cleaner(dice: random.Random, *tables: str) -> list[Job]:
    if dice.random() > 0.3:
        return []
    ttl = dice.choice(["1s", "1h"])
    return [Job("cleaner", (Stage("clean", {"tables": tables, "times": 2, "ttl": ttl}),))]


def reader(dice: random.Random, call: str, shape: str = "") -> list[Job]:
    stage = Stage(call, {"times": 5, "shape": shape})
    return [Job("reader", (stage,), faulty=False)] if dice.random() < 0.4 else []


def column(dice: random.Random) -> Sequence[Job]:
    more = [backfill("B", dice)] if dice.random() < 0.6 else []
    kinds = CHANGES if dice.random() < 0.6 else ("touch", "touch", "compact", "append", "update")
    return [
        backfill("A", dice),
        others(dice, 4, kinds),
        *more,
        *cleaner(dice, "t"),
        *reader(dice, "read_column"),
    ]


def chain(dice: random.Random) -> Sequence[Job]:
    inner = [Job(name, (Stage("backfill", "a"),)) for name in ("inner", "other inner")[: dice.choice([1, 1, 2])]]
    return [backfill("A", dice), *inner, others(dice), *cleaner(dice, "t")]


def replaced(dice: random.Random) -> Sequence[Job]:
    more = [backfill("B", dice)] if dice.random() < 0.3 else []
    return [backfill("A", dice), *more, others(dice, 6, ("replace", "replace", "replace", "append", "touch"))]


def folds(dice: random.Random) -> Sequence[Job]:
    runs = [backfill(name, dice) for name in ("A", "B", "C", "D")[: dice.choice([2, 3, 4])]]
    return [*runs, others(dice, 5, ("append", "update", "touch", "replace"))]


def listed(dice: random.Random) -> Sequence[Job]:
    """One run after another folds the ledgers that a job reads."""
    return [backfill("A", dice), Job("B", (Stage("append_and_backfill"),) * 3)]


def pruned(dice: random.Random) -> Sequence[Job]:
    """Facts are written while a cleanup drops others."""
    cleaner = Job("cleaner", (Stage("clean", {"tables": ("t",), "times": 2, "ttl": "1h"}),))
    return [backfill("A", dice), cleaner, others(dice, 6, ("append", "append", "append", "update"))]


def crossed(dice: random.Random) -> Sequence[Job]:
    """Two jobs commit at once, and rows move between their commits."""
    more = [backfill("B", dice)] if dice.random() < 0.6 else []
    return [backfill("A", dice), *more, others(dice, 5, ("nudge", "nudge", "nudge", "touch", "append"))]


def moved(dice: random.Random) -> Sequence[Job]:
    """Rows move between the commits of two jobs, one of which may be given up."""
    first, other = backfill("A", dice), replace(backfill("B", dice), retried=dice.random() < 0.4)
    if dice.random() < 0.6:
        plan, apply, commit, finish = in_airflow("t")
        first = Job("A", (plan, apply, replace(commit, since=("B", "commit.after")), finish))
        begins, *rest = other.stages
        other = replace(other, stages=(replace(begins, since=("A", "plan.saved")), *rest))
    return [first, other, others(dice, 5, ("nudge", "nudge", "nudge", "update", "update", "touch", "compact"))]


def died(dice: random.Random) -> Sequence[Job]:
    """The job that died goes on, or another one does what it left."""
    cleaner = Job("cleaner", (Stage("clean", {"tables": ("t",), "times": 2, "ttl": "1s"}),))
    late = Job("A", (Stage("find_plan"), Stage("apply"), Stage("commit"), Stage("finish")))
    return [late if dice.random() < 0.6 else backfill("A", dice), cleaner]


def tidied(dice: random.Random) -> Sequence[Job]:
    """A view whose versions others remove."""
    kinds = ("append", "update", "view tidy", "view tidy")
    more = [refresh("B", dice)] if dice.random() < 0.5 else []
    return [refresh("A", dice), *more, others(dice, 6, kinds)]


def copied(dice: random.Random) -> Sequence[Job]:
    """A view to which others add rows."""
    more = [refresh("B", dice)] if dice.random() < 0.3 else []
    return [refresh("A", dice), *more, others(dice, 4, ("append", "view copy", "view copy"))]


def vacuumed(dice: random.Random) -> Sequence[Job]:
    more = [backfill("B", dice)] if dice.random() < 0.4 else []
    kinds = ("append", "update", "touch", "compact", *["vacuum"] * 3)
    return [backfill("A", dice), *more, others(dice, 5, kinds), *cleaner(dice, "t")]


def view(dice: random.Random) -> Sequence[Job]:
    if dice.random() < 0.2:
        return [refresh("A", dice)]
    more = [refresh("B", dice)] if dice.random() < 0.6 else []
    return [refresh("A", dice), others(dice), *more, *cleaner(dice, "t", "v"), *reader(dice, "read_view", "rows")]


def groups(dice: random.Random) -> Sequence[Job]:
    # A plan of groups is computed by the process that made it, or by Spark.
    more = [Job("B", (Stage("refresh"),))] if dice.random() < 0.5 else []
    return [
        Job("A", (Stage("refresh"),)),
        others(dice),
        *more,
        *cleaner(dice, "t", "v"),
        *reader(dice, "read_view", "groups"),
    ]


def whole_view(dice: random.Random) -> Sequence[Job]:
    more = [refresh("B", dice)] if dice.random() < 0.5 else []
    return [refresh("A", dice), others(dice), *more, *cleaner(dice, "t", "v"), *reader(dice, "read_view", "kept")]


def promotion(dice: random.Random) -> Sequence[Job]:
    promote = Job("promote", (Stage("promote"),))
    more = [Job("B", (Stage("backfill", "m"),), retried=False)] if dice.random() < 0.6 else []
    return [backfill("A", dice), *more, promote, others(dice, 4, (*CHANGES, "say", "say", "say")), *cleaner(dice, "t")]


def load(dice: random.Random) -> Sequence[Job]:
    loads = [Job(name, (Stage("load"),)) for name in ("load", "other load")[: dice.choice([1, 1, 2])]]
    more = [backfill("A", dice)] if dice.random() < 0.6 else []
    return [*loads, *more, others(dice, 4, (*CHANGES, *["rekey"] * 4)), *cleaner(dice, "t")]


def limited(dice: random.Random) -> Sequence[Job]:
    return [Job("A", (Stage("backfill"),)), Job("B", (Stage("backfill"),))]


PAIRS = ("pepe", "epep", "ppee", "eepp", "peep", "eppe")
"""Of plan, apply, commit and finish, which release runs each: all pairs of two stages and two releases."""


def in_turn(table: str) -> Sequence[Job]:
    """Return one run after another, each with its stages by both releases."""
    stages: list[Stage] = []
    for pair in PAIRS:
        of_run = ("append_and_plan", "apply", "commit", "finish")
        by = [PRESENT if letter == "p" else EARLIER for letter in pair]
        stages += [Stage(call, table, release) for call, release in zip(of_run, by, strict=True)]
    return [Job("A", tuple(stages), retried=False, faulty=False)]


_ALL = (
    Scenario("column", "make_column", column, "judge_column"),
    Scenario("coroutines", "make_slow", column, "judge_column"),
    Scenario("chain", "make_chain", chain, "judge_chain"),
    Scenario("vacuumed", "make_column", vacuumed, "judge_column", traps=(("A", "commit t.lance"),)),
    Scenario("replaced", "make_column", replaced, "judge_column", traps=(("A", "commit t.lance"),)),
    Scenario("folds", "make_column", folds, "judge_column", fold_after=3),
    Scenario(
        "listed",
        "make_column",
        listed,
        "judge_column",
        begins=("filled",),
        fold_after=2,
        traps=(("A", "read t.lance/_checkpoints/state/"),),
    ),
    Scenario("pruned", "make_column", pruned, "judge_column", traps=(("cleaner", "state/field-"),)),
    Scenario("crossed", "make_column", crossed, "judge_column", traps=(("A", "commit t.lance"), ("A", "/ledger."))),
    Scenario(
        "moved",
        "make_column",
        moved,
        "judge_column",
        traps=(("A", "commit t.lance"), ("A", "/ledger."), ("B", "commit.after")),
    ),
    Scenario(
        "died",
        "make_column",
        died,
        "judge_column",
        begins=("died",),
        traps=(("cleaner", "jobs"), ("cleaner", "delete ")),
    ),
    Scenario(
        "tidied",
        "make_view",
        tidied,
        "judge_view",
        traps=(("A", "commit v.lance"), ("A", "swap.after"), ("A", "mirror")),
    ),
    Scenario("copied", "make_view", copied, "judge_view"),
    Scenario("view", "make_view", view, "judge_view"),
    Scenario("groups", "make_groups", groups, "judge_groups"),
    Scenario("duplicates", "make_duplicates", whole_view, "judge_duplicates"),
    Scenario("promotion", "make_candidate", promotion, "judge_promotion", traps=(("promote", "commit t.lance"),)),
    Scenario("load", "make_column", load, "judge_load"),
    Scenario("limit", "make_limited", limited, "judge_limited"),
)
ALL = {one.name: one for near in _ALL for one in (near, replace(near, name=f"{near.name}-far", far=True))}
SCENARIOS = {
    **ALL,
    "in-turn": Scenario("in-turn", "make_column", lambda _: in_turn("t"), "judge_in_turn"),
    "in-turn-view": Scenario("in-turn-view", "make_view", lambda _: in_turn("v"), "judge_in_turn"),
}
