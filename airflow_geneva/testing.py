"""Helpers for tests of columns, functions and DAGs: `pytest_plugins = ["airflow_geneva.testing"]` in a conftest.py."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_geneva.database import Database, connect
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.siblings import sibling_in
from airflow_geneva.engine.plan.backfill import FAILED
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.view import View

if TYPE_CHECKING:
    from airflow_geneva.engine.plan.model import Plan
    from airflow_geneva.table import Table

_MOST_BYTES = 64 << 20
_SHOWN = 5


def assert_up_to_date(table: Table, column: str | None = None) -> None:
    """Fail unless every row of a computed column holds what its function returns now, and nothing is left to compute.

    The function runs on all rows, in this process. Of a view, only what is left to compute is looked at.

    Args:
        table: a table, or a view without `column`.
        column: a computed column of the table.
    """
    if isinstance(table, View):
        plan, target = table.plan_refresh(), f"view {table.name!r}"
        _assert_nothing_left(plan, target, "not up to date", "view.get_errors()", "Refresh")
        assert plan.swap is not None
        groups = table.view_definition.grouping is not None
        gone = not plan.swap.idle if groups else plan.swap.gone
        assert not gone, f"{target} has rows that its query no longer gives. Refresh it."
        return
    assert column is not None, "Name a computed column."
    errors = f"table.get_errors(column_name={column!r})"
    _assert_nothing_left(table.plan_backfill(column), f"column {column!r}", "not computed", errors, "Backfill")
    function, inputs = table.column_udf(column), table.definition(column).input_columns
    now = function if inputs is None else (function, list(inputs))
    found = table.query().select({"stored": f"`{column}`", "now": now}).to_arrow().to_pylist()
    if sibling := sibling_in(table.schema.field(column)):  # one call fills it and others, each from its field
        found = [row | {"now": row["now"] and row["now"][sibling.field]} for row in found]
    wrong = [(at, row) for at, row in enumerate(found) if not _same(**row)]
    assert not wrong, (
        f"{len(wrong)} of {len(found)} rows of column {column!r} hold another value than the function returns now. The "
        f"first ones, by position: {wrong[:_SHOWN]}"
    )


def _assert_nothing_left(plan: Plan, target: str, otherwise: str, errors: str, remedy: str) -> None:
    """Fail if a plan has due rows; rows that failed before are told apart, because the next job alone does not help."""
    failed = plan.reasons.get(FAILED, 0)
    others = plan.rows_pending - failed
    why = f" failed and {'is' if failed == 1 else 'are'} tried again: {errors} says why"
    if others:
        of = f"{counted(others, 'row')} of {target} {'is' if others == 1 else 'are'} {otherwise}"
        raise AssertionError(
            f"{of}, and {counted(failed, 'row')}{why}. {remedy} it." if failed else f"{of}. {remedy} it."
        )
    assert not failed, f"{counted(failed, 'row')} of {target}{why}. Correct the function or its input."


def _same(stored: Any, now: Any) -> bool:
    return bool(stored == now) or repr(stored) == repr(now)  # NaN equals nothing, also in a list


class ModelService:
    """A model service on this machine, with OpenAI's API for embeddings and chat, which counts what it is asked.

    While it is open, `OPENAI_BASE_URL` and `OPENAI_API_KEY` name it, so that the ready-made functions call it; a job on
    Spark gets both, like those of a real service. A vector holds the length of its text, and a chat answers with the
    last message.

    Args:
        dimensions: length of the vectors, unless a request names one; may be changed later.
        answer: makes the answer of a chat from its last message, likewise.

    Attributes:
        requests: the requests so far, as they came.
        failures: the statuses of the next answers: `service.failures.append(500)` fails one request.
    """

    def __init__(self, dimensions: int = 8, answer: Callable[[str], str] = lambda message: message) -> None:
        self.dimensions = dimensions
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self._closing = ExitStack()

    @property
    def texts(self) -> list[str]:
        """All texts of which vectors were asked for."""
        return [text for request in self.requests for text in _texts(request)]

    def __enter__(self) -> ModelService:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        patch = pytest.MonkeyPatch()
        patch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        patch.setenv("OPENAI_API_KEY", "of-a-test")
        for close in (server.server_close, thread.join, server.shutdown, patch.undo):
            self._closing.callback(close)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def _respond(self, path: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(request)
        if self.failures:
            return self.failures.pop(0), {"error": {"message": "as the test asked for", "type": "test"}}
        if path.endswith("/embeddings"):
            size = request.get("dimensions") or self.dimensions
            vectors = [[float(len(text))] * size for text in _texts(request)]
            data = [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)]
            return 200, {"data": data, "usage": {"prompt_tokens": len(data), "total_tokens": len(data)}}
        message = {"role": "assistant", "content": self.answer(request["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}


def _texts(request: dict[str, Any]) -> Sequence[str]:
    given = request.get("input", [])
    return [given] if isinstance(given, str) else given


def _handler_of(service: ModelService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            size = min(int(self.headers["Content-Length"] or 0), _MOST_BYTES)
            status, answer = service._respond(self.path, parse(self.rfile.read(size)))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@pytest.fixture
def geneva_database(tmp_path: Path) -> Database:
    """An empty database in the temporary folder of the test."""
    return connect(tmp_path / "database")


@pytest.fixture
def model_service() -> Iterator[ModelService]:
    """A :class:`ModelService` for one test."""
    with ModelService() as service:
        yield service
