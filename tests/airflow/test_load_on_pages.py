"""A real API server under load: 200 requests at once, a tenth of them hostile, while a DAG runs."""

from __future__ import annotations

import json
import re
import select
import socket
import sqlite3
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pyarrow as pa
import pytest

from airflow_geneva import Table, connect
from tests.support.counting import triple
from tests.support.stack import LOCKED_SECONDS, RUN_SECONDS, START_SECONDS, Stack, start_stack, wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

AT_ONCE, HOSTILE = 200, 20
LATE_SECONDS = 120
"""A heartbeat is due each second; Airflow's default timeout is five minutes."""
GROWTH_BYTES = 150_000_000
USER = {"somebody": "a-password"}
DAG = """
import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task

with DAG("busy", schedule=None):

    @task
    def wait():
        Path({folder!r}, "started").touch()
        while not Path({folder!r}, "go").exists():
            time.sleep(0.05)

    wait()

for name in ("geneva_backfill", "geneva_create_view"):
    with DAG(name, schedule=None):
        wait()
"""


@dataclass
class Server:
    stack: Stack
    table: Table
    folder: Path

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        """Ask as an administrator, unless `headers` say otherwise; return the status and the body of the answer."""
        given = {"Authorization": f"Bearer {self.stack.token}", "Content-Type": "application/json", **headers}
        sent = {name: value for name, value in given.items() if value}
        request = urllib.request.Request(f"{self.stack.url}/geneva{path}", body, sent)
        try:
            with urllib.request.urlopen(request, timeout=RUN_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def create_view(self, **query: Any) -> tuple[int, str]:
        asked = {"kind": "query", "output_schema": "", "source_query": json.dumps({"source": "docs", **query})}
        return self.ask("/namespace/lance_local/v1/materialized_view/v/create", json.dumps(asked).encode())

    def flood(self, size: int) -> int:
        """Send a body without a login, for as long as the server takes it; return the status of the answer."""
        there = urlsplit(self.stack.url)
        path = "/geneva/namespace/lance_local/v1/table/docs/backfill_column"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        with socket.create_connection((str(there.hostname), int(there.port or 0)), timeout=RUN_SECONDS) as channel:
            channel.sendall(head.encode())
            with suppress(OSError):
                for _ in range(size // 100_000):
                    if select.select([channel], [], [], 0)[0]:
                        break
                    channel.sendall(b" " * 100_000)
            answer = channel.recv(4_096).decode(errors="replace")
        return int(answer.split()[1])

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.stack.processes["api-server"].pid)

    def memory(self) -> int:
        """Bytes of the server, without its readers."""
        return int(self.process.memory_info().rss)

    def loaded(self) -> bool:
        """Whether the server has loaded Lance's native code."""
        return "/lance/" in Path(f"/proc/{self.process.pid}/maps").read_text()

    def since_heartbeat(self, run_id: str) -> float:
        """Seconds since the newest heartbeat of a run's task."""
        asked = "SELECT last_heartbeat_at FROM task_instance WHERE run_id = ?"
        assert self.stack.database
        with closing(sqlite3.connect(self.stack.database, timeout=LOCKED_SECONDS)) as database:
            [[at]] = database.execute(asked, [run_id]).fetchall()
        if at is None:
            return 0.0
        then = datetime.fromisoformat(at).replace(tzinfo=timezone.utc)
        return (datetime.now(timezone.utc) - then).total_seconds()


def log_in(stack: Stack) -> bool:
    """Get the token of a user; False while the server does not answer."""
    [(name, password)] = USER.items()
    body = {"username": name, "password": password}
    with suppress(OSError):
        vars(stack)["token"] = stack._ask("POST", "/auth/token", {}, body)["access_token"]
    return "token" in vars(stack)


@pytest.fixture(scope="module")
def server(new_airflow_db: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("load")
    database = connect(root / "db")
    table = database.create_table("docs", pa.table({"x": pa.array(range(100), pa.int64())}))
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    files = {"busy.py": DAG.format(folder=str(root))}
    connection = json.dumps({"conn_type": "lance", "host": database.uri})
    (root / "passwords.json").write_text(json.dumps(USER))
    settings = {
        "AIRFLOW_CONN_LANCE_LOCAL": connection,
        # With it, Airflow adds the token of an administrator to every request.
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "somebody:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(root / "passwords.json"),
    }
    with start_stack(root / "home", new_airflow_db, files, settings, ()) as stack:
        stack.start("api-server")
        stack.airflow("dags", "reserialize")
        wait_for(lambda: log_in(stack), START_SECONDS, "the login")
        stack.start("scheduler")
        stack.wait()
        yield Server(stack, table, root)


SUM = "+".join(["x"] * 3_000) + " > 0"
GOOD = (
    "/", "/databases/lance_local", "/databases/lance_local.json", "/databases/lance_local/graph",
    "/databases/lance_local/tables/docs", "/databases/lance_local/tables/docs/standing",
    "/databases/lance_local/tables/docs.json", "/databases/lance_local/tables/docs/history", "/dag?dag_id=busy",
    "/namespace/lance_local/v1/namespace/%24/table/list",
)  # fmt: skip


def test_sql_in_a_request_ends_nothing_and_is_refused_by_its_size(server: Server) -> None:
    """Each of these once stopped the server, ended it, or took more than a gigabyte of it."""
    assert server.create_view(where="x > 1")[0] == 200
    before = server.memory()
    for query in (
        {"where": "x" + "-- " * 27 + "x"},
        {"where": SUM},
        {"select": {"n": SUM}},
        {"select": {"n": "length(repeat('x', 10000000))"}},
    ):
        status, answer = server.create_view(**query)
        assert (status, json.loads(answer)["code"]) == (400, 13)
    assert server.memory() - before < GROWTH_BYTES
    assert not server.loaded()


def test_a_stored_view_ends_nothing_for_those_who_open_its_page(server: Server) -> None:
    database = connect(server.folder / "db")
    view = server.table.query().where("x > 1").select(["x"]).create_materialized_view(database, "stored")
    key = "geneva::view::query"
    stored = json.loads(view.lance.schema.metadata[key.encode()])
    view.lance.update_schema_metadata({key: json.dumps({**stored, "where": SUM})})
    status, page = server.ask("/databases/lance_local/tables/stored")
    assert status == 200
    assert "is the limit" in page
    assert server.ask("/databases/lance_local/tables/docs")[0] == 200
    database.drop_table("stored")


def test_the_login_comes_before_the_body(server: Server) -> None:
    path, before = "/namespace/lance_local/v1/table/docs/backfill_column", server.memory()
    assert server.ask(path, b"{", Authorization="")[0] == 401
    assert server.flood(150_000_000) == 401
    assert server.memory() - before < 30_000_000
    assert server.ask(path, b" " * 2_000_000)[0] == 413


def test_a_cookie_is_no_token_of_the_namespace_whatever_header_stands_beside_it(server: Server) -> None:
    cookie = f"_token={server.stack.token}"
    path = "/namespace/lance_local/v1/namespace/%24/table/list"
    for authorization in ("", "Basic x", "Bearer", f"Token {server.stack.token}"):
        assert server.ask(path, Cookie=cookie, Authorization=authorization)[0] == 401
    assert server.ask(path, Cookie=cookie, Authorization="Bearer x")[0] in (401, 403)
    assert server.ask("/databases/lance_local", Cookie=cookie, Authorization="")[0] == 200


def test_two_hundred_requests_at_once_are_answered_and_tasks_keep_their_heartbeats(server: Server) -> None:
    run_id = server.stack.trigger("busy")
    wait_for((server.folder / "started").exists, START_SECONDS, "the task")
    for path in GOOD:
        assert server.ask(path)[0] == 200, path
    hostile = [
        lambda: server.create_view(where=SUM)[0],
        lambda: server.create_view(where="x" + "-- " * 27 + "x")[0],
        lambda: server.create_view(select={"n": "length(repeat('x', 10000000))"})[0],
        lambda: server.flood(20_000_000),
        lambda: server.ask("/namespace/lance_local/v1/table/docs/backfill_column", b"[" * 900_000)[0],
    ]
    before, gaps = server.memory(), []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        bad = [pool.submit(hostile[number % len(hostile)]) for number in range(HOSTILE)]
        good = [pool.submit(server.ask, GOOD[number % len(GOOD)]) for number in range(AT_ONCE - HOSTILE)]
        while not all(one.done() for one in (*bad, *good)):
            gaps.append(server.since_heartbeat(run_id))
            with suppress(Exception):
                good[0].result(timeout=1)
    assert Counter(one.result()[0] for one in good) == {200: AT_ONCE - HOSTILE}
    assert set(Counter(one.result() for one in bad)) <= {400, 401}
    assert max(gaps) < LATE_SECONDS
    assert server.memory() - before < GROWTH_BYTES
    assert not server.loaded()
    readers = [one for one in server.process.children() if re.search("pages.reader", " ".join(one.cmdline()))]
    assert len(readers) <= 2
    (server.folder / "go").touch()
    assert server.stack.finish("busy", run_id) == "success"
