"""Paths of the models that the real engine takes: after each step, the disk is in the model's state."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.model import exploring
from tests.model.explore import Graph
from tests.model.traces import TRACED, Walks
from tests.mutants.guards import GUARDS


def trace(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.model.traces", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3_000)
    assert done.returncode in (0, 1), done.stderr[-3_000:]
    return done.stdout or done.stderr[-3_000:]


def explored(of: str) -> Iterator[Graph[Any]]:
    """Explorations that take every step of one process that paths can take."""
    if of == "column":
        yield exploring.explore_column(exploring.COLUMN(changes=True, intervals=True))
    elif of == "events":
        yield exploring.explore_events()
    else:
        yield exploring.explore_view(exploring.VIEW(changes=True, notes=True))
        yield exploring.explore_view(exploring.VIEW(kills=False, shown=True, two_jobs=True, changes=True))


OF_TWO = {
    "column": {("", "change"), ("commit.before", "verify")},
    "view": {("", "change"), ("", "note")},
    "events": set[tuple[str, str]](),
}


@pytest.mark.parametrize("of", TRACED)
def test_two_hundred_paths_take_every_step_that_can_be_taken(of: str) -> None:
    walks, traced, wanted = Walks(of), TRACED[of], OF_TWO[of].copy()
    for number in range(200):
        walks.draw(random.Random(f"trace {number}"))
    for graph in explored(of):
        for state in graph.came_from:
            at = state.processes[0].at
            actions = [step.action for step in traced.machine.steps(state) if step.actor == "A"]
            actions += ["replace"] if at not in ("start", "ended") else []
            wanted |= {(at, action) for action in actions if traced.can_be_taken(at, action)}
    assert set(walks.taken) == wanted


@pytest.mark.parametrize("of", ["column", "view"])
def test_the_engine_takes_paths_of_the_model(of: str) -> None:
    said = trace("--of", of, "--traces", "2")
    assert " 0 differ" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("of", TRACED)
def test_the_engine_takes_fifty_paths_of_the_model(of: str) -> None:
    said = trace("--of", of, "--traces", "50")
    assert " 0 differ" in said, said


@pytest.mark.soak
@pytest.mark.parametrize("of", TRACED)
def test_the_engine_takes_a_thousand_paths_of_the_model(of: str) -> None:
    said = trace("--of", of, "--traces", "1000")
    assert " 0 differ" in said, said


@pytest.mark.slow
def test_an_engine_with_a_defect_leaves_a_path() -> None:
    said = trace("--traces", "40", "--mutant", "facts-after-the-commit")
    assert "known: engine [], model" in said, said
    (lost,) = (at for at, guard in enumerate(GUARDS) if guard.why.startswith("The event of a commit would be lost"))
    said = trace("--of", "events", "--traces", "12", "--mutant", f"guard-{lost}")
    assert "marks: engine" in said, said
