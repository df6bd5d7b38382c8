"""The engine on an S3-compatible server: checkpoints, commits and documents, with credentials that stay secret."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import lance
import pyarrow as pa
import pytest
from lance_namespace import ListTablesRequest

from airflow_geneva import RateLimit, connect, report, udf
from airflow_geneva.database import Database
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.status import read_job
from airflow_geneva.engine.lance_io.table_versions import newest_stamp, stamp_of
from airflow_geneva.engine.limits.store import BudgetTable
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.run.housekeeping import reduce_old_jobs
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import GenevaError, JobFailed
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace, label, labelled, leave_trace, triple, tripled
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.invariants import (
    assert_exact,
    assert_honest,
    assert_nothing_to_do_is_free,
    assert_right,
    assert_twice_at_most,
)
from tests.support.latency import SlowProxy, Trouble
from tests.support.object_store import KEY, SECRET, Bucket, numbers
from tests.udfs_for_tests import group_histories, views

pytestmark = pytest.mark.slow


def assert_nothing_secret(bucket: Bucket) -> None:
    for name, data in bucket.objects().items():
        for secret in (KEY, SECRET):
            assert secret.encode() not in data, f"{name} holds a credential"


def test_plain_pylance_sees_the_same_tables(db: Database, tmp_path: Path) -> None:
    for database in (db, connect(tmp_path / "local")):
        database.create_table("docs", numbers(1, 2))
        names = database.lance.list_tables(ListTablesRequest(id=[])).tables
        assert names == database.table_names() == ["docs"]
        options = dict(database.options)
        seen = lance.dataset(namespace_client=database.lance, table_id=["docs"], storage_options=options)
        assert seen.to_table() == database.open_table("docs").to_arrow()
        assert SECRET not in f"{database.lance!r} {database!r}"


def test_a_backfill_on_an_object_store_is_like_any_other(db: Database, bucket: Bucket, trace: Trace) -> None:
    assert db.table_names() == []
    table = db.create_table("docs", numbers(*range(60)), max_rows_per_file=20)
    assert db.table_names() == ["docs"]
    table.add_columns({"y": label})
    result = table.backfill("y", runner="inline", checkpoint_size=8)
    assert_exact(trace, range(60))
    assert_honest(result, table, rows_run=60)
    assert_nothing_to_do_is_free(db.open_table("docs"), "y", trace)
    table.add(numbers(500))
    table.lance.optimize.compact_files()
    table.backfill("y", where="id = 500", runner="inline")
    assert_exact(trace, [*range(60), 500])
    assert_right(table, "y", labelled)
    assert bucket.objects("/_checkpoints/")
    assert_nothing_secret(bucket)


def test_tables_and_views_are_copied_to_a_store_and_from_it(
    db: Database, bucket: Bucket, options: dict[str, str], trace: Trace, tmp_path: Path
) -> None:
    local = connect(tmp_path / "local")
    table = local.create_table("docs", numbers(*range(60)), max_rows_per_file=20)
    table.add_columns({"y": label})
    table.backfill("y", runner="inline")
    view = table.query().select({"id": "id", "p": (views.plus, ["x"])}).create_materialized_view(local, "v")
    view.refresh(runner="inline")
    up = db.copy_table(table)
    db.copy_table(view)
    far = connect(f"{bucket.uri}/other", storage_options=options)
    far.copy_table(up)
    far.copy_table(db.open_view("v"))
    back = connect(tmp_path / "back").copy_table(db.copy_table(up, "docs_2", rewrite=True), "docs")
    trace.clear()
    for copy in (up, far.open_table("docs"), back):
        assert_nothing_to_do_is_free(copy, "y", trace)
        assert_right(copy, "y", labelled)
    assert far.open_view("v").refresh(runner="inline").rows_run == 0
    assert len(trace) == 0
    assert_nothing_secret(bucket)


def test_a_run_that_failed_goes_on_from_its_checkpoints(db: Database, bucket: Bucket, trace: Trace) -> None:
    @udf(data_type=pa.int64(), version="1")
    def brittle(x: int) -> int:
        leave_trace([x])
        if trace.counts()[30] == 1 and x == 30:
            raise RuntimeError("first time")
        return tripled(x)

    table = db.create_table("docs", numbers(*range(60)), max_rows_per_file=20)
    table.add_columns({"y": brittle})
    with pytest.raises(JobFailed, match="first time"):
        table.backfill("y", udf=brittle, runner="inline", checkpoint_size=5)
    for damaged in bucket.objects("frag-1/range-0-5"):
        bucket.put(damaged, b"")
    result = table.backfill("y", udf=brittle, runner="inline")
    assert_right(table, "y", tripled)
    assert_exact(trace, [*range(60), 30, *range(20, 25)])
    assert (result.rows_reused, result.rows_computed) == (25, 35)
    assert_nothing_secret(bucket)


@pytest.mark.skipif("'GENEVA_STORE' in os.environ", reason="only the S3 server counts its requests")
@pytest.mark.parametrize("change", ["append", "update"])
def test_a_backfill_of_one_row_asks_as_much_however_many_versions_passed(
    bucket: Bucket, endpoint: str, options: dict[str, str], trace: Trace, change: str
) -> None:
    asked = []
    with SlowProxy(endpoint, 0.0).running() as proxy:
        db = connect(f"s3://{bucket.name}/db", storage_options={**options, "aws_endpoint": proxy.url})
        for versions in (2, 12):
            table = db.create_table(f"docs_{versions}", numbers(*range(20)), max_rows_per_file=10)
            table.add_columns({"y": triple})
            table.backfill("y", runner="inline")
            for turn in range(versions):
                table.lance.update_config({"turn": str(turn)})
            if change == "append":
                table.add(numbers(500))
            else:
                table.lance.update({"x": "500"}, where="id = 5")
            with proxy.counting() as requests:
                table.backfill("y", runner="inline")
            # The documents of the job are written once a second, by a clock.
            asked.append(Counter(each.method for each in requests if "/_checkpoints/jobs/" not in each.path))
            assert trace.counts()[500] == len(asked)
            assert_right(table, "y", tripled)
    assert asked[0] == asked[1]


def test_documents_are_listed_read_and_deleted(bucket: Bucket, options: dict[str, str]) -> None:
    folder = Storage.at(f"{bucket.uri}/db/docs.lance/_checkpoints", options)
    assert folder.list_files() == []
    assert folder.list_folder("jobs") == ([], [])
    folder.write_json("jobs/a/job.json", {"k": 1})
    folder.write_json("jobs/b/job.json", {"k": 2})
    assert folder.exists("jobs/a/job.json")
    assert folder.read_json("jobs/b/job.json") == {"k": 2}
    assert sorted(folder.list_files("jobs")) == ["jobs/a/job.json", "jobs/b/job.json"]
    assert folder.list_folder("jobs") == (["a", "b"], [])
    assert folder.list_folder("jobs/a") == ([], ["job.json"])
    # What the console of a store writes for an empty folder, and some stores keep of one.
    bucket.put("db/docs.lance/_checkpoints/state/", b"")
    assert (folder.list_folder("state"), folder.list_files("state")) == (([], []), [])
    folder.delete("jobs/a/job.json")
    folder.delete("jobs/a/job.json")
    assert not folder.exists("jobs/a/job.json")
    with pytest.raises(FileNotFoundError):
        folder.read_bytes("jobs/a/job.json")


def test_checkpoints_are_packed_and_old_jobs_reduced(
    bucket: Bucket, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_geneva.engine.run.housekeeping._KEPT_WHOLE", 0)
    folder = Storage.at(f"{bucket.uri}/db/docs.lance/_checkpoints", options)
    store = CheckpointStore(folder)
    keys = [f"udf-f_ver-1_col-y_where-0_uri-0_srcfiles-{'0' * 32}_frag-{at}" for at in range(3)]
    for name in keys:
        store[name] = pa.record_batch({"value": [1]})
    store.pack(keys)
    assert len(bucket.objects("/udf-")) == 1
    prefix, fresh = keys[0].rpartition("0" * 32)[0], CheckpointStore(folder)
    assert fresh.list_keys(prefix) == keys
    assert fresh[keys[2]].num_rows == 1
    # A task of another process finishes fragments just after this one has listed.
    later = [f"{keys[0]}{at}" for at in range(2)]
    CheckpointStore(folder).add({name: pa.record_batch({"value": [2]}) for name in later})
    assert fresh.list_keys(prefix) == keys
    fresh.look_again()
    assert fresh.list_keys(prefix) == sorted(keys + later)
    job = JobFolder.of(folder, "a")
    job.write_record({"kind": "backfill", "state": "PENDING", "table": "t", "column": "y", "version": 1})
    job.storage.write_json("plan-1.json", {})
    job.write_result("DONE", BackfillResult("a", "DONE").to_json())
    reduce_old_jobs(folder)
    assert sorted(name.rpartition("/")[2] for name in bucket.objects("/jobs/")) == ["job.json"]
    assert read_job(job).state == "DONE"  # type: ignore[union-attr]


def test_the_newest_version_of_a_table_is_known_without_opening_it(db: Database) -> None:
    docs = db.location("docs")
    assert newest_stamp(docs) is None
    stamps = []
    for _ in range(2):
        table = db.create_table("docs", numbers(1))
        stamps.append(newest_stamp(docs))
        table.add(numbers(2))
        stamps.append(newest_stamp(docs))
        assert stamp_of(docs, 1) == stamps[-2]
        assert stamp_of(docs, 3) is None
        db.drop_table("docs")
    assert [stamp.version for stamp in stamps if stamp] == [1, 2, 1, 2]
    assert len(set(stamps)) == 4


@pytest.mark.parametrize("call", [lambda db: db.open_table("docs"), lambda db: db.table_names()])
def test_a_store_that_does_not_answer_is_named(
    db: Database, endpoint: str, options: dict[str, str], call: Callable[[Database], Any]
) -> None:
    away = {name: value.replace(endpoint, "http://127.0.0.1:9") for name, value in options.items()}
    db = connect(db.uri, storage_options={**away, "client_max_retries": "0", "retry_timeout": "1"})
    with pytest.raises(GenevaError, match=db.uri) as caught:
        call(db)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("kind", ["column", "load", "view"])
def test_a_commit_after_which_the_credentials_end_is_said_to_have_landed(
    db: Database, endpoint: str, options: dict[str, str], kind: str
) -> None:
    """The job said that it cannot commit, and all of its values were visible."""
    committing, ended = re.compile(rf"/{'v' if kind == 'view' else 'docs'}\.lance/_versions/.*manifest"), list[str]()

    def trouble(method: str, path: str) -> Trouble:
        if ended:
            return "denied"
        if method == "PUT" and committing.search(unquote(path)):
            ended.append(path)
        return ""

    def run(db: Database, value: int) -> BackfillResult:
        if kind == "view":
            return db.open_view("v").refresh(runner="inline")
        table = db.open_table("docs")
        if kind == "column":
            return table.backfill("y", runner="inline")
        return table.load_columns(pa.table({"id": [1], "z": [value]}), on="id", runner="inline")

    table = db.create_table("docs", numbers(1, 2, 3))
    table.add_columns({"y": triple})
    table.query().select({"y": (triple, ["x"])}).create_materialized_view(db, "v")
    if kind == "load":
        run(db, 0)  # which adds the column
    with SlowProxy(endpoint, 0.0, trouble).running() as proxy:
        through = connect(db.uri, storage_options={**options, "aws_endpoint": proxy.url})
        with pytest.raises(JobFailed, match=r"is committed and its values are visible, .*403 Forbidden.* run again"):
            run(through, 1)
    again = run(db, 1)
    assert (again.state, again.rows_computed, again.rows_left) == ("DONE", 0, 0)


def test_a_table_on_a_store_can_be_planned_without_writing(db: Database, bucket: Bucket) -> None:
    table = db.create_table("docs", numbers(1, 2, 3))
    table.add_columns({"y": triple})
    before = bucket.objects()
    assert table.plan_backfill("y").rows_pending == 3
    assert bucket.objects() == before


SIZES = {"checkpoint_size": 5, "batch_size": 5, "checkpoint_interval": 0.0, "runner": "inline"}
DUE = range(20)


def do(db: Database, name: str) -> BackfillResult:
    table = db.open_table(name)
    return table.refresh(**SIZES) if isinstance(table, View) else table.backfill("y", commit_granularity=1, **SIZES)


def run_and_die(uri: str, options: dict[str, str], name: str, fault: str) -> None:
    """Do a job in this process, which is killed before it ends; called in one of its own."""
    db = connect(uri, storage_options=options)
    Fault(fault).arm()
    do(db, name)


def seldom(*faults: str) -> list[Any]:
    return [pytest.param(fault, marks=pytest.mark.soak) for fault in faults]


@pytest.mark.parametrize(
    "fault",
    [
        "checkpoint.written:3",
        "commit.after:1",
        *seldom("apply.step:3", "staged.written:2", "commit.before:2", "finish.begin:1"),
    ],
)
def test_a_backfill_that_is_killed_goes_on_where_it_was(
    db: Database, options: dict[str, str], trace: Trace, fault: str
) -> None:
    table = db.create_table("docs", numbers(*DUE), max_rows_per_file=10)
    table.add_columns({"y": triple})
    arguments = {"uri": db.uri, "options": options, "name": "docs", "fault": fault}
    died = forge().run("tests.promises.test_object_store:run_and_die", arguments, {TRACE: str(trace.path)})
    assert died == -signal.SIGKILL
    result = do(db, "docs")
    assert_honest(result, table)
    assert_right(table, "y", tripled)
    assert_twice_at_most(trace, DUE, slack=5)
    assert_nothing_to_do_is_free(table, "y", trace)


@pytest.mark.parametrize(
    "fault",
    [
        "staged.written:2",
        "swap.after:1",
        *seldom("apply.step:3", "checkpoint.written:3", "swap.before:1", "mirror.write:1", "finish.end:1"),
    ],
)
def test_a_refresh_that_is_killed_goes_on_where_it_was(
    db: Database, options: dict[str, str], trace: Trace, fault: str
) -> None:
    table = db.create_table("docs", numbers(*DUE), max_rows_per_file=10)
    query = table.query().select(["id"]).add_columns({"p": (views.plus, ["x"])})
    view = query.create_materialized_view(db, "v")
    arguments = {"uri": db.uri, "options": options, "name": "v", "fault": fault}
    died = forge().run("tests.promises.test_object_store:run_and_die", arguments, {TRACE: str(trace.path)})
    assert died == -signal.SIGKILL
    whole = [{"id": x, "p": x + 1} for x in DUE]
    assert view.to_arrow().to_pylist() in ([], whole)
    assert do(db, "v").state == "DONE"
    assert view.to_arrow().sort_by("id").to_pylist() == whole
    assert_twice_at_most(trace, DUE, slack=5)
    version, seen = view.version, len(trace)
    again = do(db, "v")
    assert (again.state, again.rows_computed, view.version, len(trace)) == ("DONE", 0, version, seen)


def test_the_budget_of_a_limit_is_not_overwritten_and_holds_no_credential(
    bucket: Bucket, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    @udf(data_type=pa.int64(), limit=RateLimit("service", requests_per_minute=60_000))
    def same(x: int) -> int:
        report(tokens=2)
        return x

    table = db.create_table("numbers", numbers(1, 2, 3))
    table.add_columns({"y": same})
    result = table.backfill("y", runner="inline")
    assert (result.rows_computed, result.usage.calls, result.usage.tokens) == (3, 3, 6)
    assert db.table_names() == ["numbers"]
    budgets = BudgetTable(table.location.limits, "service")
    # What was read long ago is not written over, and two reads take a busy machine longer than that.
    monkeypatch.setattr("airflow_geneva.engine.limits.store.own_seconds", lambda: 0.0)
    first, second = budgets.read(), budgets.read()
    assert budgets.write(first.budget, first)
    assert not budgets.write(second.budget, second)
    assert not [name for name, data in bucket.objects("_geneva/").items() if SECRET.encode() in data]


def test_groups_on_an_object_store_are_followed_without_a_secret_in_their_tables(
    db: Database, bucket: Bucket, trace: Trace
) -> None:
    table = db.create_table("docs", pa.table({"g": [0, 1, 0], "x": [1, 2, 3]}))
    columns = {"n": "count(*)", "s": "sum(x)", "m": (group_histories.largest, ["x"])}
    view = table.query().group_by("g").agg(columns).create_materialized_view(name="v")

    def refreshed() -> tuple[int, dict[int, tuple[int, int, int]]]:
        result = view.refresh(runner="inline")
        return result.rows_computed, {row.pop("g"): tuple(row.values()) for row in view.to_arrow().to_pylist()}

    assert refreshed() == (2, {0: (2, 4, 3), 1: (1, 2, 2)})
    table.lance.update({"x": "7"}, where="g = 1")
    assert refreshed() == (1, {0: (2, 4, 3), 1: (1, 7, 7)})
    assert refreshed()[0] == 0
    assert_nothing_secret(bucket)
    db.drop_table("v")
    assert not [name for name in bucket.objects() if "/v.lance/" in name]
