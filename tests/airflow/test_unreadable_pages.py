"""Pages about what cannot be read: malformed connections, damaged records, stores that are away or never answer."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from airflow.sdk import DAG, BaseOperator

from airflow_geneva import Database, connect
from airflow_geneva.assets import lance_asset
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.storage import timeouts as patience
from airflow_geneva.engine.storage.timeouts import StoreThreads
from airflow_geneva.pages import own_threads
from tests.support.browsing import SECRET, Get, cells, ids_of, make_table, of_job, text_of
from tests.support.driving import register
from tests.support.elsewhere import point_elsewhere
from tests.support.rights import Rights

pytestmark = pytest.mark.airflow

MALFORMED = {
    "list": {"conn_type": "lance", "host": "/db", "extra": [1]},
    "text": {"conn_type": "lance", "host": "/db", "extra": "not JSON"},
    "nowhere": {"conn_type": "lance"},
    "odd": {"conn_type": "lance", "host": "/db", "extra": {"storage_options": [1]}},
}


def test_a_malformed_connection_does_not_hide_the_others(
    reader: Get, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, connection in MALFORMED.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW_CONN_BROKEN", "{broken")
    Rights.give("reader", connections=[*MALFORMED, "broken"])
    listed = {conn_id: told for conn_id, told, _ in cells(reader("/"))[1:]}
    # Airflow 3.1 does not read those whose extra field is no object, and so does not say of which type they are.
    assert {"shelf", "nowhere", "odd"} <= listed.keys() <= {"shelf", *MALFORMED}
    assert listed["shelf"] == database.uri
    for name in {"list", "text"} & listed.keys():
        assert "is not a JSON object" in listed[name]
    assert "The host of Airflow connection 'nowhere' is ''" in listed["nowhere"]
    assert "storage_options is of type list" in listed["odd"]
    for name in MALFORMED.keys() & listed.keys():
        assert listed[name] in text_of(reader(f"/databases/{name}", status=404))


def test_a_table_that_names_another_database_is_not_opened_for_a_page(
    reader: Get, database: Database, tmp_path: Path
) -> None:
    table = make_table(database)
    point_elsewhere(
        table, connect(tmp_path / "other").create_table("people", {"password": [f"p{n}" for n in range(77)]})
    )
    for page in (reader("/databases/shelf"), reader("/databases/shelf/tables/docs", status=503)):
        assert "77" not in text_of(page)
        assert "password" not in text_of(page)
    assert "lies in no place that may be opened" in text_of(page)


def test_a_damaged_record_is_left_out_of_lists_and_has_a_page_that_says_so(reader: Get, database: Database) -> None:
    table = make_table(database)
    whole = table.backfill("y", runner="inline").job_id
    for number, record in enumerate((b"[1]", b"{}", b"{half")):
        damaged = JobFolder.of(table.location.checkpoints, f"29990101T000000-{number}")
        damaged.storage.write_bytes("job.json", record)
        for part in ("", "/live"):
            page = text_of(reader(f"{of_job('docs', damaged.job_id)}{part}", status=404))
            assert f"The record of job {damaged.job_id}" in page
            assert "is damaged" in page
        assert "damaged" not in reader(of_job("docs", damaged.job_id), "stranger", status=404)
    assert ids_of(reader("/databases/shelf")) == [whole]
    assert whole in reader("/databases/shelf/tables/docs/standing")


@pytest.mark.parametrize("expression", ["x * 2", "<b>", "[" * 650_000])
def test_what_lancedb_defines_is_shown_in_short(reader: Get, database: Database, expression: str) -> None:
    table = make_table(database)
    computed = {"computed_column": "true", "computed_column.kind": "sql", "computed_column.expression": expression}
    table.lance.update_field_metadata({"x": computed})
    table.lance.update_schema_metadata({"mv.definition": expression})
    for part in ("", "/standing"):
        assert "[" * 300 not in reader(f"/databases/shelf/tables/docs{part}")
    page = text_of(reader("/databases/shelf/tables/docs"))
    assert f"A materialized view that LanceDB maintains: {expression:.200}" in page
    assert f"LanceDB: {expression:.200}" in page
    columns = json.loads(reader("/databases/shelf/tables/docs.json"))["columns"]
    assert next(one for one in columns if one["name"] == "x").keys() == {"name", "type", "computed_by"}


def test_what_is_wrong_names_no_place_to_those_who_may_not_know_it(
    browse: Get, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DAG("author_of_docs", schedule=[lance_asset("docs", "shelf")]) as dag:
        BaseOperator(task_id="read")
    register(dag)
    table = make_table(database)
    damaged = JobFolder.of(table.location.checkpoints, "29990101T000000-x")
    damaged.storage.write_bytes("job.json", b"[1]")
    Rights.give("author", dags=[dag.dag_id])
    Rights.give("neighbour", dags=["another"])
    page = browse(of_job("docs", damaged.job_id), "author", status=404)
    assert "Damaged record" in page
    assert database.uri not in page
    assert "Damaged" not in browse(of_job("docs", damaged.job_id), "neighbour", status=404)
    # A job of another table of the database is not there for them, damaged or not.
    other = JobFolder.of(make_table(database, "other").location.checkpoints, "29990101T000000-y")
    other.storage.write_bytes("job.json", b"[1]")
    assert "Damaged" not in browse(of_job("other", other.job_id), "author", status=404)
    shutil.rmtree(database.uri)
    page = browse("/databases/shelf/tables/docs", "author", status=503)
    assert "cannot be reached" in page
    assert database.uri not in page


def test_a_folder_that_is_not_on_this_machine_is_told_from_a_table_that_is_not_there(
    reader: Get, database: Database
) -> None:
    make_table(database)
    assert "There is no table" in text_of(reader("/databases/shelf/tables/other", status=404))
    shutil.rmtree(database.uri)
    for path in ("/databases/shelf/tables/docs", "/databases/shelf/tables/docs/standing", of_job("docs", "x")):
        assert "There is no folder" in text_of(reader(path, status=503))


def test_a_table_that_cannot_be_read_is_there(reader: Get, database: Database) -> None:
    table = make_table(database)
    for manifest in (Path(table.uri) / "_versions").glob("*.manifest"):
        manifest.write_bytes(manifest.read_bytes()[:70])
    assert "cannot be opened" in text_of(reader("/databases/shelf/tables/docs", status=503))


def remote(monkeypatch: pytest.MonkeyPatch, endpoint: str, **more: str) -> None:
    """The connection `far`, to a database on an object store."""
    options = {
        "aws_access_key_id": "AKIAPLANTED", "aws_secret_access_key": SECRET, "aws_region": "us-east-1",
        "aws_endpoint": endpoint, "allow_http": "true", **more,
    }  # fmt: skip
    connection = {"conn_type": "lance", "host": "s3://lake/db", "extra": {"storage_options": options}}
    monkeypatch.setenv("AIRFLOW_CONN_FAR", json.dumps(connection))
    Rights.give("reader", connections=["far"])


FAR = ("/databases/far", "/databases/far/tables/docs", "/databases/far/tables/docs/standing")


@pytest.mark.parametrize("path", [*FAR, f"{FAR[1]}/jobs/20260101T000000-x"])
def test_a_store_that_cannot_be_reached_is_not_a_table_that_is_not_there(
    reader: Get, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    remote(monkeypatch, "http://127.0.0.1:9", client_max_retries="0")
    page = text_of(reader(path, status=503))
    assert "Not reached" in page
    assert "s3://lake/db" in page


def test_a_store_that_never_answers_is_not_waited_for(
    reader: Get, deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With options that say nothing about time, Lance alone would wait for minutes."""
    remote(monkeypatch, deaf)
    monkeypatch.setattr(
        patience, "_SHORT_TIMEOUTS", {**patience._SHORT_TIMEOUTS, "timeout": "1s", "client_retry_timeout": "1"}
    )
    began = time.monotonic()
    for path in FAR:
        assert "Not reached" in reader(path, status=503)
    assert time.monotonic() - began < 60


def test_pages_about_a_store_that_hangs_hold_up_no_others(
    reader: Get, database: Database, deaf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked of it, and however often: its calls use a few threads, and none of Airflow's."""
    make_table(database)
    remote(monkeypatch, deaf, timeout="600s")
    threads = StoreThreads("geneva-page-test", most=2)
    monkeypatch.setattr(own_threads, "_THREADS", threads)
    monkeypatch.setattr(own_threads, "_PATIENCE_SECONDS", 0.5)

    def ours() -> list[str]:
        return [found.name for found in threading.enumerate() if found.name == "geneva-page-test"]

    for _ in range(5):
        page = text_of(reader("/databases/far", status=503))
        assert "has not answered for 0.5 seconds" in page
        assert len(ours()) <= 2
    monkeypatch.setattr(own_threads, "_PATIENCE_SECONDS", 30.0)
    assert ">docs</a>" in reader("/databases/shelf")
