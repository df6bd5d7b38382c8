"""SIGKILL anywhere in a job, whatever happens to the table before it is run again: as if nobody had been killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import airflow_geneva
from airflow_geneva import connect
from airflow_geneva.table import Table
from tests.counting import TRACE, Trace
from tests.engine.forge import forge
from tests.engine.harness import (
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
from tests.engine.test_views import NOT_THIRD, Asked, assert_equals_query, assert_nothing_to_refresh, shown

pytestmark = pytest.mark.crash

HISTORIES = int(os.environ.get("GENEVA_KILL_HISTORIES", "12"))
SOAK_SECONDS = float(os.environ.get("GENEVA_SOAK_SECONDS", "1800"))

# Every fault point with the job in which it is passed, and one of its passages.
POINTS: dict[str, tuple[Job, int]] = {
    "plan.recorded": (Job("plain", True), 1),
    "plan.saved": (Job("where"), 1),
    "apply.step": (Job("skip", True), 9),
    "checkpoint.write": (Job("skip", True), 4),
    "checkpoint.written": (Job("where", True), 5),
    "staged.write": (Job("plain"), 2),
    "staged.written": (Job("skip"), 3),
    "commit.before": (Job("where", True), 2),
    "commit.after": (Job("plain", True), 1),
    "finish.begin": (Job("continue"), 1),
    "finish.end": (Job("plain"), 1),
    "note.write": (Job("continue", True), 1),
    "note.written": (Job("continue"), 1),
}
# Those of a view's refresh, with one of its passages each.
OF_A_REFRESH = {
    "plan.recorded": 1,
    "plan.saved": 1,
    "apply.step": 3,
    "checkpoint.write": 2,
    "staged.write": 1,
    "staged.written": 2,
    "swap.before": 1,
    "swap.after": 1,
    "finish.begin": 1,
    "finish.end": 1,
}
# Garbage is collected among the changes of random histories; tidying up: see test_housekeeping; views: see
# test_views_created and test_view_kills.
ELSEWHERE = {
    "cleanup.removed",
    "fold.written",
    "pack.written",
    "record.kept",
    "file.removed",
    "view.staged",
    "snapshot.written",
    "advance.written",
    "mirror.write",
    "swap.ground",
}


def test_every_fault_point_of_the_source_is_killed_at() -> None:
    sources = Path(airflow_geneva.__file__).parent.rglob("*.py")
    named = {name for path in sources for name in re.findall(r'fault_point\("([^"]+)"\)', path.read_text())}
    assert named == set(POINTS) | set(OF_A_REFRESH) | ELSEWHERE


def meanwhile(name: str) -> tuple[Change, ...]:
    """Something else at every point."""
    some = [(), (delete, compact), (update, upsert), (restore,), (compact, collect_garbage)]
    return some[sorted(POINTS).index(name) % len(some)]


@pytest.mark.parametrize("name", POINTS)
def test_a_job_that_dies_at_a_point_ends_as_if_it_had_not(tmp_path: Path, name: str) -> None:
    job, passage = POINTS[name]
    rounds = (Round((Fault(f"{name}:{passage}"),), meanwhile(name)),)
    figures = check(History(name, job, rounds), tmp_path)
    assert figures.kills == 1


def refresh_and_die(database: str, fault: str) -> None:
    """Refresh a view in this process; called in one of its own."""
    view = connect(database).open_table("v")
    Fault(fault).arm()
    view.refresh(runner="inline", **REFRESH)


REFRESH = {"checkpoint_size": 5, "batch_size": 5, "max_rows_per_fragment": 20}


@pytest.mark.parametrize("name", OF_A_REFRESH)
def test_a_view_whose_refresh_dies_at_a_point_is_as_before_or_after_and_refreshed_by_the_next(
    make_table: Callable[..., Table], trace: Trace, name: str
) -> None:
    table, asked = make_table(60, per_fragment=20), Asked(NOT_THIRD)
    view = asked.make(table)
    view.refresh(runner="inline", **REFRESH)
    before = table.version
    table.lance.update({"x": "x + 301"}, where="id % 4 = 1")
    table.lance.delete("id >= 55")
    table.add([{"id": number, "x": number} for number in range(100, 140)])
    trace.clear()
    arguments = {"database": table.location.database_uri, "fault": f"{name}:{OF_A_REFRESH[name]}"}
    environment = {TRACE: str(trace.path)}
    assert forge().run("tests.engine.test_kills:refresh_and_die", arguments, environment) == -signal.SIGKILL
    assert sorted(shown(view)) in (sorted(asked.rows(table, before)), sorted(asked.rows(table)))
    due = set(asked.rows(table)) - set(asked.rows(table, before))
    assert view.refresh(runner="inline", **REFRESH).state == "DONE"
    assert_equals_query(view, table, asked)
    assert len(due) <= len(trace) <= len(due) + 5
    assert_nothing_to_refresh(view, trace)


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
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f"\n{figures}")
    assert figures.kills > 0
