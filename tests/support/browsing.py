"""Shared by tests of the pages: requests as a given user, and checks that every page must pass."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from airflow.api_fastapi.app import create_auth_manager, purge_cached_app
from fastapi.testclient import TestClient

from airflow_geneva import Database, Skip, Table, connect, udf
from airflow_geneva.engine.job.folder import JobFolder, plan_name
from airflow_geneva.links.job import JobLink
from airflow_geneva.pages import access
from airflow_geneva.pages.app import app
from tests.support.counting import triple
from tests.support.driving import Driver
from tests.support.rights import Rights

SECRET = "a-secret-access-key-of-somebody"
Get = Callable[..., Any]


def browsing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Get]:
    """Requests a page as a given user and returns the answer; every returned page is checked."""
    monkeypatch.setenv("AIRFLOW__CORE__AUTH_MANAGER", "tests.support.rights.Rights")
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)
    monkeypatch.setattr(Rights, "dags", {})
    monkeypatch.setattr(Rights, "connections", {})
    monkeypatch.setattr(Rights, "triggers", {})
    monkeypatch.setattr(Rights, "xcoms", {})
    monkeypatch.setattr(access, "_KEPT_SECONDS", 1e-9)
    manager = create_auth_manager()
    client = TestClient(app, raise_server_exceptions=True, root_path="/geneva")

    def get(path: str, user: str | None = "reader", status: int = 200) -> str:
        headers = {} if user is None else {"Authorization": f"Bearer {Rights.token(user, manager)}"}
        answer = client.get(path, headers=headers)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text[:2000]}"
        assert_harmless(answer)
        return str(answer.text)

    yield get
    purge_cached_app()


def assert_harmless(answer: Any) -> None:
    """Check that a page has no inline script or style, no foreign resources and no secret, and has security headers."""
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert SECRET not in answer.text
    if "html" in answer.headers.get("content-type", ""):
        assert answer.headers["cache-control"] == "no-store"
        tags = " ".join(re.findall(r"<[^>]*>", answer.text))
        assert not re.search(r"<script(?! src=\"/geneva/static/)|<style|\sstyle=|\son[a-z]+=|javascript:", tags)
        # The only links to other sites are those to Spark's UI, which open outside of Airflow's frame.
        own = re.sub(r'href="http://[^"]*" target="_blank" rel="noopener noreferrer"', "", answer.text)
        assert not re.search(r"(?:src|href|data-live)=\"(?![/#])", own)


def shelf_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """The database of the connection `shelf`, which `reader` may read."""
    made = connect(path)
    Path(made.uri).mkdir()
    options = {"aws_secret_access_key": SECRET}
    connection = {"conn_type": "lance", "host": made.uri, "extra": {"storage_options": options}}
    monkeypatch.setenv("AIRFLOW_CONN_SHELF", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW_CONN_PG", json.dumps({"conn_type": "postgres", "host": made.uri}))
    return made


def with_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the connection `shelf` another key: what was counted with its former ones is not shown any more."""
    connection = json.loads(os.environ["AIRFLOW_CONN_SHELF"])
    connection["extra"]["storage_options"]["aws_secret_access_key"] += "x"
    monkeypatch.setenv("AIRFLOW_CONN_SHELF", json.dumps(connection))


def make_table(database: Database, name: str = "docs", rows: int = 100) -> Table:
    data = pa.table({"x": pa.array(range(rows), pa.int64())})
    made = database.create_table(name, data, max_rows_per_file=25)
    made.add_columns({"y": triple})
    return made


RUNNING = {
    "kind": "backfill", "table": "docs", "column": "y", "udf": "triple", "udf_version": "v", "version": 1,
    "rows_total": 2000, "rows_pending": 1000, "shards": 2, "reasons": {"never computed": 1000, "computed": 1000},
}  # fmt: skip
PRINT = "f" * 64


def running_job(table: Table, started: float) -> str:
    folder = JobFolder.of(table.location.checkpoints, "20260101T000000-running")
    size = {"rows": 500, "fragments": 5, "staged": 0, "rows_staged": 0, "rows_held": 0}
    folder.storage.write_json(plan_name(PRINT), {"shards": [size, size]})
    folder.write_record({**RUNNING, "started": started}, PRINT)
    progress = {
        "at": started, "samples": [[0.0, 0], [5.0, 100], [10.0, 300]],
        "rows": 500, "rows_computed": 280, "rows_checkpointed": 280, "rows_ready": 200, "rows_committed": 0,
        "rows_failed": 20, "rows_reused": 0, "rows_skipped": 0, "rows_left": 0, "fragments": 5, "ready": 2,
        "committed": 0, "seconds": 10.0, "versions": [],
    }  # fmt: skip
    folder.update_shard(PRINT, 0, applying=progress)
    committing = {
        **progress, "ready": 5, "rows_checkpointed": 480, "rows_ready": 480, "committed": 1, "rows_committed": 100,
        "versions": [2],
    }  # fmt: skip
    folder.update_shard(PRINT, 1, committing=committing)
    folder.update_shard(PRINT, 0, alive={"at": started, "step": "apply"})
    return folder.job_id


@udf(on_error=[Skip(Exception)])
def fail_deeply(x: int) -> int:
    """Fail with a long traceback."""

    def even(depth: int) -> int:
        return odd(depth - 1) if depth else int("<not a number>")

    def odd(depth: int) -> int:
        return even(depth - 1)

    return even(200)


def make_large(database: Database, jobs: int = 500, columns: int = 300, nodes: int = 40) -> list[str]:
    """Make a database with many jobs, a table of many columns, and a graph of many nodes; return its pages.

    Half of the nodes are computed columns of the table, and half are views of it.
    """
    computed, views = (nodes - 1) // 2, nodes - 1 - (nodes - 1) // 2
    numbers = pa.array(range(100), pa.int64())
    plain = {f"a_measurement_{number}": numbers for number in range(columns - computed)}
    table = database.create_table("docs", pa.table(plain))
    names = [f"a_score_{number}" for number in range(computed)]
    table.add_columns({name: (triple, ["a_measurement_0"]) for name in names})
    for number in range(views):
        query = table.query().select([names[number % computed]])
        query.create_materialized_view(database, f"a_view_{number}")
    table.add_columns({"a_failure": (fail_deeply, ["a_measurement_0"])})
    failed = table.backfill("a_failure", runner="inline")
    done = JobFolder.of(table.location.checkpoints, table.backfill(names[0], runner="inline").job_id)
    for number in range(jobs - 1):
        copied = done.storage.path("").rstrip("/").replace(done.job_id, f"20260101T{number:012}-0123456789")
        shutil.copytree(done.storage.path(""), copied)
        JobFolder.of(table.location.checkpoints, Path(copied).name).update_record(column=names[number % computed])
    shelf, home = "/databases/shelf", "/databases/shelf/tables/docs"
    parts = ("", "/standing", "/history", "/versions")
    of_database = [f"{shelf}{part}" for part in ("", "/live", "/graph", "/graph/live", "/plan", "/plan/live")]
    of_tables = [f"{place}{part}" for place in (home, f"{shelf}/tables/a_view_0") for part in parts]
    return [
        "/",
        f"{shelf}/counts",
        *of_database,
        *of_tables,
        of_job("docs", done.job_id),
        of_job("docs", failed.job_id),
    ]


def of_job(table: str, job_id: str) -> str:
    return f"/databases/shelf/tables/{table}/jobs/{job_id}"


def whole(get: Get, path: str) -> str:
    """Return a page, or a part of one, once everything in it is counted."""
    until = time.monotonic() + 120
    while ">counting<" in (page := get(path)) or "Reading the tables" in page:
        assert time.monotonic() < until
    return page


def cells(html: str) -> list[list[str]]:
    """Return the texts of a page's tables, row by row."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html, re.DOTALL)
    return [[text_of(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)] for row in rows]


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def ids_of(html: str) -> list[str]:
    return re.findall(r'<td class="id"><a href="[^"]*">([^<]*)</a>', html)


def of_task(run: Driver, task_id: str, map_index: int = -1) -> str:
    key = SimpleNamespace(dag_id=run.dag.dag_id, run_id=run.run_id, task_id=task_id, map_index=map_index)
    return JobLink().get_link(run.dag.task_dict[task_id], ti_key=key).removeprefix("/geneva")
