"""Paths of the model that the real engine takes: after each step, the disk is in the model's state."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.model import column, exploring
from tests.model.traces import Walks, can_be_taken


def trace(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.model.traces", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3_000)
    assert done.returncode in (0, 1), done.stderr[-3_000:]
    return done.stdout


def test_a_hundred_paths_take_every_step_that_can_be_taken() -> None:
    walks = Walks()
    for number in range(100):
        walks.draw(random.Random(f"trace {number}"))
    scope = exploring.COLUMN(changes=True, intervals=True)
    machine, wanted = column.Column(scope), {("", "change"), ("commit.before", "verify")}
    for state in exploring.explore_column(scope).came_from:
        at = state.processes[0].at
        steps = list(machine.steps(state))
        wanted |= {(at, step.action) for step in steps if step.actor == "A" and can_be_taken(at, step.action)}
        if at not in ("start", "ended") and can_be_taken(at, "replace"):
            wanted.add((at, "replace"))
    assert set(walks.taken) == wanted


def test_the_engine_takes_paths_of_the_model() -> None:
    said = trace("--traces", "2")
    assert " 0 differ" in said, said


@pytest.mark.slow
def test_the_engine_takes_a_hundred_paths_of_the_model() -> None:
    said = trace("--traces", "100")
    assert " 0 differ" in said, said


@pytest.mark.soak
def test_the_engine_takes_a_thousand_paths_of_the_model() -> None:
    said = trace("--traces", "1000")
    assert " 0 differ" in said, said


@pytest.mark.slow
def test_an_engine_with_a_defect_leaves_a_path() -> None:
    said = trace("--traces", "40", "--mutant", "facts-after-the-commit")
    assert "known: engine [], model" in said, said
