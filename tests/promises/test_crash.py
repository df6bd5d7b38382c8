"""What is durable, and on record, of a backfill that was killed; kills anywhere: test_kills and tests/simulation."""

from __future__ import annotations

import os
import signal
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
from tests.support.invariants import assert_nothing_to_do_is_free, assert_right

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


def run_until(table: Table, fault: str) -> int:
    """Run a backfill in a process of its own that dies at a fault point; its exit code."""
    arguments = {"database": str(Path(table.uri).parent), "fault": fault}
    return forge().run("tests.promises.test_crash:backfill_and_die", arguments, {TRACE: os.environ[TRACE]})


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
