"""The commands about jobs, on real tables: running, killed, failed, and many."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import UDF, View, connect, udf
from airflow_geneva.engine.job.error_records import ErrorRecord, write_errors
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.meter import Stopwatch
from airflow_geneva.engine.run.background import JobFuture
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.errors import JobFailed
from airflow_geneva.table import Table
from tests.support.commands import run
from tests.support.counting import triple
from tests.udfs_for_tests import views as udfs


@pytest.fixture
def table(tmp_path: Path) -> Table:
    rows = pa.table({"x": pa.array(range(100), pa.int64())})
    made = connect(tmp_path / "db").create_table("docs", rows, max_rows_per_file=25)
    made.add_columns({"y": triple})
    return made


@pytest.fixture
def db(table: Table) -> str:
    return str(Path(table.uri).parent)


def read(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_jobs_lists_the_newest_first(table: Table, db: str) -> None:
    assert "No jobs." in run("jobs", db)
    first = table.backfill("y", runner="inline")
    second = table.backfill("y", runner="inline")
    lines = run("jobs", db).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:3] for line in lines[1:]] == [
        [second.job_id, "DONE", "docs.y"],
        [first.job_id, "DONE", "docs.y"],
    ]
    assert [job["id"] for job in read("jobs", db, "--newest", "1")] == [second.job_id]
    assert read("jobs", db, "--table", "docs")[1]["rows_computed"] == 100


def test_status_shows_a_job_and_its_shards(table: Table, db: str) -> None:
    job = table.backfill("y", runner="inline", shard_size=2)
    text = run("status", db, job.job_id)
    assert text.startswith("DONE: backfill of docs.y with triple")
    assert "100 of 100 rows due: 100 checkpointed, 100 ready to commit, 100 committed, 0 failed, 0 left" in text
    assert len(re.findall(r"shard \d .* committed +50 of 50 rows$", text, re.M)) == 2
    assert read("status", db, job.job_id)["shards"][1]["rows_committed"] == 50


def test_the_bar_shows_every_row_that_failed(table: Table, db: str) -> None:
    @udf(data_type=pa.int64(), name="triple", version="1", on_error="skip")
    def fails_once(x: int) -> int:
        return x // (x - 30)

    table.alter_columns({"y": fails_once})
    job = table.backfill("y", udf=fails_once, runner="inline")
    text = run("status", db, job.job_id)
    assert re.search(r"shard 0 ━{15}x committed +99 of 100 rows, 1 failed", text)
    assert run("jobs", db).split()[-3:] == ["100", "1", "0"]


def test_status_watches_a_job_until_it_has_ended(table: Table, db: str) -> None:
    reached, opened = threading.Event(), threading.Event()

    def gated(x: int) -> int:
        if x == 60:
            reached.set()
            opened.wait()
        return 3 * x + 1

    function = udf(data_type=pa.int64(), version="1", name="gated")(gated)
    table.alter_columns({"y": function})
    plan = table.plan_backfill("y", udf=function, shard_size=1, batch_size=5)
    future = JobFuture.start(plan, table.location, Udfs({"y": function}), "inline", Stopwatch())
    reached.wait()
    try:
        running = run("status", db, future.job_id)
        assert running.startswith("RUNNING: backfill of docs.y")
        assert re.search(r"shard 1 .*committed", running)
        assert re.search(r"shard 2 .*applying", running)
        assert re.search(r"shard 3 .*waiting +0 of 25 rows", running)
        assert [job["state"] for job in read("jobs", db)] == ["RUNNING"]
        threading.Timer(0.5, opened.set).start()
        watched = run("status", db, future.job_id, "--watch")
    finally:
        opened.set()
    assert watched.startswith("DONE")
    assert future.result().state == "DONE"
    lines = [json.loads(line) for line in run("status", db, future.job_id, "--watch", "--json").splitlines()]
    assert [line["state"] for line in lines] == ["DONE"]


def test_status_of_a_killed_job_says_how_far_it_was(table: Table, db: str) -> None:
    code = f"""
from airflow_geneva import connect
connect({db!r}).open_table("docs").backfill("y", runner="inline", shard_size=1)
"""
    environment = {**os.environ, "AIRFLOW_GENEVA_FAULT": "commit.after:2"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGKILL
    (job,) = read("jobs", db)
    assert (job["state"], job["dead"], job["open"], job["step"]) == ("RUNNING", False, True, "commit")
    text = run("status", db, job["id"])
    assert re.search(r"shard 0 .*committed +25 of 25", text)
    assert re.search(r"shard 1 .*committing +25 of 25 rows", text)
    # Nobody beats for it any more, and a day is over.
    folder = JobFolder.of(table.location.checkpoints, job["id"])
    record = folder.read("job.json")
    assert record is not None
    folder.storage.write_json("job.json", {**record, "started": 1.0})
    for name in folder.storage.list_folder()[1]:
        if alive := (folder.read(name) or {}).get("alive"):
            folder.storage.write_json(name, {**(folder.read(name) or {}), "alive": {**alive, "at": 2.0}})
    assert run("status", db, job["id"], "--watch").startswith("RUNNING (found dead): backfill")
    assert "RUNNING (dead)" in run("jobs", db)


def test_a_failed_job_shows_its_error_whatever_signs_are_in_it(table: Table, db: str) -> None:
    @udf(data_type=pa.int64(), version="1")
    def breaks(x: int) -> int:
        raise ValueError("[bold]no[/nothing] closes this")

    table.alter_columns({"y": breaks})
    with pytest.raises(Exception, match="closes this"):
        table.backfill("y", udf=breaks, runner="inline", where="x > 3", shard_size=1)
    (job,) = read("jobs", db)
    assert (job["state"], job["rows_failed"], job["rows_left"], job["where"]) == ("FAILED", 1, 95, "x > 3")
    text = run("status", db, job["id"])
    assert "[bold]no[/nothing] closes this" in text
    assert "Error: " in text
    assert "; error: " not in text
    assert re.search(r"shard 0 .*failed +0 of 21 rows", text)
    assert re.search(r"shard 1 .*left +0 of 25 rows", text)


def test_a_damaged_record_is_told_and_left_out_of_the_list(table: Table, db: str) -> None:
    whole = table.backfill("y", runner="inline").job_id
    damaged = JobFolder.of(table.location.checkpoints, "29990101T000000-x")
    damaged.storage.write_bytes("job.json", b'["of", "another", "shape"]')
    assert [job["id"] for job in read("jobs", db)] == [whole]
    for command in (["status", db, damaged.job_id], ["plan", db, "--job", damaged.job_id]):
        assert f"Error: The record of job {damaged.job_id} in {damaged.storage.root} is damaged" in run(
            *command, code=1
        )


def test_errors_prints_rows_with_their_traceback(table: Table, db: str) -> None:
    assert "No errors." in run("errors", db)
    job = table.backfill("y", runner="inline")
    trace = "Traceback\n  here"
    records = [
        ErrorRecord(job.job_id, column, "f", "v", (1 << 32) | row, row, "ValueError", "[red]bad", trace, 1, 1, at)
        for column, row, at in [("y", 5, 10.0), ("y", 6, 20.0), ("z", 7, 30.0)]
    ]
    write_errors(JobFolder.of(table.location.checkpoints, job.job_id).storage, "range-0-10", records)
    assert "No errors." in run("errors", db)
    text = run("errors", db, "--history", "--rows")
    assert text.startswith("docs: row address 4294967303 (fragment 1, offset 7): ValueError: [red]bad")
    assert text.count("    here") + text.count("  Traceback") == 6
    assert [record["row_id"] for record in read("errors", db, "--history", "--column", "y")] == [6, 5]
    assert [record["row_id"] for record in read("errors", db, "--job", job.job_id, "--newest", "1")] == [7]
    assert "2 more are not shown" in run("errors", db, "--history", "--rows", "--newest", "1")
    assert read("errors", db, "--table", "docs", "--history")[0]["table"] == "docs"
    assert "has a column 'typo'" in run("errors", db, "--column", "typo", code=1)


def test_errors_groups_what_fails_now_by_its_cause(table: Table, db: str) -> None:
    @udf(data_type=pa.int64(), name="triple", version="1", on_error="skip")
    def strict(x: int) -> int:
        if x % 40 == 7:
            raise ValueError(f"no value for {x}")
        return 1 // (x - 30) + x

    table.alter_columns({"y": strict})
    table.backfill("y", udf=strict, runner="inline")
    text = run("errors", db)
    assert text.startswith("docs: 3 rows of y: ValueError: no value for ...\n  for example row address ")
    assert "docs: 1 row of y: ZeroDivisionError: integer division or modulo by zero" in text
    assert "ValueError: no value for 47\n" in run("errors", db, "--rows")
    assert len(read("errors", db)) == 4
    table.lance.delete("x = 30")
    assert "ZeroDivisionError" not in run("errors", db)


def test_a_job_says_what_it_cost_and_who_started_it(table: Table, db: str) -> None:
    priced = udf(data_type=pa.int64(), version="7", cost=0.5)(lambda x: x)
    table.alter_columns({"y": priced})
    assert "cost" not in run("jobs", db)
    first = table.backfill("y", udf=priced, runner="inline", where="x < 40")
    second = table.backfill("y", udf=priced, runner="inline", price_per_slot_hour=3600.0)
    text = run("status", db, first.job_id)
    assert "  cost 20 (estimated 20)" in text
    assert f" by {getpass.getuser()}@{socket.gethostname()}, " in text
    found = read("status", db, second.job_id)
    spent = found["cost"] - 60 * 0.5
    assert 0 < spent < sum(found["seconds"].values()) * 16
    assert found["cost_expected"][0] <= found["cost"]
    assert [float(line.split()[-1]) for line in run("jobs", db).splitlines() if "DONE" in line][1] == 20
    assert read("jobs", db)[1]["cost"] == 20


def test_jobs_are_found_by_state_dag_and_age(table: Table, db: str) -> None:
    done = table.backfill("y", runner="inline", where="x < 3").job_id
    planned = table.backfill("y", runner="inline", where="x < 5").job_id
    folder = JobFolder.of(table.location.checkpoints, planned)
    folder.update_record(airflow={"dag_id": "hourly", "run_id": "r", "task_id": "t", "try": 1})
    record = folder.storage.read_json("job.json")
    folder.update_record(ended={**record["ended"], "state": "FAILED", "error": "no"})

    def ids(*options: str) -> list[str]:
        return [job["id"] for job in read("jobs", db, *options)]

    assert ids("--state", "failed") == ids("--dag", "hourly") == [planned]
    assert ids("--state", "DONE", "--since", "1h") == [done]
    assert ids("--since", "999999999w") == [planned, done]
    assert ids("--dag", "other") == ids("--state", "RUNNING") == []
    assert ids("--newest", "1", "--state", "DONE") == [done]
    assert [job.id for job in connect(db).jobs(since=datetime.now(timezone.utc) + timedelta(hours=1))] == []
    assert "--state LOST is unknown" in run("jobs", db, "--state", "lost", code=1)
    assert "--since week is not an age" in run("jobs", db, "--since", "week", code=1)


def test_plan_explains_and_writes_nothing(table: Table, db: str) -> None:
    text = run("plan", db, "docs", "y", "--where", "x < 50")
    assert "Backfill of docs.y with triple" in text
    assert "where x < 50" in text
    assert "100 rows: 50 pending" in text
    assert read("jobs", db) == []
    assert "with double (version" in run("plan", db, "docs", "y", "--udf", "tests.support.counting:double")


def test_plan_explains_the_refresh_of_a_view(table: Table, db: str) -> None:
    make_view(table, udfs.picky)
    before = table.version
    table.lance.delete("x = 40")
    text = run("plan", db, "--view", "picked")
    assert f"Refresh of view picked to version {before + 1} of its source" in text
    assert "99 rows: 69 pending" in text
    assert "100 rows: 70 pending" in run("plan", db, "--view", "picked", "--read-version", str(before))
    assert read("jobs", db) == []


def test_plan_of_everything_says_what_would_run_and_runs_it(table: Table, db: str) -> None:
    make_view(table, udfs.picky)
    text = run("plan", db, "--all")
    assert "Plan of " in text
    assert "docs.y: 100 rows now (100 never computed)" in text
    found = json.loads(run("plan", db, "--all", "--json", "--what-if", "docs.y=tests.support.counting:double"))
    assert [one["name"] for one in found["targets"]] == ["docs.y", "picked"]
    assert (found["changed"], found["targets"][0]["rows"]) == (["docs.y"], 100)
    assert read("jobs", db) == []
    assert "docs.y: " in run("plan", db, "--all", "--run", "--runner", "inline")
    assert [job["state"] for job in read("jobs", db)] == ["DONE", "DONE"]
    assert "docs.y: 0 rows now" in run("plan", db, "--all")
    assert "airflow-geneva plan DB --all --run" in run("plan", db, "docs", "y", "--run", code=1)
    assert "give TABLE.COLUMN=MODULE:NAME" in run("plan", db, "--all", "--what-if", "docs.y", code=1)
    assert "Leave --job and --view out" in run("plan", db, "--all", "--view", "picked", code=1)


def test_plan_says_what_cannot_be_asked_of_a_view(table: Table, db: str) -> None:
    assert "'docs' is a table and not a view" in run("plan", db, "--view", "docs", code=1)
    make_view(table, udfs.picky)
    said = run("plan", db, "--view", "picked", "--where", "x = 1", "--recompute-mixed", code=1)
    assert "--where and --recompute-mixed apply to columns" in said


def test_plan_prints_what_a_job_carries_out(table: Table, db: str) -> None:
    ran = table.backfill("y", runner="inline", shard_size=2)
    idle = table.backfill("y", runner="inline")
    text = run("plan", db, "--job", ran.job_id)
    assert "100 rows, 100 pending, 0 with nothing to do" in text
    assert text.count("50 rows in 2 fragments") == 2
    assert "Nothing to do: 100 rows up to date" in run("plan", db, "--job", idle.job_id)


def make_view(table: Table, function: UDF) -> View:
    query = table.query().where("x >= 30").select(["x"]).add_columns({"e": (function, ["x"])})
    return query.create_materialized_view(name="picked")


def test_jobs_about_a_view_name_it_and_its_source(table: Table, db: str) -> None:
    view = make_view(table, udfs.picky)
    job = view.refresh(runner="inline", shard_size=1)
    idle = view.refresh(runner="inline", src_version=1)
    table.lance.delete("x % 10 = 7")
    left = view.refresh(runner="inline")
    assert [line.split()[1:3] for line in run("jobs", db).splitlines()[1:]] == [["DONE", "picked"]] * 3
    found = read("jobs", db, "--table", "picked")[2]
    assert (found["kind"], found["table"], found["view"]) == ("refresh", "picked", "picked")
    assert (found["column"], found["source"], found["udf"], found["udf_version"]) == (None, "docs", "picky", "1")
    assert (found["rows_total"], found["rows_computed"], found["rows_failed"], found["errors"]) == (100, 63, 7, 7)
    assert found["commits"] == list(job.commits)
    text = run("status", db, job.job_id)
    assert text.startswith(f"DONE: refresh of picked from docs with picky (version 1), job {job.job_id}")
    assert "70 of 100 rows due: 63 checkpointed, 63 ready to commit, 63 committed, 7 failed, 0 left" in text
    assert f"planned on version {found['version']} of docs, 1 commit: version {job.commits[0]}" in text
    assert len(re.findall(r"shard \d .* committed .* of 2\d rows, \d failed$", text, re.MULTILINE)) == 3
    assert str(connect(db).job(job.job_id)).startswith("DONE: refresh of picked from docs")
    text = run("plan", db, "--job", job.job_id)
    assert f"docs at version {found['version']}: 100 rows, 70 pending, 30 with nothing to do" in text
    assert "shard 0: 20 rows in 1 fragment" in text
    assert "No row had to be computed: rows were only removed from the view" in run("plan", db, "--job", left.job_id)
    # Rows that failed are tried again.
    assert "7 pending" in run("plan", db, "--job", idle.job_id)


def test_errors_of_a_view_name_its_column_and_the_rows_of_its_source(table: Table, db: str) -> None:
    view = make_view(table, udfs.picky)
    job = view.refresh(runner="inline")
    rows = table.lance.to_table(columns=["x"], filter="x >= 30 AND x % 10 = 7", with_row_address=True).to_pylist()
    assert view.get_failed_row_addresses(job.job_id) == sorted(row["_rowaddr"] for row in rows)
    first = f"picked: row address {2 << 32 | 7} of source docs (fragment 2, offset 7): ValueError: not 57"
    text = run("errors", db, "--job", job.job_id, "--column", "e", "--rows")
    assert first in text
    assert text.count("column e, UDF picky (version 1), attempt 1") == len(rows) == 7
    assert "No errors." in run("errors", db, "--table", "docs")
    assert {record["source"] for record in read("errors", db)} == {"docs"}
    table.add([{"x": 100}])
    assert "101 rows: 8 pending" in run("plan", db, "--view", "picked")
    assert "100 rows: 7 pending" in run("plan", db, "--view", "picked", "--errors-only")
    again = read("refresh", db, "picked", "--errors-only", "--runner", "inline")
    assert (again["rows_failed"], again["rows_computed"], again["rows_run"]) == (7, 0, 7)


def test_a_failed_refresh_says_which_row_of_the_source_which_column_failed_on(table: Table, db: str) -> None:
    view = make_view(table, udfs.strict)
    with pytest.raises(JobFailed, match=r"Computing picked\.e failed at row 7 of fragment 1 of its source"):
        view.refresh(runner="inline", shard_size=1)
    (job,) = read("jobs", db)
    assert (job["state"], job["rows_failed"], job["rows_left"], job["view"]) == ("FAILED", 1, 69, "picked")
    text = run("status", db, job["id"])
    assert text.startswith("FAILED: refresh of picked from docs with picky (version 2)")
    assert "Computing picked.e failed" in text
    assert "rows/s" not in text
    (record,) = read("errors", db)
    assert (record["column"], record["udf"], record["udf_version"]) == ("e", "picky", "2")
    assert (record["row_address"], record["source"], record["rule"]) == (1 << 32 | 7, "docs", -1)
    assert "shard 0: 20 rows in 1 fragment" in run("plan", db, "--job", job["id"])
    assert "Call airflow-geneva refresh DB VIEW." in run("plan", db, "picked", "e", code=1)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_mistyped_path_is_an_error_that_suggests_the_database(table: Table, db: str) -> None:
    wrong = db[:-1]
    assert f"Error: There is no database {wrong}: no such folder. Did you mean {db}?" in run("jobs", wrong, code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs"], "Error: Expected DB, got 0 arguments"),
        (["jobs", "{db}", "more"], "Error: Expected DB, got 2 arguments"),
        (["jobs", "{db}/nowhere"], "no such folder"),
        (["jobs", "{db}", "--table", "nope"], "There is no table 'nope'"),
        (["status", "{db}"], "Error: Expected DB JOB, got 1 argument"),
        (["status", "{db}", "20200101-x"], "There is no job '20200101-x'"),
        (["status", "{db}", "../../x"], "is not a job id"),
        (["errors", "{db}", "--job", "x"], "There is no job 'x'"),
        (["plan", "{db}", "docs", "nope"], "Column 'nope' is not defined in table 'docs'"),
        (["plan", "{db}", "docs", "y", "--where", "nope > 1"], "nope"),
        (["plan", "{db}", "--job", "x"], "There is no job 'x'"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_exit_code_1(
    table: Table, db: str, arguments: list[str], message: str
) -> None:
    assert message in run(*(argument.format(db=db) for argument in arguments), code=1)


def test_credentials_come_from_the_environment_and_never_show(
    table: Table, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_GENEVA_STORAGE_OPTIONS", '{"aws_secret_access_key": "hunter2"}')
    job = table.backfill("y", runner="inline")
    assert "hunter2" not in run("status", db, job.job_id) + run("jobs", db) + run("plan", db, "--job", job.job_id)
    monkeypatch.setenv("AIRFLOW_GENEVA_STORAGE_OPTIONS", "hunter2")
    message = run("jobs", db, code=1)
    assert "not JSON" in message
    assert "hunter2" not in message


def test_an_airflow_connection_names_the_database(table: Table, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = table.backfill("y", runner="inline")
    connection = {"conn_type": "lance", "host": db, "extra": {"storage_options": {"aws_region": "eu-west-1"}}}
    monkeypatch.setenv("AIRFLOW_CONN_MY_LANCE", json.dumps(connection))
    assert [found["id"] for found in read("jobs", "--conn-id", "my_lance")] == [job.job_id]
    assert read("status", job.job_id, "--conn-id", "my_lance")["id"] == job.job_id
    assert read("status", db, job.job_id, "--conn-id", "my_lance")["id"] == job.job_id


@pytest.mark.airflow
def test_a_connection_in_airflows_database_names_the_database(
    table: Table, db: str, store_connection: Callable[..., None]
) -> None:
    job = table.backfill("y", runner="inline")
    store_connection("stored_lance", conn_type="lance", host=db)
    assert [found["id"] for found in read("jobs", "--conn-id", "stored_lance")] == [job.job_id]
    assert "Airflow connection 'nobody' does not exist" in run("jobs", "--conn-id", "nobody", code=1)


@pytest.mark.parametrize("field", ["column", "table", "view", "udf", "source"])
def test_the_record_of_a_job_cannot_steer_the_terminal(table: Table, db: str, field: str) -> None:
    job = table.backfill("y", runner="inline")
    record = Path(table.uri, "_checkpoints", "jobs", job.job_id, "job.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), field: "\x1b[2J\x07\rall is well\x9b"}))
    for command in (["jobs", db], ["status", db, job.job_id], ["plan", db, "--job", job.job_id]):
        code = 1 if command[0] == "plan" and field == "table" else 0
        assert not set(run(*command, code=code)) & set("\x1b\x07\r\x9b")


def test_messages_of_udfs_cannot_steer_the_terminal(table: Table, db: str) -> None:
    def hostile(x: int) -> int:
        raise ValueError("\x1b[2J\x07\rall is well\x9b")

    function = udf(data_type=pa.int64(), name="triple", version="1")(hostile)
    with pytest.raises(JobFailed) as failed:
        table.backfill("y", udf=function, runner="inline")
    assert failed.value.result is not None
    for command in (["errors", db], ["status", db, failed.value.result.job_id]):
        told = run(*command)
        assert r"\x1b[2J\x07\x0dall is well\x9b" in told
        assert not set(told) & set("\x1b\x07\r\x9b")
