"""Several processes at one table at once: nothing lost, nothing stale called done, no row run that need not be.

Any order of their steps: see tests/simulation.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.lance_io import conflicts
from airflow_geneva.engine.plan.saved_plan import SavedPlan, load_plan
from airflow_geneva.engine.results import BackfillResult, ShardResult
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import JobFailed
from airflow_geneva.table import Table
from tests.support.counting import TRACE, Trace
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.invariants import assert_exact, assert_honest, assert_nothing_to_do_is_free, assert_right, job_of
from tests.udfs_for_tests.histories import GATE, GATE_AT, gated, many, value_of

pytestmark = pytest.mark.crash

ROWS, PER_FRAGMENT, CHECKPOINT = 100, 25, 5
SIZES: dict[str, Any] = {"checkpoint_size": CHECKPOINT, "batch_size": CHECKPOINT, "commit_granularity": 1}
HERE = "tests.promises.test_concurrency"


def apply_saved(database: str, job_id: str, fingerprint: str) -> None:
    """What the driver of a spark-submit does, in this process."""
    location = connect(database).location("docs")
    storage = JobFolder.of(location.checkpoints, job_id).storage
    saved = load_plan(storage, fingerprint)
    for index in range(len(saved.shards)):
        apply_inline(location, saved.spec, saved.load_shard(storage, index), Udfs({saved.spec.column: gated}))


def commit_saved(database: str, job_id: str, fingerprint: str, out: str) -> None:
    """What a commit task does."""
    location = connect(database).location("docs")
    storage = JobFolder.of(location.checkpoints, job_id).storage
    saved = load_plan(storage, fingerprint)
    results = [
        PlannedJob(location, saved).commit(saved.load_shard(storage, index)).to_json()
        for index in range(len(saved.shards))
    ]
    Path(out).write_text(json.dumps(results))


def finish_saved(database: str, job_id: str, fingerprint: str, shards: str) -> None:
    """What a finish task does."""
    location = connect(database).location("docs")
    saved = load_plan(JobFolder.of(location.checkpoints, job_id).storage, fingerprint)
    PlannedJob(location, saved).finish([ShardResult.from_json(found) for found in json.loads(Path(shards).read_text())])


def backfill(database: str, column: str, out: str, fault: str | None = None) -> None:
    """One call of its own."""
    if fault is not None:
        Fault(fault).arm()
    function = gated if column == "y" else many(20)[int(column[1:])]
    result = connect(database).open_table("docs").backfill(column, udf=function, runner="inline", **SIZES)
    Path(out).write_text(json.dumps(result.to_json()))


@dataclass
class Job:
    """A job whose stages may be run by any process, any number of times."""

    table: Table
    saved: SavedPlan
    folder: Path

    @staticmethod
    def begin(table: Table, folder: Path) -> Job:
        plan = table.plan_backfill("y", udf=gated, **{**SIZES, "shard_size": 2})
        return Job(table, record_plan(plan, table.location), folder)

    @property
    def arguments(self) -> dict[str, str]:
        database = str(Path(self.table.uri).parent)
        return {"database": database, "job_id": self.saved.spec.job_id, "fingerprint": self.saved.fingerprint}

    def start(self, stage: str, environment: dict[str, str] | None = None, **arguments: str) -> int:
        return forge().start(f"{HERE}:{stage}", {**self.arguments, **arguments}, {**TRACED, **(environment or {})})

    def start_commit(self, name: str) -> int:
        return self.start("commit_saved", out=str(self.folder / name))

    def run(self, stage: str, **arguments: str) -> None:
        assert forge().wait(self.start(stage, **arguments)) == 0

    def result(self, *names: str) -> BackfillResult:
        """The end of the job, by what its commit tasks returned."""
        found = [ShardResult.from_json(item) for name in names for item in json.loads((self.folder / name).read_text())]
        return PlannedJob(self.table.location, self.saved).finish(found)


TRACED: dict[str, str] = {}


@pytest.fixture
def table(make_table: Callable[..., Table], trace: Trace) -> Table:
    TRACED[TRACE] = str(trace.path)
    made = make_table(ROWS, per_fragment=PER_FRAGMENT)
    made.add_columns({"y": gated})
    return made


@dataclass
class Gate:
    """Where a process waits; see the UDF."""

    folder: Path

    @staticmethod
    def at(folder: Path, x: int) -> tuple[Gate, dict[str, str]]:
        folder.mkdir()
        return Gate(folder), {GATE: str(folder), GATE_AT: str(x)}

    def wait(self) -> None:
        until = time.monotonic() + 60
        while not (self.folder / "reached").exists():
            assert time.monotonic() < until, "nobody came to the gate"
            time.sleep(0.01)

    def open(self) -> None:
        (self.folder / "open").touch()


@pytest.mark.core
@pytest.mark.parametrize("ends", ["before the commit", "after the commit", "after the finish"])
@pytest.mark.shows("Stop, kill, restart", "the driver of a killed task goes on beside the retry")
def test_an_orphaned_driver_that_goes_on_beside_the_retry_changes_nothing(
    table: Table, trace: Trace, tmp_path: Path, ends: str
) -> None:
    job = Job.begin(table, tmp_path)
    gate, environment = Gate.at(tmp_path / "gate", 60)
    orphan = job.start("apply_saved", environment)
    gate.wait()

    def end_orphan(when: str) -> None:
        if ends == when:
            gate.open()
            assert forge().wait(orphan) == 0

    job.run("apply_saved")
    end_orphan("before the commit")
    job.run("commit_saved", out=str(tmp_path / "first"))
    end_orphan("after the commit")
    result = job.result("first")
    end_orphan("after the finish")
    assert (result.state, result.rows_computed, len(result.commits)) == ("DONE", ROWS, 4)
    assert_honest(result, table)
    # The retry takes over what the orphan had kept; both run the rest of the fragment at the gate, and the one that the
    # orphan had read ahead.
    assert len(trace) - ROWS <= 15 + PER_FRAGMENT
    assert_right(table, "y", value_of)
    job.run("commit_saved", out=str(tmp_path / "second"))
    late = job.result("second")
    assert (late.state, late.commits) == ("DONE", result.commits)
    assert_right(table, "y", value_of)
    assert_nothing_to_do_is_free(table, "y", trace, udf=gated)


def test_a_job_that_starts_while_another_runs_takes_over_what_that_has_kept(
    table: Table, trace: Trace, tmp_path: Path
) -> None:
    database = str(Path(table.uri).parent)
    gate, environment = Gate.at(tmp_path / "gate", 70)
    out = tmp_path / "first"
    first = forge().start(
        f"{HERE}:backfill", {"database": database, "column": "y", "out": str(out)}, {**TRACED, **environment}
    )
    gate.wait()
    second = table.backfill("y", udf=gated, runner="inline", **SIZES)
    assert (second.state, second.rows_reused, second.rows_computed) == ("DONE", 70, 30)
    gate.open()
    assert forge().wait(first) == 0
    result = BackfillResult.from_json(json.loads(out.read_text()))
    assert (result.state, result.rows_left, result.commits) == ("DONE", 0, ())
    assert result.rows_computed + result.rows_reused == ROWS
    assert_honest(result, table)
    # Both ran what stood at the gate, and what the first one had read ahead.
    assert len(trace) == ROWS + CHECKPOINT + PER_FRAGMENT
    assert_right(table, "y", value_of)
    assert_nothing_to_do_is_free(table, "y", trace, udf=gated)


def test_a_job_that_starts_after_another_died_runs_the_rest_only(table: Table, trace: Trace, tmp_path: Path) -> None:
    arguments = {"database": str(Path(table.uri).parent), "column": "y", "out": str(tmp_path / "first")}
    code = forge().run(f"{HERE}:backfill", {**arguments, "fault": "checkpoint.written:10"}, TRACED)
    assert code == -signal.SIGKILL
    kept = len(trace)
    result = table.backfill("y", udf=gated, runner="inline", **SIZES)
    assert (result.rows_reused, result.rows_computed) == (kept, ROWS - kept)
    assert_exact(trace, range(ROWS))


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.shows("Run", "let several backfills of a column meet")
def test_one_column_by_several_processes_at_once_is_right_and_each_change_is_told_once(
    table: Table, trace: Trace, tmp_path: Path, processes: int
) -> None:
    database = str(Path(table.uri).parent)
    defined = table.version
    outs = [tmp_path / f"result-{number}" for number in range(processes)]
    running = [
        forge().start(f"{HERE}:backfill", {"database": database, "column": "y", "out": str(out)}, TRACED)
        for out in outs
    ]
    assert [forge().wait(pid) for pid in running] == [0] * processes
    results = [BackfillResult.from_json(json.loads(out.read_text())) for out in outs]
    for result in results:
        assert result.state == "DONE"
        assert_honest(result, table)
    commits = [version for result in results for version in result.commits]
    assert len(commits) == len(set(commits)) == 4
    assert [version for version in range(defined + 1, table.version + 1) if job_of(table, version)] == sorted(commits)
    assert max(trace.counts().values()) <= processes
    assert_right(table, "y", value_of)
    assert_nothing_to_do_is_free(table, "y", trace, udf=gated)


COLUMNS = 20 if os.environ.get("GENEVA_SOAK") == "1" else 8


def test_many_columns_by_a_process_each_while_rows_come_change_and_move(
    make_table: Callable[..., Table], trace: Trace, tmp_path: Path
) -> None:
    TRACED[TRACE] = str(trace.path)
    dice = random.Random(20)
    table = make_table(60, per_fragment=15)
    functions = many(COLUMNS)
    table.add_columns({f"c{number}": function for number, function in enumerate(functions)})
    database, outs = str(Path(table.uri).parent), [tmp_path / f"result-{number}" for number in range(COLUMNS)]
    running = [
        forge().start(f"{HERE}:backfill", {"database": database, "column": f"c{n}", "out": str(out)}, TRACED)
        for n, out in enumerate(outs)
    ]
    for step in range(12):
        table.add([{"id": 1_000 + step, "x": 1_000 + step}])
        rows = sorted(dice.sample(range(60), 3))
        table.lance.update({"x": f"{10_000 * (step + 1)} + id"}, where=f"id IN ({', '.join(map(str, rows))})")
        if step % 4 == 3:
            try_to_compact(table)
    assert [forge().wait(pid) for pid in running] == [0] * COLUMNS
    for number, out in enumerate(outs):
        result = BackfillResult.from_json(json.loads(out.read_text()))
        assert_honest(result, table)
        planned = inputs(table.location.open(result.from_version))
        now = {row["id"]: row for row in table.lance.to_table(columns=["id", "x", f"c{number}"]).to_pylist()}
        same = {row: x for row, x in planned.items() if now[row]["x"] == x}
        lacking = [row for row, x in same.items() if now[row][f"c{number}"] != value(number, x)]
        assert len(lacking) <= result.rows_left, f"column {number} calls {len(lacking)} rows done that are not"
    for number, function in enumerate(functions):
        own = Trace(Path(f"{trace.path}.{number}"))
        rows = table.lance.to_table(columns=["id", "x", f"c{number}"]).to_pylist()
        due = [row["x"] for row in rows if row[f"c{number}"] != value(number, row["x"])]
        result = table.backfill(f"c{number}", udf=function, runner="inline")
        assert (result.state, result.rows_computed + result.rows_reused) == ("DONE", len(due))
        assert_right(table, f"c{number}", lambda x, number=number: value(number, x))
        if number % 5 == 0:
            assert_nothing_to_do_is_free(table, f"c{number}", own, udf=function)


def value(number: int, x: int) -> int:
    return number * 1_000_000 + x


def inputs(dataset: lance.LanceDataset) -> dict[int, int]:
    return {row["id"]: row["x"] for row in dataset.to_table(columns=["id", "x"]).to_pylist()}


def try_to_compact(table: Table) -> None:
    """Lance gives a compaction up that meets a commit."""
    try:
        table.lance.optimize.compact_files(target_rows_per_fragment=30)
    except OSError as error:
        if "conflict" not in str(error):
            raise


def test_a_commit_that_meets_others_again_and_again_waits_longer_each_time_and_says_so_at_last(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENEVA_VERSION_CONFLICT_MAX_RETRIES", "4")
    waits: list[float] = []
    monkeypatch.setattr(conflicts, "time", SimpleNamespace(sleep=waits.append))
    commit = lance.LanceDataset.commit

    def busy(*args: Any, **more: Any) -> Any:
        table.location.open().restore()
        return commit(*args, **more)

    monkeypatch.setattr(lance.LanceDataset, "commit", busy)
    with pytest.raises(JobFailed, match=r"'docs' at every one of 5 tries to commit column 'y'.*MAX_RETRIES") as caught:
        table.backfill("y", udf=gated, runner="inline", **SIZES)
    assert caught.value.result is not None
    assert (caught.value.result.state, caught.value.result.rows_left) == ("FAILED", ROWS)
    assert len(waits) == 4
    assert all(waits[at] < waits[at + 2] for at in range(2))
    monkeypatch.setattr(lance.LanceDataset, "commit", commit)
    assert table.plan_backfill("y", udf=gated).rows_pending == ROWS
    result = table.backfill("y", udf=gated, runner="inline", **SIZES)
    assert (result.state, result.rows_computed, result.rows_reused) == ("DONE", 0, ROWS)
    assert_exact(trace, range(ROWS))


def test_what_a_commit_could_not_take_is_told_and_planned_again(table: Table, trace: Trace, tmp_path: Path) -> None:
    job = Job.begin(table, tmp_path)
    job.run("apply_saved")
    table.lance.update({"x": "x + 1000"}, where="id IN (3, 30)")
    table.lance.delete("id >= 95")
    job.run("commit_saved", out=str(tmp_path / "first"))
    result = job.result("first")
    assert_honest(result, table)
    rows = table.to_arrow()
    due = sum(y != value_of(x) for x, y in zip(rows["x"].to_pylist(), rows["y"].to_pylist(), strict=True))
    assert table.plan_backfill("y", udf=gated).rows_pending == due


@pytest.mark.parametrize("gone", ["id < 25", "id < 60", "true"])
def test_rows_that_are_deleted_meanwhile_are_not_left(table: Table, trace: Trace, tmp_path: Path, gone: str) -> None:
    job = Job.begin(table, tmp_path)
    job.run("apply_saved")
    table.lance.delete(gone)
    job.run("commit_saved", out=str(tmp_path / "first"))
    result = job.result("first")
    assert (result.state, result.rows_left) == ("DONE", 0)
    assert_honest(result, table)
    assert_nothing_to_do_is_free(table, "y", trace, udf=gated)
