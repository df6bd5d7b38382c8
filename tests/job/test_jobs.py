"""Jobs on record: while they run, when they are killed, in the background, and among ten thousand others."""

from __future__ import annotations

import gc
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.database import Database
from airflow_geneva.engine.job import progress
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.heartbeat import RUNNING_TIMEOUT
from airflow_geneva.engine.job.meter import Stopwatch
from airflow_geneva.engine.job.status import Job, read_job
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.run import caps
from airflow_geneva.engine.run.background import JobFuture
from airflow_geneva.engine.run.peers import PEERS
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.spark.runner import SparkRunner
from airflow_geneva.table import Table
from tests.support.counting import Trace, triple
from tests.support.tables import MakeTable
from tests.udfs_for_tests import views as view_udfs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Gate:
    """A UDF that stops in front of one value until it is let through."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.reached = threading.Event()
        self.opened = threading.Event()

    def udf(self) -> UDF:
        def gated(x: int) -> int:
            if x == self.before:
                self.reached.set()
                self.opened.wait()
            return 2 * x

        return udf(data_type=pa.int64(), version="1", name="gated")(gated)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate(before=60)
    yield made
    made.opened.set()


def start(table: Table, function: UDF, **sizing: int) -> JobFuture:
    plan = table.plan_backfill("y", udf=function, **sizing)
    return JobFuture.start(plan, table.location, Udfs({"y": function}), "inline", Stopwatch())


def test_a_job_can_be_watched_while_it_runs(make_table: MakeTable, tmp_path: Path, gate: Gate) -> None:
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": gate.udf()})
    future = start(table, gate.udf(), shard_size=1, batch_size=5)
    gate.reached.wait()
    job = connect(tmp_path / "db").job(future.job_id)
    assert (job.state, job.open, job.step, job.target) == ("RUNNING", True, "apply", "docs.y")
    assert [shard.step for shard in job.shards] == ["committed", "committed", "applying", "waiting"]
    assert (job.rows_committed, job.rows_left, len(job.commits)) == (50, 50, 2)
    assert job.rows_checkpointed >= job.rows_ready >= job.rows_committed
    assert not future.done()
    assert future.status().state == "RUNNING"
    assert repr(future) == f"JobFuture(docs.y, job_id={future.job_id!r}, running)"
    with pytest.raises(TimeoutError, match="goes on"):
        future.result(timeout=0.01)

    gate.opened.set()
    result = future.result()
    job = future.status()
    assert (result.state, result.job_id, result.rows_computed) == ("DONE", future.job_id, 100)
    assert (job.state, job.rows_checkpointed, job.rows_ready, job.rows_committed) == ("DONE", 100, 100, 100)
    assert job.commits == result.commits
    assert set(job.seconds) == {"plan", "apply", "commit", "finish"}
    assert repr(future).endswith("DONE)")


@pytest.fixture
def noticed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a job has noticed that it is canceled, for which it looks all the time."""
    monkeypatch.setattr(progress, "CHECK_SECONDS", 0.0)
    found = threading.Event()
    stop = caps.stop_if_canceled

    def stopping(folder: JobFolder) -> None:
        try:
            stop(folder)
        except caps.Canceled:
            found.set()
            raise

    monkeypatch.setattr(caps, "stop_if_canceled", stopping)
    return found


@pytest.mark.parametrize("how", ["future", "database"])
def test_a_job_that_is_canceled_keeps_what_is_computed_and_the_next_goes_on(
    make_table: MakeTable, tmp_path: Path, gate: Gate, noticed: threading.Event, how: str
) -> None:
    table, db = make_table(100, per_fragment=25), connect(tmp_path / "db")
    table.add_columns({"y": gate.udf()})
    future = start(table, gate.udf(), shard_size=1, batch_size=5)
    gate.reached.wait()
    future.cancel() if how == "future" else db.cancel_job(future.job_id)
    assert noticed.wait(60)
    gate.opened.set()
    result = future.result()
    job = future.status()
    assert (result.state, job.state, job.error) == ("PARTIAL", "PARTIAL", None)
    # The call that ran when it was canceled has ended, and its rows are there, too.
    assert 50 <= result.rows_computed < 75
    assert result.rows_computed + result.rows_left == 100
    assert f"canceled by {getpass.getuser()}@{socket.gethostname()}, " in str(result)
    assert table.lance.count_rows("y is not null") == result.rows_computed
    with pytest.raises(InvalidInput, match="cannot be canceled: it is PARTIAL"):
        db.cancel_job(future.job_id)
    again = table.backfill("y", udf=gate.udf(), runner="inline")
    assert (again.state, again.rows_computed) == ("DONE", 100 - result.rows_computed)


def test_a_job_that_is_canceled_in_its_first_call_keeps_its_row_and_makes_no_other(
    make_table: MakeTable, noticed: threading.Event
) -> None:
    table, gate = make_table(100), Gate(before=0)
    table.add_columns({"y": gate.udf()})
    future = start(table, gate.udf())
    gate.reached.wait()
    future.cancel()
    assert noticed.wait(60)
    for thread in threading.enumerate():
        if thread.name == "geneva-progress":
            thread.join()
    gate.opened.set()
    result = future.result()
    assert (result.state, result.rows_run, result.rows_computed) == ("PARTIAL", 1, 1)


def test_a_job_of_many_short_shards_is_canceled_between_them(
    make_table: MakeTable, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(100, per_fragment=5)
    table.add_columns({"y": gate.udf()})
    future = start(table, gate.udf(), shard_size=1)
    gate.reached.wait()
    connect(tmp_path / "db").cancel_job(future.job_id)
    # No shard takes until the next look: only the one between two shards is due.
    monkeypatch.setattr(progress, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(progress.ProgressReporter, "look", lambda _: None)
    gate.opened.set()
    result = future.result()
    assert (result.state, result.rows_computed) == ("PARTIAL", 65)


def test_a_job_that_was_canceled_before_it_was_planned_again_runs(make_table: MakeTable) -> None:
    table = make_table(20)
    table.add_columns({"y": triple})
    job_id = table.backfill("y", where="x < 5", runner="inline").job_id
    folder = JobFolder.of(table.location.checkpoints, job_id)
    assert folder.canceled_by() is None
    folder.cancel("ann")
    assert folder.canceled_by() == "ann"
    folder.update_record(resumed=time.time())
    assert folder.canceled_by() is None
    for damaged in (b"[]", b'{"by": "x"}', b'{"by": "x", "attempt": 3}', b"{"):
        folder.storage.write_bytes("cancel.json", damaged)
        assert folder.canceled_by() is None


@pytest.mark.slow
def test_background_jobs_that_ended_keep_no_plan_in_memory(make_table: MakeTable) -> None:
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": triple})
    gc.collect()
    shards = {id(found) for found in gc.get_objects() if isinstance(found, Shard)}
    futures = []
    for rest in range(3):
        futures.append(table.backfill_async("y", where=f"id % 3 = {rest}", runner="inline"))
        assert futures[-1].result().rows_left == 0
    for thread in threading.enumerate():
        if thread.name in {f"geneva-{future.job_id}" for future in futures}:
            thread.join()
    gc.collect()
    assert {id(found) for found in gc.get_objects() if isinstance(found, Shard)} <= shards


def test_a_background_job_that_fails_raises_from_its_result(make_table: MakeTable) -> None:
    @udf(data_type=pa.int64(), version="1")
    def breaks(x: int) -> int:
        return 1 // (x - 30)

    table = make_table(100, per_fragment=25)
    table.add_columns({"y": breaks})
    future = start(table, breaks, shard_size=1)
    with pytest.raises(JobFailed, match="ZeroDivisionError") as caught:
        future.result()
    assert caught.value.result is not None
    assert caught.value.result.rows_computed == 25
    job = future.status()
    assert (job.state, job.rows_committed, job.rows_failed, job.rows_left) == ("FAILED", 25, 1, 74)
    assert job.error is not None
    assert "ZeroDivisionError" in job.error
    assert [shard.step for shard in job.shards] == ["committed", "failed", "left", "left"]
    assert "ZeroDivisionError" in str(job.shards[1].error)
    assert repr(future).endswith("failed)")


def test_the_shard_of_a_refresh_that_failed_is_told_from_those_that_are_done(
    make_table: MakeTable, trace: Trace, tmp_path: Path
) -> None:
    table = make_table(40, per_fragment=10)
    query = table.query().select(["x"]).add_columns({"p": (view_udfs.strict, ["x"])}).where("x % 10 <> 2 or x = 22")
    view = query.create_materialized_view(connect(tmp_path / "db"), "v")
    with pytest.raises(JobFailed, match="not 22") as failed:
        view.refresh(runner="inline", shard_size=1)
    assert failed.value.result is not None
    job = connect(tmp_path / "db").job(failed.value.result.job_id)
    assert [shard.step for shard in job.shards] == ["verified", "verified", "failed", "left"]
    assert "not 22" in str(job.shards[2].error)


def test_what_cannot_be_started_is_refused_by_the_call_itself(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    plan = table.plan_backfill("y")
    Path(table.location.checkpoints.root).write_text("a file where the folder should be")
    with pytest.raises(OSError, match="_checkpoints"):
        JobFuture.start(plan, table.location, Udfs({"y": triple}), "inline", Stopwatch())


@pytest.mark.spark
def test_a_background_job_uses_the_spark_session_that_is_there(make_table: MakeTable, spark: SparkSession) -> None:
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": triple})
    settings = dict(spark.conf.getAll)
    future = JobFuture.start(
        table.plan_backfill("y"), table.location, Udfs({"y": triple}), "spark", Stopwatch(), cluster=SparkRunner()
    )
    assert future.result().rows_computed == 100
    (shard,) = future.status().shards
    assert (shard.step, shard.rows_committed, shard.fragments_ready) == ("committed", 100, 4)
    assert dict(spark.conf.getAll) == settings, "a session of our own was laid over the caller's"


SCRIPT = """
import sys, time
import pyarrow as pa
from airflow_geneva import connect, udf
from airflow_geneva.engine.run.background import JobFuture
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.job.meter import Stopwatch

@udf(data_type=pa.int64(), version="1")
def slow(x: int) -> int:
    time.sleep(0.01)
    return x

table = connect(sys.argv[1]).open_table("docs")
plan = table.plan_backfill("y", udf=slow, shard_size=1, intra_applier_concurrency=2)
print(JobFuture.start(plan, table.location, Udfs({"y": slow}), "inline", Stopwatch()).job_id)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 2),
    reason="Python 3.12.0 to 3.12.2 start no thread once the main thread has ended (gh-113964)",
)
def test_a_program_that_ends_waits_for_its_background_job_and_says_so(make_table: MakeTable, tmp_path: Path) -> None:
    @udf(data_type=pa.int64(), version="1")
    def slow(x: int) -> int:
        return x

    table = make_table(40, per_fragment=10)
    table.add_columns({"y": slow})
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "db")], capture_output=True, text=True, check=True
    )  # fmt: skip
    job_id = ran.stdout.strip()
    assert f"this process waits for job {job_id}" in ran.stderr
    assert connect(tmp_path / "db").job(job_id).state == "DONE"
    assert table.count_rows("y = x") == 40


def kill_at(table: Table, fault: str) -> None:
    code = f"""
from airflow_geneva import connect
connect({str(Path(table.uri).parent)!r}).open_table("docs").backfill("y", runner="inline", shard_size=1)
"""
    environment = {**os.environ, "AIRFLOW_GENEVA_FAULT": fault}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "state", "steps"),
    [
        ("plan.recorded", "PENDING", []),
        ("plan.saved", "PENDING", ["waiting", "waiting", "waiting", "waiting"]),
        ("apply.step", "RUNNING", ["applying", "waiting", "waiting", "waiting"]),
        ("commit.before:2", "RUNNING", ["committed", "committing", "waiting", "waiting"]),
        ("finish.begin", "RUNNING", ["committed", "committed", "committed", "committed"]),
    ],
)
def test_a_killed_job_says_how_far_it_was_and_is_found_dead_in_time(
    make_table: MakeTable, trace: Trace, fault: str, state: str, steps: list[str]
) -> None:
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": triple})
    kill_at(table, fault)
    (name,) = os.listdir(table.location.checkpoints.folder("jobs").root)
    folder = JobFolder.of(table.location.checkpoints, name)

    def at(seconds: float) -> Job:
        job = read_job(folder, now=time.time() + seconds)
        assert job is not None
        return job

    job = at(0)
    assert (job.state, job.open, job.dead) == (state, True, False)
    assert [shard.step for shard in job.shards] == steps
    assert job.rows_committed == 25 * steps.count("committed")
    dead = at(24 * 3600 + 60)
    assert {shard.step for shard in dead.shards} <= {"committed", "left"}
    assert (at(RUNNING_TIMEOUT + 60).dead, dead.dead) == (state == "RUNNING", True)
    assert table.backfill("y", runner="inline").state == "DONE"


def test_the_share_of_reused_work_is_on_record(make_table: MakeTable, trace: Trace, tmp_path: Path) -> None:
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": triple})
    kill_at(table, "commit.before:2")
    result = table.backfill("y", runner="inline")
    job = connect(tmp_path / "db").job(result.job_id)
    assert (job.rows_skipped, job.rows_reused, job.rows_computed) == (25, 25, 50)
    assert job.share_reused == pytest.approx(1 / 3)


def test_a_job_with_nothing_to_do_is_on_record_and_leaves_no_heartbeat(make_table: MakeTable, tmp_path: Path) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    result = table.backfill("y", runner="inline")
    job = connect(tmp_path / "db").job(result.job_id)
    assert (job.state, job.rows_skipped, job.shards, job.commits) == ("DONE", 10, (), ())
    files = os.listdir(JobFolder.of(table.location.checkpoints, job.id).storage.root)
    assert [name for name in files if not name.startswith("plan-")] == ["job.json"]


@pytest.mark.slow
def test_only_the_jobs_that_are_asked_for_are_read(
    make_table: MakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(10)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    database = connect(tmp_path / "db")
    database.create_table("other", pa.table({"x": [1]}))
    copy_jobs(database, 2000)
    read: list[str] = []
    real = Storage.read_bytes

    def counting(self: Storage, name: str) -> bytes:
        read.append(self.path(name))
        return real(self, name)

    monkeypatch.setattr(Storage, "read_bytes", counting)
    newest = database.jobs(newest=5)
    assert [job.id for job in newest] == sorted((job.id for job in newest), reverse=True)
    assert len(newest) == 5
    assert len(read) <= 5 * 3
    assert database.jobs(table="other") == []
    read.clear()
    assert database.job(newest[3].id).rows_computed == 10
    assert len(read) <= 12
    assert len(database.jobs(newest=None)) == 2001


def copy_jobs(database: Database, count: int) -> None:
    """Make many jobs of the only one, older than it."""
    (job,) = database.jobs()
    root = Path(database.location("docs").checkpoints.folder("jobs").root)
    for number in range(count):
        name = f"2020{number:016}-copy"
        shutil.copytree(root / job.id, root / name)
        record = json.loads((root / name / "job.json").read_text())
        (root / name / "job.json").write_text(json.dumps({**record, "id": name}))


def test_asking_for_what_is_not_there_says_so(make_table: MakeTable, tmp_path: Path) -> None:
    make_table(10)
    database = connect(tmp_path / "db")
    with pytest.raises(InvalidInput, match="There is no job 'x'"):
        database.job("x")
    with pytest.raises(InvalidInput, match="is not a job id"):
        database.job("../x")
    with pytest.raises(InvalidInput, match="There is no table 'nope'"):
        database.jobs(table="nope")


@pytest.mark.parametrize("kind", ["backfill", "refresh"])
def test_a_job_that_is_interrupted_is_on_record_as_failed(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = make_table(20)
    db = connect(os.path.dirname(table.location.uri))
    table.add_columns({"y": triple})
    view = table.query().select(["x"]).create_materialized_view(db, "v")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(PEERS, kind, replace(PEERS[kind], inline=interrupt))
    with pytest.raises(KeyboardInterrupt):
        table.backfill("y", runner="inline") if kind == "backfill" else view.refresh(runner="inline")
    [job] = [job for job in db.jobs() if job.kind == kind]
    assert (job.state, job.error) == ("FAILED", "KeyboardInterrupt")
