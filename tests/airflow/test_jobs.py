"""The record of a job that Airflow runs: whose it is, how far each shard is, and why one failed."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from airflow.sdk import DAG

from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.shard_status import read_shards
from airflow_geneva.engine.job.status import Job, read_job
from airflow_geneva.task_groups import BackfillTaskGroup
from tests.airflow.conftest import Desk
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow

ROWS = 10


def run_group(desk: Desk, run_after: datetime | None = None) -> Driver:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        BackfillTaskGroup(table=desk.table.name, column="n", inline_below_rows=10**9, shard_size=1)
    return Driver.trigger(dag, run_after=run_after).go()


def job_of(desk: Desk, run: Driver) -> Job:
    """The job of a run, its shards included."""
    job = desk.database.job(run.xcom("backfill.plan", "summary")["job_id"])
    assert isinstance(job, Job)
    return job


def test_a_job_knows_its_airflow_run_and_the_time_of_every_stage(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")
    run = run_group(desk)
    assert run.state == "success", run.errors
    job = job_of(desk, run)
    assert job.airflow is not None
    assert (job.airflow.dag_id, job.airflow.task_id) == (f"dag_{desk.table.name}", "backfill.plan")
    assert (job.state, job.rows_committed, len(job.commits)) == ("DONE", 2 * ROWS, 2)
    assert set(job.seconds) == {"plan", "apply", "commit", "finish"}
    assert [dict(shard.seconds).keys() for shard in job.shards] == [{"apply", "commit"}] * 2
    folder = JobFolder.of(desk.table.location.checkpoints, job.id)
    _, heartbeat = read_shards(folder, folder.read("job.json") or {})
    # That the job has ended, its record says: `finish` writes no last heartbeat besides.
    assert heartbeat is not None
    assert heartbeat.step == "finish"


def test_the_record_says_which_shard_failed_and_why_until_it_is_mended(desk: Desk) -> None:
    desk.append("abc")
    desk.define(n="length")
    desk.break_at("b04")
    run = run_group(desk)
    job = job_of(desk, run)
    assert (job.state, job.rows_committed, job.rows_failed, job.rows_left) == ("FAILED", 2 * ROWS, 1, ROWS - 1)
    assert job.error is not None
    assert job.error.startswith("Shard 1: Computing")
    assert job.error.endswith("1 of 3 shards not committed: [1].")
    assert job.error in run.error("backfill.finish")
    assert "b04" in job.error
    assert [shard.step for shard in job.shards] == ["committed", "failed", "committed"]
    assert [shard.error is None for shard in job.shards] == [True, False, True]
    assert "shard 1: failed, 4 of 10 rows checkpointed" in str(job)
    assert str(job).count(": Computing") == 1, "the error is there once"

    desk.mend()
    run.clear(("backfill.shards.apply", 1)).go()
    job = read_job(JobFolder.of(desk.table.location.checkpoints, job.id)) or job
    assert (job.state, job.error, job.rows_committed) == ("DONE", None, 3 * ROWS)
    assert [shard.error for shard in job.shards] == [None] * 3


@pytest.mark.shows("Dates", "look for the newest jobs after a backfill of old dates")
def test_the_newest_job_is_the_one_that_began_last_whatever_date_it_is_for(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run_group(desk)
    desk.append("b")
    late = run_group(desk, run_after=datetime(2020, 1, 1, tzinfo=timezone.utc))
    [newest] = desk.database.jobs(newest=1, table=desk.table.name)
    assert newest.airflow is not None
    assert newest.airflow.run_id == late.run_id
    late.clear("backfill.plan").go()
    # A run that was cleared is the same job.
    assert [job.id for job in desk.database.jobs(table=desk.table.name)].index(newest.id) == 0
    assert len(desk.database.jobs(table=desk.table.name)) == 2
