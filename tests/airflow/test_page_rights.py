"""What each user sees of the pages: jobs and tables by the rights that Airflow knows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.api_fastapi.app import create_auth_manager
from airflow.sdk import DAG, BaseOperator, get_current_context, task
from fastapi.testclient import TestClient

from airflow_geneva import Database, connect
from airflow_geneva.assets import lance_asset, watched_lance_asset
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.links.job import JobLink
from airflow_geneva.pages import access
from airflow_geneva.pages.app import app
from airflow_geneva.task_groups import BackfillTaskGroup
from tests.airflow.conftest import Desk
from tests.support.browsing import (
    Get,
    cells,
    ids_of,
    make_table,
    of_job,
    of_task,
    running_job,
    text_of,
    with_another_key,
)
from tests.support.driving import Driver, register
from tests.support.hostile import edit_definition
from tests.support.processes import as_another_process
from tests.support.rights import Rights

pytestmark = pytest.mark.airflow


def dag_over(desk: Desk, name: str, **settings: Any) -> DAG:
    with DAG(name, schedule=None) as dag:
        BackfillTaskGroup(table=desk.table.name, column="n", inline_below_rows=10**9, shard_size=1, **settings)
    return dag


@pytest.fixture
def ran(desk: Desk) -> Driver:
    """A run of a DAG of two shards over the desk's table."""
    desk.append("ab")
    desk.define(n="length")
    run = Driver.trigger(dag_over(desk, f"dag_{desk.table.name}")).go()
    assert run.state == "success", run.errors
    return run


@pytest.mark.parametrize(
    ("task_id", "map_index"),
    [("backfill.plan", -1), ("backfill.shards.apply", 0), ("backfill.shards.commit", 1), ("backfill.finish", -1)],
)
def test_the_button_of_every_task_leads_to_its_job(
    browse: Get, desk: Desk, ran: Driver, task_id: str, map_index: int
) -> None:
    Rights.give("reader", dags=[ran.dag.dag_id])
    assert [link.name for link in ran.dag.task_dict[task_id].operator_extra_links] == ["Geneva job"]
    pushed = ran.xcom(task_id, JobLink().xcom_key, map_index)
    path = of_task(ran, task_id, map_index)
    assert pushed == f"/geneva{path}"
    page = browse(path)
    assert f"Backfill of {desk.table.name}.n" in page
    assert ">DONE<" in page
    (job,) = desk.database.jobs()
    assert job.id in page
    assert f'href="/dags/{ran.dag.dag_id}"' in page
    assert ["Planned by", "backfill.plan, try 1"] in cells(page)
    assert ["20", "never computed"] in cells(page)
    assert job.id not in browse(path, user="stranger", status=403)


def test_the_tab_of_a_task_finds_its_job_however_airflow_writes_the_address(browse: Get, ran: Driver) -> None:
    Rights.give("reader", dags=[ran.dag.dag_id])
    assert "+" in ran.run_id
    # Airflow 3.1 does not encode run ids, and no Airflow replaces the index of a task that is not mapped.
    raw = f"/task?dag_id={ran.dag.dag_id}&run_id={ran.run_id}&task_id=backfill.finish&map_index={{MAP_INDEX}}"
    assert ">DONE<" in browse(raw)
    other = f"/task?dag_id={ran.dag.dag_id}&run_id={ran.run_id}&task_id=after&map_index=-1"
    page = browse(other)
    assert "works for no single job" in page
    assert 'task_id=backfill.plan&map_index=-1">' in page
    assert "has planned" in browse(other.replace("run_id=", "run_id=no"))


def test_a_job_in_a_database_of_its_own_is_found_from_its_task(
    browse: Get, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("a")
    desk.define(n="length")
    connection = {"conn_type": "lance", "host": str(tmp_path / "elsewhere")}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps(connection))
    run = Driver.trigger(dag_over(desk, f"dag_{desk.table.name}", database=desk.database.uri)).go()
    Rights.give("reader", dags=[run.dag.dag_id])
    page = browse(of_task(run, "backfill.plan"))
    assert ">DONE<" in page
    assert "/databases/lance_default" not in page


def test_a_view_tells_nothing_of_a_database_that_the_user_may_not_see(
    browse: Get, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write the view's folder asks for rows of another database by its filter, and reads their number."""
    payroll = connect(tmp_path / "payroll")
    payroll.create_table("docs", [{"x": 123456}])
    view = make_table(database).query().where("x >= 0").select(["x"]).create_materialized_view(database, "v")
    pages = ("/databases/shelf/tables/v/standing", "/databases/shelf", "/databases/shelf/graph")
    for where in ("x = 123456", "x = 1"):
        edit_definition(view, source_database=payroll.uri, where=where)
        with_another_key(monkeypatch)
        Rights.give("reader", connections=["shelf"])
        assert all("1 pending" not in text_of(browse(page)) for page in pages)
        assert "names a source in another database" in browse(pages[0])
    monkeypatch.setenv("AIRFLOW_CONN_PAYROLL", json.dumps({"conn_type": "lance", "host": payroll.uri}))
    edit_definition(view, where="x = 123456")
    assert "names a source in another database" in browse(pages[0])
    Rights.give("owner", connections=["shelf", "payroll"])
    assert "never computed" in text_of(browse(pages[0], "owner"))
    assert "names a source in another database" not in browse(pages[0], "owner")
    assert "names a source in another database" in browse(pages[0]), "a count of another user is not shown"
    shelf = [text_of(browse(pages[1], user)) for user in ("owner", "reader")]
    assert ["v never computed" in page for page in shelf] == [True, False], shelf


def test_a_job_of_a_dag_is_for_those_who_may_read_the_dag(browse: Get, desk: Desk, ran: Driver) -> None:
    importable = desk.table.column_udf("n")
    own = desk.table.backfill("n", udf=importable, runner="inline", errors_only=True).job_id
    (of_dag,) = (job.id for job in desk.database.jobs() if job.airflow)
    shelf = "/databases/lance_default"
    table = f"{shelf}/tables/{desk.table.name}"
    Rights.give("author", dags=[ran.dag.dag_id])
    Rights.give("operator", connections=["lance_default"])
    Rights.give("neighbour", dags=["another_dag"])
    # The DAG names the table as an asset, so its readers see the table, and jobs that nobody else can speak for.
    assert sorted(ids_of(browse(shelf, "author"))) == sorted([own, of_dag])
    assert ids_of(browse(shelf, "operator")) == [own]
    browse(f"{table}/jobs/{of_dag}", "author")
    browse(f"{table}/jobs/{own}", "author")
    browse(f"{table}/jobs/{own}", "operator")
    assert desk.table.name in browse(table, "author")
    assert own in browse(f"{table}/standing", "author")
    assert of_dag not in browse(f"{table}/standing", "operator")
    for part in ("", "/live"):
        browse(f"{table}/jobs/{of_dag}{part}", "operator", status=404)
    for path in (shelf, table, f"{table}/standing", f"{table}/jobs/{of_dag}", f"{table}/jobs/{own}/live"):
        page = browse(path, "neighbour", status=404)
        assert desk.table.name not in page
    assert "lance_default" not in browse("/", "neighbour")
    assert "lance_default" in browse("/", "author")
    # Where a database lies is for those who may read its connection.
    assert desk.database.uri in browse(shelf, "operator")
    assert desk.database.uri not in browse(shelf, "author") + browse("/", "author")


def test_a_planned_job_of_another_dag_does_not_become_readable_by_naming_it(
    browse: Get, desk: Desk, ran: Driver
) -> None:  # fmt: skip
    """Whoever writes a DAG can push what they like."""
    summary = ran.xcom("backfill.plan", "summary")
    with DAG(f"thief_{desk.table.name}", schedule=None) as dag:

        @task
        def steal(what: dict[str, Any]) -> None:
            get_current_context()["ti"].xcom_push("summary", what)

        steal.override(task_id="names_it")(summary)
        steal.override(task_id="names_a_place")({**summary, "plan_uri": "/etc/passwd"})
        steal.override(task_id="names_a_folder")({**summary, "job_id": "../../x"})
    thief = Driver.trigger(dag).go()
    assert thief.state == "success", thief.errors
    Rights.give("thief", dags=[dag.dag_id])
    for task_id in ("names_it", "names_a_place", "names_a_folder"):
        page = browse(of_task(thief, task_id), "thief", status=404)
        assert "DONE" not in page
    Rights.give("both", dags=[dag.dag_id, ran.dag.dag_id])
    assert ">DONE<" in browse(of_task(thief, "names_it"), "both")


def test_only_connections_to_lance_databases_are_opened(reader: Get, database: Database) -> None:
    page = reader("/")
    assert ">shelf</a>" in page
    assert "pg" not in [text for row in cells(page) for text in row]
    assert "is not of type 'lance'" in text_of(reader("/databases/pg", status=404))
    reader("/databases/unknown", status=404)


def test_a_registered_dag_names_its_tables(browse: Get, database: Database) -> None:
    with DAG("names_a_table", schedule=None) as dag:
        BackfillTaskGroup(table="docs", column="y", lance_conn_id="shelf")
    register(dag)
    make_table(database)
    make_table(database, "secret")
    Rights.give("author", dags=["names_a_table"])
    page = browse("/databases/shelf", "author")
    assert ">docs</a>" in page
    assert "secret" not in page
    browse("/databases/shelf/tables/secret", "author", status=404)


@pytest.mark.parametrize("way", [{}, {"since": "view:v", "quiet_period": 60}])
def test_a_dag_that_is_scheduled_on_a_watched_asset_names_the_table(
    browse: Get, database: Database, way: dict[str, Any]
) -> None:
    with DAG(f"watches_{len(way)}", schedule=[watched_lance_asset("docs", "shelf", **way)]) as dag:
        BaseOperator(task_id="read")
    register(dag)
    make_table(database)
    make_table(database, "secret")
    Rights.give("author", dags=[dag.dag_id])
    page = browse("/databases/shelf", "author")
    assert ">docs</a>" in page
    assert "secret" not in page
    browse("/databases/shelf/tables/docs", "author")
    browse("/databases/shelf/tables/secret", "author", status=404)


def test_what_dags_name_is_looked_up_once_in_a_while_and_the_rights_of_users_each_time(
    browse: Get, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DAG("names_it_once", schedule=[lance_asset("docs", "shelf")]) as dag:
        BaseOperator(task_id="read")
    register(dag)
    table = make_table(database)
    path = of_job("docs", table.backfill("y", runner="inline").job_id)
    monkeypatch.setattr(access, "_KEPT_SECONDS", 1e9)
    as_another_process()
    Rights.give("author", dags=[dag.dag_id])
    before = access._find_dags.cache_info().misses
    for part in ("", "/live", "/live", "/live"):
        assert "DONE" in browse(f"{path}{part}", "author")
        browse(f"{path}{part}", "neighbour", status=404)
    assert access._find_dags.cache_info().misses - before == 1
    Rights.dags["author"].clear()
    browse(f"{path}/live", "author", status=404)


def test_a_reader_of_the_connection_is_not_asked_about_dags(
    reader: Get, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_job("docs", make_table(database).backfill("y", runner="inline").job_id)

    def refuse(_: int) -> Any:
        raise AssertionError

    monkeypatch.setattr(access, "_find_dags", refuse)
    assert "DONE" in reader(f"{path}/live")


def test_a_job_that_no_dag_started_does_not_become_readable_by_naming_it(
    browse: Get, desk: Desk, database: Database
) -> None:
    """Where a job is, XCom says; who may see it, what lies there."""
    own = make_table(database).backfill("y", runner="inline").job_id
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(dag_over(desk, f"dag_{desk.table.name}")).go()
    summary = run.xcom("backfill.plan", "summary")
    place = {"job_id": own, "plan_uri": f"{database.uri}/docs.lance/_checkpoints/jobs/{own}/plan"}
    with DAG(f"thief_{desk.table.name}", schedule=None) as dag:

        @task
        def steal(what: dict[str, Any]) -> None:
            get_current_context()["ti"].xcom_push("summary", what)

        # By the connection of its database, by another one, and as the job of a table that the thief may see.
        steal.override(task_id="own")({**summary, **place, "table": "docs", "lance_conn_id": "shelf"})
        steal.override(task_id="other")({**summary, **place, "table": "docs"})
        steal.override(task_id="table")({**summary, **place, "lance_conn_id": "shelf"})
    thief = Driver.trigger(dag).go()
    assert thief.state == "success", thief.errors
    Rights.give("thief", dags=[dag.dag_id, run.dag.dag_id])
    for task_id in ("own", "other", "table"):
        page = browse(of_task(thief, task_id), "thief", status=404)
        assert own not in page
        assert "DONE" not in page
    Rights.give("operator", dags=[dag.dag_id], connections=["shelf"])
    assert "DONE" in browse(of_task(thief, "own"), "operator")
    browse(of_task(thief, "other"), "operator", status=404)


def test_a_job_is_canceled_by_those_who_may_start_its_dag(
    browse: Get, database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "airflow_geneva.pages")
    with DAG("writes_docs", schedule=None) as dag:
        BackfillTaskGroup(table="docs", column="y", lance_conn_id="shelf")
    register(dag)
    table = make_table(database)
    job_id = running_job(table, time.time())
    folder = JobFolder.of(table.location.checkpoints, job_id)
    Rights.give("reader", connections=["shelf"], dags=["writes_docs"])
    Rights.give("starter", dags=["writes_docs"], triggers=["writes_docs"])
    path = of_job("docs", job_id)
    client = TestClient(app, raise_server_exceptions=False, root_path="/geneva")

    def ask(user: str, kind: str = "application/json", **more: str) -> int:
        token = {"Cookie": f"_token={Rights.token(user, create_auth_manager())}", "Content-Type": kind, **more}
        return client.post(f"{path}/cancel", headers=token, content="{}").status_code

    assert ">Cancel</button>" not in browse(path)
    assert (ask("reader"), ask("stranger")) == (403, 404)
    assert ask("starter", "text/plain") == ask("starter", **{"Sec-Fetch-Site": "cross-site"}) == 415
    assert folder.canceled_by() is None
    for part in ("", "/live"):
        assert f'data-trigger="/geneva{path}/cancel"' in browse(path + part, "starter")
    assert ask("starter") == 200
    assert folder.canceled_by() == "starter, in Airflow"
    folder.update_record(airflow={"dag_id": "another", "run_id": "r", "task_id": "t", "try": 1})
    Rights.give("starter", dags=["another"])
    assert ask("starter") == 403
    folder.write_result("DONE", BackfillResult(job_id, "DONE").to_json(), None, 0)
    Rights.give("starter", triggers=["another"])
    assert ask("starter") == 403
    monkeypatch.setattr("airflow_geneva.pages.app._may_cancel", lambda *given: True)
    assert ask("starter") == 409, "it ended after the check"
    assert caplog.text.count("starter, in Airflow canceled job") == 1
