"""A Lance connection that names a catalog: tasks, Spark applications, sensors, pages and commands."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from airflow.models.xcom import XComModel
from airflow.sdk import DAG
from airflow.sdk._shared.secrets_masker import redact
from airflow.utils.session import create_session
from lance_namespace import CreateNamespaceRequest
from sqlalchemy import select

from airflow_geneva import connect, connect_namespace
from airflow_geneva.engine.storage.catalogs import options_in
from airflow_geneva.engine.watch.conditions import WaitCondition
from airflow_geneva.engine.watch.watcher import TableWatcher
from airflow_geneva.errors import TableRemade
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.operators._lance_task import load_job
from airflow_geneva.sensors import NewFragmentsSensor
from airflow_geneva.task_groups import RefreshTaskGroup
from tests.airflow.conftest import Desk, Logs
from tests.support.browsing import Get, ids_of, of_task
from tests.support.catalog import TOKEN, VendingCatalog
from tests.support.commands import run as run_command
from tests.support.desk import make_dag, make_view, texts
from tests.support.driving import Driver
from tests.support.object_store import Bucket
from tests.support.rights import Rights

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

SECONDS = 5.0


@pytest.fixture
def catalog(bucket: Bucket, endpoint: str) -> Iterator[VendingCatalog]:
    with VendingCatalog(endpoint, f"{bucket.uri}/warehouse", SECONDS).running() as running:
        yield running


@pytest.fixture
def desk_in_catalog(desk: Desk, catalog: VendingCatalog, monkeypatch: pytest.MonkeyPatch) -> Desk:
    db = connect_namespace("rest", catalog.properties)
    db.lance.create_namespace(CreateNamespaceRequest(id=["prod"]))
    table = db.create_table(f"prod.{desk.table.name}", desk.table.to_arrow().schema.empty_table())
    found = replace(desk, database=db, table=table)
    extra = {"namespace": {"impl": "rest", "properties": catalog.properties}}
    for name in ("LANCE_DEFAULT", "SHELF"):
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps({"conn_type": "lance", "extra": extra}))
    found.define(n="length")
    found.append("ab")
    return found


def xcoms_of(run: Driver) -> str:
    query = select(XComModel.value).where(XComModel.run_id == run.run_id, XComModel.dag_id == run.dag.dag_id)
    with create_session() as session:
        return " ".join(map(str, session.scalars(query)))


@pytest.mark.parametrize("below", [pytest.param(10**9, id="in the plan task"), pytest.param(0, id="on Spark")])
def test_a_run_through_a_catalog_writes_no_secret_and_uses_no_credentials_that_ended(
    desk_in_catalog: Desk, catalog: VendingCatalog, bucket: Bucket, logs: Logs, java_home: str, below: int
) -> None:
    desk = desk_in_catalog
    run = Driver.trigger(make_dag(desk, inline_below_rows=below, shard_size=None)).go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    assert catalog.refused == []
    found = [xcoms_of(run), *(line for lines in logs.by_task.values() for line in lines)]
    assert desk.table.name in found[0]
    found += [content.decode("latin-1") for content in bucket.objects().values()]
    assert len(found) > 20
    assert not [secret for secret in (TOKEN, *catalog.secrets) for text in found if secret in text]


def test_a_view_in_a_catalog_is_refreshed_and_a_sensor_sees_new_rows(
    desk_in_catalog: Desk, catalog: VendingCatalog
) -> None:
    desk = desk_in_catalog
    make_view(desk, "prod.v")
    with DAG(f"refresh_{desk.table.name}", schedule=None) as dag:
        RefreshTaskGroup(view="prod.v", inline_below_rows=10**9)
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert desk.database.open_view("prod.v").to_arrow().num_rows == 20
    watcher = TableWatcher(WaitCondition(desk.table.name, "view:prod.v", min_new_rows=1))
    now = datetime.now(timezone.utc)
    database = LanceHook().get_database()
    quiet = watcher.step(database, now)
    assert quiet is not None
    assert quiet.event is None
    desk.append("c")
    seen = watcher.step(database, now)
    assert seen is not None
    assert seen.event is not None
    assert (seen.event["table"], seen.event["new_rows"]) == (desk.table.name, 10)
    missing = TableWatcher(WaitCondition("prod.none", "1")).step(database, now)
    assert missing is not None
    assert missing.told == "Table prod.none does not exist yet."
    assert catalog.refused == []


def test_a_task_creates_a_view_in_a_catalog_once(desk_in_catalog: Desk) -> None:
    create = CreateMaterializedViewOperator(
        task_id="create", view="prod.v", table=desk_in_catalog.table.name, select=["text"]
    )
    assert [create.execute({})["created"] for _ in range(2)] == [True, False]


def test_a_deferred_sensor_waits_in_the_triggerer_for_rows_in_a_catalog(
    desk_in_catalog: Desk, catalog: VendingCatalog
) -> None:
    desk = desk_in_catalog
    with DAG(f"wait_{desk.table.name}", schedule=None) as dag:
        NewFragmentsSensor(
            task_id="wait", table=desk.table.name, since=desk.table.version, deferrable=True, poke_interval=1
        )
    timer = threading.Timer(SECONDS + 2, lambda: desk.append("c"))
    timer.start()
    run = Driver.trigger(dag).go()
    timer.join()
    assert run.state == "success", run.errors
    assert run.xcom("wait")["new_rows"] == 10
    assert catalog.refused == []


def test_a_view_in_a_folder_is_refreshed_from_a_catalog_that_its_connection_names(
    desk_in_catalog: Desk, catalog: VendingCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_in_catalog
    make_view(replace(desk, database=connect(tmp_path / "views")))
    extra = {"source_namespaces": [{"impl": "rest", "properties": catalog.properties}]}
    connection = {"conn_type": "lance", "host": str(tmp_path / "views"), "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_VIEWS", json.dumps(connection))
    with DAG(f"refresh_{desk.table.name}", schedule=None) as dag:
        RefreshTaskGroup(view="v", lance_conn_id="views", sources=[desk.database.uri], inline_below_rows=10**9)
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    shown = connect(tmp_path / "views").open_table("v").to_arrow()
    assert dict(zip(shown["text"].to_pylist(), shown["n"].to_pylist(), strict=True)) == dict.fromkeys(texts("ab"), 3)
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [secret for secret in (TOKEN, *catalog.secrets) for text in [xcoms_of(run), *written] if secret in text]


def test_a_plan_of_a_table_that_was_moved_since_says_so(desk_in_catalog: Desk, catalog: VendingCatalog) -> None:
    table = desk_in_catalog.table
    reference = {"plan_uri": f"{table.uri}/_checkpoints/jobs/j/plan", "fingerprint": "0", "table": table.name}
    catalog.move(table.name, f"{table.uri}-moved")
    with pytest.raises(TableRemade, match=r"says that it is in \S+-moved now.*Clear the plan task"):
        load_job(connect_namespace("rest", catalog.properties), reference)


def test_pages_and_commands_show_the_tables_and_jobs_of_a_catalog(
    desk_in_catalog: Desk, browse: Get, monkeypatch: pytest.MonkeyPatch, catalog: VendingCatalog
) -> None:
    desk, name = desk_in_catalog, desk_in_catalog.table.name
    job = desk.table.backfill("n", runner="inline")
    Rights.give("reader", connections=["shelf"])
    assert "namespace://rest/http://127.0.0.1" in browse("/")
    deadline = time.monotonic() + 30
    while name not in (shown := browse("/databases/shelf")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert name in shown
    page = browse(f"/databases/shelf/tables/{name}")
    assert "Other columns" in page
    assert ids_of(shown) == [job.job_id]
    assert "Rows computed" in browse(f"/databases/shelf/tables/{name}/history")
    standing = browse(f"/databases/shelf/tables/{name}/standing")
    assert "length (version 1)" in standing
    while "up to date" not in standing and time.monotonic() < deadline:
        standing = browse(f"/databases/shelf/tables/{name}/standing")
    assert "up to date" in standing
    details = browse(f"/databases/shelf/tables/{name}/jobs/{job.job_id}")
    assert "DONE" in details
    assert not [secret for secret in (TOKEN, *catalog.secrets) if secret in page + details + shown]
    listed = json.loads(run_command("jobs", "--conn-id", "lance_default", "--json"))
    monkeypatch.setenv("AIRFLOW_GENEVA_NAMESPACE_PROPERTIES", json.dumps({"headers.Authorization": f"Bearer {TOKEN}"}))
    assert json.loads(run_command("jobs", f"namespace://rest/{catalog.url}", "--json")) == listed
    assert [one["id"] for one in listed] == [job.job_id]
    monkeypatch.setenv("AIRFLOW_GENEVA_NAMESPACE_PROPERTIES", "not JSON")
    told = run_command("jobs", f"namespace://rest/{catalog.url}", code=1)
    assert "AIRFLOW_GENEVA_NAMESPACE_PROPERTIES is not a JSON object" in told


def test_the_page_of_a_run_finds_its_job_in_a_catalog(desk_in_catalog: Desk, browse: Get) -> None:
    desk = desk_in_catalog
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "success", run.errors
    Rights.give("reader", connections=["lance_default"], dags=[run.dag.dag_id])
    job = desk.database.jobs()[0]
    assert job.id in browse(of_task(run, "backfill.plan"))


@pytest.mark.parametrize("as_text", [False, True])
def test_the_connection_is_read_and_its_secrets_are_masked(
    desk_in_catalog: Desk, catalog: VendingCatalog, monkeypatch: pytest.MonkeyPatch, as_text: bool
) -> None:
    token = f"another-token-{as_text}"
    given: Any = {"impl": "rest", "properties": {"uri": catalog.url, "headers.Authorization": f"Bearer {token}"}}
    extra = {"namespace": json.dumps(given) if as_text else given, "storage_options": {"aws_region": "eu-west-1"}}
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", json.dumps({"conn_type": "lance", "extra": extra}))
    hook = LanceHook("other")
    database = hook.get_database()
    assert (database.uri, hook.uri) == (f"namespace://rest/{catalog.url}",) * 2
    assert token not in str(redact(f"a log with {token} in it"))
    assert token not in repr(database)
    ok, message = hook.test_connection()
    assert not ok
    assert token not in message
    assert LanceHook().test_connection() == (True, f"1 table in {database.uri}: {desk_in_catalog.table.name}")
    # Another catalog, in which the source of a view lies.
    other = {"impl": "rest", "properties": {"uri": "https://lake.example", "headers.X-Key": f"key-{token}"}}
    listed = json.dumps([other]) if as_text else [other]
    lance = {"conn_type": "lance", "host": "s3://bucket/db", "extra": {"source_namespaces": listed}}
    monkeypatch.setenv("AIRFLOW_CONN_VIEWS", json.dumps(lance))
    views = LanceHook("views").get_database()
    found = dict(options_in(views.options, "namespace://rest/https://lake.example"))
    assert json.loads(found["geneva_namespace"]) == other
    assert f"key-{token}" not in str(redact(f"a log with key-{token} in it"))
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", json.dumps({"conn_type": "lance", "extra": {"namespace": {"uri": "x"}}}))
    with pytest.raises(ValueError, match="not of the form"):
        LanceHook("wrong").get_database()
