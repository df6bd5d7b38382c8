"""Worlds that a seed decides: whatever the order, the faults and the kills, what is left is right."""

from __future__ import annotations

import re

import pytest

from tests.simulation import chance
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.shrink import shrink, told
from tests.simulation.simulate import simulate
from tests.simulation.world import Move

SEEDS = 30
WAY = re.compile(r"^seed (\d+) took the way (\w+)$", re.MULTILINE)


def test_every_world_ends_right_and_two_runs_of_a_seed_take_the_same_way() -> None:
    done = simulate("--seeds", str(SEEDS), "--shrink", "20", "-v")
    wrong = done.stdout[done.stdout.find("goes wrong") - 40 :]
    assert done.returncode == 0, wrong[:8000] + done.stderr[-2000:]
    ways = WAY.findall(done.stdout)
    assert len({way for _, way in ways}) == SEEDS, "two seeds took the same way"
    if chance.has_compiler():
        again = simulate("--seeds", "4", "--first", "0", "-v")
        assert WAY.findall(again.stdout) == ways[:4]


@pytest.mark.slow
@pytest.mark.parametrize("first", [1_000, 1_100])
def test_a_hundred_more_worlds_end_right(first: int) -> None:
    done = simulate("--seeds", "100", "--first", str(first))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    "mutant",
    [
        # With any other request of the engine, other seeds find a defect: in each change, only those that many find.
        pytest.param(one, id=one.name, marks=pytest.mark.slow if one.found_by < 10 else pytest.mark.soak)
        for one in MUTANTS
        if one.found_by is not None
    ],
)
def test_a_defect_of_the_protocol_is_found(mutant: Mutant) -> None:
    assert mutant.found_by is not None
    seeds = str(100 + 20 * mutant.found_by)
    done = simulate("--mutant", mutant.name, "--scenario", mutant.scenario, "--seeds", seeds, "--shrink", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "goes wrong" in done.stdout


@pytest.mark.slow
def test_a_world_with_a_defect_is_found_and_told_in_the_words_of_the_fault_points() -> None:
    done = simulate("--mutant", "swap-on-another-base", "--scenario", "view", "--seeds", "100", "--shrink", "10")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "which the query never selected" in done.stdout
    assert "swap.before" in done.stdout
    assert re.search(r"Run it again: python -m tests.simulation --scenario view --first \d+ --seeds 1 -v", done.stdout)


def test_shrinking_leaves_the_moves_that_matter() -> None:
    moves = [Move("kill" if at in (7, 30) else "go", "AB"[at % 2], 0, str(at)) for at in range(40)]
    tried: list[int] = []

    def fails(left: list[Move]) -> bool:
        tried.append(len(left))
        points = [move.point for move in left]
        return "3" in points and any(move.kind == "kill" and move.point == "7" for move in left)

    left = shrink(moves, fails, lambda: len(tried) < 300)
    assert [(move.kind, move.point) for move in left] == [("go", "3"), ("kill", "7")]
    assert len(tried) <= 300
    assert shrink(moves, fails, lambda: False) == moves


def test_a_trace_is_told_by_turns_without_what_only_reads() -> None:
    trace = [
        "A starts backfill",
        "A 0 read t.lance/job.json",
        "A 0 write t.lance/job.json",
        "A 0 plan.saved",
        "B 2 commit t.lance -> kill",
    ]
    assert told(trace) == "  A: starts backfill, write job.json, plan.saved\n  B: commit t.lance -> kill"
