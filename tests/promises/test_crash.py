"""SIGKILL at every named point of a backfill: what is durable stays, and the next run completes it."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_geneva import connect, expect, udf
from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.table import Table
from tests.support.counting import TRACE, Trace, label as computed, labelled, leave_trace
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.invariants import assert_honest, assert_nothing_to_do_is_free, assert_right, assert_whole_commits

pytestmark = pytest.mark.crash

MakeTable = Callable[..., Table]

ROWS, CHECKPOINT = 200, 10
SIZES = {"checkpoint_size": CHECKPOINT, "batch_size": 5, "shard_size": 2, "commit_granularity": 1}
SOAK = os.environ.get("GENEVA_SOAK") == "1"


@udf(data_type=pa.int64(), expect=[expect.max_null_fraction(0), expect.between(0, 3 * ROWS)])
def checked(x: int) -> int:
    leave_trace([x])
    return 3 * x


def backfill_and_die(database: str, fault: str) -> None:
    """One run in this process; called in one of its own."""
    Fault(fault).arm()
    connect(database).open_table("docs").backfill("y", runner="inline", **SIZES)


# Each with the number of passages of one run, so that first, middle and last can be hit.
POINTS = {
    "plan.recorded": 1,
    "plan.saved": 1,
    "apply.step": 40,
    "checkpoint.write": 24,
    "checkpoint.written": 24,
    "staged.write": 4,
    "staged.written": 4,
    "commit.before": 4,
    "commit.after": 4,
    "finish.begin": 1,
    "finish.end": 1,
}


def run_until(table: Table, fault: str) -> int:
    """Run a backfill in a process of its own that dies at a fault point; its exit code."""
    arguments = {"database": str(Path(table.uri).parent), "fault": fault}
    return forge().run("tests.promises.test_crash:backfill_and_die", arguments, {TRACE: os.environ[TRACE]})


def nothing(table: Table) -> None:
    """A run that is simply started again."""


def delete_and_compact(table: Table) -> None:
    table.lance.delete("id % 7 = 3")
    table.lance.optimize.compact_files()


def delete_and_append(table: Table) -> None:
    table.lance.delete("id % 7 = 3")
    table.add([{"id": 900 + at, "x": 900 + at} for at in range(5)])


def assert_resumed(table: Table, trace: Trace, slack: int) -> None:
    """Complete, right, nothing run that was not due, and little run twice."""
    assert_right(table, "y", labelled)
    run = trace.counts()
    alive = Counter(table.to_arrow()["x"].to_pylist())
    assert set(alive) <= set(run) <= set(alive) | set(range(ROWS))
    again = sum((run - Counter(set(run))).values())
    assert again <= slack, f"{again} rows ran twice, {slack} are allowed"
    assert_nothing_to_do_is_free(table, "y", trace)


def cases() -> list[tuple[str, Callable[[Table], None]]]:
    """Every point at its first and last passage, and in the middle with others acting before the resume."""
    found: list[tuple[str, Callable[[Table], None]]] = []
    for name, passages in POINTS.items():
        found.append((f"{name}:{passages}", nothing))
        found.append((f"{name}:{max(1, passages // 2)}", delete_and_compact))
        if SOAK:
            for at in range(1, passages + 1):
                found += [(f"{name}:{at}", act) for act in (nothing, delete_and_compact, delete_and_append)]
    return found


@pytest.mark.parametrize(("fault", "meanwhile"), cases())
def test_a_run_killed_anywhere_is_completed_by_the_next(
    make_table: MakeTable, trace: Trace, fault: str, meanwhile: Callable[[Table], None]
) -> None:
    table = make_table(ROWS, per_fragment=50)
    table.add_columns({"y": computed})
    defined = table.version
    assert run_until(table, fault) == -signal.SIGKILL
    assert_whole_commits(table, "y", labelled, since=defined)
    durable = table.count_rows("y IS NOT NULL")
    meanwhile(table)
    result = table.backfill("y", runner="inline", **SIZES)
    assert result.state == "DONE"
    assert_honest(result, table)
    assert result.rows_skipped <= durable
    assert_whole_commits(table, "y", labelled, since=defined)
    assert_resumed(table, trace, slack=CHECKPOINT)


def test_a_killed_job_is_on_record_and_the_next_one_says_what_it_took_over(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(ROWS, per_fragment=50)
    table.add_columns({"y": computed})
    run_until(table, "commit.before:2")
    (record,) = read_jobs(table.location.checkpoints, job_ids(table.location.checkpoints))
    assert (record.state, record.rows_pending) == ("RUNNING", ROWS)
    result = table.backfill("y", runner="inline", **SIZES)
    assert (result.rows_skipped, result.rows_reused, result.rows_computed) == (50, 50, 100)
    assert [record.state for record in read_jobs(table.location.checkpoints, job_ids(table.location.checkpoints))] == [
        "DONE",
        "RUNNING",
    ]


def test_a_commit_whose_job_died_before_it_could_say_so_counts(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(ROWS, per_fragment=50)
    table.add_columns({"y": computed})
    run_until(table, "commit.after:4")
    assert_right(table, "y", labelled)
    assert_nothing_to_do_is_free(table, "y", trace)
    assert len(trace) == ROWS


@pytest.mark.parametrize("fault", ["staged.written:4", "values.check:2", "values.checked:1", "commit.before:1"])
def test_values_that_are_checked_as_a_whole_are_invisible_until_then_and_are_kept(
    make_table: MakeTable, trace: Trace, fault: str
) -> None:
    table = make_table(ROWS, per_fragment=50)
    table.add_columns({"y": checked})
    assert run_until(table, fault) == -signal.SIGKILL
    assert table.count_rows("y IS NOT NULL") == 0
    result = table.backfill("y", runner="inline", **SIZES)
    assert (result.state, len(result.commits), len(trace) <= ROWS + CHECKPOINT) == ("DONE", 1, True)
    assert [(one.passed, one.rows) for one in result.checked] == [(True, ROWS)] * 2
    assert_right(table, "y", lambda x: 3 * x)


@pytest.mark.parametrize("seed", range(200 if SOAK else 1))
def test_ten_kills_in_a_row_at_random_points_with_changes_in_between(
    make_table: MakeTable, trace: Trace, seed: int
) -> None:
    dice = random.Random(seed)
    table = make_table(ROWS, per_fragment=50)
    table.add_columns({"y": computed})
    defined, kills = table.version, 0
    for at in range(10):
        name = dice.choice(sorted(POINTS))
        code = run_until(table, f"{name}:{dice.randint(1, max(1, POINTS[name] // 4))}")
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if at == 3:
            delete_and_compact(table)
        if at == 6:
            delete_and_append(table)
        assert_right(table, "y", labelled, where="y IS NOT NULL")
    result = table.backfill("y", runner="inline", **SIZES)
    assert_honest(result, table)
    assert_whole_commits(table, "y", labelled, since=defined)
    assert kills >= 5 or seed
    assert_resumed(table, trace, slack=CHECKPOINT * kills)
