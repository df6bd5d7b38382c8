"""`LanceHook`: connections in every form that Airflow hands them over in, and no secret that shows."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from airflow.sdk import Connection
from airflow.sdk._shared.secrets_masker import redact

from airflow_geneva import connect
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.errors import InvalidInput
from airflow_geneva.get_provider_info import get_provider_info
from airflow_geneva.hooks import lance
from airflow_geneva.hooks.lance import LanceHook

pytestmark = [pytest.mark.airflow, pytest.mark.core]


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch, airflow_db: Path) -> Any:
    def set_connection(connection: Any) -> LanceHook:
        text = connection if isinstance(connection, str) else json.dumps({"conn_type": "lance", **connection})
        monkeypatch.setenv("AIRFLOW_CONN_MY_LANCE", text)
        return LanceHook("my_lance")

    return set_connection


@pytest.mark.parametrize(
    ("connection", "uri"),
    [
        ({"host": "s3://bucket/some/db"}, "s3://bucket/some/db"),
        ({"host": "s3://bucket/some/db/"}, "s3://bucket/some/db"),
        ({"host": "/data/db"}, "/data/db"),
        ({"host": "file:///data/db"}, "/data/db"),
        ({"extra": {"uri": "gs://bucket/db"}}, "gs://bucket/db"),
        ("lance://s3://bucket/some/db", "s3://bucket/some/db"),
        ("lance:///data/db", "/data/db"),
        ("lance://%2Fdata%2Fdb", "/data/db"),
        ("lance://s3%3A%2F%2Fbucket%2Fdb", "s3://bucket/db"),
    ],
)
def test_the_uri_is_found_however_airflow_split_it(define: Any, connection: Any, uri: str) -> None:
    assert define(connection).get_database().uri == uri


@pytest.mark.parametrize("connection", [{"host": "db"}, {}, {"host": "some/db"}])
def test_a_place_that_depends_on_the_worker_is_refused(define: Any, connection: Any) -> None:
    with pytest.raises(InvalidInput, match="a relative path, which differs per worker"):
        define(connection).get_database()


@pytest.mark.parametrize("given", [["s3://bucket/photos", "/data/more/"], '["s3://bucket/photos", "/data/more"]'])
def test_places_of_the_connection_and_of_the_configuration_are_allowed(
    define: Any, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    monkeypatch.setenv("AIRFLOW__GENEVA__ALLOWED_PLACES", "s3://archive, gs://one/two")
    hook = define({"host": "s3://bucket/db", "extra": {"allowed_places": given}})
    everywhere = ("/data/more", "gs://one/two", "s3://archive", "s3://bucket/photos")
    for database in (hook.get_database(), hook.get_database("s3://bucket/other")):
        assert database.location("docs").places.roots == (database.uri, *everywhere)
    monkeypatch.delenv("AIRFLOW__GENEVA__ALLOWED_PLACES")
    assert define({"host": "s3://bucket/db"}).get_database().location("docs").places.roots == ("s3://bucket/db",)


def test_a_place_has_the_storage_options_or_headers_of_its_connection(
    define: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"aws_secret_access_key": "planted-place-key", "region": "eu-west-1"}
    others = {
        "SCANS": {"conn_type": "lance", "extra": {"storage_options": options}},
        "ARCHIVE": {"conn_type": "http", "login": "reader", "password": "planted-login"},
        "TOKEN": {"conn_type": "http", "password": "planted-token", "extra": {"headers": {"x-kind": "scan"}}},
    }
    for name, connection in others.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(connection))
    web = "https://archive.example"
    places = {"s3://scans": "scans", web: "archive", f"{web}/private": "token", "gs://open": None}
    given = {"host": "s3://bucket/db", "extra": {"allowed_places": places}}
    for hook in (define(given), asyncio.run(define(given).aread())):
        table = hook.get_database().location("docs")
        assert table.places.roots == ("s3://bucket/db", *sorted(places))
        assert dict(table.options_at("s3://scans/1.png")) == options
        assert dict(table.options_at("gs://open/1.png")) == {}
        assert dict(table.options_of_place(f"{web}/1")) == {"authorization": "Basic cmVhZGVyOnBsYW50ZWQtbG9naW4="}
        assert dict(table.options_of_place(f"{web}/private/1")) == {
            "authorization": "Bearer planted-token",
            "x-kind": "scan",
        }
        shown = mask_secrets("planted-place-key cmVhZGVyOnBsYW50ZWQtbG9naW4= planted-token")
        assert "planted" not in shown
        assert "cmVh" not in shown
        assert "planted-token" not in str(redact("planted-token"))
        assert "planted" not in repr(table)


def test_a_place_of_an_object_store_takes_a_connection_of_aws(define: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"region_name": "eu-west-1", "aws_session_token": "planted-session", "endpoint_url": "http://store:9000"}
    connection = {"conn_type": "aws", "login": "planted-id", "password": "planted-key", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_PARTNER", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW_CONN_REGION", json.dumps({"conn_type": "aws", "extra": {"region_name": "eu-west-1"}}))
    of_s3 = {"service_config": {"s3": {"endpoint_url": "HTTP://minio:9000"}}}
    monkeypatch.setenv("AIRFLOW_CONN_OF_S3", json.dumps({"conn_type": "aws", "extra": of_s3}))
    places = {"s3://scans": "partner", "s3a://other": "region", "S3://third": "of_s3"}
    table = define({"host": "s3://bucket/db", "extra": {"allowed_places": places}}).get_database().location("docs")
    assert dict(table.options_at("s3://scans/1.png")) == {
        "aws_access_key_id": "planted-id",
        "aws_secret_access_key": "planted-key",
        "aws_session_token": "planted-session",
        "aws_region": "eu-west-1",
        "aws_endpoint": "http://store:9000",
        "allow_http": "true",
    }
    assert dict(table.options_at("s3://other/1.png")) == {"aws_region": "eu-west-1"}
    assert dict(table.options_at("s3://third/1.png")) == {"aws_endpoint": "HTTP://minio:9000", "allow_http": "true"}
    assert "planted" not in mask_secrets("planted-key planted-session")


@pytest.mark.parametrize(
    ("place", "connection", "says"),
    [
        ("s3://scans", {"conn_type": "http", "password": "planted"}, "of type 'http', which holds nothing for it"),
        ("gs://scans", {"conn_type": "aws", "login": "planted"}, "of type 'aws', which holds nothing for it"),
        ("s3://scans", {"conn_type": "aws", "extra": {"role_arn": "arn:aws:iam::1:role/x"}}, "role_arn"),
        ("s3://scans", {"conn_type": "aws", "extra": {"config_kwargs": {"region_name": "eu"}}}, "config_kwargs"),
    ],
)
def test_a_connection_that_says_nothing_about_a_place_is_refused(
    define: Any, monkeypatch: pytest.MonkeyPatch, place: str, connection: Any, says: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_PARTNER", json.dumps(connection))
    with pytest.raises(InvalidInput, match=says) as raised:
        define({"host": "s3://bucket/db", "extra": {"allowed_places": {place: "partner"}}}).get_database()
    assert "planted" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("s3://bucket", "is neither a list of URIs"),
        ({"s3://bucket": 1}, "is neither a list of URIs"),
        ({"s3://bucket": "none"}, "Airflow connection 'none' does not exist. .* names it for s3://bucket"),
        (["photos"], "A place in allowed_places of Airflow connection .* is 'photos', a relative path"),
        (["s3://user:planted-password@bucket"], "credentials as storage_options"),
        ([7], "is neither a list of URIs"),
    ],
)
def test_a_place_that_is_none_is_refused_with_where_it_is_named(define: Any, given: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        define({"host": "s3://bucket/db", "extra": {"allowed_places": given}}).get_database()
    assert "planted-password" not in str(raised.value)


def test_a_trigger_reads_the_connection_and_then_asks_airflow_for_nothing(
    define: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = define({"host": "s3://bucket/db", "extra": {"storage_options": {"aws_secret_access_key": "planted-key"}}})
    assert asyncio.run(hook.aread()) is hook
    assert "planted-key" not in str(redact("planted-key"))

    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("Airflow was asked from a thread")

    monkeypatch.setattr(LanceHook, "get_connection", asked)
    monkeypatch.setattr(Connection, "extra_dejson", property(asked))
    monkeypatch.setattr(lance, "mask_secret", asked)
    database = hook.get_database()
    assert (database.uri, dict(database.options)) == ("s3://bucket/db", {"aws_secret_access_key": "planted-key"})
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match="'nowhere' does not exist"):
        asyncio.run(LanceHook("nowhere").aread())


def test_another_database_is_opened_with_the_same_options(define: Any) -> None:
    hook = define({"host": "s3://bucket/db", "extra": {"storage_options": {"aws_region": "eu-west-1"}}})
    database = hook.get_database("s3://other/db")
    assert database.uri == "s3://other/db"
    assert dict(database.options) == {"aws_region": "eu-west-1"}


@pytest.mark.parametrize("as_text", [False, True])
def test_secrets_among_the_storage_options_are_masked(define: Any, as_text: bool) -> None:
    options = {"azure_storage_account_key": f"key-{as_text}-1234567", "aws_region": f"region-{as_text}-1"}
    hook = define({"host": "az://c/db", "extra": {"storage_options": json.dumps(options) if as_text else options}})
    assert hook.storage_options == options
    shown = redact(" ".join(options.values()))
    assert options["azure_storage_account_key"] not in shown
    assert options["aws_region"] in shown
    assert options["azure_storage_account_key"] not in repr(hook.get_database())


def test_a_missing_connection_says_how_to_define_it(airflow_db: Path) -> None:
    with pytest.raises(InvalidInput, match=r"'no_such' does not exist.*AIRFLOW_CONN_NO_SUCH"):
        LanceHook("no_such").get_database()


@pytest.mark.parametrize("extra", [[1], "[1]", "not JSON", "5", '"text"'])
def test_an_extra_field_that_is_no_object_is_refused_without_repeating_it(define: Any, extra: Any) -> None:
    hook = define({"conn_type": "lance", "host": "s3://bucket/db", "extra": extra})
    # Airflow 3.1 does not read such a connection at all.
    refused = r"extra field of Airflow connection .* is not a JSON object|'my_lance' cannot be read"
    with pytest.raises(InvalidInput, match=refused) as caught:
        hook.get_database()
    assert "not JSON" not in str(caught.value)


def test_the_form_is_the_same_wherever_airflow_looks_for_it() -> None:
    [connection] = get_provider_info()["connection-types"]
    behaviour = LanceHook.get_ui_field_behaviour()
    declared = connection["ui-field-behaviour"]
    assert behaviour == {name.replace("-", "_"): value for name, value in declared.items()}


def test_the_button_of_the_form_lists_the_tables(define: Any, tmp_path: Path) -> None:
    hook = define({"host": str(tmp_path)})
    assert hook.test_connection() == (True, f"0 tables in {tmp_path}")
    connect(tmp_path).create_table("docs", schema=pa.schema({"text": pa.string()}))
    assert hook.test_connection() == (True, f"1 table in {tmp_path}: docs")


@pytest.mark.parametrize(
    ("connection", "told"),
    [
        ({"host": "/no/such/place"}, "There is no folder /no/such/place"),
        ({"host": "db"}, "a relative path, which differs per worker"),
        ({"host": "/data", "extra": {"storage_options": "secret"}}, "storage_options is text, but not JSON"),
    ],
)
def test_the_button_of_the_form_says_what_is_wrong(define: Any, connection: Any, told: str) -> None:
    works, message = define(connection).test_connection()
    assert not works
    assert told in message


def test_the_button_of_the_form_shows_no_token_that_a_store_repeats(define: Any) -> None:
    """As S3 does when it says that a token has expired."""
    token = "FwoGZXIvYXdzEJr+the/token=="

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<Error><Code>ExpiredToken</Code><Token-0>{self.headers['x-amz-security-token']}</Token-0></Error>"
            self.send_response(400)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {
            "aws_access_key_id": "AKIAIOSFODNN7EXAMPLE",
            "aws_secret_access_key": "a-secret-access-key",
            "aws_session_token": token,
            "aws_endpoint": f"http://127.0.0.1:{server.server_port}",
            "aws_region": "us-east-1",
            "allow_http": "true",
        }
        connection = {"host": "s3://bucket/db", "extra": {"storage_options": options}}
        works, message = define(connection).test_connection()
        server.shutdown()
    assert not works
    assert "ExpiredToken" in message
    assert token not in message
