"""Services in jobs: calls in flight whatever the query, and nothing paid twice; against the loopback server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, RateLimit, connect
from airflow_geneva.engine.apply import checkpoint_writer
from airflow_geneva.functions import chat, embeddings, text_chunks
from tests.support.marks import slow_after
from tests.support.openai_server import OpenAIServer, answer_to, embedding_of

ROOT = Path(__file__).parents[2]
embed = embeddings("small", 8, batch_size=4)
plain_embed = embeddings("small", 8, dedup=False)
PER_SECOND, PER_REQUEST = 50, 10
"""Requests that the limit of `limited_embed` allows, and the texts of each."""
limited_embed = embeddings(
    "small",
    8,
    dedup=False,
    batch_size=PER_REQUEST,
    limit=RateLimit("embedding", requests_per_minute=60 * PER_SECOND),
    price_per_million_tokens=100.0,
)
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
    slow_after(
        1,
        [
            {"text": "passage.text", "vector": (embed, ["text"])},
            {"vector": (embed, ["passage.text"]), "text": "passage.text"},
            {"again": "upper(passage.text)", "text": "passage.text", "vector": (embed, ["passage.text"])},
        ],
    ),
)
def test_requests_are_in_flight_across_batches_whatever_the_order_of_columns(
    server: OpenAIServer, database: Database, columns: dict[str, Any]
) -> None:
    server.change(latency=1.0)
    passages = make_passages(database, [f"A sentence about number {at}, and no more." for at in range(120)])
    passages.refresh(runner="inline")
    view = database.open_table("passages").query().select(columns).create_materialized_view(database, "embedded")
    view.refresh(runner="inline")
    found = view.to_arrow()
    assert found["vector"].to_pylist() == [embedding_of(text) for text in found["text"].to_pylist()]
    counts = server.counts()
    assert (counts.rows, counts.requests) == (120, 30)
    assert counts.most_concurrent > 8


def test_chunks_of_changed_documents_are_due_by_their_values(server: OpenAIServer, database: Database) -> None:
    """Also without `dedup`: the view keeps what it has of them, and the view on it is not asked."""
    texts = [" ".join(f"Sentence {at} of document {doc}." for at in range(8)) for doc in range(6)]
    passages = make_passages(database, texts)
    columns = {"text": "passage.text", "start": "passage.start", "vector": (plain_embed, ["passage.text"])}
    embedded = database.open_table("passages").query().select(columns).create_materialized_view(database, "embedded")
    above = database.open_table("embedded").query().select({"text": "text", "said": (summary, ["text"])})
    summed = above.create_materialized_view(database, "summed")
    docs = database.open_table("docs")

    def refresh() -> tuple[int, int, int]:
        """Refresh all; return the rows that were due in the two upper views, and the texts that were paid."""
        before = server.counts().rows
        passages.refresh(runner="inline")
        due = embedded.plan_refresh().rows_pending
        assert embedded.refresh(runner="inline").rows_run == due
        due_above = summed.plan_refresh().rows_pending
        assert summed.refresh(runner="inline").rows_run == due_above
        wanted = sorted((row["passage"]["text"], row["passage"]["start"]) for row in passages.to_arrow().to_pylist())
        found = embedded.to_arrow().to_pylist()
        assert sorted((row["text"], row["start"]) for row in found) == wanted
        assert [row["vector"] for row in found] == [embedding_of(row["text"]) for row in found]
        ids = database.open_table("passages").lance.to_table(columns=[], with_row_id=True, filter="__is_set")
        shown = embedded.lance.to_table(columns=["__source_row_id"], filter="__is_set")
        assert sorted(shown["__source_row_id"].to_pylist()) == sorted(ids["_rowid"].to_pylist())
        found = [embedded.lance.count_rows(filter=f"text = '{text}'") for text, _ in wanted]
        assert found == [sum(text == other for other, _ in wanted) for text, _ in wanted]
        said = summed.to_arrow().to_pylist()
        assert sorted((row["text"], row["said"]) for row in said) == [(text, answer_to(text)) for text, _ in wanted]
        assert [view.plan_refresh().rows_pending for view in (passages, embedded, summed)] == [0, 0, 0]
        return due, due_above, server.counts().rows - before

    assert refresh()[0] == len(passages.to_arrow())
    embedded.lance.create_scalar_index("text", "BTREE")
    docs.lance.update({"path": "'moved.md'"}, where="id IN (1, 3)")
    assert refresh() == (0, 0, 0)
    docs.lance.update({"text": "text || ' A paragraph at its very end.'"}, where="id = 2")
    assert refresh() == (1, 1, 2)
    docs.lance.update({"path": "'again.md'"})
    docs.lance.delete("id = 4")
    assert refresh() == (0, 0, 0)
    docs.lance.optimize.compact_files()
    database.open_table("embedded").lance.optimize.compact_files()
    docs.lance.update({"text": "'Another document.'"}, where="id = 0")
    docs.lance.update({"path": "'last.md'"}, where="id = 5")
    assert refresh() == (1, 1, 2)
    docs.add(pa.table({"id": [7], "path": ["new.md"], "text": [texts[4]]}))
    due, due_above, _ = refresh()
    assert due == due_above > 1


@pytest.mark.crash
def test_a_kill_within_the_first_interval_takes_what_is_in_flight_and_about_a_seconds_worth(
    server: OpenAIServer, database: Database
) -> None:
    texts = pa.table({"text": [f"text {at:04}" for at in range(4_000)]})
    docs = database.create_table("docs", texts)
    docs.add_columns({"vector": limited_embed})
    server.change(latency=0.2, requests_per_minute=60 * PER_SECOND, window_seconds=6)
    command = f"""
from airflow_geneva import connect
connect({database.uri!r}).open_table("docs").backfill("vector", runner="inline")
"""
    lost = 0
    for paid in (1_800, 3_000):
        with subprocess.Popen([sys.executable, "-c", command], cwd=ROOT) as process:
            while (found := server.counts(paid=False)).rows < paid:
                assert process.poll() is None
                time.sleep(0.02)
            process.kill()
        lost += found.most_concurrent * PER_REQUEST + 1.5 * PER_SECOND * PER_REQUEST
    docs.backfill("vector", runner="inline")
    assert docs.to_arrow()["vector"].to_pylist() == [embedding_of(text) for text in texts["text"].to_pylist()]
    counts = server.counts()
    assert counts.paid_again <= lost


def test_a_checkpoint_is_due_by_what_calls_cost(
    server: OpenAIServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text costs 0.0002: its two tokens, at 100 for a million."""
    kept = list[int]()
    write = checkpoint_writer.write_range

    def counted(store: Any, key: Any, start: int, end: int, values: pa.Array, rows: Any) -> None:
        kept.append(len(values))
        write(store, key, start, end, values, rows)

    monkeypatch.setattr(checkpoint_writer, "write_range", counted)
    docs = database.create_table("docs", pa.table({"text": [f"text {at:03}" for at in range(400)]}))
    docs.add_columns({"vector": limited_embed})
    docs.backfill("vector", runner="inline", checkpoint_cost=0.02, checkpoint_interval=600.0)
    assert 2 <= len(kept) <= 4
    kept.clear()
    docs.add_columns({"dear": limited_embed})
    docs.backfill("dear", runner="inline", checkpoint_cost=1.0)
    assert kept == []


def test_equal_inputs_are_paid_once_in_columns_of_columns(server: OpenAIServer, database: Database) -> None:
    server.change(latency=0.1, fail_inputs={"text 03": ["500", 1]})
    table = database.create_table("docs", pa.table({"text": [f"text {at % 16:02}" for at in range(96)]}))
    columns = {"text": "text", "a": (once_summary, ["text"]), "b": (once_question, ["a"])}
    view = table.query().select(columns).create_materialized_view(database, "asked")
    view.refresh(runner="inline")
    for row in view.to_arrow().to_pylist():
        assert (row["a"], row["b"]) == (answer_to(row["text"]), answer_to(answer_to(row["text"])))
    assert (server.counts().rows, server.counts().most_paid) == (32, 1)


@pytest.mark.slow
def test_requests_of_columns_of_columns_are_in_flight(server: OpenAIServer, database: Database) -> None:
    server.change(latency=1.0)
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
