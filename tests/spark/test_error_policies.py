"""Error policies where Spark runs the UDF: a row may fail, a task does not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva.engine.job.folder import COMMIT, JobFolder
from airflow_geneva.engine.job.status import read_job
from airflow_geneva.errors import JobFailed
from tests.udfs_for_tests import picky

pytestmark = pytest.mark.spark


def make_table(tmp_path: Path, function: airflow_geneva.UDF, rows: int = 10_000) -> airflow_geneva.Table:
    data = pa.table({"x": pa.array(range(rows))})
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=rows // 5)
    table.add_columns({"y": function})
    return table


@pytest.mark.parametrize("function", [picky.skipping, picky.deadly])
def test_failed_rows_are_null_and_listed_and_no_task_is_lost(
    spark: object, tmp_path: Path, function: airflow_geneva.UDF
) -> None:
    table = make_table(tmp_path, function)
    result = table.backfill("y", task_size=1_500, batch_size=500, runner="spark")
    assert (result.state, result.rows_computed, result.rows_failed) == ("DONE", 9_990, 10)
    rows = table.lance.to_table(with_row_address=True).to_pylist()
    assert all(row["y"] == (None if picky.is_bad(row["x"]) else 2 * row["x"]) for row in rows)
    failed = sorted(row["_rowaddr"] for row in rows if row["y"] is None)
    assert table.get_failed_row_addresses(result.job_id) == table.get_failed_row_addresses() == failed
    assert len(table.get_errors(result.job_id)) == 10
    folder = JobFolder.of(table.location.checkpoints, result.job_id)
    job = read_job(folder)
    assert job is not None
    assert (job.rows_committed, job.rows_failed, job.rows_left, job.shards[0].rows_failed) == (9_990, 10, 0, 10)
    shard = ((folder.read("job.json") or {})["plan"], 0)
    status = {**folder.read_shard(*shard), **folder.read_shard(*shard, COMMIT)}
    assert [status[part]["rows_failed"] for part in ("applying", "applied", "committing")] == [10, 10, 10]


def test_failed_rows_of_a_view_are_listed_as_rows_of_its_source(spark: object, tmp_path: Path) -> None:
    data = pa.table({"x": pa.array(range(10_000))})
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=2_000)
    query = table.query().select(["x"]).add_columns({"y": (picky.skipping, ["x"])})
    view = query.create_materialized_view(name="picked")
    result = view.refresh(task_size=1_500, batch_size=500, runner="spark")
    assert (result.state, result.rows_computed, result.rows_failed) == ("DONE", 9_990, 10)
    rows = table.lance.to_table(with_row_address=True).to_pylist()
    failed = sorted(row["_rowaddr"] for row in rows if picky.is_bad(row["x"]))
    assert view.get_failed_row_addresses(result.job_id) == view.get_failed_row_addresses() == failed
    assert {(e.column, e.udf, e.source) for e in view.get_errors()} == {("y", "skipping", "numbers")}
    job = airflow_geneva.connect(tmp_path / "db").job(result.job_id)
    assert (job.target, job.source, job.rows_committed, job.rows_failed) == ("picked", "numbers", 9_990, 10)
    assert {shard.step for shard in job.shards} == {"committed"}


def test_limits_count_over_all_tasks_of_a_job_and_all_tries_of_a_task(spark: object, tmp_path: Path) -> None:
    died = tmp_path / "died"
    data = pa.table({"x": pa.array(range(10_000)), "died": [str(died)] * 10_000})
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=2_000)
    table.add_columns({"y": picky.limited})
    version = table.version
    with pytest.raises(JobFailed, match=r"at most 9 rows.* 10 failed"):
        table.backfill("y", task_size=2_000, checkpoint_size=1_000, runner="spark")
    assert died.exists(), "the try after it did not run the row that was given up before"
    assert table.version == version


def test_a_worker_that_dies_without_a_policy_is_told_how_its_row_is_found(spark: object, tmp_path: Path) -> None:
    table = make_table(tmp_path, picky.deadly_without_a_policy, 1_000)
    with pytest.raises(JobFailed, match=r'UDF .*deadly_without_a_policy.* died.*on_error="skip"'):
        table.backfill("y", runner="spark")
