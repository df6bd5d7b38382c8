"""Services in jobs: calls in flight whatever the query, and nothing paid twice; against the loopback server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, connect
from airflow_geneva.functions import chat, embeddings, text_chunks
from tests.support.openai_server import OpenAIServer, answer_to, embedding_of

embed = embeddings("small", 8, batch_size=4)
summary = chat("small", "Sum up.")
question = chat("small", "Ask about it.")
once_summary = chat("small", "Sum up.", deterministic=True, dedup=True)
once_question = chat("small", "Ask about it.", deterministic=True, dedup=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    with OpenAIServer() as running:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-any")
        monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
        yield running


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return connect(tmp_path / "db")


def make_passages(database: Database, texts: list[str]) -> Any:
    """Make a view of passages, as struct column `passage`, of documents with an id, a path and a text."""
    ids = pa.array(range(len(texts)), pa.int64())
    docs = database.create_table("docs", pa.table({"id": ids, "path": [f"{at}.md" for at in ids], "text": texts}))
    cut = docs.query().select({"path": "path", "passage": (text_chunks(60), ["text"])}).explode("passage")
    return cut.create_materialized_view(database, "passages")


@pytest.mark.parametrize(
    "columns",
    [
        {"text": "passage.text", "vector": (embed, ["text"])},
        {"vector": (embed, ["passage.text"]), "text": "passage.text"},
        {"again": "upper(passage.text)", "text": "passage.text", "vector": (embed, ["passage.text"])},
    ],
)
def test_requests_are_in_flight_across_batches_whatever_the_order_of_columns(
    server: OpenAIServer, database: Database, columns: dict[str, Any]
) -> None:
    server.change(latency=0.3)
    passages = make_passages(database, [f"A sentence about number {at}, and no more." for at in range(120)])
    passages.refresh(runner="inline")
    view = database.open_table("passages").query().select(columns).create_materialized_view(database, "embedded")
    view.refresh(runner="inline")
    found = view.to_arrow()
    assert found["vector"].to_pylist() == [embedding_of(text) for text in found["text"].to_pylist()]
    counts = server.counts()
    assert (counts.rows, counts.requests) == (120, 30)
    assert counts.most_concurrent > 8


def test_equal_inputs_are_paid_once_in_columns_of_columns(server: OpenAIServer, database: Database) -> None:
    server.change(latency=0.1, fail_inputs={"text 03": ["500", 1]})
    table = database.create_table("docs", pa.table({"text": [f"text {at % 16:02}" for at in range(96)]}))
    columns = {"text": "text", "a": (once_summary, ["text"]), "b": (once_question, ["a"])}
    view = table.query().select(columns).create_materialized_view(database, "asked")
    view.refresh(runner="inline")
    for row in view.to_arrow().to_pylist():
        assert (row["a"], row["b"]) == (answer_to(row["text"]), answer_to(answer_to(row["text"])))
    assert (server.counts().rows, server.counts().most_paid) == (32, 1)


def test_requests_of_columns_of_columns_are_in_flight(server: OpenAIServer, database: Database) -> None:
    server.change(latency=0.3)
    table = database.create_table("docs", pa.table({"text": [f"text {at:02}" for at in range(64)]}))
    columns = {"text": "text", "a": (summary, ["text"]), "b": (question, ["a"])}
    view = table.query().select(columns).create_materialized_view(database, "asked")
    view.refresh(runner="inline")
    for row in view.to_arrow().to_pylist():
        assert (row["a"], row["b"]) == (answer_to(row["text"]), answer_to(answer_to(row["text"])))
    counts = server.counts()
    assert (counts.rows, counts.paid_again) == (128, 0)
    # Up to 16 calls of each column; with one batch after the other these would be 16.
    assert counts.most_concurrent > 20
