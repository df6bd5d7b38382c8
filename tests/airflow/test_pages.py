"""The pages in the Airflow UI: closed, escaped, and right."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pytest
from airflow import plugins_manager
from airflow.api_fastapi.app import create_auth_manager
from airflow.models.dag import DagModel
from airflow.models.log import Log
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Asset
from airflow.utils.session import create_session
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sqlalchemy import select

from airflow_geneva import Database, Table, connect, udf
from airflow_geneva.assets import lance_asset, watched_lance_asset
from airflow_geneva.engine.api import Freshness
from airflow_geneva.engine.counts import StoreRequests
from airflow_geneva.engine.display import format_time
from airflow_geneva.engine.job.error_records import ErrorRecord, write_errors
from airflow_geneva.engine.job.folder import RECORD, JobFolder, plan_name
from airflow_geneva.engine.job.status import Job, JobList
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.udf.definition import UDF_KEY
from airflow_geneva.errors import JobFailed, UdfError
from airflow_geneva.operators import _airflow_internals as internals
from airflow_geneva.pages import databases, documents, tables
from airflow_geneva.pages.app import app
from airflow_geneva.pages.databases import DatabaseDetails, TableCard
from airflow_geneva.pages.graph import Key, Node, lay_out
from airflow_geneva.pages.jobs import JobsPage
from airflow_geneva.pages.namespace import NamespaceRoute
from airflow_geneva.pages.rendering import environment
from airflow_geneva.pages.tables import ColumnRow, CountCache, FreshnessView
from airflow_geneva.pages.visible import Owner, VisibleDatabase
from airflow_geneva.task_groups import RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.browsing import (
    PRINT,
    SECRET,
    Get,
    assert_harmless,
    cells,
    ids_of,
    make_large,
    make_table,
    of_job,
    of_task,
    running_job,
    text_of,
    whole,
    with_another_key,
)
from tests.support.counting import double, triple
from tests.support.driving import Driver
from tests.support.hostile import DEEP, edit_definition, write_definition
from tests.support.rights import Rights
from tests.support.within_reader import Everybody

pytestmark = pytest.mark.airflow

# Who is let in


def filled(route: APIRoute) -> str:
    query = "?dag_id=d&run_id=r&task_id=t&uri=lance://shelf/docs&first=y&second=z"
    return re.sub(r"\{[a-z_:]+\}", "pages.css", route.path) + query


@pytest.mark.core
def test_every_route_asks_who_is_there(browse: Get) -> None:
    programs = [route for route in app.routes if isinstance(route, NamespaceRoute)]
    pages = [route for route in app.routes if type(route) is APIRoute]
    assert len(programs) + len(pages) == len(app.routes)
    paths = [filled(route) for route in pages if route.methods == {"GET"}]
    posts = [filled(route) for route in pages if route.methods == {"POST"}]
    assert (len(paths), len(posts), len(programs)) == (27, 2, 12)
    client = TestClient(app)
    for route in programs:
        for method in route.methods:
            for headers in ({}, {"Cookie": "_token=x"}, {"Authorization": "Bearer x.y.z"}):
                answer = client.request(method, filled(route), headers=headers, json={})
                assert answer.status_code in (401, 403), (route.path, headers)
                assert "shelf" not in answer.text
    for path in (*paths, *posts):
        for headers in ({}, {"Cookie": "_token=x"}, {"Authorization": "Basic eDp4"}):
            answer = client.request("POST" if path in posts else "GET", path, headers=headers)
            assert answer.status_code in (401, 403), (path, headers)
            assert "shelf" not in answer.text
    for path in paths:
        assert client.get(path, headers={"Authorization": "Bearer x.y.z"}).status_code == 403
        for method in ("POST", "PUT", "DELETE", "HEAD"):
            assert client.request(method, path).status_code == 405


def test_every_answer_has_the_headers_of_pages_and_is_not_kept(browse: Get, database: Database) -> None:
    make_table(database)
    Rights.give("reader", connections=["shelf"])
    known = {"Authorization": f"Bearer {Rights.token('reader', create_auth_manager())}"}
    client = TestClient(app, raise_server_exceptions=False, root_path="/geneva")
    statuses = set[int]()
    for route in app.routes:
        assert isinstance(route, APIRoute)
        path = filled(route).replace("bases/pages.css", "bases/shelf").replace("tables/pages.css", "tables/docs")
        for method in (*route.methods, "PATCH"):
            for headers in ({}, known):
                answer = client.request(method, path, headers=headers, follow_redirects=False)
                statuses.add(answer.status_code)
                assert_harmless(answer)
                style = answer.status_code == 200 and path.startswith("/static/")
                kept = answer.headers.get("cache-control")
                assert kept == ("private, max-age=86400" if style else "no-store"), (method, path, answer.status_code)
    assert statuses >= {200, 303, 401, 404, 405}


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/redoc", "/static/../app.py", "/static/base.html"])
def test_there_is_nothing_beside_the_routes(browse: Get, path: str) -> None:
    assert TestClient(app).get(path).status_code in (401, 404)
    browse(path, status=404)


@pytest.mark.core
def test_airflow_loads_the_plugin_and_serves_its_pages_to_users_only(
    browse: Get, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.api_fastapi.app import create_app
    from airflow.api_fastapi.core_api.datamodels.plugins import ExternalViewResponse

    (plugin,) = (found for found in plugins_manager.get_plugin_info(["external_views"]) if found["name"] == "geneva")
    routes = {view["url_route"]: view["destination"] for view in plugin["external_views"]}
    assert routes == {
        "geneva": "nav", "geneva_dag": "dag", "geneva_run": "dag_run", "geneva_job": "task_instance",
        **({"geneva_asset": "asset"} if internals.has_asset_pages() else {}),
    }  # fmt: skip
    for view in plugin["external_views"]:
        ExternalViewResponse.model_validate(view)  # Airflow leaves out a plugin with a view that is not valid
    assert {view["icon"] for view in plugin["external_views"]} == {"/geneva/static/icon.svg"}
    monkeypatch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS", "False")
    Rights.give("reader", connections=["shelf"])
    token = Rights.token("reader", create_auth_manager())
    client = TestClient(create_app(apps="core"))
    assert client.get("/geneva/").status_code == 401
    client.cookies.set("_token", token)
    answer = client.get("/geneva/")
    assert answer.status_code == 200
    assert 'href="/geneva/databases/shelf"' in answer.text
    assert client.get("/geneva/databases/shelf").status_code == 200
    assert client.get("/geneva/static/icon.svg").headers["content-type"] == "image/svg+xml"
    assert client.get("/geneva/static/pages.js").headers["content-type"].startswith("text/javascript")


def test_loading_the_plugin_loads_neither_the_pages_nor_lance() -> None:
    code = "import sys, airflow_geneva.plugin; print([m for m in ('fastapi', 'lance', 'pyarrow') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(not internals.has_asset_pages(), reason="came with Airflow 3.4")
def test_tabs_stand_on_assets_and_tasks_of_this_package_only() -> None:
    external_views, _ = plugins_manager._get_ui_plugins()
    scopes = {view["url_route"]: view.get("applies_to") for view in external_views if "geneva" in view["href"]}
    assert scopes["geneva_asset"] == {"group": [lance_asset("docs").group]}
    assert lance_asset("docs").group == watched_lance_asset("docs").group != Asset("docs").group
    [(path, marks)] = scopes["geneva_job"].items()
    assert path == "task.template_fields"
    with DAG("scopes") as dag:
        RefreshTaskGroup(view="long_docs", approve_above={"rows": 1})
        SparkSubmitOperator(task_id="other", application="x.py")
    shown = {task.task_id for task in dag.tasks if {*task.template_fields} & {*marks}}
    assert shown == set(dag.task_dict) - {"other"}
    assert [scopes[route] for route in ("geneva", "geneva_dag", "geneva_run")] == [None, None, None]


@pytest.mark.parametrize("uri", ["lance://shelf/docs", "lance://shelf/docs?changed_rows=True&watch=new_rows"])
def test_the_tab_of_an_asset_leads_to_its_table(browse: Get, database: Database, uri: str) -> None:
    Rights.give("reader", connections=["shelf"])
    make_table(database)
    assert "docs" in browse(f"/asset?{urlencode({'uri': uri})}")
    for other in ("s3://bucket/docs", "lance://", "lance://shelf", "//elsewhere.org/docs", "lance://../x"):
        browse(f"/asset?{urlencode({'uri': other})}", status=404)
    browse(f"/asset?{urlencode({'uri': uri})}", user="nobody", status=404)


# What cannot get out, and what cannot get in


@pytest.mark.parametrize(
    "path",
    [
        "/databases/shelf/tables/%2e%2e",
        "/databases/shelf/tables/..%2Fother",
        "/databases/shelf/tables/.hidden",
        "/databases/shelf/tables/docs%00",
        "/databases/shelf/tables/docs/jobs/%2e%2e",
        "/databases/shelf/tables/docs/jobs/..%2F..%2Fjobs",
        "/databases/shelf/tables/docs/jobs/.x",
        "/databases/shelf/tables/..%5Cdocs/jobs/x",
        "/databases/shelf?before=../../x",
        "/databases/shelf/tables/docs/jobs/20260101T000000-none",
    ],
)
def test_names_cannot_leave_their_folder(reader: Get, database: Database, path: str) -> None:
    make_table(database)
    make_table(connect(Path(database.uri).parent / "other"))
    reader(path, status=404)


@pytest.mark.core
def test_what_a_udf_says_is_text(reader: Get, database: Database) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;"

    @udf(data_type=pa.int64(), version="1")
    def shouts(x: int) -> int:
        raise ValueError(f"{hostile} with {SECRET}")

    table = make_table(database)
    table.lance.add_columns({"path": f"concat('<b>key</b> {SECRET} ', x)"})
    table.set_key("path")
    table.alter_columns({"y": shouts})
    with pytest.raises(JobFailed) as failed:
        table.backfill("y", udf=shouts, runner="inline", where="x < 50 and x > 0 or x = 3")
    assert failed.value.result is not None
    page = reader(of_job("docs", failed.value.result.job_id))
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert hostile in unescape(page)
    assert "with ***" in page
    assert "<td>&lt;b&gt;key&lt;/b&gt; *** 1</td>" in page
    assert "x &lt; 50 and x &gt; 0" in page


def test_a_secret_is_masked_before_a_text_is_cut(reader: Get, database: Database) -> None:
    table = make_table(database)
    job_id = table.backfill("y", runner="inline").job_id
    folder = JobFolder.of(table.location.checkpoints, job_id)
    message = "x" * (300 - len(SECRET) // 2) + SECRET
    error = ErrorRecord(job_id, "y", "f", "v", 1, 1, "ValueError", message, "Traceback", 1, 1, 1.0)
    write_errors(folder.storage, "range-0", [error])
    record = folder.storage.read_json("job.json")
    folder.storage.write_json("job.json", {**record, "ended": {**record["ended"], "errors": 1}})
    assert "a-secret" not in reader(of_job("docs", job_id))


def test_a_table_of_another_making_is_text_too(reader: Get, database: Database) -> None:
    name = "<b>bold</b>"
    database.create_table("odd", pa.table({name: [1], "y": [2]}))
    database.open_table("odd").lance.update_field_metadata({"y": {UDF_KEY: "{<b>no definition"}})
    page = reader("/databases/shelf/tables/odd") + reader("/databases/shelf/tables/odd/standing")
    assert "<b>" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "not a stored UDF definition" in page


def hostile_name(view: Table) -> None:
    edit_definition(view, columns=[{"name": 7, "kind": "column", "type": "int64", "expression": "x"}])


def hostile_depth(view: Table) -> None:
    write_definition(view, DEEP)


def hostile_time(view: Table) -> None:
    """A job that ended long after the last day of any calendar."""
    [record] = Path(view.uri, "_checkpoints", "jobs").glob("*/job.json")
    written = json.loads(record.read_text())
    record.write_text(json.dumps({**written, "ended": {**written["ended"], "ended": 1e300}}))


def hostile_text(view: Table) -> None:
    """Half a pair of surrogates, which no answer can be encoded with."""
    [record] = Path(view.uri, "_checkpoints", "jobs").glob("*/job.json")
    record.write_text(record.read_text().replace('"udf_version":"', '"udf_version":"\\ud800'))


@pytest.mark.parametrize("damage", [hostile_name, hostile_depth, hostile_time, hostile_text])
def test_what_somebody_writes_into_one_view_breaks_the_pages_of_no_other_table(
    reader: Get, database: Database, damage: Callable[[Table], None]
) -> None:
    table = make_table(database)
    good = table.query().select(["x"]).create_materialized_view(database, "good")
    view = table.query().select(["x"]).create_materialized_view(database, "v")
    job_id = view.refresh(runner="inline").job_id
    damage(view)
    for path in ("/databases/shelf", "/databases/shelf/graph", "/databases/shelf/tables/docs"):
        assert "docs" in reader(path)
    standing = reader("/databases/shelf/tables/docs/standing")
    assert good.name in text_of(standing)
    assert "never computed" in text_of(standing)
    reader("/databases/shelf/tables/docs/history")
    for part in ("", "/standing", "/history"):
        reader(f"/databases/shelf/tables/v{part}")
    if damage in (hostile_time, hostile_text):
        assert "Damaged record" in reader(of_job("v", job_id), status=404)


def test_an_error_has_the_headers_of_every_page(
    reader: Get, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no word of this")

    monkeypatch.setattr("airflow_geneva.pages.app.list_databases", fail)
    client = TestClient(app, raise_server_exceptions=False, root_path="/geneva")
    token = Rights.token("reader", create_auth_manager())
    answer = client.get("/", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 500
    assert_harmless(answer)
    assert "no word" not in answer.text


# What is shown


def test_a_database_with_nothing_in_it(reader: Get, database: Database) -> None:
    page = reader("/databases/shelf")
    assert "No tables." in page
    assert "No jobs." in page
    assert "There is no Lance database that you may see" in reader("/", user="nobody")


def test_a_database_that_the_server_does_not_reach(reader: Get, database: Database) -> None:
    Path(database.uri).rmdir()
    assert "on the machine of the API server" in reader("/databases/shelf")


@pytest.mark.core
def test_one_job(reader: Get, database: Database) -> None:
    table = make_table(database)
    job = table.backfill("y", runner="inline", shard_size=2, where="x < 60")
    page = reader("/databases/shelf")
    assert ids_of(page) == [job.job_id]
    assert cells(page)[1][:2] == ["DONE", "docs.y"]
    page = reader(of_job("docs", job.job_id))
    assert "data-live" not in page
    assert ["60", "never computed"] in cells(page)
    assert re.search(r'<rect class="committed" x="0.0" y="0" width="100.0"', page)
    assert [row[2:6] for row in cells(page) if row[1:2] == ["committed"]] == [
        ["", "50 committed", "2 of 2", ""],
        ["", "10 committed", "1 of 1", ""],
    ]
    assert "60 committed of 60 due rows 60 computed by this job, 0 reused 60 run" in text_of(page)
    assert re.search(r"Average speed [\d,]+ rows/s a shard", text_of(page))
    assert "Commits" in text_of(page)
    assert "where <code>x &lt; 60</code>" in page
    assert reader(f"{of_job('docs', job.job_id)}/live").startswith('<div id="live">')
    assert "to the store" not in page
    folder = JobFolder.of(table.location.checkpoints, job.job_id)
    folder.write_result("DONE", replace(job, store_requests=StoreRequests(reads=1_200, writes=1)).to_json())
    page = reader(of_job("docs", job.job_id))
    assert "1,201 requests to the store: 1,200 reads, 1 write" in text_of(page)


def test_programs_read_what_pages_show(reader: Get, database: Database) -> None:
    table = make_table(database)
    job = table.backfill("y", runner="inline", where="x < 60")
    found = json.loads(reader(f"{of_job('docs', job.job_id)}.json"))
    assert (found["version"], found["job"]["id"], found["job"]["rows_committed"]) == (1, job.job_id, 60)
    for _ in range(50):
        found = json.loads(reader("/databases/shelf/tables/docs.json"))
        [column] = [one for one in found["columns"] if one["name"] == "y"]
        if column["state"]:
            break
    assert (found["rows"], found["table_version"], found["is_view"]) == (table.count_rows(), table.version, False)
    assert (column["state"], column["rows"]["pending"]) == ("stale", table.count_rows() - 60)
    assert column["job"]["id"] == job.job_id
    found = json.loads(reader("/databases/shelf.json"))
    assert [one["name"] for one in found["tables"]] == ["docs"]
    unknown = {"rows": None, "is_view": None, "pending": None, "failed": None, "state": "counting"}
    document = documents.database_document(
        "shelf", DatabaseDetails((TableCard("docs", counting=True),), {}, (), JobsPage((), None))
    )
    assert document["tables"] == [{"name": "docs", "source": None, **unknown}]
    assert [one["id"] for one in found["jobs"]] == [job.job_id]


def test_programs_get_no_more_than_pages_show(reader: Get, database: Database) -> None:
    job = make_table(database).backfill("y", runner="inline")
    for path in ("/databases/shelf.json", "/databases/shelf/tables/docs.json", f"{of_job('docs', job.job_id)}.json"):
        said = reader(path, user="stranger", status=404)
        assert json.loads(said) == {"version": 1, "status": 404, "error": None}
    assert json.loads(reader("/databases/shelf/tables/none.json", status=404))["status"] == 404


def test_more_jobs_than_a_page_holds(reader: Get, database: Database) -> None:
    table = make_table(database)
    ids = [f"20260101T{number:06}-x" for number in range(230)]
    for job_id in ids:
        record = {"kind": "backfill", "table": "docs", "column": "y", "version": 1, "started": 1.0}
        JobFolder.of(table.location.checkpoints, job_id).write_record(record)
    path: str | None = "/databases/shelf"
    seen: list[list[str]] = []
    while path:
        page = reader(path)
        seen.append(ids_of(page))
        older = re.search(r'href="/geneva([^"]*)">Older<', page)
        path = unescape(older[1]) if older else None
    assert [len(ids) for ids in seen] == [100, 100, 30]
    assert [job_id for listed in seen for job_id in listed] == ids[::-1]


def test_jobs_that_are_not_for_the_viewer_do_not_cut_a_page_short(reader: Get, database: Database) -> None:
    table = make_table(database)
    for number in range(1300):
        hidden = {"airflow": {"dag_id": "d", "run_id": "r", "task_id": "t", "try": 1}} if number >= 50 else {}
        record = {"kind": "backfill", "table": "docs", "column": "y", "version": 1, "started": 1.0, **hidden}
        JobFolder.of(table.location.checkpoints, f"20260101T{number:06}-x").write_record(record)
    page = reader("/databases/shelf")
    assert ids_of(page) == []
    # A thousand were looked at; the rest is a click away.
    assert "before=20260101T000300-x" in page
    assert len(ids_of(reader("/databases/shelf?before=20260101T000300-x"))) == 50


def test_a_running_job_moves(reader: Get, database: Database) -> None:
    table = make_table(database)
    job_id = running_job(table, time.time())
    page = reader(of_job("docs", job_id))
    assert ">RUNNING<" in page
    assert re.search(r"40 rows/s, about \d s left", text_of(page))
    assert re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="0" width="([\d.]+)"', page)[:3] == [
        ("committed", "0.0", "10.0"), ("ready", "10.0", "58.0"), ("checkpointed", "68.0", "8.0"),
    ]  # fmt: skip
    assert '<rect class="failed" x="76.0" y="0" width="4.0"' in page
    assert "100 of 1000 due rows committed, 40 failed" in page
    # 20 rows/s for five seconds, then 40.
    assert '<polygon points="0,80 0.0,40.0 300.0,40.0 300.0,0.0 600.0,0.0 600,80">' in page
    assert "30 rows/s on average, at most 40 rows/s" in text_of(page)
    assert "100 committed 580 ready to commit 80 checkpointed 40 failed 200 to do of 1,000 due rows" in text_of(page)
    assert cells(page)[1][:4] == ["0", "applying", "", "200 ready to commit 80 checkpointed 20 failed 200 to do"]
    assert "will end FAILED" not in page
    live = re.search(r'data-live="/geneva([^"]*)" data-after="(\d+)" data-then="reload"', page)
    assert live
    assert 'http-equiv="refresh"' in page
    folder = JobFolder.of(table.location.checkpoints, job_id)
    progress = folder.read_shard(PRINT, 0)["applying"]
    folder.update_shard(PRINT, 0, applying={**progress, "rows_computed": 380, "rows_checkpointed": 380})
    part = reader(live[1])
    assert "40 rows/s" in text_of(part)
    assert "Spark UI" not in part
    busy = {"between": 50.0, "called": 45.0, "reading": 0.0, "preprocessing": 5.0, "writing": 0.0}
    folder.update_shard(PRINT, 0, applying={**progress, "busy": busy})
    assert "function busy 90 %, waited 10 % for preprocessing" in text_of(reader(live[1]))
    folder.update_shard(PRINT, 0, applying={**progress, "spark_ui": "http://worker:4711"})
    assert '<a href="http://worker:4711" target="_blank" rel="noopener noreferrer">Spark UI</a>' in reader(live[1])
    folder.update_shard(PRINT, 0, applying={**progress, "spark_ui": "javascript:alert(1)"})
    assert "javascript" not in reader(live[1])
    assert "<html" not in part
    assert "data-live" in part


def test_a_running_job_whose_shard_failed_says_how_it_will_end_and_what_to_do(reader: Get, database: Database) -> None:
    table = make_table(database)
    job_id = running_job(table, time.time())
    folder = JobFolder.of(table.location.checkpoints, job_id)
    error = "UDF 'f' raised KeyError\nCorrect the function.\nInput batch schema: x: int64"
    with pytest.raises(UdfError), folder.recording_failure(PRINT, 0):
        raise UdfError(error)
    page = text_of(reader(of_job("docs", job_id)))
    assert "1 shard failed: the run will end FAILED, unless another try succeeds" in page
    assert "UDF 'f' raised KeyError Correct the function. " in page
    assert "Input batch schema" not in page
    with pytest.raises(UdfError), folder.recording_failure(PRINT, 0, last=True):
        raise UdfError(error)
    for text in (text_of(reader(of_job("docs", job_id))), str(database.job(job_id))):
        assert "1 shard failed: the run will end FAILED" in text
        assert "unless" not in text
    done = {"rows_run": 500, "rows_computed": 500, "rows_failed": 0, "seconds": 25.0, "start_seconds": 15.0}
    folder.update_shard(PRINT, 0, applied=done, failure=None)
    page = text_of(reader(of_job("docs", job_id)))
    assert "Spark's start 15 s a shard, in Apply" in page
    assert "Average speed 50 rows/s a shard" in page
    assert cells(reader(of_job("docs", job_id)))[1][5:7] == ["15 s", "50 rows/s on average"]
    folder.update_shard(PRINT, 0, applied={**done, "spark_start": {"jvm": 3.1, "session": 2.2, "function": 11.4}})
    page = text_of(reader(of_job("docs", job_id)))
    assert "Spark's start 17 s a shard, in Apply: JVM 3.1, session 2.2, function 11.4" in page
    assert cells(reader(of_job("docs", job_id)))[1][5] == "17 s"


def test_a_job_that_nobody_works_on_any_more(reader: Get, database: Database) -> None:
    job_id = running_job(make_table(database), 1_000_000.0)
    page = reader(of_job("docs", job_id))
    assert "found dead" in page
    assert [row[1] for row in cells(page) if len(row) == 7 and row[0].isdecimal()] == ["left", "left"]
    assert "data-live" not in page
    assert "rows/s, about" not in text_of(page)


def test_a_failed_job_shows_its_error_and_the_rows(reader: Get, database: Database) -> None:
    table = make_table(database)

    @udf(data_type=pa.int64(), version="1")
    def breaks(x: int) -> int:
        raise ValueError("no such model")

    table.alter_columns({"y": breaks})
    with pytest.raises(JobFailed) as failed:
        table.backfill("y", udf=breaks, runner="inline", shard_size=1)
    assert failed.value.result is not None
    page = reader(of_job("docs", failed.value.result.job_id))
    assert ">FAILED<" in page
    stages = [row[1] for row in cells(page) if len(row) == 7 and row[0].isdecimal()]
    assert stages == ["failed"] + ["left"] * (len(stages) - 1)
    assert len(stages) > 1
    assert "no such model" in page
    assert '<pre class="error">' in page
    assert "1 error record " in text_of(page)
    assert "ValueError ended the job, see above" in text_of(page)
    assert "no such model" not in page.rpartition("</pre>")[2]


def test_a_job_that_is_done_with_failed_rows_warns_and_leads_to_them(reader: Get, database: Database) -> None:
    @udf(data_type=pa.int64(), version="1", on_error="skip")
    def strict(x: int) -> int:
        return 1 // (x % 4)

    table = make_table(database)
    table.alter_columns({"y": strict})
    job = table.backfill("y", udf=strict, runner="inline")
    assert (job.state, job.rows_failed) == ("DONE", 25)
    place = of_job("docs", job.job_id)
    page = reader(place)
    assert '<span class="state partial">DONE</span>' in page
    assert page.count('href="#errors"') == 2
    assert "25 rows failed and hold NULL." in text_of(page)
    for listed in ("/databases/shelf", "/databases/shelf/tables/docs/standing"):
        assert f'<a class="bad" href="/geneva{place}#errors">25</a>' in reader(listed)


def test_all_errors_are_paged_and_sorted(reader: Get, database: Database) -> None:
    table = make_table(database)
    job_id = table.backfill("y", runner="inline").job_id
    folder = JobFolder.of(table.location.checkpoints, job_id)
    example = ErrorRecord(job_id, "y", "f", "v", 3 << 32, 0, "ValueError", "", "Traceback", 1, 1, 0.0)
    records = [
        replace(
            example,
            row_address=(3 << 32) | row,
            row_id=row,
            message=f"row {row}",
            time=-float(row),
            key=str(row * 7 % 1500),
        )
        for row in range(1500)
    ]
    for start in range(0, 1500, 500):
        write_errors(folder.storage, f"range-{start}", records[start : start + 500])
    record = folder.storage.read_json("job.json")
    folder.storage.write_json("job.json", {**record, "ended": {**record["ended"], "errors": 1500}})
    place = of_job("docs", job_id)

    def listed(page: str) -> list[tuple[int, int]]:
        rows = [row for row in cells(page) if len(row) == 6 and row[2] == "3"]
        assert [int(row[1]) for row in rows] == [(3 << 32) | int(row[3]) for row in rows]
        return [(int(row[0]), int(row[3])) for row in rows]

    page = reader(place)
    assert "1,500 error records: 1,500 rows ValueError row ..." in text_of(page)
    assert "page 1 of 60 1 2 3 4 60" in text_of(page)
    assert [row for _, row in listed(page)] == list(range(25))
    assert [row for _, row in listed(reader(f"{place}?errors=99"))] == list(range(1475, 1500))
    [by_key] = re.findall(r'href="/geneva([^"#]*)#errors">by key<', page)
    page = reader(unescape(by_key))
    assert [key for key, _ in listed(page)] == list(range(25))
    [last] = re.findall(r'href="/geneva([^"#]*)#errors">60<', page)
    assert [key for key, _ in listed(reader(unescape(last)))] == list(range(1475, 1500))
    assert [row for _, row in listed(reader(f"{place}?errors=2&order=address"))] == list(range(25, 50))
    for wrong in ("errors=none", "order=none"):
        reader(f"{place}?{wrong}", status=404)


def stands(html: str) -> dict[str, list[str]]:
    return {row[0]: row[1:4] for row in cells(html) if len(row) == 6}


@pytest.mark.core
def test_a_table_tells_how_its_columns_and_views_stand(reader: Get, database: Database) -> None:
    table = make_table(database)
    table.add_columns({"z": triple, "gone": triple})
    table.backfill("y", runner="inline")
    table.lance.create_scalar_index("y", "BTREE")
    table.backfill("gone", runner="inline")
    # Its code is nowhere on the API server.
    stored = table.definition("gone").to_json().replace("tests.support.counting:triple", "gone.with:the_wind")
    table.lance.update_field_metadata({"gone": {UDF_KEY: stored}})
    view = table.query().where("x < 50").select(["x"]).create_materialized_view(database, "small")
    table.query().select(["y"]).create_materialized_view(database, "all_of_it")
    view.refresh(runner="inline")
    path = "/databases/shelf/tables/docs"
    page = reader(path)
    assert 'data-live="/geneva/databases/shelf/tables/docs/standing"' in page
    found = stands(reader(f"{path}/standing"))
    assert found["y"] == ["up to date", "0", "0"]
    assert found["z"] == ["never computed", "100", "0"]
    assert found["gone"] == ["up to date", "0", "0"]
    assert found["small"] == ["up to date", "0", "0"]
    assert found["all_of_it"] == ["never computed", "100", "0"]
    table.add([{"x": 99}])
    appended = written_at(table.lance)
    table.add([{"x": 7}])
    part = reader(f"{path}/standing")
    found = stands(part)
    assert {name: found[name][1:] for name in ("y", "z", "gone")} == {
        "y": ["2", "0"], "z": ["102", "0"], "gone": ["2", "0"],
    }  # fmt: skip
    since = f'stale</span> for <time title="since {format_time(appended / 1e9)}"'
    assert part.count(since) >= 2
    assert found["gone"][0].startswith("stale for")
    assert found["z"][0] == "never computed"
    assert found["small"][0].startswith("stale for")
    assert found["small"][1:] == ["1", "0"]
    assert ["y_idx", "y", "BTree", "100", "2", "1"] in cells(reader(path))
    page = reader("/databases/shelf/tables/small")
    assert 'made of <a href="/geneva/databases/shelf/tables/docs">docs</a>' in " ".join(page.split())
    assert "__is_set" not in page
    assert stands(reader("/databases/shelf/tables/small/standing"))["small"][1:] == ["1", "0"]
    history = reader(f"{path}/history")
    assert [row[:2] for row in cells(history)[1:]] == [["y", "1"], ["gone", "1"]]
    assert history.count('class="done"') == 6  # rows due and computed, and seconds; none failed
    assert cells(reader("/databases/shelf/tables/small/history"))[1][:2] == ["small", "1"]


def test_a_view_of_groups_tells_what_it_groups_and_whether_rows_came(reader: Get, database: Database) -> None:
    table = make_table(database)
    table.backfill("y", runner="inline")
    query = table.query().where("x < 50").group_by("y").agg({"n": "count(*)", "most": "max(x)"}, order_by=["x desc"])
    view = query.create_materialized_view(database, "groups")
    path = "/databases/shelf/tables/groups"
    assert stands(reader("/databases/shelf/tables/docs/standing"))["groups"] == ["never computed", "50", "0"]
    done = view.refresh(runner="inline")
    assert stands(reader(f"{path}/standing"))["groups"] == ["up to date", "0", "0"]
    table.add([{"x": 7}, {"x": 99}])
    table.backfill("y", runner="inline")
    found = stands(reader("/databases/shelf/tables/docs/standing"))["groups"]
    assert (found[0].startswith("stale for"), found[1:]) == (True, ["1", "0"])
    page = " ".join(reader(path).split())
    standing = " ".join(reader("/databases/shelf/tables/docs/standing").split())
    assert "y, n, most of docs: groups by y of the rows where x &lt; 50 ordered by x desc" in standing
    touched = "touched groups: 50 new groups, 0 with other rows; the largest of 50 groups, y="
    assert touched in standing
    assert touched in reader(f"/databases/shelf/tables/groups/jobs/{done.job_id}")
    assert "aggregate max(x)" in page
    assert 'made of <a href="/geneva/databases/shelf/tables/docs">docs</a>' in page
    assert "__group" not in page


@pytest.mark.parametrize(("oldest", "read"), [("y", 100), ("z", 150)])
def test_a_history_reads_jobs_until_each_column_has_enough_of_them(
    database: Database, monkeypatch: pytest.MonkeyPatch, oldest: str, read: int
) -> None:
    table = make_table(database)
    others = ["a", "b", "c", "z"]
    table.add_columns(dict.fromkeys(others, triple))
    done = JobFolder.of(table.location.checkpoints, table.backfill("y", runner="inline").job_id)
    frequent = ["y", *others] if oldest == "y" else ["y", *others[:-1]]
    for number in range(149):
        copied = f"20260101T{number:012}-0123456789"
        shutil.copytree(done.storage.path(""), Path(done.storage.path("")).with_name(copied))
        column = oldest if number == 10 else frequent[number % len(frequent)]
        JobFolder.of(table.location.checkpoints, copied).update_record(column=column)
    found, jobs = list[str](), JobList.read

    def read_and_note(listed: JobList, start: int, most: int) -> list[Job]:
        part = jobs(listed, start, most)
        found.extend(job.id for job in part)
        return part

    monkeypatch.setattr(JobList, "read", read_and_note)
    histories = tables.read_histories(VisibleDatabase("shelf", Owner(), database), table.location)
    assert {one.name: len(one.jobs) for one in histories} == {
        name: 1 if name == oldest == "z" else 18 for name in ("y", *others)
    }
    assert len(found) == len({*found}) == read


def test_a_table_lists_its_versions_and_the_rows_that_were_due_after_each(reader: Get, database: Database) -> None:
    table = make_table(database)
    path = "/databases/shelf/tables/docs"

    def versions(path: str) -> list[list[str]]:
        while "data-live" in (part := reader(f"{path}/versions")):
            pass
        assert re.search(r'<time title="[^"]*" data-age', part)
        return [[row[0], *row[2:]] for row in cells(part)[1:]]

    assert [row[4] for row in versions(path)] == ["100", "0"], "it had no computed column at first"
    table.backfill("y", runner="inline", where="x < 60")
    table.add([{"x": 1000}, {"x": 1001}])
    assert versions(path) == [
        ["4", "Append", "x, y", "2", "42", ""],
        ["3", "DataReplacement", "y", "60", "40", "backfill"],
        ["2", "Merge", "", "", "100", ""],
        ["1", "Overwrite", "x", "100", "0", ""],
    ]
    view = table.query().select(["x"]).create_materialized_view(database, "v")
    view.refresh(runner="inline")
    of_jobs = [row for row in versions("/databases/shelf/tables/v") if row[-1]]
    assert of_jobs[0][3:] == ["102", "0", "refresh"]


def test_the_due_rows_of_many_columns_are_counted_for_the_newest_versions_only(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(database)
    table.add_columns({"z": triple})
    for x in range(60):
        table.add([{"x": x}])
    monkeypatch.setattr(tables, "_MOST_COUNTS", 6)
    opened = VisibleDatabase("shelf", Everybody(), database)
    found = tables.read_versions(opened, table.location, 60)
    assert (len(found.versions), found.counting) == (50, False)
    assert [version.due for version in found.versions[:4]] == [320, 318, 316, None]


def test_a_page_that_polls_a_slow_store_counts_each_version_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(database)
    counted, due_after = list[int](), tables._due_after

    def counting(location: Any, version: int, *about: Any) -> int:
        counted.append(version)
        return due_after(location, version, *about)

    monkeypatch.setattr(tables, "_due_after", counting)
    monkeypatch.setattr(tables._COUNTS, "_kept_seconds", 0.0)
    opened = VisibleDatabase("shelf", Everybody(), database)
    for _ in range(2):
        assert [one.due for one in tables.read_versions(opened, table.location, 60).versions] == [100, 0]
    table.add([{"x": 1000}])
    assert [one.due for one in tables.read_versions(opened, table.location, 60).versions] == [101, 100, 0]
    assert sorted(counted) == [1, 2, 3]
    table.backfill("y", runner="inline")
    assert tables.read_versions(opened, table.location, 60).versions[0].due == 0


def test_a_database_tells_how_its_tables_stand_and_what_is_computed_from_what(reader: Get, database: Database) -> None:
    path = "/databases/shelf"
    assert "No tables" in reader(f"{path}/graph")
    table = make_table(database)
    table.add_columns({"z": udf(data_type=pa.int64(), version="1", input_columns=["y"])(lambda y: y)})
    table.query().select(["z"]).create_materialized_view(database, "derived")
    table.backfill("y", runner="inline")
    database.create_table("plain", pa.table({"x": [1]}))
    page = whole(reader, f"{path}/live")
    assert states_of(page) == {"docs": "never computed", "derived": "never computed", "plain": ""}
    assert states_of(whole(reader, f"{path}/live?fresh=never+computed&table=DOCS")) == {"docs": "never computed"}
    assert ids_of(reader(f"{path}?state=FAILED")) == []
    assert len(ids_of(reader(f"{path}?state=DONE&table=oc"))) == 1
    graph = whole(reader, f"{path}/graph/live")
    titles = re.findall(r"<title>(.*?)</title>", graph)
    assert [unescape(title) for title in titles] == [
        "view derived: never computed", "table docs: table",
        "column docs.y: up to date", "column docs.z: never computed", "table plain: table",
    ]  # fmt: skip
    assert graph.count("<path") == 3
    assert 'class="column up-to-date" href="/geneva/databases/shelf/tables/docs"' in graph
    job_id = running_job(table, time.time())
    page = whole(reader, f"{path}/live")
    assert states_of(page)["docs"] == "running"
    assert re.search(r"40 rows/s, about \d s left", text_of(page))
    assert job_id in page
    folder = JobFolder.of(table.location.checkpoints, job_id)
    for shard in (0, 1):
        folder.update_shard(PRINT, shard, applying=None, committing=None, submitted={"batch": 500})
    page = whole(reader, f"{path}/live")
    assert (states_of(page)["docs"], "<h2>Running" in page, "<h2>Waiting" in page) == ("waiting", False, True)
    assert "RUNNING 1,000 rows with the service, which says when it answers" in " ".join(text_of(page).split())


def test_a_view_of_a_stale_view_is_not_green(reader: Get, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(database)
    first = table.query().select(["x"]).create_materialized_view(database, "first")
    second = first.query().select(["x"]).create_materialized_view(database, "second")
    third = second.query().select(["x"]).create_materialized_view(database, "third")
    for view in (first, second, third):
        view.refresh(runner="inline")
    path = "/databases/shelf"
    assert states_of(whole(reader, f"{path}/live"))["third"] == "up to date"
    table.add(pa.table({"x": pa.array([1], pa.int64())}))
    with_another_key(monkeypatch)
    told = "up to date with first, which is stale"
    for narrowed in ("/live", "/live?table=third"):
        page = whole(reader, f"{path}{narrowed}")
        assert states_of(page)["third"] == "source is stale"
        assert told in text_of(page)
    assert f"view second: {told}" in whole(reader, f"{path}/graph/live")
    for standing in ("third", "second"):
        page = whole(reader, f"{path}/tables/{standing}/standing")
        assert stands(page)["third"][0] == "source is stale"
        assert told in text_of(page)
    first.refresh(runner="inline")
    with_another_key(monkeypatch)
    assert "up to date with second, which is stale" in text_of(whole(reader, f"{path}/live"))


def test_what_is_wrong_is_counted_comes_first_and_is_found(reader: Get, database: Database) -> None:
    """By state of tables, and by state, DAG and age of jobs."""
    for name in ("a_fresh", "failing", "stale"):
        table = make_table(database, name)
        table.backfill("y", udf=triple, runner="inline")
    newest = database.jobs(1, "failing")[0]
    folder = JobFolder.of(database.location("failing").checkpoints, newest.id)
    folder.update_record(airflow={"dag_id": "hourly", "run_id": "r", "task_id": "t", "try": 1})
    folder.update_record(ended={**folder.read(RECORD)["ended"], "state": "FAILED", "error": "no"})
    database.open_table("stale").add({"x": [1]})
    Rights.give("reader", dags=["hourly"])
    path = "/databases/shelf"
    assert list(states_of(whole(reader, f"{path}/live"))) == ["failing", "stale", "a_fresh"]
    assert f'data-live="/geneva{path}/counts"' in reader("/")
    counts = whole(reader, f"{path}/counts")
    assert text_of(counts) == "1 failed 1 stale"
    for link, found in (("fresh=failed", ["failing"]), ("fresh=stale", ["stale"])):
        assert f'href="/geneva{path}?{link}"' in counts
        assert list(states_of(whole(reader, f"{path}/live?{link}"))) == found
    for chosen in ("dag=hourly", "state=FAILED&since=24h", "dag=hourly&since=7d"):
        assert ids_of(reader(f"{path}?{chosen}")) == [newest.id]
    assert len(ids_of(reader(f"{path}?since=1h"))) == 3
    assert ids_of(reader(f"{path}?dag=daily")) == []
    reader(f"{path}?since=week", status=404)


def test_a_database_that_cannot_be_read_says_so_in_the_overview(reader: Get, database: Database) -> None:
    shutil.rmtree(database.uri)
    assert text_of(reader("/databases/shelf/counts")) == "unreachable"


def test_a_table_lists_each_column_once_and_compares_from_its_row(reader: Get, database: Database) -> None:
    table, long = make_table(database), "n" * 200
    table.add_columns({long: (triple, ["x"])})
    path = "/databases/shelf/tables/docs"
    page = reader(path)
    assert [row[0] for row in cells(page) if len(row) == 3] == ["Column", "x"]
    standing = whole(reader, f"{path}/standing")
    assert f'<td class="name">{long}</td>' in standing
    assert f'{path}/compare?first=y&amp;second={long}">Compare</a>' in standing
    assert 'href="/geneva/databases/shelf?table=docs"' in page


def test_the_plan_counts_what_is_due_and_bounds_what_follows(
    reader: Get, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(database)
    table.add_columns({"z": (double, ["y"])})
    for column, function in (("y", triple), ("z", double)):
        table.backfill(column, udf=function, runner="inline")
    view = table.query().select(["z"]).create_materialized_view(database, "v")
    view.refresh(runner="inline")
    path = "/databases/shelf/plan"

    def rows() -> dict[str, list[str]]:
        return {row[0]: row[1:3] for row in cells(whole(reader, f"{path}/live"))[1:]}

    assert rows() == {"docs.y": ["0", "0"], "docs.z": ["0", "0"], "v": ["0", "0"]}
    table.add({"x": [100, 101]})
    with_another_key(monkeypatch)
    assert rows() == {"docs.y": ["2", "2"], "docs.z": ["2", "at most 4"], "v": ["2", "at most 6"]}
    page = reader(path)
    assert "airflow-geneva plan --conn-id shelf --all" in page
    assert f'href="/geneva{path}"' in reader("/databases/shelf") + reader("/databases/shelf/graph")
    newest = database.jobs(1, "docs")[0]
    folder = JobFolder.of(table.location.checkpoints, newest.id)
    folder.update_record(ended={**folder.read(RECORD)["ended"], "state": "FAILED", "error": "no model"})
    with_another_key(monkeypatch)
    said = {row[0]: row[-1] for row in cells(whole(reader, f"{path}/live"))[1:]}
    assert said["docs.z"] == "its newest job failed: no model"
    assert said["v"] == "docs.z, from which it is computed, is blocked"


def test_the_graph_shows_one_table_with_what_it_reads_and_feeds_or_without_columns(
    reader: Get, database: Database
) -> None:
    """What is computed from other tables is left out, and folded columns lend their state to the table."""
    make_table(database, "other")
    table = make_table(database)
    view = table.query().select(["y"]).create_materialized_view(database, "v")
    view.query().select(["y"]).create_materialized_view(database, "w")

    def nodes(query: str) -> set[str]:
        return set(re.findall(r"<title>(\w+ [\w.]+): ", whole(reader, f"/databases/shelf/graph/live{query}")))

    around_v = {"column docs.y", "table docs", "view v", "view w"}
    assert nodes("") == around_v | {"table other", "column other.y"}
    assert nodes("?focus=v") == around_v
    assert nodes("?fold=true") == {"table docs", "table other", "view v", "view w"}
    assert nodes("?focus=other&fold=true") == {"table other"}
    assert "never computed" in whole(reader, "/databases/shelf/graph/live?focus=other&fold=true")
    assert "graph?focus=v" in reader("/databases/shelf/tables/v")


def test_the_pages_of_a_large_database_are_small(reader: Get, database: Database) -> None:
    sizes = dict[str, int]()
    for path in make_large(database):
        page = whole(reader, path)
        sizes[path] = len(page.encode())
    assert {path: size for path, size in sizes.items() if size >= 100_000} == {}, "see bench/pages.py for their times"


def test_of_hundreds_of_columns_those_that_need_attention_are_listed() -> None:
    fresh, stale = Freshness(100, 0), Freshness(100, 5)
    rows = [
        ColumnRow(f"a_score_{number}", "int64", "scores:score (version 0123456789abcdef) of a_measurement", standing)
        for number in range(300)
        for standing in [stale if number % 10 == 9 else fresh]
    ]
    values = {"root": "/geneva", "conn_id": "shelf", "table": "docs"}
    page = (
        environment()
        .get_template("_standing.html")
        .render(standing=FreshnessView(tuple(rows), (), counting=False), **values)
    )
    assert len(page.encode()) < 100_000
    assert [row[0] for row in cells(page)[1:31]] == [f"a_score_{number}" for number in range(9, 300, 10)]
    assert len(cells(page)) == 101
    assert "and 200 more that need no more attention than these: all as a document" in text_of(page)


def test_every_shard_of_a_large_job_is_on_a_page(reader: Get, database: Database) -> None:
    table = make_table(database)
    folder = JobFolder.of(table.location.checkpoints, running_job(table, time.time()))
    size = {"rows": 10, "fragments": 1, "staged": 0, "rows_staged": 0, "rows_held": 0}
    folder.storage.write_json(plan_name(PRINT), {"shards": [size] * 120})
    folder.update_record(shards=120)
    path = of_job("docs", folder.job_id)
    assert f'href="/geneva{path}?shards=3#shards">3</a>' in reader(path)
    pages = [reader(f"{path}{part}?shards={page}") for part, page in (("", 1), ("/live", 2), ("", 3))]
    assert f'data-live="/geneva{path}/live?shards=2"' in pages[1]
    found = [int(number) for page in pages for number in re.findall(r'<tr>\s*<td class="n">(\d+)</td>', page)]
    assert sorted(found) == [*range(120)]


def states_of(page: str) -> dict[str, str]:
    cards = re.findall(r'<li class="card">\s*<div class="line"><a [^>]*>(.*?)</a>(?: <span[^>]*>(.*?)</span>)?', page)
    return {unescape(name): state for name, state in cards if "." not in name}


def test_a_view_is_refreshed_in_airflow_and_its_job_is_shown(
    browse: Get, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS", "False")
    desk.append("a")
    view = f"v_{desk.table.name}"
    desk.table.query().select(["text"]).create_materialized_view(desk.database, view)
    with DAG(f"refresh_{desk.table.name}", schedule=None, params={"errors_only": False}) as dag:
        RefreshTaskGroup(view=view, inline_below_rows=10**9, errors_only="{{ params.errors_only }}")
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    Rights.give("reader", dags=[dag.dag_id])
    page = browse(of_task(run, "refresh.shards.commit", 0))
    assert f"Refresh of {view}" in page
    assert "of the source" in page
    for part in (f"run?dag_id={dag.dag_id}&run_id={run.run_id.replace('+', '%2B')}", f"dag?dag_id={dag.dag_id}"):
        page = browse(f"/{part}")
        assert f">{view}</a>" in page
        assert ">DONE<" in page
        assert of_task(run, "refresh.plan")[1:].split("&")[0] in unescape(page)
        browse(f"/{part}", "stranger", status=403)
    job_page = "/databases/lance_default/tables/{}/jobs/{}".format(view, run.xcom("refresh.plan", "summary")["job_id"])
    # The button is for those who may start the DAG. Airflow checks that again, and logs it.
    path = f"/databases/lance_default/tables/{view}"
    assert f">{dag.dag_id}</a>" in browse(path)
    Rights.give("starter", dags=[dag.dag_id], triggers=[dag.dag_id])
    assert "which is paused" in browse(path, "starter")
    with create_session() as session:
        session.get(DagModel, dag.dag_id).is_paused = False
    everywhere = (
        path,
        job_page,
        of_task(run, "refresh.plan"),
        "/databases/lance_default",
        "/databases/lance_default/live",
    )
    for place in everywhere:
        assert "Refresh now" not in browse(place)
        assert whole(lambda path: browse(path, "starter"), place).count(f"/{dag.dag_id}/dagRuns") == 1
    page = browse(path, "starter")
    address = unescape(re.search(r'data-trigger="([^"]*)"', page)[1])  # type: ignore[index]
    assert [start(address, user) for user in ("reader", "starter")] == [403, 200]
    with create_session() as session:
        asked = select(Log.owner).where(Log.event == "trigger_dag_run", Log.dag_id == dag.dag_id)
        assert set(session.scalars(asked)) == {"starter"}
    folder = JobFolder.of(desk.database.location(view).checkpoints, run.xcom("refresh.plan", "summary")["job_id"])
    # Another button runs failed rows alone, by a parameter that the DAG has to have.
    assert "errors_only" not in page
    write_errors(folder.storage, "a", [ErrorRecord(folder.job_id, "y", "f", "v", 1, 1, "E", "m", "", 1, 1, 1.0)])
    folder.update_record(ended={**folder.read(RECORD)["ended"], "errors": 1})
    page = browse(job_page, "starter")
    assert 'data-param="errors_only"' in page
    details = unescape(re.search(r'data-details="([^"]*)"', page)[1])  # type: ignore[index]
    assert [*ask(details, "starter")["params"]] == ["errors_only"]
    # What an XCom says is not trusted: the job's record names another DAG.
    folder.update_record(airflow={"dag_id": "another", "run_id": "r", "task_id": "t", "try": 1})
    assert ">DONE<" not in browse(f"/dag?dag_id={dag.dag_id}")


def start(address: str, user: str) -> int:
    """Do what the button does."""
    from airflow.api_fastapi.app import create_app

    client = TestClient(create_app(apps="core"))
    client.cookies.set("_token", Rights.token(user, create_auth_manager()))
    assert (
        client.post(address, content='{"logical_date": null}', headers={"Content-Type": "text/plain"}).status_code
        != 200
    )
    return client.post(address, json={"logical_date": None}).status_code


def ask(address: str, user: str) -> dict[str, dict[str, object]]:
    from airflow.api_fastapi.app import create_app

    client = TestClient(create_app(apps="core"))
    client.cookies.set("_token", Rights.token(user, create_auth_manager()))
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    found: dict[str, dict[str, object]] = answer.json()
    return found


def test_a_graph_costs_what_it_has_nodes() -> None:
    """Chained columns made it grow with their square: 16 seconds for 2,000."""
    names = [("docs", f"c{number}") for number in range(2_000)]
    nodes, edges = [Node(key, "stale", "column") for key in names], list(pairwise(names))
    began = time.process_time()
    graph = lay_out(nodes, edges)
    assert time.process_time() - began < 2
    assert [node.x for node in graph.nodes] == sorted({node.x for node in graph.nodes})
    more = lay_out([*nodes, Node(("other",), "stale", "table")], edges)
    assert (len(more.nodes), more.left_out, more.paths) == (2_000, 1, graph.paths)


def test_a_graph_with_circles_has_all_of_its_nodes() -> None:
    """As whoever may write definitions can make them."""
    keys: list[Key] = [(name,) for name in "abcde"]
    circle = [(keys[0], keys[1]), (keys[1], keys[2]), (keys[2], keys[0]), (keys[2], keys[3]), (keys[4], keys[1])]
    graph = lay_out([Node(key, "stale", "view") for key in keys], circle)
    assert len({(node.x, node.y) for node in graph.nodes}) == len(keys)
    assert len(graph.paths) == len(circle)
    assert lay_out([Node(key, "stale", "view") for key in keys[:1]], [(keys[0], keys[0])]).nodes[0].key == keys[0]


def test_counts_are_made_once_and_not_waited_for() -> None:
    counts = CountCache(at_once=1)
    made: list[int] = []
    go_on = threading.Event()

    def slow() -> int:
        made.append(1)
        go_on.wait()
        return 42

    def broken() -> int:
        raise ValueError("no")

    assert counts.get("db", "a", slow, time.monotonic() + 0.05) is None
    assert counts.get("db", "a", slow, time.monotonic()) is None
    go_on.set()
    assert counts.get("db", "a", slow, time.monotonic() + 60) == 42
    assert made == [1]
    with pytest.raises(ValueError, match="no"):
        counts.get("db", "b", broken, time.monotonic() + 60)
    assert counts.get("db", "b", lambda: 1, time.monotonic() + 60) == 1


def test_every_count_of_a_page_is_made_once_and_found_together_with_the_others() -> None:
    counts = CountCache(at_once=1)
    made: list[str] = []

    def slow(name: str) -> str:
        made.append(name)
        time.sleep(0.05)
        return name

    def ask() -> list[str | None]:
        return [counts.get("db", name, partial(slow, name), time.monotonic()) for name in "abc"]

    until = time.monotonic() + 120
    while ask() != ["a", "b", "c"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert made == ["a", "b", "c"]


def test_no_more_counts_are_begun_than_can_be_made() -> None:
    counts = CountCache(at_once=1)
    go_on = threading.Event()
    before = threading.active_count()
    for version in range(50):
        assert counts.get("db", version, go_on.wait, time.monotonic()) is None
    assert threading.active_count() - before <= 1
    go_on.set()
    until = time.monotonic() + 120
    while counts.get("db", 49, lambda: True, time.monotonic() + 1) is None:
        assert time.monotonic() < until


def test_a_database_that_hangs_holds_up_the_counts_of_no_other() -> None:
    counts = CountCache(at_once=2)
    go_on = threading.Event()
    try:
        for version in range(50):
            assert counts.get("hung", version, go_on.wait, time.monotonic()) is None
        assert counts.get("other", 0, lambda: 42, time.monotonic() + 120) == 42
        assert counts.get("hung", 0, lambda: 42, time.monotonic() + 0.1) is None
    finally:
        go_on.set()


def test_two_columns_are_compared_without_what_rows_hold(database: Database, reader: Get) -> None:
    table = make_table(database)
    table.add_columns({"z": double})
    table.backfill(["y", "z"], runner="inline")
    path = "/databases/shelf/tables/docs"
    page = reader(path)
    assert f'action="/geneva{path}/compare"' in page
    assert re.findall(r"<option( selected)?>(\w)<", page) == [
        (" selected", "y"),
        ("", "z"),
        ("", "y"),
        (" selected", "z"),
    ]
    shown = reader(f"{path}/compare?first=y&second=z")
    while "Comparing..." in shown:
        shown = reader(f"{path}/compare/live?first=y&second=z")
    assert "Comparison of &#39;y&#39; and &#39;z&#39;" in shown
    assert "values of 100 of 100 rows differ" in shown
    assert "farthest apart" not in shown
    for wrong in ("first=y&second=none", "first=y&second=y", "first=y&second=tests.support.counting:triple"):
        assert "There is nothing here" in reader(f"{path}/compare?{wrong}", status=404)


@pytest.mark.parametrize("what", ["cards", "views", "comparisons"])
def test_what_one_connection_reads_is_not_shown_for_another_one_of_the_same_folder(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []

    class Nothing:
        def without_values(self) -> str:
            return ""

    monkeypatch.setattr(databases, "_read", lambda database, *more: read.append(database) or TableCard("docs"))
    monkeypatch.setattr(tables, "_find_views", lambda location: read.append(location) or {})
    monkeypatch.setattr(Table, "compare", lambda table, *more, **named: read.append(table.location) or Nothing())
    table = make_table(connect(tmp_path))
    shown = [
        VisibleDatabase(name, Everybody(), Database(table.location.database_uri, (("account_key", name),)))
        for name in ("first", "second", "first")
    ]
    for opened in shown:
        until = time.monotonic() + 30
        if what == "cards":
            databases.read_cards(opened, [table.name], (), 30.0)
        elif what == "views":
            assert tables._views_of(opened, opened.locate(table.name), 1, until) == []
        else:
            assert tables.compare(opened, table.name, "x", "y", 30.0) == ""
    assert [dict(one.options)["account_key"] for one in read] == ["first", "second"]  # type: ignore[attr-defined]
