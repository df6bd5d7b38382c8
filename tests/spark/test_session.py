"""A backfill on a SparkSession does what the inline one does, and outlives its workers."""

from __future__ import annotations

import importlib
import json
import linecache
import os
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva import expect
from airflow_geneva.engine.apply.batch_api import StillWaiting
from airflow_geneva.engine.job import progress as job_progress
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.status import Job
from airflow_geneva.engine.run import caps, choice, pipeline
from airflow_geneva.engine.run.estimate import estimate_by_history
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import InvalidInput, JobFailed, UdfError
from airflow_geneva.spark import local, progress, signs, tasks as spark_session
from airflow_geneva.spark.runner import SparkRunner
from tests.spark import spark_udfs
from tests.spark.spark_udfs import (
    compacts_once_at_700,
    dies_once_at_700,
    double,
    doubled_later,
    fails_at_700,
    logged,
    seen,
)
from tests.support.latency import SlowProxy
from tests.support.object_store import Bucket, options_of

pytestmark = pytest.mark.spark


def make_table(tmp_path: Path, rows: int, per_fragment: int) -> tuple[airflow_geneva.Table, str]:
    log = str(tmp_path / "log")
    data = pa.table({"x": pa.array(range(rows)), "log": pa.array([log] * rows)})
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=per_fragment)
    return table, log


def assert_doubled(table: airflow_geneva.Table, column: str = "y") -> None:
    values = table.to_arrow()
    assert values.column(column).to_pylist() == [2 * x for x in values.column("x").to_pylist()]


def test_a_shard_without_an_executor_says_that_it_waits_for_one(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert spark_session._has_executor(spark)  # type: ignore[arg-type]
    table, _log = make_table(tmp_path, 10, 10)
    table.add_columns({"y": double})
    asked: list[str] = []

    def has_none(_session: object) -> bool:
        asked.extend(shard.step for job in table_jobs(tmp_path) for shard in job.shards)
        return False

    monkeypatch.setattr(spark_session, "_has_executor", has_none)
    monkeypatch.setattr(progress, "_USUAL_WAIT", 0.0)
    monkeypatch.setattr(progress, "_TASK_REPORT_SECONDS", 0.0)
    table.backfill("y", runner="spark")
    assert_doubled(table)
    assert asked[-1] == "waiting for an executor"
    assert [record for record in caplog.messages if "waits for an executor" in record] == caplog.messages[:1]


def table_jobs(tmp_path: Path) -> list[Job]:
    return list(airflow_geneva.connect(tmp_path / "db").jobs())


def test_every_row_is_computed_once_and_the_counts_are_the_real_ones(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 5_000, 700)
    table.add_columns({"y": logged})
    result = table.backfill("y", runner="spark")
    assert_doubled(table)
    assert sorted(seen(log)) == list(range(5_000))
    assert (result.state, result.rows_computed, result.rows_skipped) == ("DONE", 5_000, 0)
    again = table.backfill("y", runner="spark")
    assert (again.rows_computed, again.rows_skipped, again.commits) == (0, 5_000, ())
    assert len(seen(log)) == 5_000


def test_a_changed_function_of_a_view_runs_alone_on_rows_that_its_source_renumbered(
    spark: object, tmp_path: Path
) -> None:
    table, log = make_table(tmp_path, 3_000, 700)
    lower = table.query().select(["x", "log"]).add_columns({"w": double}).create_materialized_view(name="lower")
    lower.refresh(runner="inline")
    columns = {"y": (logged, ["x", "log"]), "z": (double, ["x"])}
    view = lower.query().select(["x"]).add_columns(columns).create_materialized_view(name="v")
    view.refresh(runner="spark")
    lower.alter_columns({"w": (spark_udfs.triple, ["x"])})
    lower.refresh(runner="inline", on_code_change="recompute")
    view.alter_columns({"z": (spark_udfs.triple, ["x"])})
    result = view.refresh(runner="spark", on_code_change="recompute", task_size=500)
    assert (result.rows_computed, sorted(seen(log))) == (3_000, list(range(3_000)))
    found = {row["x"]: (row["y"], row["z"]) for row in view.to_arrow().to_pylist()}
    assert found == {x: (2 * x, 3 * x) for x in range(3_000)}


def test_a_job_stops_at_its_cap_or_when_it_is_canceled_and_the_next_one_goes_on(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, log = make_table(tmp_path, 3_000, 700)
    table.add_columns({"y": spark_udfs.slow})
    result = table.backfill("y", runner="spark", max_rows=900, shard_size=3)
    assert (result.state, result.rows_computed, result.rows_left, len(seen(log))) == ("PARTIAL", 900, 2_100, 900)
    # Two slots need 4 seconds for the rest.
    result = table.backfill("y", runner="spark", max_seconds=1.0, shard_size=3)
    assert result.state == "PARTIAL"
    assert any("stopped at its cap of 1 seconds" in note for note in result.notes)
    assert 0 < result.rows_computed < 2_100
    assert result.rows_computed + result.rows_left == 2_100
    assert len(seen(log)) == 900 + result.rows_computed
    assert table.count_rows("y IS NOT NULL") == len(seen(log))
    # A person cancels it after the first look of the driver.
    monkeypatch.setattr(job_progress, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(caps, "stop_if_canceled", canceled_once_rows_are_computed(log, len(seen(log))))
    before = len(seen(log))
    result = table.backfill("y", runner="spark", shard_size=3)
    assert result.state == "PARTIAL"
    assert any("canceled by ann" in note for note in result.notes)
    assert 0 < result.rows_computed == len(seen(log)) - before
    assert table.count_rows("y IS NOT NULL") == len(seen(log))
    monkeypatch.undo()
    assert table.backfill("y", runner="spark").state == "DONE"
    assert_doubled(table)
    assert sorted(seen(log)) == list(range(3_000))


def canceled_once_rows_are_computed(log: Path, before: int) -> Callable[[JobFolder], None]:
    def look(folder: JobFolder) -> None:
        if len(seen(log)) > before:
            raise caps.Canceled("canceled by ann")

    return look


def test_tasks_make_no_more_calls_than_the_cap_pays_whether_or_not_they_fail(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 300, 100)
    table.add_columns({"y": spark_udfs.tried})
    result = table.backfill("y", runner="spark", max_cost=90.0)
    assert (result.state, result.rows_run) == ("PARTIAL", len(seen(log)))
    assert len(seen(log)) <= 90 + 2, "a call is in flight in each of two slots"
    assert 0 < result.rows_computed == table.count_rows("y IS NOT NULL") < 90
    left = 300 - result.rows_computed
    # What is left costs at most three calls for each row.
    assert table.backfill("y", runner="spark", max_cost=3.0 * left).state == "DONE"
    assert_doubled(table)


def test_tasks_call_no_more_than_the_cap_on_reported_cost_pays(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 3_000, 700)
    table.add_columns({"y": spark_udfs.priced})
    result = table.backfill("y", runner="spark", max_cost=300.0)
    assert (result.state, result.usage.cost) == ("PARTIAL", len(seen(log)))
    assert 300 <= len(seen(log)) <= 300 + 2, "a call is in flight in each of two slots"
    assert result.rows_computed == table.count_rows("y IS NOT NULL") == len(seen(log))
    assert table.backfill("y", runner="spark", max_cost=5_000.0, task_size=500).state == "DONE"
    table.add(pa.table({"x": [1], "log": [log]}))
    assert table.backfill("y", runner="spark", max_cost=5_000.0).state == "DONE", "a task waits after its last row"


def test_rows_that_others_move_while_tasks_run_become_visible(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 3_000, 250)
    table.lance.add_columns({"other": "x"})
    table.add_columns({"y": (compacts_once_at_700, ["x", "log"])})
    result = table.backfill("y", runner="spark", shard_size=4)
    assert (result.state, result.rows_computed, result.rows_left) == ("DONE", 3_000, 0)
    assert_doubled(table)
    assert sorted(seen(log)) == list(range(3_000))
    assert not table.backfill("y", runner="spark").changed


def test_waiting_for_spark_is_not_told_as_planning(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = local.open_session

    def slow(concurrency: int) -> object:
        time.sleep(1.5)
        return start(concurrency)

    monkeypatch.setattr(local, "open_session", slow)
    table, _ = make_table(tmp_path, 100, 50)
    table.add_columns({"y": double})
    view = table.query().select(["x"]).add_columns({"y2": (double, ["x"])}).create_materialized_view(name="v")
    database = airflow_geneva.connect(tmp_path / "db")
    for do in (partial(table.backfill, "y"), view.refresh):
        began = time.monotonic()
        result = do(runner="spark")
        assert sum(result.seconds.values()) <= time.monotonic() - began + 0.1, "nothing is told twice"
        assert list(result.seconds)[:3] == ["plan", "spark", "apply"]
        assert result.seconds["spark"] >= 1.5
        assert re.search(r"plan [^,]+, spark [^,]+, apply", str(database.job(result.job_id)))
    assert "spark" not in table.backfill("y", runner="spark").seconds
    assert "spark" not in view.refresh(ignore_checkpoints=True, runner="inline").seconds
    table.add(pa.table({"x": [1], "log": [""]}))
    plan = view.plan_refresh()
    assert estimate_by_history(plan, "spark", SparkRunner()).start_seconds == 0, "the session is up"
    monkeypatch.setattr(SparkRunner, "is_up", lambda self: False)
    assert estimate_by_history(plan, "spark", SparkRunner()).start_seconds == result.seconds["spark"]


def test_a_job_that_turns_out_slow_goes_on_on_spark(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "INLINE_BELOW_SECONDS", 1e-9)
    table, log = make_table(tmp_path, 4_000, 2_000)
    table.add_columns({"y": logged})
    result = table.backfill("y", checkpoint_size=100)
    assert list(result.seconds)[:3] == ["plan", "spark", "apply"]
    assert_doubled(table)
    assert sorted(seen(log)) == list(range(4_000))
    job = airflow_geneva.connect(tmp_path / "db").job(result.job_id)
    assert job.runner == "spark"
    assert "of 4,000 rows took" in str(job.runner_reason)


def test_a_fragment_larger_than_a_task_is_split_and_put_together_again(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 4_000, 2_000)
    table.lance.delete("x % 10 = 3")
    table.add_columns({"y": logged})
    result = table.backfill("y", task_size=300, intra_applier_concurrency=2, runner="spark")
    assert_doubled(table)
    assert result.rows_computed == 3_600
    assert sorted(seen(log)) == [x for x in range(4_000) if x % 10 != 3]


def test_a_udf_of_this_process_travels_to_the_workers(spark: object, tmp_path: Path) -> None:
    table, _ = make_table(tmp_path, 100, 50)
    factor = 2
    rows_of = expect.satisfies(lambda values: values.num_rows == 100, whole=True)

    @airflow_geneva.udf(data_type=pa.int64(), expect=[expect.between(0, 197), rows_of])
    def local(x: int) -> int:
        return x * factor

    table.add_columns({"y": local})
    version = table.version
    with pytest.raises(JobFailed, match=r"between\(0, 197\).*1 of 100 rows.*: 198"):
        table.backfill("y", udf=local, runner="spark")
    assert table.version == version
    local = airflow_geneva.udf(data_type=pa.int64(), expect=[expect.between(0, 198), rows_of])(local.func)
    result = table.backfill("y", udf=local, runner="spark")
    assert (result.rows_computed, result.rows_reused, [one.rows for one in result.checked]) == (0, 100, [100, 100])
    assert_doubled(table)


def test_a_failing_row_is_named_and_everything_before_it_is_kept(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 1_000, 1_000)
    table.add_columns({"y": (fails_at_700, ["x", "log"])})
    with pytest.raises(JobFailed, match=r"row 700 of fragment 0.*seven hundred is too much") as caught:
        table.backfill("y", task_size=1_000, runner="spark")
    assert isinstance(caught.value.__cause__, UdfError)
    assert caught.value.result is not None
    assert caught.value.result.state == "FAILED"
    (shard,) = airflow_geneva.connect(tmp_path / "db").job(caught.value.result.job_id).shards
    assert (shard.step, shard.rows_per_second) == ("failed", 0.0)
    assert "seven hundred is too much" in str(shard.error)
    # Spark did not run the failing task again.
    assert Counter(seen(log))[700] == 1
    table.alter_columns({"y": logged})
    Path(log).unlink()
    plan = table.plan_backfill("y")
    assert plan.rows_to_run == 1_000, "checkpoints of other code are not used"
    table.alter_columns({"y": fails_at_700})
    assert table.plan_backfill("y").rows_to_run == 300


def test_a_killed_python_worker_costs_at_most_its_own_interval(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 1_000, 1_000)
    table.add_columns({"y": dies_once_at_700})
    result = table.backfill("y", checkpoint_size=100, runner="spark")
    assert_doubled(table)
    assert result.rows_computed == 1_000
    twice = [x for x, runs in Counter(seen(log)).items() if runs > 1]
    assert 0 < len(twice) <= 100, "only the checkpoint that was being computed runs again"


def test_tasks_look_for_what_an_earlier_try_left_only_if_there_was_one(spark: object, endpoint: str) -> None:
    name = f"s3://{Bucket(endpoint).name}/db"
    near = airflow_geneva.connect(name, storage_options=options_of(endpoint))
    near.create_table("numbers", pa.table({"x": range(80)}), max_rows_per_file=10).add_columns({"y": double})
    with SlowProxy(endpoint, 0.0).running() as proxy, proxy.counting() as requests:
        far = airflow_geneva.connect(name, storage_options=options_of(proxy.url))
        result = far.open_table("numbers").backfill("y", runner="spark", concurrency=1, task_size=10)
    assert_doubled(near.open_table("numbers"))
    assert result.rows_computed == 80
    packs = [request for request in requests if "prefix" in str(request) and str(request).endswith("packed/")]
    assert len(packs) < 8, "there are eight groups of rows, and the process that runs them listed the packs once"
    ended = {str(request) for request in requests if re.search(r"PUT .*/progress/.*/task-", str(request))}
    assert len(ended) < 8, "a task takes one group after another"


def test_a_batch_api_gets_every_row_once_and_is_asked_until_it_has_answered(spark: object, tmp_path: Path) -> None:
    table, log = make_table(tmp_path, 2_000, 1_500)
    table.add_columns({"y": doubled_later})
    result = table.backfill("y", runner="spark", task_size=800)

    def batches() -> int:
        return len(list(Path(log).parent.glob(f"{Path(log).name}-*-asked")))

    assert (result.rows_computed, result.usage.cost) == (2_000, paid := batches())
    table.add(pa.table({"x": range(2_000, 2_700), "log": [log] * 700}))
    plan = table.plan_backfill("y")
    job = PlannedJob(table.location, record_plan(plan, table.location, store_code=True))
    job.waits = False
    (shard,) = plan.shards
    for _ in range(2):
        with pytest.raises(StillWaiting):
            job.apply_on(SparkRunner(spark), shard)
        assert sum(job.waiting(shard).batches.values()) == 700
        assert "700 rows with the service" in str(airflow_geneva.connect(tmp_path / "db").job(plan.spec.job_id))
    assert job.apply_on(SparkRunner(spark), shard)["rows_run"] == 700
    assert job.waiting(shard).batches == {}
    assert job.finish([job.commit(shard)]).usage.cost == batches() - paid
    assert_doubled(table)
    assert sorted(seen(log)) == list(range(2_700))


def test_tasks_keep_a_limit_of_the_database_and_their_calls_are_counted(spark: object, tmp_path: Path) -> None:
    table, _ = make_table(tmp_path, 1_200, 300)
    table.add_columns({"y": spark_udfs.limited})
    usage = table.backfill("y", runner="spark").usage
    assert_doubled(table)
    assert (usage.calls, usage.cost) == (12, 6.0)
    (key,) = (tmp_path / "db" / "_geneva" / "limits").iterdir()
    assert "spark-tests" in key.name
    assert airflow_geneva.connect(tmp_path / "db").table_names() == ["numbers"]


def test_progress_is_kept_in_a_file_and_ends_with_the_truth(spark: object, tmp_path: Path) -> None:
    table, _ = make_table(tmp_path, 2_000, 500)
    table.add_columns({"y": double})
    result = table.backfill("y", runner="spark")
    [status] = Path(table.uri, "_checkpoints", "jobs", result.job_id).glob("status-*-0000.json")
    progress = json.loads(status.read_text())["applying"]
    assert (progress["rows"], progress["rows_computed"], progress["ready"], progress["fragments"]) == (
        2_000,
        2_000,
        4,
        4,
    )


def test_udf_of_a_module_is_used_as_it_is_in_the_table(spark: object, tmp_path: Path) -> None:
    table, _ = make_table(tmp_path, 10, 10)
    table.add_columns({"y": double})
    assert table.definition("y").import_path == f"{spark_udfs.__name__}:double"
    table.backfill("y", udf=None, runner="spark")
    assert_doubled(table)


def test_workers_that_hold_older_code_do_not_pass_it_off_as_the_new(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    module = folder / "edited_udfs.py"
    source = (
        "from __future__ import annotations\nfrom airflow_geneva.engine.udf import udf\n\n\n"
        "@udf\ndef add(x: int) -> int:\n    return x + {}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    table, _ = make_table(tmp_path, 10, 10)
    try:
        for added in (1, 200):
            module.write_text(source.format(added) + "\n" * added)
            sys.modules.pop("edited_udfs", None)
            importlib.invalidate_caches()
            linecache.clearcache()
            add = importlib.import_module("edited_udfs").add
            if added == 1:
                table.add_columns({"y": add})
            result = table.backfill("y", udf=add, on_code_change="recompute", runner="spark")
            assert result.rows_computed == 10
            assert table.to_arrow().column("y").to_pylist() == [x + added for x in range(10)]
    finally:
        sys.modules.pop("edited_udfs", None)


@pytest.mark.parametrize("killed", ["driver", "daemon of the workers"])
def test_tasks_that_are_left_alone_keep_their_rows_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    monkeypatch.setattr(progress, "_TASK_REPORT_SECONDS", 0.1)
    if killed == "driver":
        monkeypatch.setattr(signs, "_DRIVER_LOST_SECONDS", 0.5)
    else:
        parents = iter([os.getppid()])
        monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    table, log = make_table(tmp_path, 2_000, 500)
    table.add_columns({"y": spark_udfs.slow})
    location = table.location
    plan = table.plan_backfill("y", checkpoint_size=10)
    saved = record_plan(plan, location)
    job = JobFolder.of(location.checkpoints, saved.spec.job_id)
    task_spec = spark_session.TaskSpec(
        location, saved.spec, Udfs.planned(saved.spec), job, saved.fingerprint, 0, "try", slots=1, skipped={},
        services={"OPENAI_API_KEY": "planted"},
    )  # fmt: skip
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert "planted" not in repr(task_spec)
    spark_session.DriverSigns(task_spec.progress).write()
    run = spark_session._GroupRunner(task_spec, 0, 0)
    assert pickle.loads(run(0)) == ([], [])
    assert os.environ.pop("OPENAI_API_KEY") == "planted"
    if killed == "driver":
        report = json.loads(Path(job.storage.root, "progress", "try", "task-000000.json").read_text())
        [kind, message] = report["failure"]
        assert kind == "StorageError"
        assert "no sign of life" in message
    done = len(seen(log))
    assert 0 < done < 1_000
    assert table.backfill("y", runner="inline").rows_computed == 2_000 - done
    assert_doubled(table)


def test_a_task_that_was_killed_and_finds_nothing_left_has_ended(tmp_path: Path) -> None:
    table, _ = make_table(tmp_path, 20, 10)
    table.add_columns({"y": spark_udfs.slow})
    saved = record_plan(table.plan_backfill("y"), table.location)
    job = JobFolder.of(table.location.checkpoints, saved.spec.job_id)
    udfs = Udfs.planned(saved.spec)
    task_spec = spark_session.TaskSpec(table.location, saved.spec, udfs, job, saved.fingerprint, 0, "try", 1, {})
    spark_session.DriverSigns(task_spec.progress).write()
    for group in range(len(task_spec.read_groups(0))):
        for task in (0, 1):
            task_spec.claims(0).write_json(f"{group:06}-{task:06}", {})
    task_spec.progress.write_json("task-000000.json", {"usage": {"calls": 3}, "skipped": {}})
    assert pickle.loads(spark_session._GroupRunner(task_spec, 0, 0)(0)) == ([], [])
    report = task_spec.progress.read_json("task-000000.json")
    assert report["ended"] is True, "else the driver keeps the rest of its allowance for it"
    assert report["usage"]["calls"] == 3


def test_what_is_sent_to_the_tasks_does_not_grow_with_the_rows_that_are_due(tmp_path: Path) -> None:
    sizes = []
    for rows in (1_000, 50_000):
        table, _ = make_table(tmp_path / str(rows), rows, 500)
        table.add_columns({"y": double})
        plan = table.plan_backfill("y", where="x % 3 = 1")
        saved = record_plan(plan, table.location)
        job = JobFolder.of(table.location.checkpoints, saved.spec.job_id)
        task_spec = spark_session.TaskSpec(
            table.location, saved.spec, Udfs.planned(saved.spec), job, saved.fingerprint, 0, "try", 2, {}
        )
        sizes.append(len(cloudpickle.dumps(spark_session._GroupRunner(task_spec, 0, 0))))
        groups = task_spec.read_groups(0)
        units = [unit for group in groups for unit in group]
        assert sorted((unit.task.id, row) for unit in units for row in unit.run.offsets()) == sorted(
            (task.id, row) for task in plan.shards[0].fragments for row in task.due.offsets()
        )
    assert abs(sizes[1] - sizes[0]) < 100


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("Traceback ...\nModuleNotFoundError: No module named 'pyarrow'", "python3.9 -m pip install pyarrow pylance "),
        ("Traceback ...\nModuleNotFoundError: No module named 'sklearn'", "python3.9 -m pip install scikit-learn."),
        (
            'java.io.IOException: Cannot run program "/opt/none": error=2',
            "their Python '/opt/none' is not there",
        ),
    ],
)
def test_workers_that_lack_a_package_or_a_python_are_told_apart_from_this_process(
    tmp_path: Path, error: str, says: str
) -> None:
    table, _ = make_table(tmp_path, 10, 10)
    table.add_columns({"y": double})
    session = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec="/usr/bin/python3.9"))
    explained = spark_session._explained(RuntimeError(error), table.plan_backfill("y").spec, session)  # type: ignore[arg-type]
    assert isinstance(explained, InvalidInput)
    assert says in str(explained)
