"""Two releases of the package take turns at the same tables: what is left is right, or one refuses by name."""

from __future__ import annotations

import re

import pytest

from tests.simulation.releases import LAST, has_history
from tests.simulation.simulate import simulate

needs_history = pytest.mark.skipif(not has_history(), reason=f"the earlier release is commit {LAST} of a full clone")


@needs_history
@pytest.mark.parametrize("scenario", ["in-turn", "in-turn-view"])
def test_each_stage_of_a_job_may_be_of_either_release(scenario: str) -> None:
    done = simulate("--beside", LAST, "--scenario", scenario, "--seeds", "1", "--shrink", "0", "-v")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    started = re.findall(r"^A\S* starts \S+, (\w+)$", done.stdout, re.MULTILINE)
    runs = {tuple(started[at : at + 4]) for at in range(0, len(started), 4)}
    for one in range(4):
        for other in range(one):
            assert len({(run[one], run[other]) for run in runs}) == 4


@needs_history
@pytest.mark.slow
def test_worlds_of_two_releases_end_right() -> None:
    done = simulate("--beside", LAST, "--seeds", "36")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_a_job_that_a_release_with_other_plans_refuses_is_planned_again_and_ends_right() -> None:
    done = simulate("--beside", "plan-format", "--scenario", "column", "--seeds", "8", "-v")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    stages, refused = dict[str, str](), set[str]()
    for name, call, failed in re.findall(
        r"^(\S+) (?:starts (\w+), \w+|(fails: InvalidInput))$", done.stdout, re.MULTILINE
    ):
        stages[name] = call or stages[name]
        refused |= {stages[name]} if failed else set()
    assert {"apply", "commit"} <= refused
