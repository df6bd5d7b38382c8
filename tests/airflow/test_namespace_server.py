"""Airflow's API server answers an unmodified client of Lance's namespaces, by the rights that Airflow knows."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import lance_namespace
import pyarrow as pa
import pytest
import uvicorn
from airflow.api_fastapi.app import create_auth_manager, purge_cached_app
from fastapi import FastAPI
from lance_namespace import (
    AlterTableBackfillColumnsRequest,
    CountTableRowsRequest,
    CreateMaterializedViewRequest,
    CreateMaterializedViewResponse,
    DeclareTableRequest,
    DescribeTableRequest,
    DescribeTransactionRequest,
    LanceNamespace,
    ListNamespacesRequest,
    ListTablesRequest,
    RefreshMaterializedViewRequest,
    TableExistsRequest,
    errors,
)

from airflow_geneva.pages.namespace import DAGS, MOST_BYTES
from tests.airflow.conftest import Desk
from tests.support.desk import make_view
from tests.support.driving import DagBag, Driver, register
from tests.support.rights import Rights

pytestmark = pytest.mark.airflow

SECRET = "a-secret-access-key-of-somebody"
EXAMPLE = Path(__file__).parents[2] / "dags_examples" / "on_request.py"
Client = Callable[..., LanceNamespace]


@pytest.fixture
def dags(airflow_db: Path) -> dict[str, Any]:
    bag = DagBag(EXAMPLE)
    assert not bag.import_errors
    return dict(bag.dags)


@pytest.fixture
def client(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Opens the namespace of the desk's connection as a user."""
    from airflow_geneva.pages.app import app

    monkeypatch.setenv("AIRFLOW__CORE__AUTH_MANAGER", "tests.support.rights.Rights")
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)
    for name in ("dags", "connections", "triggers", "xcoms"):
        monkeypatch.setattr(Rights, name, {})
    manager = create_auth_manager()
    whole = FastAPI()
    whole.mount("/geneva", app)
    server = uvicorn.Server(uvicorn.Config(whole, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    uri = f"http://127.0.0.1:{port}/geneva/namespace/lance_default"

    def connect(user: str | None = "reader") -> LanceNamespace:
        headers = {} if user is None else {"headers.Authorization": f"Bearer {Rights.token(user, manager)}"}
        return lance_namespace.connect("rest", {"uri": uri, **headers})

    connect.uri = uri  # type: ignore[attr-defined]
    yield connect
    server.should_exit = True
    thread.join()
    purge_cached_app()


def connection(desk: Desk, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> None:
    extra["storage_options"] = {"aws_secret_access_key": SECRET}
    value = {"conn_type": "lance", "host": desk.database.uri, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps(value))


def run_of(job_id: str, dags: dict[str, Any]) -> Driver:
    dag_id, _, run_id = job_id.partition(":")
    return Driver(dags[dag_id], register(dags[dag_id]), run_id)


def describe(catalog: LanceNamespace, job_id: str) -> tuple[str, dict[str, str]]:
    found = catalog.describe_transaction(DescribeTransactionRequest(id=[job_id]))
    return found.status, found.properties or {}


@pytest.mark.core
def test_tables_are_listed_described_and_opened(client: Client, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.append("ab")
    connection(desk, monkeypatch)
    Rights.give("reader", connections=["lance_default"])
    catalog, name = client(), desk.table.name
    assert catalog.list_tables(ListTablesRequest(id=[])).tables == [name]
    assert catalog.list_namespaces(ListNamespacesRequest(id=[])).namespaces == []
    found = catalog.describe_table(DescribeTableRequest(id=[name]))
    assert (found.location, found.storage_options) == (desk.table.uri, None)
    catalog.table_exists(TableExistsRequest(id=[name]))
    assert lance.dataset(namespace_client=catalog, table_id=[name]).count_rows() == 20
    with pytest.raises(errors.TableNotFoundError, match="There is no table 'other'"):
        catalog.describe_table(DescribeTableRequest(id=["other"]))
    with pytest.raises(errors.NamespaceNotFoundError):
        catalog.list_tables(ListTablesRequest(id=["prod"]))
    with pytest.raises(errors.UnsupportedOperationError, match="'count_rows' is no operation of this server"):
        catalog.count_table_rows(CountTableRowsRequest(id=[name]))
    connection(desk, monkeypatch, vend_credentials=True)
    vended = catalog.describe_table(DescribeTableRequest(id=[name])).storage_options
    assert vended == {"aws_secret_access_key": SECRET}


def test_a_new_table_is_declared_where_the_program_writes_it(
    client: Client, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection(desk, monkeypatch)
    Rights.give("reader", connections=["lance_default"])
    catalog, rows = client(), pa.table({"text": ["a", "bb"]})
    assert lance.write_dataset(rows, namespace_client=catalog, table_id=["new"], mode="create").count_rows() == 2
    assert desk.database.open_table("new").to_arrow() == rows
    with pytest.raises(errors.TableAlreadyExistsError, match="There is a table or view 'new' already"):
        catalog.declare_table(DeclareTableRequest(id=["new"]))
    with pytest.raises(errors.InvalidInputError, match=r"\['location'\] of the request"):
        catalog.declare_table(DeclareTableRequest(id=["other"], location="s3://elsewhere/other.lance"))
    with pytest.raises(errors.InvalidInputError, match="'no=name' is not"):
        catalog.declare_table(DeclareTableRequest(id=["no=name"]))


def test_fields_that_would_change_what_is_described_are_refused_and_not_ignored(
    client: Client, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("a")
    connection(desk, monkeypatch, vend_credentials=True)
    Rights.give("reader", connections=["lance_default"])
    catalog, table = client(), [desk.table.name]
    with pytest.raises(errors.InvalidInputError, match=r"\['branch'\] of the request"):
        catalog.describe_table(DescribeTableRequest(id=table, branch="trial"))
    with pytest.raises(errors.InvalidInputError, match=r"\['version'\] of the request"):
        catalog.describe_table(DescribeTableRequest(id=table, version=1))
    assert catalog.describe_table(DescribeTableRequest(id=table, vend_credentials=False)).storage_options is None
    assert lance.dataset(namespace_client=catalog, table_id=table, version=1).version == 1


DEEP = {"source_query": "[" * 10_000, "output_schema": "", "kind": "query"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("table/docs/backfill_column", []),
        ("table/docs/describe?delimiter=", {}),
        ("materialized_view/v/create", DEEP),
    ],
)
def test_a_request_of_another_form_is_invalid_input(client: Client, path: str, body: Any) -> None:
    Rights.give("reader", connections=["lance_default"], triggers=DAGS.values())
    header = {"Authorization": f"Bearer {Rights.token('reader', create_auth_manager())}"}
    address = f"{client.uri}/v1/{path}"  # type: ignore[attr-defined]
    text = json.dumps(body).encode()
    request = urllib.request.Request(address, text, {**header, "Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert (refused.value.code, json.load(refused.value)["code"]) == (400, int(errors.ErrorCode.INVALID_INPUT))


def test_a_backfill_is_a_dag_run_that_is_followed(client: Client, desk: Desk, dags: dict[str, Any]) -> None:
    desk.append("ab")
    desk.define(n="length")
    for dag in dags.values():
        register(dag)
    Rights.give("reader", connections=["lance_default"], dags=["geneva_backfill"], triggers=["geneva_backfill"])
    catalog = client()
    asked = AlterTableBackfillColumnsRequest(id=[desk.table.name], column="n", where="text LIKE 'a%'", task_size=5)
    job_id = catalog.alter_table_backfill_columns(asked).job_id
    assert describe(catalog, job_id)[0] == "Queued"
    assert run_of(job_id, dags).go().state == "success"
    status, about = describe(catalog, job_id)
    assert (status, about["rows_computed"], about["state"]) == ("Succeeded", "10", "DONE")
    assert sum(value is not None for value in desk.values().values()) == 10
    assert describe(catalog, about["job_id"])[1]["rows_computed"] == "10"


def test_a_refresh_is_a_dag_run_too_and_the_connection_names_its_dag(
    client: Client, desk: Desk, dags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("ab")
    make_view(desk)
    register(dags["geneva_refresh"])
    Rights.give("reader", connections=["lance_default"], dags=["geneva_refresh"], triggers=["geneva_refresh"])
    asked = RefreshMaterializedViewRequest(id=["v"], max_rows_per_fragment=7)
    job_id = client().refresh_materialized_view(asked).job_id
    assert run_of(job_id, dags).go().state == "success"
    assert describe(client(), job_id)[1]["rows_computed"] == "20"
    assert len(desk.database.open_view("v").lance.get_fragments()) == 3
    connection(desk, monkeypatch, refresh_dag="another")
    with pytest.raises(errors.PermissionDeniedError, match="'another'"):
        client().refresh_materialized_view(asked)


def create(catalog: LanceNamespace, view: str, source: str, **asked: Any) -> CreateMaterializedViewResponse:
    """Ask for a view; names of the specification's fields are the request's, and others are the query's."""
    request = {name: asked.pop(name) for name in ("with_no_data", "output_schema") if name in asked}
    given = {"output_schema": "", **request, "source_query": json.dumps({"source": source, **asked})}
    return catalog.create_materialized_view(CreateMaterializedViewRequest(id=[view], kind="query", **given))


def test_a_view_is_created_by_a_dag_run_that_refreshes_it_too(client: Client, desk: Desk, dags: dict[str, Any]) -> None:
    desk.append("ab")
    register(dags["geneva_create_view"])
    Rights.give("reader", connections=["lance_default"], dags=["geneva_create_view"])
    catalog, select = client(), {"text": "text", "n": ["geneva_dag_udfs:length", ["text"]]}
    with pytest.raises(errors.PermissionDeniedError, match="You may not start runs of DAG 'geneva_create_view'"):
        create(catalog, "v", desk.table.name, select=select)
    Rights.give("reader", triggers=["geneva_create_view"])
    created = create(catalog, "v", desk.table.name, select=select, where="text LIKE 'a%'", with_no_data=False)
    assert created.version == 0
    assert created.job_id is not None
    assert run_of(created.job_id, dags).go().state == "success"
    status, about = describe(catalog, created.job_id)
    assert (status, about["rows_computed"], about["version"]) == ("Succeeded", "10", "2")
    assert lance.dataset(namespace_client=catalog, table_id=["v"]).to_table(columns=["n"])["n"].to_pylist() == [3] * 10
    with pytest.raises(errors.LanceNamespaceError, match="There is a table or view 'v' already"):
        create(catalog, "v", desk.table.name, select=select)


def test_a_view_is_created_without_data_and_its_run_can_be_cleared(
    client: Client, desk: Desk, dags: dict[str, Any]
) -> None:
    desk.append("a")
    register(dags["geneva_create_view"])
    Rights.give("reader", connections=["lance_default"], dags=dags, triggers=dags)
    schema = pa.schema([("twice", pa.string())])
    asked = {"select": {"twice": "text || text"}, "output_schema": base64.b64encode(schema.serialize()).decode()}
    job_id = create(client(), "v", desk.table.name, **asked).job_id
    assert job_id is not None
    run = run_of(job_id, dags).go()
    assert (run.state, run.states()["refresh.plan"]) == ("success", "skipped")
    assert describe(client(), job_id)[0] == "Succeeded"
    assert desk.database.open_view("v").to_arrow().num_rows == 0
    assert run.clear("create").go().state == "success"


def test_the_api_server_imports_no_function_of_a_view_and_the_run_says_why_it_failed(
    client: Client, desk: Desk, dags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("a")
    register(dags["geneva_create_view"])
    Rights.give("reader", connections=["lance_default"], dags=dags, triggers=dags)
    (tmp_path / "view_udfs.py").write_text("import airflow_geneva\n\nnot_a_udf = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job_id = create(client(), "v", desk.table.name, select={"n": ["view_udfs:not_a_udf", ["text"]]}).job_id
    assert job_id is not None
    assert "view_udfs" not in sys.modules
    assert run_of(job_id, dags).go().state == "failed"
    status, about = describe(client(), job_id)
    assert (status, "error" in about) == ("Failed", False)  # without the right to read XComs
    Rights.give("reader", xcoms=dags)
    _, about = describe(client(), job_id)
    assert "makes no UDF of 'not_a_udf'" in about["error"]
    assert "view_udfs" not in sys.modules


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"where": "nothing > 1"}, "nothing"),
        ({"select": {"n": "nothing + 1", "m": ["some.module:udf", ["text"]]}}, "nothing"),
        ({"select": {"m": ["some.module:udf"]}}, "Give SQL, or a UDF with its inputs"),
        ({"select": {"n": "length(text)"}, "output_schema": "eA=="}, "no Arrow schema in base64"),
        ({"explode": "text"}, "does not fit: 'explode' of the query makes a 'chunker'"),
    ],
)
def test_a_view_that_cannot_be_had_is_refused_at_once(
    client: Client, desk: Desk, dags: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    desk.append("a")
    Rights.give("reader", connections=["lance_default"], triggers=["geneva_create_view"])
    with pytest.raises(errors.InvalidInputError, match=message):
        create(client(), "v", desk.table.name, **asked)
    with pytest.raises(errors.TableNotFoundError, match="There is no table 'other'"):
        create(client(), "v", "other")


def test_a_filter_that_does_not_fit_is_told_by_the_run(client: Client, desk: Desk, dags: dict[str, Any]) -> None:
    desk.append("a")
    desk.define(n="length")
    register(dags["geneva_backfill"])
    Rights.give("reader", connections=["lance_default"], dags=dags, triggers=dags, xcoms=dags)
    asked = AlterTableBackfillColumnsRequest(id=[desk.table.name], column="n", where="nothing > 1")
    job_id = client().alter_table_backfill_columns(asked).job_id
    assert run_of(job_id, dags).go().state == "failed"
    assert "nothing" in describe(client(), job_id)[1]["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("namespace/%24/exists", {}),
        ("table/docs/describe", {}),
        ("table/docs/backfill_column", {"column": "n"}),
        ("materialized_view/docs/refresh", {}),
        ("materialized_view/docs/create", {"kind": "query", "source_query": "{}", "output_schema": ""}),
        ("transaction/docs/describe", {}),
    ],
)
def test_a_body_that_names_something_else_than_the_path_is_refused(
    client: Client, desk: Desk, path: str, body: dict[str, Any]
) -> None:
    Rights.give("reader", connections=["lance_default"], triggers=DAGS.values())
    header = {"Authorization": f"Bearer {Rights.token('reader', create_auth_manager())}"}
    for named in (["other"], "docs", [["docs"]]):
        data = json.dumps({**body, "id": named}).encode()
        address = f"{client.uri}/v1/{path}"  # type: ignore[attr-defined]
        request = urllib.request.Request(address, data, {**header, "Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        answer = json.load(refused.value)
        assert (refused.value.code, answer["code"]) == (400, int(errors.ErrorCode.INVALID_INPUT))
        assert "and the body names" in answer["error"]


def test_what_cannot_be_had_starts_nothing(client: Client, desk: Desk, dags: dict[str, Any]) -> None:
    desk.append("a")
    Rights.give("reader", connections=["lance_default"], dags=["gone"], triggers=["geneva_backfill", "geneva_refresh"])
    catalog, table = client(), [desk.table.name]
    with pytest.raises(errors.InvalidInputError, match=r"Column 'text' of table .* has no UDF"):
        catalog.alter_table_backfill_columns(AlterTableBackfillColumnsRequest(id=table, column="text"))
    desk.define(n="length")
    with pytest.raises(errors.InvalidInputError, match=r"\['cluster'\] of the request have no counterpart"):
        catalog.alter_table_backfill_columns(AlterTableBackfillColumnsRequest(id=table, column="n", cluster="c"))
    with pytest.raises(errors.InvalidInputError, match="is a table and not a view"):
        catalog.refresh_materialized_view(RefreshMaterializedViewRequest(id=table))
    with pytest.raises(errors.TransactionNotFoundError):
        catalog.describe_transaction(DescribeTransactionRequest(id=["gone:run"]))
    with pytest.raises(errors.TransactionNotFoundError):
        catalog.describe_transaction(DescribeTransactionRequest(id=["no-such-job"]))


@pytest.mark.core
def test_nothing_is_answered_without_the_right_to_it(client: Client, desk: Desk, dags: dict[str, Any]) -> None:
    desk.append("a")
    desk.define(n="length")
    register(dags["geneva_backfill"])
    Rights.give("reader", connections=["lance_default"])
    asked = AlterTableBackfillColumnsRequest(id=[desk.table.name], column="n")
    with pytest.raises(errors.UnauthenticatedError):
        client(None).list_tables(ListTablesRequest(id=[]))
    with pytest.raises(errors.PermissionDeniedError):
        client("stranger").list_tables(ListTablesRequest(id=[]))
    with pytest.raises(errors.PermissionDeniedError):
        client("stranger").alter_table_backfill_columns(asked)
    with pytest.raises(errors.PermissionDeniedError, match="You may not start runs of DAG 'geneva_backfill'"):
        client().alter_table_backfill_columns(asked)
    Rights.give("reader", triggers=["geneva_backfill"])
    job_id = client().alter_table_backfill_columns(asked).job_id
    with pytest.raises(errors.TransactionNotFoundError, match="that you may read"):
        describe(client(), job_id)


def test_a_page_of_a_table_called_namespace_keeps_the_form_of_pages(client: Client, desk: Desk) -> None:
    Rights.give("reader", connections=["lance_default"])
    header = {"Authorization": f"Bearer {Rights.token('reader', create_auth_manager())}"}
    pages = client.uri.partition("/namespace/")[0]  # type: ignore[attr-defined]
    for path, kind in (("tables/namespace", "text/html"), ("tables/namespace.json", "application/json")):
        request = urllib.request.Request(f"{pages}/databases/lance_default/{path}", headers=header)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        text = refused.value.read().decode()
        assert (refused.value.code, refused.value.headers.get_content_type()) == (404, kind)
        assert '"code"' not in text
        assert kind == "text/html" or json.loads(text)["status"] == 404


def test_a_page_of_another_site_cannot_ask_in_the_name_of_a_user(client: Client, desk: Desk) -> None:
    """A browser sends the cookie of Airflow's login along, and never a header of its own."""
    Rights.give("reader", connections=["lance_default"])
    token = Rights.token("reader", create_auth_manager())
    address = f"{client.uri}/v1/namespace/%24/table/list"  # type: ignore[attr-defined]
    for headers, method, expected in (
        ({"Cookie": f"_token={token}"}, "GET", (401, 16)),
        ({"Cookie": f"_token={token}", "Authorization": "Basic x"}, "GET", (401, 16)),
        ({"Cookie": f"_token={token}", "Authorization": f"Basic {token}"}, "GET", (401, 16)),
        ({"Cookie": f"_token={token}", "Authorization": "Bearer"}, "GET", (401, 16)),
        ({"Cookie": f"_token={token}", "Authorization": "Bearer x"}, "GET", (403, 15)),
        ({"Cookie": "_token=x", "Authorization": f"Bearer {token}"}, "DELETE", (406, 0)),
        ({"Authorization": f"Bearer {token}"}, "DELETE", (406, 0)),
    ):
        request = urllib.request.Request(address, headers=headers, method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert (refused.value.code, json.loads(refused.value.read())["code"]) == expected


def test_the_login_is_asked_for_first_then_the_rights_and_then_the_body(client: Client, desk: Desk) -> None:
    """Whatever the body holds: without a login or a right, not a byte of it is parsed, nor any table opened."""
    manager = create_auth_manager()
    Rights.give("reader", connections=["lance_default"])
    Rights.give("starter", connections=["lance_default"], triggers=DAGS.values())
    bodies = {"no JSON": b"{", "no object": b"[]", "too deep": b"[" * 100_000, "large": b" "}
    of_starter = {"no JSON": 400, "no object": 400, "too deep": 400, "large": 413}
    for path in ("table/none/backfill_column", "materialized_view/none/refresh", "materialized_view/none/create"):
        for kind, body in bodies.items():
            for user, expected in ((None, 401), ("stranger", 403), ("reader", 403), ("starter", of_starter[kind])):
                headers = {} if user is None else {"Authorization": f"Bearer {Rights.token(user, manager)}"}
                headers["Content-Type"] = "application/json"
                # Only the length of a large body: if the answer comes while it is being sent, the connection breaks.
                if kind == "large":
                    headers["Content-Length"] = str(MOST_BYTES + 1)
                address = f"{client.uri}/v1/{path}"  # type: ignore[attr-defined]
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(urllib.request.Request(address, body, headers))
                assert refused.value.code == expected, (path, kind, user, refused.value.read())


def test_a_body_without_a_length_is_read_up_to_the_limit(client: Client, desk: Desk) -> None:
    Rights.give("reader", connections=["lance_default"])
    token = Rights.token("reader", create_auth_manager())
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    address = f"{client.uri}/v1/table/docs/describe"  # type: ignore[attr-defined]
    sent: list[int] = []

    def endless() -> Iterator[bytes]:
        for _ in range(1_000):
            sent.append(1)
            yield b" " * 100_000

    with pytest.raises((urllib.error.URLError, ConnectionError)) as refused:
        urllib.request.urlopen(urllib.request.Request(address, endless(), headers))
    assert getattr(refused.value, "code", 413) == 413
    assert len(sent) < 1_000
