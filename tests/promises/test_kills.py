"""SIGKILL anywhere in a job, whatever happens to the table before it is run again: as if nobody had been killed."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

import airflow_geneva
from tests.support.harness import (
    Change,
    Fault,
    Figures,
    History,
    Job,
    Round,
    check,
    collect_garbage,
    compact,
    delete,
    random_history,
    restore,
    update,
    upsert,
)
from tests.support.queries import POINTS as OF_A_REFRESH

pytestmark = pytest.mark.crash

HISTORIES = int(os.environ.get("GENEVA_KILL_HISTORIES", "4"))
SOAK_SECONDS = float(os.environ.get("GENEVA_SOAK_SECONDS", "1800"))

# Every fault point with the job in which it is passed, and one of its passages.
POINTS: dict[str, tuple[Job, int]] = {
    "plan.recorded": (Job("plain", True), 1),
    "plan.saved": (Job("where"), 1),
    "apply.step": (Job("async", True), 9),
    "batch.submit": (Job("batch", True), 3),
    "batch.submitted": (Job("batch"), 2),
    "batch.kept": (Job("batch", True), 4),
    "checkpoint.write": (Job("skip", True), 4),
    "checkpoint.written": (Job("where", True), 5),
    "staged.write": (Job("siblings"), 2),
    "staged.written": (Job("skip"), 3),
    "commit.before": (Job("where", True), 2),
    "commit.after": (Job("siblings", True), 1),
    "finish.begin": (Job("continue"), 1),
    "finish.end": (Job("siblings"), 1),
    "note.write": (Job("continue", True), 1),
    "note.written": (Job("continue"), 1),
    "index.before": (Job("indexed", True), 1),
    "index.after": (Job("indexed"), 1),
    "cache.write": (Job("dedup", True), 2),
    "cache.evict": (Job("dedup"), 1),
    "cache.evicted": (Job("dedup", True), 1),
    "limit.before": (Job("async"), 1),
    "limit.after": (Job("async", True), 1),
}
# Garbage is collected among the changes of random histories; tidying up: see test_housekeeping; views: see
# test_views_created and test_view_kills; promotions: see test_promotions; copies: see test_copying; groups: see
# test_group_kills; duplicates: see test_duplicate_histories.
ELSEWHERE = {
    "cleanup.removed",
    "fold.written",
    "pack.written",
    "plans.removed",
    "file.removed",
    "view.staged",
    "advance.written",
    "ground.write",
    "swap.ground",
    "values.check",
    "values.checked",
    "promote.before",
    "promote.after",
    "copy.cloned",
    "copy.recorded",
    "groups.create",
    "groups.before",
    "groups.after",
    "groups.rows",
    "duplicates.clustered",
}


@pytest.mark.core
def test_every_fault_point_of_the_source_is_killed_at() -> None:
    sources = Path(airflow_geneva.__file__).parent.rglob("*.py")
    named = {
        name for path in sources for name in re.findall(r'(?:fault_point\(|before=|after=)"([^"]+)"', path.read_text())
    }
    assert named == set(POINTS) | set(OF_A_REFRESH) | ELSEWHERE


def meanwhile(name: str) -> tuple[Change, ...]:
    """Something else at every point."""
    some = [(), (delete, compact), (update, upsert), (restore,), (compact, collect_garbage)]
    return some[sorted(POINTS).index(name) % len(some)]


AS_BEFORE = {"apply.step", "checkpoint.write", "staged.write", "finish.begin", "finish.end"}
"""A kill at these leaves what one at the point before leaves, or a job that is over; simulated worlds have them too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in AS_BEFORE else [pytest.mark.core]) for name in POINTS]
)
def test_a_job_that_dies_at_a_point_ends_as_if_it_had_not(tmp_path: Path, name: str) -> None:
    job, passage = POINTS[name]
    rounds = (Round((Fault(f"{name}:{passage}"),), meanwhile(name)),)
    figures = check(History(name, job, rounds), tmp_path)
    assert figures.kills == 1


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_history_with_kills_ends_as_the_one_without(tmp_path: Path, seed: int) -> None:
    check(random_history(seed), tmp_path)


@pytest.mark.soak
def test_thousands_of_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    until, seed, figures = time.monotonic() + SOAK_SECONDS, 10_000, Figures()
    while time.monotonic() < until:
        folder = tmp_path / str(seed)
        figures += check(random_history(seed), folder)
        seed += 1
        shutil.rmtree(folder, ignore_errors=True)  # what was killed last may be writing
    with capsys.disabled():
        print(f"\n{figures}")
    assert figures.kills > 0
