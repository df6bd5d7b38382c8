"""A job as it is read from its folder: state, life, counts, and what older versions of the package wrote."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_geneva.engine.counts import StoreRequests, Usage
from airflow_geneva.engine.job import error_records
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.current_errors import JobErrors, group_errors
from airflow_geneva.engine.job.error_records import ErrorRecord, count_errors, read_errors, write_errors
from airflow_geneva.engine.job.folder import JobFolder, plan_name
from airflow_geneva.engine.job.heartbeat import APPROVAL_TIMEOUT, RUNNING_TIMEOUT, WAITING_TIMEOUT
from airflow_geneva.engine.job.progress import Progress, ProgressReporter, Sample
from airflow_geneva.engine.job.shard_results import write_shard_result
from airflow_geneva.engine.job.spark_start import SparkStart
from airflow_geneva.engine.job.status import Job, job_ids, read_job, read_jobs
from airflow_geneva.engine.results import DONE, FAILED, BackfillResult, ShardResult
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import DamagedRecord

PRINT = "f" * 64
RECORD = {
    "kind": "backfill",
    "state": "PENDING",
    "table": "docs",
    "column": "n",
    "udf": "length",
    "udf_version": "abc",
    "where": None,
    "version": 7,
    "read_version": None,
    "rows_total": 1000,
    "rows_pending": 300,
    "shards": 2,
    "started": 1_000_000.0,
}
SIZES = [
    {"rows": 200, "fragments": 2, "staged": 1, "rows_staged": 100, "rows_held": 20},
    {"rows": 100, "fragments": 1, "staged": 0, "rows_staged": 0, "rows_held": 0},
]
AIRFLOW = {"airflow": {"dag_id": "d", "run_id": "r", "task_id": "g.plan", "try": 2}}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "_checkpoints"))


@pytest.fixture
def folder(checkpoints: Storage) -> JobFolder:
    made = JobFolder.of(checkpoints, "20260101T000000-a")
    made.write_record(RECORD)
    return made


def read(folder: JobFolder, now: float | None = None) -> Job:
    job = read_job(folder, now=now)
    assert job is not None
    return job


def beat(folder: JobFolder, at: float, step: str, over: bool = False) -> None:
    record = folder.read("job.json") or {}
    if not record["plan"]:
        plan(folder, [], record)
    folder.update_shard(PRINT, 0, "finish", alive={"at": at, "step": step, "over": over})


def plan(folder: JobFolder, sizes: list[dict[str, int]], record: dict[str, Any] = RECORD) -> None:
    folder.storage.write_json(plan_name(PRINT), {"shards": sizes})
    folder.write_record(record, PRINT)


def end(folder: JobFolder, state: str = "DONE", **more: Any) -> None:
    result = BackfillResult(folder.job_id, state, **more)
    folder.write_result(state, result.to_json(), "it broke" if state == "FAILED" else None, errors=3)


def test_a_planned_job_is_pending_and_knows_what_lies_ahead(folder: JobFolder) -> None:
    plan(folder, SIZES)
    job = read(folder, now=RECORD["started"] + 5)
    assert (job.state, job.open, job.dead, job.target) == ("PENDING", True, False, "docs.n")
    assert (job.rows_total, job.rows_pending, job.rows_skipped, job.rows_left) == (1000, 300, 700, 300)
    assert (job.rows_checkpointed, job.rows_ready, job.rows_committed) == (120, 100, 0)
    assert [shard.step for shard in job.shards] == ["waiting", "waiting"]


def test_a_running_job_says_how_busy_its_functions_are(folder: JobFolder) -> None:
    plan(folder, SIZES)
    for shard, busy in enumerate([Busy(20.0, 19.0, reading=1.0), Busy(20.0, 17.0, preprocessing=3.0)]):
        reporter = ProgressReporter(80, 1, rows_done=10, busy=partial(Busy.__add__, busy, Busy()))
        assert str(reporter.now()).endswith(f"time left not known yet, {busy}")
        folder.update_shard(PRINT, shard, applying=reporter.document())
    beat(folder, RECORD["started"] + 10, "apply")
    job = read(folder, now=RECORD["started"] + 12)
    assert job.busy == "function busy 90 %, waited 2 % for reading, waited 8 % for preprocessing"
    assert f"  {job.busy}" in job.lines()
    assert job.to_json()["shards"][1]["busy"]["preprocessing"] == 3.0
    assert read(folder, now=RECORD["started"] + 1_000_000).busy == "", "it is dead"


def test_a_running_job_adds_its_shards_up(folder: JobFolder) -> None:
    plan(folder, SIZES)
    applying = ProgressReporter(80, 1, lambda found: folder.update_shard(PRINT, 0, applying=found), rows_held=20)
    applying.rows_done += 30
    applying.keep()
    beat(folder, RECORD["started"] + 10, "apply")
    job = read(folder, now=RECORD["started"] + 12)
    assert (job.state, job.step) == ("RUNNING", "apply")
    assert (job.rows_checkpointed, job.rows_ready, job.rows_committed) == (150, 100, 0)
    assert (job.rows_computed, job.rows_left, job.commits) == (30, 300, ())

    applying.rows_done += 50
    applying.add_ready(100)
    applying.keep()
    job = read(folder, now=RECORD["started"] + 12)
    assert ([shard.step for shard in job.shards], job.rows_per_second) == (["applied", "waiting"], 0)
    committing = ProgressReporter(
        200, 2, lambda found: folder.update_shard(PRINT, 0, committing=found), rows_ready=200, ready=2
    )
    committing.set_committed(1, 100, (8,))
    job = read(folder, now=RECORD["started"] + 12)
    assert (job.rows_checkpointed, job.rows_ready, job.rows_committed) == (200, 200, 100)
    assert (job.rows_left, job.commits, job.shards[0].fragments_committed) == (200, (8,), 1)

    done = ShardResult(0, PRINT, rows_computed=80, rows_reused=118, rows_failed=2, fragments=2, versions=(8, 9))
    write_shard_result(folder, done)
    job = read(folder, now=RECORD["started"] + 12)
    assert (job.rows_checkpointed, job.rows_ready, job.rows_committed) == (198, 198, 198)
    assert (job.rows_computed, job.rows_reused, job.rows_failed, job.rows_left) == (80, 118, 2, 100)
    assert (job.commits, [shard.step for shard in job.shards]) == ((8, 9), ["committed", "waiting"])


def test_a_running_job_counts_what_its_plan_and_its_committed_shards_used_too(folder: JobFolder) -> None:
    before = StoreRequests(reads=5, lists=2)
    plan(folder, SIZES, {**RECORD, "store_requests": asdict(before)})
    for shard in (0, 1):
        reporter = ProgressReporter(80, 1, usage=lambda: Usage(calls=3, tokens=10, cost=0.5, rows=80))
        reporter.store_requests = lambda: StoreRequests(reads=100, writes=10)
        folder.update_shard(PRINT, shard, applying=reporter.document())
    committed = StoreRequests(reads=7, writes=3, deletes=1)
    write_shard_result(folder, ShardResult(0, PRINT, rows_computed=200, store_requests=committed))
    job = read(folder, now=RECORD["started"] + 12)
    assert [shard.step for shard in job.shards] == ["committed", "applying"]
    assert (job.usage, job.rows_run, job.cost) == (Usage(6, 20, 1.0), 160, 1.0)
    assert job.store_requests == StoreRequests(reads=212, writes=23, lists=2, deletes=1)
    assert "  238 requests to the store: 212 reads, 23 writes, 2 lists, 1 delete" in job.lines()
    assert json.loads(json.dumps(job.to_json()))["store_requests"] == vars(job.store_requests)

    end(folder, store_requests=StoreRequests(reads=300))
    assert read(folder).store_requests == StoreRequests(reads=300)


@pytest.mark.parametrize("damaged", ["x", 7, {"reads": "x"}, {"reads": None}, {"reads": [1]}])
def test_a_damaged_count_of_requests_counts_nothing(folder: JobFolder, damaged: object) -> None:
    plan(folder, SIZES, {**RECORD, "store_requests": damaged})
    document = {**ProgressReporter(80, 1).document(), "usage": {"rows": 80, "store_requests": damaged}}
    folder.update_shard(PRINT, 0, applying=document)
    job = read(folder, now=RECORD["started"] + 12)
    assert (job.rows_run, job.store_requests) == (80, StoreRequests())


def test_rows_that_failed_are_a_state_of_their_own_in_every_stage(folder: JobFolder) -> None:
    plan(folder, SIZES[1:])
    applying = ProgressReporter(100, 2, lambda found: folder.update_shard(PRINT, 0, applying=found))
    applying.failed = lambda: 6
    applying.rows_done += 60
    applying.keep()

    def counts() -> tuple[int, ...]:
        job = read(folder)
        (shard,) = job.shards
        assert (job.rows_failed, job.rows_computed) == (shard.rows_failed, shard.rows_computed)
        states = (job.rows_checkpointed, job.rows_ready, job.rows_committed, job.rows_failed, job.rows_left)
        assert job.rows_committed + job.rows_failed + job.rows_left == job.rows_pending
        return states

    folder.update_record(rows_pending=100)
    assert "6 of them failed" in str(applying.now())
    assert counts() == (54, 0, 0, 6, 94)
    folder.update_shard(PRINT, 0, applied={"rows_run": 100, "rows_computed": 90, "rows_failed": 10, "seconds": 4.0})
    assert counts() == (90, 90, 0, 10, 90)
    write_shard_result(folder, ShardResult(0, PRINT, rows_computed=90, rows_failed=10, fragments=2, versions=(8,)))
    assert counts() == (90, 90, 90, 10, 0)
    assert "90 committed, 10 failed" in str(read(folder).shards[0])


def test_a_running_job_says_from_the_first_second_how_long_it_still_takes(folder: JobFolder) -> None:
    started = RECORD["started"]
    plan(folder, SIZES)
    # Nothing is known but that Spark starts twice, 10 s each.
    assert str(read(folder, now=started).time_left) == (
        "at least 20 s left, then 180 rows, and how long one takes is not known yet"
    )
    assert read(folder, now=started).seconds_left is None
    folder.update_record(expected={"start_seconds": 4.0, "rows_per_second": 5.0})
    # Of 300 rows due, 120 are checkpointed: 8 s for Spark, 36 s for the rows.
    assert (job := read(folder, now=started)).seconds_left == 44.0
    assert (job.state, job.rows_per_second) == ("PENDING", 0)
    folder.update_shard(PRINT, 0, started={"at": started + 10})
    job = read(folder, now=started + 13)
    assert (job.shards[0].step, job.seconds_left, job.state) == ("starting", 41.0, "RUNNING")
    folder.update_shard(
        PRINT, 0, applying={**ProgressReporter(180, 2, has_executor=False).document(), "at": started + 14}
    )
    job = read(folder, now=started + 15)
    assert (job.shards[0].step, job.seconds_left) == ("waiting for an executor", None)
    assert str(job.time_left).endswith("left, then an unknown wait for a Spark executor")

    advance(folder, 0, rows_done=30, at=started + 24)
    beat(folder, started + 24, "apply")
    job = read(folder, now=started + 24)
    # The task began 14 s before, and its first rows came after 5 s, as those of the other shard will.
    assert (job.shards[0].start_seconds, dict(job.shards[0].seconds)) == (5.0, {"apply": 14.0})
    # Of the 50 rows that are left to it, 3 take a second by the 30 that are done, and 5 by 100 of earlier jobs.
    own = 50 / 3 * (30 + 100 * 3 / 5) / 130
    assert (job.rows_per_second, job.seconds_left) == (3.0, pytest.approx(own + 5 + 100 / 3))
    assert "3 rows/s, about 50 s left" in str(job)
    assert read(folder, now=started + 30).seconds_left == pytest.approx(job.seconds_left - 6)
    # Two at a time.
    advance(folder, 1, rows_done=20, at=started + 24)
    job = read(folder, now=started + 24)
    assert (job.rows_per_second, job.seconds_left) == (5.0, pytest.approx(80 / 2 * (20 + 50 * 2 / 5) / 70))
    assert job.to_json()["seconds_left"] == job.seconds_left
    silent = read(folder, now=started + 24 + 120)
    assert (silent.seconds_left, str(silent.time_left)) == (None, "no process has given a sign of life for 2 min")
    dead = read(folder, now=started + WAITING_TIMEOUT + 25)
    assert (dead.dead, dead.rows_per_second, dead.seconds_left, dead.time_left) == (True, 0.0, None, None)


def test_before_the_first_rows_a_job_says_what_takes_the_time(folder: JobFolder) -> None:
    started = RECORD["started"]
    plan(folder, SIZES[1:])
    folder.update_shard(PRINT, 0, started={"at": started + 10})
    beat(folder, started + 240, "apply")
    unknown = "then 100 rows, and how long one takes is not known yet"
    assert str(read(folder, now=started + 243).time_left) == f"Spark is starting (3 min 53 s so far), {unknown}"
    reporter = ProgressReporter(100, 2)
    folder.update_shard(PRINT, 0, applying={**reporter.document(), "at": started + 250})
    job = read(folder, now=started + 275)
    assert str(job.time_left) == f"loading the function (25 s so far), {unknown}"
    assert f"  loading the function (25 s so far), {unknown}" in job.lines()
    folder.update_record(expected={"start_seconds": 4.0, "rows_per_second": 5.0})
    assert str(read(folder, now=started + 250).time_left).startswith("loading the function (0.0 s so far), about ")
    folder.update_record(expected={"start_seconds": 4.0, "rows_per_second": 5.0}, runner="inline")
    advance(folder, 0, rows_done=30, at=started + 260)
    assert str(read(folder, now=started + 260).time_left).startswith("about ")


def test_a_shard_that_failed_tells_its_time_and_one_speed(folder: JobFolder) -> None:
    plan(folder, SIZES[1:])
    advance(folder, 0, rows_done=80, at=RECORD["started"] + 20)
    folder.update_shard(PRINT, 0, failure={"error": "ValueError: no", "last": True})
    found = replace(BackfillResult(folder.job_id, FAILED).with_seconds(plan=0.5, finish=0.1), rows_computed=0)
    folder.write_result(FAILED, found.to_json(), "ValueError: no", 0, {}, PRINT)
    job = read(folder)
    assert (job.state, dict(job.seconds)) == ("FAILED", {"plan": 0.5, "apply": 10.0, "finish": 0.1})
    assert (job.shards[0].applied_per_second, job.average_speed) == (8.0, 8.0)


def test_the_start_of_spark_is_told_by_part(folder: JobFolder) -> None:
    plan(folder, SIZES[1:])
    reporter = ProgressReporter(100, 2, start=lambda: SparkStart(jvm=3.1, session=2.04))
    reporter.complete_start([])
    reporter.complete_start([SparkStart(worker=2.5, function=3.0), SparkStart(worker=2.9, function=1.4)])
    reporter.complete_start([SparkStart(worker=0.1, function=0.1)])
    folder.update_shard(PRINT, 0, applying=reporter.document())
    done = {"rows_run": 100, "rows_computed": 100, "rows_failed": 0, "seconds": 20.0}
    told = "Spark's start 9.4 s a shard, in Apply: JVM 3.1, session 2.0, Python worker 2.9, function 1.4"
    assert f"  {told}" in read(folder).lines()
    # It is a part of the result, because the progress of a committed shard is not read.
    document = folder.read_shard(PRINT, 0)["applying"]
    folder.update_shard(PRINT, 0, applied={**done, "spark_start": document["spark_start"]}, applying=None)
    assert f"  {told}" in read(folder).lines()
    found = replace(BackfillResult(folder.job_id, DONE).with_seconds(plan=0.5, spark=7.0, finish=0.1))
    folder.write_result(DONE, found.to_json(), None, 0, {}, PRINT)
    in_session = "Spark's start 16 s: JVM 3.1, session 9.0, Python worker 2.9, function 1.4"
    assert f"  {in_session}" in read(folder).lines()
    for damaged in ({"jvm": -1.0}, {"jvm": "1e999"}, {"jvm": []}, [3.1]):
        folder.update_shard(PRINT, 0, applied={**done, "spark_start": damaged})
        assert read(folder).spark_start == ""


def test_a_job_that_waits_for_a_person_says_so_and_is_not_dead_after_a_weekend(folder: JobFolder) -> None:
    started = RECORD["started"]
    plan(folder, SIZES)
    folder.update_record(approval="rows 180 is above 100", expected={"start_seconds": 4.0, "rows_per_second": 5.0})
    beat(folder, started, "plan", over=True)
    waiting = read(folder, now=started + 3 * WAITING_TIMEOUT)
    assert (waiting.open, waiting.state, waiting.seconds_left) == (True, "PENDING", None)
    assert waiting.time_left is not None
    assert waiting.time_left.waits
    assert "  waits until it is approved and its first task starts: rows 180 is above 100" in waiting.lines()
    assert read(folder, now=started + APPROVAL_TIMEOUT + 25).dead
    folder.update_shard(PRINT, 0, started={"at": started + 10})
    approved = read(folder, now=started + 13)
    assert (approved.state, approved.seconds_left) == ("RUNNING", 41.0)
    folder.update_shard(PRINT, 0, submitted={"batch": 30})
    asked = read(folder, now=started + 13).time_left
    assert asked is not None
    assert (asked.waits, asked.unknown) == (True, "30 rows with the service, which says when it answers")
    folder.update_shard(PRINT, 1, started={"at": started + 10})
    asked = read(folder, now=started + 13).time_left
    assert asked is not None
    assert not asked.waits
    assert read(folder, now=started + WAITING_TIMEOUT + 25).dead


def test_the_speed_is_that_since_the_first_rows_which_may_have_waited_for_a_model() -> None:
    samples = (Sample(0.0, 0), Sample(20.0, 10), Sample(30.0, 60))
    loaded = Progress(100, 1, seconds=30.0, samples=samples, rows_computed=60)
    assert str(loaded).endswith(
        "60 of 100 rows computed (60 %), 0 of 1 fragment ready (0 rows), 5 rows/s, about 8 s left"
    )
    first = replace(loaded, samples=samples[:2], rows_computed=10)
    assert str(first).endswith("0 rows/s, time left not known yet")


def test_a_job_remembers_why_rows_were_due_or_were_not(folder: JobFolder) -> None:
    assert read(folder).reasons == {}
    folder.write_record({**RECORD, "reasons": {"never computed": 300, "computed": 700}})
    assert read(folder).reasons == {"never computed": 300, "computed": 700}


def test_what_a_shard_could_not_commit_stays_ready(folder: JobFolder) -> None:
    plan(folder, SIZES[:1])
    folder.update_shard(PRINT, 0, applied={"rows_run": 80, "rows_computed": 80, "rows_failed": 0, "seconds": 4.0})
    partly = ShardResult(0, PRINT, rows_computed=100, rows_left=100, fragments=1, versions=(8,), seconds=0.5)
    write_shard_result(folder, partly)
    (shard,) = read(folder).shards
    assert (shard.rows_checkpointed, shard.rows_ready, shard.rows_committed) == (200, 200, 100)
    assert dict(shard.seconds) == {"apply": 4.0, "commit": 0.5}


def advance(folder: JobFolder, shard: int, rows_done: int, step: str = "applying", at: float | None = None) -> None:
    samples = (Sample(0.0, 0), Sample(1.0, rows_done // 10), Sample(10.0, rows_done))
    rows = {"rows_computed": rows_done, "rows_checkpointed": rows_done + SIZES[shard]["rows_held"]}
    progress = Progress(80, 1, seconds=10.0, samples=samples, **rows)
    moment = {} if at is None else {"at": at}
    folder.update_shard(PRINT, shard, **{step: {**asdict(progress), **moment}})


def test_a_shard_whose_try_failed_says_so_and_has_no_speed_until_it_is_tried_again(folder: JobFolder) -> None:
    plan(folder, SIZES)
    advance(folder, 0, rows_done=30)
    advance(folder, 1, rows_done=20)
    with pytest.raises(OSError, match="no disk"), folder.recording_failure(PRINT, 1):
        raise OSError("no disk")
    beat(folder, RECORD["started"] + 10, "apply")
    job = read(folder, now=RECORD["started"] + 12)
    assert [shard.step for shard in job.shards] == ["applying", "failed"]
    assert (job.open, job.rows_per_second, job.shards[1].rows_per_second) == (True, 3.0, 0.0)
    assert "shard 1: failed, 20 of 100 rows checkpointed, 0 ready, 0 committed; error: no disk" in str(job)
    with folder.recording_failure(PRINT, 1):
        assert read(folder, now=RECORD["started"] + 12).shards[1].step == "applying"


@pytest.mark.parametrize("step", ["applying", "committing"])
def test_no_shard_of_a_failed_job_is_worked_on(folder: JobFolder, step: str) -> None:
    plan(folder, SIZES)
    advance(folder, 0, rows_done=30, step=step)
    end(folder, "FAILED", rows_left=300)
    # The task that did the first was killed, and could not say why.
    assert [(shard.step, shard.error) for shard in read(folder).shards] == [("failed", None), ("left", None)]


def test_no_shard_of_a_job_that_is_found_dead_is_worked_on(folder: JobFolder) -> None:
    plan(folder, SIZES)
    advance(folder, 0, rows_done=30)
    beat(folder, RECORD["started"] + 10, "apply")
    dead = read(folder, now=RECORD["started"] + RUNNING_TIMEOUT + 11)
    assert (dead.state, dead.dead) == ("RUNNING", True)
    assert [(shard.step, shard.rows_per_second) for shard in dead.shards] == [("left", 0.0), ("left", 0.0)]


def test_an_ended_job_says_what_its_result_says(folder: JobFolder) -> None:
    plan(folder, [])
    end(
        folder, rows_computed=225, rows_reused=75, rows_skipped=700, commits=(8, 9), seconds={"plan": 0.5, "apply": 9.0}
    )
    job = read(folder)
    assert (job.state, job.open, job.dead) == ("DONE", False, False)
    assert (job.rows_committed, job.share_reused, job.commits, job.errors) == (300, 0.25, (8, 9), 3)
    assert list(job.seconds.items()) == [("plan", 0.5), ("apply", 9.0)]
    assert job.ended is not None
    assert job.took == job.ended - job.started


def test_a_failed_job_tells_why(folder: JobFolder) -> None:
    end(folder, "FAILED", rows_left=300)
    job = read(folder)
    assert (job.state, job.error, job.open) == ("FAILED", "it broke", False)
    assert "Error: it broke" in str(job)


@pytest.mark.parametrize(
    ("step", "over", "airflow", "limit"),
    [
        ("apply", False, False, RUNNING_TIMEOUT),
        ("apply", True, False, WAITING_TIMEOUT),
        ("apply", False, True, WAITING_TIMEOUT),
        ("plan", True, True, WAITING_TIMEOUT),
        (None, False, False, WAITING_TIMEOUT),
    ],
)
def test_a_job_is_dead_only_when_it_is_silent_for_longer_than_its_limit(
    folder: JobFolder, step: str | None, over: bool, airflow: bool, limit: float
) -> None:
    folder.write_record({**RECORD, **(AIRFLOW if airflow else {})})
    last = RECORD["started"]
    if step is not None:
        last += 500
        beat(folder, last, step, over)
    alive, dead = read(folder, now=last + limit), read(folder, now=last + limit + 1)
    assert (alive.dead, alive.open, alive.last_seen) == (False, True, last)
    assert (dead.dead, dead.open, dead.state) == (True, False, alive.state)
    assert "(found dead)" in str(dead)


def test_an_ended_job_is_never_dead(folder: JobFolder) -> None:
    end(folder)
    assert not read(folder, now=time.time() + 1e9).dead


def test_a_cleared_shard_opens_a_failed_job_again_until_it_falls_silent(folder: JobFolder) -> None:
    end(folder, "FAILED")
    ended = read(folder).ended
    assert ended is not None
    beat(folder, ended + 100, "apply")
    assert read(folder, now=ended + 200).state == "RUNNING"
    assert read(folder, now=ended + 200).open
    assert read(folder, now=ended + 200 + RUNNING_TIMEOUT).state == "FAILED"
    beat(folder, ended + 100, "finish", over=True)
    assert read(folder, now=ended + 200).state == "FAILED"


def test_a_cleared_shard_of_a_job_that_was_done_is_seen_in_a_list_too(folder: JobFolder) -> None:
    end(folder, "DONE")
    ended = read(folder).ended
    assert ended is not None
    folder.update_record(resumed=ended + 90)  # by the task that begins
    beat(folder, ended + 100, "apply")
    listed = read_job(folder, with_shards=False, now=ended + 200)
    assert listed is not None
    assert (listed.state, listed.open) == ("RUNNING", True)


def test_a_driver_that_came_too_late_leaves_a_finished_job_finished(folder: JobFolder) -> None:
    end(folder, "DONE")
    ended = read(folder).ended
    assert ended is not None
    beat(folder, ended + 100, "apply", over=True)
    assert read(folder, now=ended + 200).state == "DONE"


def test_planning_again_forgets_how_the_try_before_went(folder: JobFolder) -> None:
    plan(folder, SIZES)
    advance(folder, 0, rows_done=80)
    beat(folder, time.time(), "apply")
    end(folder, "FAILED")
    folder.write_record(RECORD)
    job = read(folder)
    assert (job.state, job.shards, job.error, job.rows_checkpointed) == ("PENDING", (), None, 0)


def test_a_finish_that_comes_after_its_job_was_planned_again_does_not_end_it(folder: JobFolder) -> None:
    plan(folder, SIZES)
    result = BackfillResult(folder.job_id, "DONE", rows_computed=300).to_json()
    folder.write_result("DONE", result, plan="e" * 64)
    assert read(folder).state == "PENDING"
    folder.write_result("DONE", result, plan=PRINT)
    assert (read(folder).state, read(folder).rows_computed) == ("DONE", 300)
    folder.write_result("PARTIAL", result, plan=PRINT)
    assert read(folder).state == "PARTIAL"


def test_damaged_and_foreign_folders_do_not_hide_the_others(checkpoints: Storage, folder: JobFolder) -> None:
    damaged = JobFolder.of(checkpoints, "20260102T000000-b")
    damaged.storage.write_bytes("job.json", b'{"kind": "back')
    checkpoints.write_bytes("jobs/not a job/x.json", b"{}")
    plan(folder, SIZES)
    folder.storage.write_bytes(plan_name(PRINT), b"[1")
    assert [job.id for job in read_jobs(checkpoints, job_ids(checkpoints))] == [folder.job_id]


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("job.json", b"[1, 2]"),
        ("job.json", b'"a text"'),
        ("job.json", b"null"),
        ("job.json", b'{"kind": "back'),
        ("job.json", b"\xff\xfe"),
        ("job.json", b"{}"),
        ("job.json", json.dumps({**RECORD, "started": "yesterday"}).encode()),
        ("job.json", json.dumps({**RECORD, "started": 1e300}).encode()),
        ("job.json", json.dumps({**RECORD, "rows_total": float("inf")}).encode()),
        ("job.json", json.dumps({**RECORD, "airflow": "by hand"}).encode()),
        ("job.json", json.dumps({**RECORD, "reasons": [1]}).encode()),
        ("job.json", b"[" * 100_000),
        ("job.json", json.dumps({**RECORD, "column": 5}).encode()),
        ("job.json", json.dumps({**RECORD, "ended": {"state": "DONE"}}).encode()),
        ("job.json", json.dumps({**RECORD, "ended": {"state": "DONE", "ended": 5, "result": []}}).encode()),
        ("job.json", json.dumps({**RECORD, "plan": 5}).encode()),
        ("plan-ffffffffffffffff.json", b'{"shards": [{}]}'),
        ("plan-ffffffffffffffff.json", b'{"shards": 3}'),
        ("plan-ffffffffffffffff.json", b"{}"),
        ("status-ffffffffffffffff-0000.json", b'{"applying": {"rows": {}}}'),
        ("status-ffffffffffffffff-0000.json", b'{"failure": "no disk"}'),
    ],
)
def test_a_damaged_job_is_told_from_one_that_is_not_there_and_does_not_hide_the_others(
    checkpoints: Storage, folder: JobFolder, caplog: pytest.LogCaptureFixture, name: str, document: bytes
) -> None:
    damaged = JobFolder.of(checkpoints, "20260102T000000-b")
    damaged.write_record(RECORD)
    plan(damaged, SIZES)
    damaged.storage.write_bytes(name, document)
    with pytest.raises(DamagedRecord, match=r"record of job 20260102T000000-b in .* is damaged"):
        read_job(damaged)
    assert [job.id for job in read_jobs(checkpoints, job_ids(checkpoints))] == [folder.job_id]
    assert "The list leaves a job out: The record of job 20260102T000000-b" in caplog.text
    assert read_job(JobFolder.of(checkpoints, "20260103T000000-c")) is None


def test_a_job_reads_well_and_goes_through_json(folder: JobFolder) -> None:
    plan(folder, SIZES, {**RECORD, **AIRFLOW, "where": "x > 1"})
    beat(folder, RECORD["started"] + 60, "plan", over=True)
    job = read(folder, now=RECORD["started"] + 61)
    assert str(job).splitlines() == [
        "PENDING: backfill of docs.n with length (version abc) where x > 1, job 20260101T000000-a",
        "  started 1970-01-12 13:46:40 UTC, last heartbeat 1970-01-12 13:47:40 UTC in step plan",
        "  300 of 1,000 rows due: 120 checkpointed, 100 ready to commit, 0 committed, 0 failed, 300 left",
        "  0 rows run, 0 computed, 0 reused (0 %), 700 skipped, 0 error records",
        "  planned on version 7, no commits",
        "  at least 20 s left, then 180 rows, and how long one takes is not known yet",
        "  Airflow: d, run r, task g.plan, try 2",
        "  shard 0: waiting, 120 of 200 rows checkpointed, 100 ready, 0 committed",
        "  shard 1: waiting, 0 of 100 rows checkpointed, 0 ready, 0 committed",
    ]
    document = json.loads(json.dumps(job.to_json()))
    assert (document["state"], document["open"], document["airflow"]["try_number"]) == ("PENDING", True, 2)
    assert document["shards"][0]["rows_ready"] == 100


def error(row: int, attempt: int = 1, at: float = 100.0, **more: Any) -> ErrorRecord:
    known = {"job_id": "20260101T000000-a", "column": "n", "udf": "length", "udf_version": "abc"}
    record = {**known, "row_address": (2 << 32) | row, "row_id": row, "exception": "ValueError", "message": "bad"}
    return ErrorRecord(
        **{**record, "traceback": "Traceback:\n  here", "attempt": attempt, "calls": 1, "time": at, **more}
    )


def test_error_records_come_back_newest_first_and_once_each(checkpoints: Storage, folder: JobFolder) -> None:
    write_errors(folder.storage, "range-0-10", [error(1, at=100.0), error(2, at=101.0)])
    write_errors(folder.storage, "range-0-20", [error(2, at=105.0), error(2, attempt=2, at=104.0)])
    found = read_errors(checkpoints)
    assert [(record.row_id, record.attempt, record.time) for record in found] == [
        (2, 1, 105.0),
        (2, 2, 104.0),
        (1, 1, 100.0),
    ]
    assert count_errors(folder.storage) == 3 == read(folder).errors
    assert (read_errors(checkpoints, folder.job_id), read_errors(checkpoints, "other")) == (found, [])
    assert (read_errors(checkpoints, column="n"), read_errors(checkpoints, column="m")) == (found, [])


def test_error_records_of_a_running_job_are_not_read_again_and_again(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Storage] = []
    count, clock = error_records.count_errors, SimpleNamespace(now=0.0)
    monkeypatch.setattr(error_records, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def slow(job: Storage) -> int:
        looked.append(job)
        clock.now += 0.1
        return count(job)

    monkeypatch.setattr(error_records, "count_errors", slow)
    write_errors(folder.storage, "range-0-10", [error(1)])
    assert [read(folder).errors for _ in range(20)] == [1] * 20
    assert len(looked) == 1
    write_errors(folder.storage, "range-10-20", [error(11)])
    clock.now += 0.9
    assert (read(folder).errors, len(looked)) == (1, 1)
    clock.now += 0.2
    assert (read(folder).errors, len(looked)) == (2, 2)
    end(folder)
    assert read(folder).errors == 3, "what the result says"


def test_running_a_range_again_replaces_its_error_records(checkpoints: Storage, folder: JobFolder) -> None:
    write_errors(folder.storage, "range-0-10", [error(1), error(2)])
    write_errors(folder.storage, "range-0-10", [error(2)])
    write_errors(folder.storage, "range-10-20", [])
    assert [record.row_id for record in read_errors(checkpoints)] == [2]


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_damaged_file_of_errors_is_left_out_with_a_warning(
    checkpoints: Storage, folder: JobFolder, caplog: pytest.LogCaptureFixture, keep: int
) -> None:
    write_errors(folder.storage, "good", [error(1)])
    write_errors(folder.storage, "bad", [error(2)])
    path = Path(folder.storage.path("errors/bad.arrow"))
    path.write_bytes(path.read_bytes()[:keep])
    assert [record.row_id for record in read_errors(checkpoints)] == [1]
    assert "bad.arrow; they are left out" in caplog.text


def test_an_error_record_names_the_row_and_shows_the_traceback() -> None:
    assert str(error(5, attempt=2, calls=3)).splitlines() == [
        "row address 8589934597 (fragment 2, offset 5): ValueError: bad",
        "  column n, UDF length (version abc), attempt 2, 3 calls, 1970-01-01 00:01:40 UTC, job 20260101T000000-a",
        "  Traceback:",
        "    here",
    ]


def test_causes_count_all_records_and_of_a_row_that_ran_again_the_newest(
    folder: JobFolder, checkpoints: Storage
) -> None:
    write_errors(folder.storage, "a", [replace(error(row), message=f"row {row}\nmore") for row in range(300)])
    write_errors(folder.storage, "b", [replace(error(row, at=200.0), message="no 'x'") for row in range(10)])
    causes = JobErrors.of(checkpoints, folder.job_id).causes()
    assert [(cause.rows, cause.message) for cause in causes] == [(290, "row ..."), (10, "no 'x'")]
    groups = group_errors(read_errors(checkpoints, folder.job_id))
    assert [(one.rows, one.message, one.kind) for one in groups] == [(c.rows, c.message, c.kind) for c in causes]
    html = groups._repr_html_()
    assert "<b>300 failed rows, 2 causes</b>" in html
    assert "<td>290</td><td>n</td><td>ValueError</td><td>row ...</td><td>858993" in html
    many = group_errors(
        error(row, message=f"{'x' * 1_000} of {chr(65 + row % 26)}{chr(97 + row // 26)}") for row in range(500)
    )
    assert "and 450 more" in many._repr_html_()
    assert len(many._repr_html_()) < 20_000
    assert JobErrors.of(checkpoints, "20260102T000000-b").causes() == []


def test_a_page_of_errors_is_read_from_the_files_that_hold_it(
    folder: JobFolder, checkpoints: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in range(10):
        rows = range(10 * part, 10 * part + 10)
        write_errors(folder.storage, f"range-{part}", [error(row, at=50.0 + row, key=str(99 - row)) for row in rows])
    errors, opened = JobErrors.of(checkpoints, folder.job_id), list[str]()
    read_bytes = Storage.read_bytes

    def reading(storage: Storage, name: str) -> bytes:
        opened.append(name)
        return read_bytes(storage, name)

    monkeypatch.setattr(Storage, "read_bytes", reading)
    found = errors.page([("key", "ascending")], 5, 10)
    assert [record.key for record in found] == [str(number) for number in range(5, 15)], "keys are numbers"
    assert {record.traceback for record in found} == {"Traceback:\n  here"}
    assert opened == ["errors/range-8.arrow", "errors/range-9.arrow"]
    assert [record.row_id for record in errors.page([("time", "descending")], 0, 2)] == [99, 98]
    write_errors(folder.storage, "range-9", [error(99, at=50.0 + 99)])
    assert [record.row_id for record in errors.page([("time", "descending")], 0, 3)] == [99], "others were replaced"
    write_errors(folder.storage, "range-a", [error(100, key="a")])
    errors = JobErrors.of(checkpoints, folder.job_id)
    assert [record.key for record in errors.page([("key", "descending")], 0, 2)] == ["a", "99"], "keys are texts"
    monkeypatch.setattr(error_records, "_MOST_RECORDS", 13)
    assert len(JobErrors.of(checkpoints, folder.job_id)) == 13, "as many as the last page that can be asked for"
    monkeypatch.setattr(error_records, "_MOST_BYTES_OF_RECORDS", 1)
    assert len(JobErrors.of(checkpoints, folder.job_id)) == 10
