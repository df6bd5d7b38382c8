"""The ready-made functions, called by jobs; those of services call the loopback server."""

from __future__ import annotations

import asyncio
import gc
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva import Database, RateLimit, RateLimited, Retry, Skip, connect
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.functions import (
    batch_chat,
    batch_embeddings,
    chat,
    clip_embeddings,
    embeddings,
    extraction,
    images,
    pages,
    sentence_embeddings,
    text_chunks,
    transcribe,
)
from tests.support.openai_server import OpenAIServer, embedding_of

KEY = "sk-planted-5d1c9a"
PERSON = pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("age", pa.int8())])

embed = embeddings("small", 8, batch_size=4)
other = embeddings("large", 8, batch_size=4)
person = extraction("small", "Who is it?", PERSON, on_error=[Skip(ValueError)])


@pytest.fixture(scope="module")
def running() -> Iterator[OpenAIServer]:
    with OpenAIServer() as started:
        yield started


@pytest.fixture
def server(running: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> OpenAIServer:
    running.begin(api_keys=(KEY,))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
    return running


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return connect(tmp_path / "db")


def run_python(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_a_version_follows_the_parameters_and_is_the_same_in_each_process() -> None:
    versions = [
        made.code_version
        for made in (embed, other, embeddings("small", 4), text_chunks(10), text_chunks(11), chat("small", "a"))
    ]
    assert len(set(versions)) == len(versions)
    assert embeddings("small", 8, price_per_million_tokens=2, batch_size=9).code_version == embed.code_version
    loaded = (
        "import sys; from airflow_geneva.functions import *;"
        " print({'faster_whisper', 'onnxruntime', 'openai', 'PIL', 'pypdfium2', 'wordllama'} & {*sys.modules},"
        " embeddings('small', 8).code_version)"
    )
    assert run_python(loaded) == f"set() {embed.code_version}"
    assert embed.import_path == f"{__name__}:embed"


@pytest.mark.parametrize(
    ("library", "make", "extra"),
    [
        ("openai", lambda: chat("small", "?"), "airflow-geneva[openai]"),
        ("PIL", images, "airflow-geneva[images]"),
        ("pypdfium2", pages, "airflow-geneva[pdf]"),
        ("PIL", lambda: pages(dpi=72), "airflow-geneva[pdf]"),
        ("onnxruntime", lambda: clip_embeddings("clip.onnx"), "airflow-geneva[clip]"),
        ("faster_whisper", transcribe, "airflow-geneva[audio]"),
        ("wordllama", sentence_embeddings, "airflow-geneva[embeddings]"),
        ("sentence_transformers", lambda: sentence_embeddings("mini"), "sentence-transformers"),
    ],
)
def test_a_missing_library_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, library: str, make: Any, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidInput, match=r"needs the package") as told:
        _ = make().function
    assert f"pip install '{extra}'" in str(told.value)


@given(st.text("ab .\n!。\u2029'"), st.integers(1, 12), st.integers(0, 11), st.sampled_from(["sentence", "word"]))
def test_chunks_cover_a_text_in_order_and_keep_their_sizes(text: str, size: int, overlap: int, borders: str) -> None:
    overlap %= size
    covered: set[int] = set()
    start, end = -1, 0
    for chunk in text_chunks(size, overlap, borders=borders)(text):
        assert text[chunk["start"] : chunk["end"]] == chunk["text"] == chunk["text"].strip()
        assert 0 < len(chunk["text"]) <= size
        assert chunk["start"] > start
        assert chunk["end"] > end
        assert not end or end - chunk["start"] <= overlap
        start, end = chunk["start"], chunk["end"]
        covered.update(range(start, end))
    assert all(letter.isspace() or at in covered for at, letter in enumerate(text))


def test_chunks_end_with_sentences_and_repeat_whole_ones(database: Database) -> None:
    text = 'One. "Two two." Three three three three.\n\nFour'
    docs = database.create_table("docs", pa.table({"id": [1, 2, 3], "text": [text, None, " "]}))
    query = docs.query().select({"id": "id", "chunk": (text_chunks(16, 11), ["text"])}).explode("chunk")
    view = query.create_materialized_view(database, "chunks")
    view.refresh(runner="inline")
    chunks = view.to_arrow()["chunk"].to_pylist()
    assert [chunk["text"] for chunk in chunks] == [
        'One. "Two two."', '"Two two." Three', "Three three", "three three", "three three.", "three.\n\nFour",
    ]  # fmt: skip
    assert all(text[chunk["start"] : chunk["end"]] == chunk["text"] for chunk in chunks)


def test_embeddings_come_in_batches_and_in_order_and_the_key_is_in_no_file(
    server: OpenAIServer, database: Database
) -> None:
    texts = [None if at % 5 == 3 else "" if at % 5 == 4 else f"text {at}" for at in range(50)]
    table = database.create_table("docs", pa.table({"text": pa.array(texts, pa.string())}))
    table.add_columns({"vector": embed})
    server.change(fail_inputs={"text 20": ["500", 1], "text 30": ["429", 1], "text 40": ["cut", 1]}, retry_after=0.01)
    result = table.backfill("vector", runner="inline")
    assert result.rows_computed == 50
    assert table.to_arrow()["vector"].to_pylist() == [embedding_of(one) if one else None for one in texts]
    counts = server.counts()
    assert counts.requests <= 13 + 3
    assert counts.failed == {"500": 1, "429": 1, "cut": 1}
    assert [
        file for file in Path(database.uri).rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()
    ] == []


def test_what_an_answer_holds_is_kept_and_only_the_rest_is_asked_again(
    server: OpenAIServer, database: Database
) -> None:
    texts = [f"text {at:02}" for at in range(64)]
    passing = [Retry(kind, backoff=0.01) for kind in (ConnectionError, RateLimited)]
    limit = RateLimit("embedding", requests_per_minute=60_000)
    made = embeddings("small", 8, batch_size=64, limit=limit, on_error=passing)
    several = {"text 40": ["cut", 1], "text 60": ["429", 1], "text 61": ["500", 1], "text 50": ["short", 1]}
    for at, (ways, again) in enumerate(
        (({"text 40": ["short", 1]}, ["text 40"]), ({"text 40": ["cut", 1]}, texts[31:]), (several, texts[31:]))
    ):
        server.reset()
        server.change(fail_inputs=ways, retry_after=0.01)
        table = database.create_table(f"docs{at}", pa.table({"text": texts}))
        table.add_columns({"vector": made})
        table.backfill("vector", udf=made, runner="inline")
        assert table.to_arrow()["vector"].to_pylist() == [embedding_of(text) for text in texts]
        counts = server.counts()
        assert counts.failed == {way: 1 for way, _ in ways.values()}
        assert {text for text, times in counts.paid.items() if times > 1} <= {*again}


def test_equal_texts_are_paid_once_and_the_plan_says_so(server: OpenAIServer, database: Database) -> None:
    texts = [f"text {at % 143:03}" for at in range(995)]
    docs = database.create_table("docs", pa.table({"text": texts}))
    docs.add_columns({"vector": embed})
    said = "vector: equal inputs of embeddings are called once (dedup)"
    assert f"{said}, also those that earlier jobs computed: _checkpoints/values" in str(docs.plan_backfill("vector"))
    docs.backfill("vector", runner="inline")
    assert (server.counts().rows, server.counts().most_paid) == (143, 1)
    docs.add([{"text": text} for text in texts[:30]])
    assert docs.backfill("vector", runner="inline").rows_cached == 30
    assert docs.to_arrow()["vector"].to_pylist() == [embedding_of(text) for text in texts + texts[:30]]
    assert server.counts().rows == 143
    assert said not in str(docs.plan_backfill("vector", udf=embeddings("small", 8, dedup=False)))
    assert not embeddings("small", 8, deterministic=False).dedup
    assert embeddings("small", 8, dedup=False).code_version == embed.code_version


def test_chunks_whose_text_did_not_change_are_not_paid_again(server: OpenAIServer, database: Database) -> None:
    texts = [" ".join(f"Sentence {at} of document {doc}." for at in range(8)) for doc in range(5)]
    rows = {"id": range(5), "path": [f"{doc}.md" for doc in range(5)], "text": texts}
    docs = database.create_table("docs", pa.table({**rows, "id": pa.array(rows["id"])}))
    cut = docs.query().select({"path": "path", "passage": (text_chunks(60), ["text"])}).explode("passage")
    passages = cut.create_materialized_view(database, "passages")
    chosen = {"path": "path", "text": "passage.text", "vector": (embed, ["passage.text"])}
    embedded = database.open_table("passages").query().select(chosen).create_materialized_view(database, "embedded")

    def refresh() -> int:
        before = server.counts().rows
        passages.refresh(runner="inline")
        embedded.refresh(runner="inline")
        found = embedded.to_arrow()
        assert found["vector"].to_pylist() == [embedding_of(text) for text in found["text"].to_pylist()]
        assert found.num_rows == passages.count_rows()
        return server.counts().rows - before

    assert refresh() == passages.count_rows()
    docs.lance.update({"path": "'moved.md'"}, where="id IN (1, 3)")
    assert refresh() == 0
    assert sorted(set(embedded.to_arrow()["path"].to_pylist())) == ["0.md", "2.md", "4.md", "moved.md"]
    docs.lance.update({"text": "text || ' A sentence of its own at the end of it.'"}, where="id = 2")
    assert refresh() == 1
    docs.add(pa.table({"id": [5, 6], "path": ["a.md", "b.md"], "text": [texts[0], texts[4]]}))
    assert refresh() == 0
    assert server.counts().most_paid == 1


def test_requests_are_filled_by_texts_and_by_tokens(server: OpenAIServer, database: Database) -> None:
    server.change(max_inputs=20, max_tokens=1_000, chars_per_token=3.0)
    # Short texts fill a request by their number, long ones by their tokens.
    texts = [f"{at:03}" if at < 300 else f"{at:03}" * 300 if at % 7 == 0 else f"{at:03}" * 20 for at in range(500)]
    texts[::50] = [None] * 10
    table = database.create_table("docs", pa.table({"text": pa.array(texts, pa.string())}))
    limit = RateLimit("service", tokens_per_minute=20_000_000)
    made = embeddings("small", 8, max_inputs=20, max_tokens=1_000, limit=limit)
    table.add_columns({"vector": made})
    table.backfill("vector", udf=made, runner="inline")
    assert table.to_arrow()["vector"].to_pylist() == [embedding_of(one) if one else None for one in texts]
    counts = server.counts()
    assert (counts.failed, counts.refused, counts.most_paid) == ({}, 0, 1)
    least = sum(1 for one in texts[:300] if one) / 20 + sum(len(one or "") for one in texts[300:]) / 3 / 1_000
    assert counts.requests <= 1.25 * least + 2
    assert embeddings("small", 8, max_inputs=4, max_tokens=9).code_version == embed.code_version
    few = RateLimit("service", tokens_per_minute=5_000)
    assert embeddings("small", 8, limit=few).func.max_tokens == 5_000
    server.change(max_inputs=2_048, max_tokens=300_000)
    long = database.create_table("long", pa.table({"text": ["x" * 24_000 + str(at) for at in range(60)]}))
    long.add_columns({"vector": embeddings("small", 8)})
    long.backfill("vector", runner="inline")
    assert server.counts().requests - counts.requests == 2


def test_a_row_whose_vector_is_always_of_another_length_fails_alone(server: OpenAIServer, database: Database) -> None:
    texts = [f"text {at:02}" for at in range(64)]
    table = database.create_table("docs", pa.table({"text": texts}))
    server.change(fail_inputs={"text 40": "short"})
    table.add_columns({"vector": embeddings("small", 8, batch_size=64, on_error=[Skip(ValueError)])})
    assert table.backfill("vector", runner="inline").rows_failed == 1
    paid = server.counts().paid
    assert {text: times for text, times in paid.items() if times > 1} == {"text 40": paid["text 40"]}
    assert paid["text 40"] <= 5


def test_a_service_that_is_not_set_up_or_gives_other_vectors_fails_with_words(
    server: OpenAIServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.change(fail_inputs={"too long": ["400", 9]})
    table = database.create_table("docs", pa.table({"text": ["a", "too long"]}))
    policy = [Skip(ValueError)]
    one, made = embeddings("other", 8, on_error=policy), embeddings("small", 4, on_error="fail")
    table.add_columns({"short": made, "wrong": one})
    with pytest.raises(GenevaError, match="vectors of 8 numbers, and dimensions=4"):
        table.backfill("short", where="text = 'a'", runner="inline")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with pytest.raises(
        GenevaError, match=r"refused: .*401.*Incorrect API key.* the password of the connection"
    ) as told:
        table.backfill("wrong", runner="inline")
    assert "sk-wrong" not in str(told.value)
    assert "correct the key (in Airflow, the connection)" in str(told.value)
    assert "correct the function" not in str(told.value)
    assert str(told.value).count("Traceback") == 1
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.change(fail_inputs={"a": ["quota", 1], "too long": ["400", 9]})
    limit = RateLimit("unpaid", requests_per_minute=6_000)
    with pytest.raises(GenevaError, match=r"refused: .*429.*until it is paid for") as told:
        table.backfill("wrong", where="text = 'a'", udf=embeddings("other", 8, limit=limit), runner="inline")
    assert "run it again (in Airflow, clear this task); it goes on from its checkpoints" in str(told.value)
    assert "This may pass" not in str(told.value)
    for url, words in {
        server.base_url.replace("v1", "v2"): r"'other' at http://127.*v2/ refused: .*404.* Check the model's name",
        "api.openai.com/v1": "begins with neither https:// nor http://",
        "http://127.0.0.1:9/v1": r"'other' at http://127.0.0.1:9/v1/ gave no answer: .*\(.*connection",
    }.items():
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        with pytest.raises(GenevaError, match=words):
            table.backfill("wrong", udf=embeddings("other", 8, on_error=policy), runner="inline")
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    assert table.backfill("wrong", runner="inline").rows_failed == 1
    [failed] = table.get_errors(column_name="wrong")
    assert "refused: Error code: 400" in failed.message
    assert "This model takes at most 8192 tokens" in failed.message
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(GenevaError, match="could not be set up: There is no OPENAI_API_KEY") as told:
        table.backfill(
            "wrong", where="text = 'a'", udf=embeddings("third", 8), on_code_change="recompute", runner="inline"
        )
    assert "Traceback" not in str(told.value)


@pytest.mark.slow
def test_a_client_of_another_key_leaves_its_sockets_to_no_other(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.change(api_keys=(), latency=0.05)
    ask = chat("small", "Say it.").function

    async def several(count: int) -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*(ask(f"text {at}") for at in range(count))), 20)

    async def change_keys() -> None:
        for key in ("first", "second", "third"):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            # The first call makes another client, and the collector may come when the former one is not closed.
            await several(1)
            gc.collect()
            assert await several(12) == [f"echo: text {at}" for at in range(12)]
            slow = asyncio.create_task(several(4))
            await asyncio.sleep(0.02)
        monkeypatch.setenv("OPENAI_API_KEY", "last")
        assert await several(4) == await slow  # whose client is closed after its calls

    asyncio.run(change_keys())


def test_a_request_that_hangs_ends_at_the_timeout_and_is_made_again(
    server: OpenAIServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [made.timeout for made in (embed, chat("small", "?"), person)] == [60, 300, 300]
    assert embeddings("small", 8, timeout=None).timeout is None
    impatient = embeddings("small", 8, timeout=3.0, on_error=[Retry(TimeoutError, attempts=2, backoff=0.01)])
    assert impatient.code_version == embed.code_version
    server.change(fail_inputs={"text": ["hang", 1]})
    table = database.create_table("docs", pa.table({"text": ["text"]}))
    table.add_columns({"vector": impatient})
    table.backfill("vector", runner="inline")
    counts = server.counts()
    assert (counts.requests, counts.failed) == (2, {"hang": 1})
    # The client library ends a request after 600 seconds, unless it is told otherwise.
    service = embeddings("small", 8, timeout=900).function

    async def seconds() -> float:
        async with service.client() as client:
            return client.timeout

    assert asyncio.run(seconds()) == 900


@pytest.mark.slow
@pytest.mark.parametrize("declared", [None, 0.00001, 0.01])
def test_a_cap_is_kept_by_the_price_that_calls_report(
    server: OpenAIServer, database: Database, declared: float | None
) -> None:
    table = database.create_table("docs", pa.table({"text": [f"text {at:04}" for at in range(2_000)]}))
    made = embeddings("small", 8, price_per_million_tokens=1_000, batch_size=20, cost=declared)
    table.add_columns({"vector": made})
    price, server_price = 3 * 0.001, 1_000 / 1e6  # three tokens a text
    server.change(latency=0.1)
    plan = table.plan_backfill("vector", udf=made, max_cost=2.0)
    assert plan.rows_to_run == 2_000
    assert ("cost" if declared else "Cost: as calls will report it") in str(plan)
    result = table.backfill("vector", udf=made, runner="inline", max_cost=2.0)
    assert result.state == "PARTIAL"
    paid = server.counts().tokens * server_price
    assert 0.95 * 2.0 <= paid <= 2.0 + 20 * price
    assert result.usage.cost == pytest.approx(paid)
    table.backfill("vector", udf=made, runner="inline", max_rows=40)
    again = table.plan_backfill("vector", udf=made)
    assert ", cost " in str(again).partition("Estimate: ")[2]
    sampled = again.estimate(sample=20).cost
    assert sampled is not None
    assert sampled.low <= again.rows_to_run * price <= sampled.high


@pytest.mark.slow
def test_a_job_of_calls_stops_at_its_cost_and_the_next_one_goes_on(server: OpenAIServer, database: Database) -> None:
    texts = [f"text {at:03}" for at in range(300)]
    table = database.create_table("docs", pa.table({"text": texts}))
    # Behind a call that does not end others go on, and their cost counts before their rows do.
    server.change(latency=0.2, fail_inputs={"text 010": ["hang", 1]})
    asked = chat("small", "Say it.", prices_per_million_tokens=(0, 10_000), cost=0.01, max_in_flight=4, timeout=20)
    table.add_columns({"said": asked})
    most, price = 30, 16 * 0.01  # what a call reports: the answers have 16 tokens
    found = table.backfill("said", udf=asked, runner="inline", max_cost=most * price)
    assert found.state == "PARTIAL"
    assert any("stopped at its cap of 4.8 (max_cost)" in note for note in found.notes)
    paid = server.counts().rows
    # As many as are begun behind it, about 70, would be paid if their cost counted with their rows.
    assert most <= paid < 2 * most
    server.change(latency=0.0, fail_inputs={})
    again = table.backfill("said", udf=asked, runner="inline")
    assert (again.state, server.counts().rows - paid) == ("DONE", 300 - found.rows_computed)
    assert table.to_arrow()["said"].to_pylist() == [f"echo: {text}" for text in texts]


def test_several_columns_fill_a_template_whose_text_is_a_part_of_the_version(
    server: OpenAIServer, database: Database
) -> None:
    rows = {"title": ["Cats", None, ""], "body": ["purr", "bark", None], "n": [1, 2, None]}
    table = database.create_table("docs", pa.table(rows))
    asked = chat("small", "Say it.", template="{{{title}}} {body}, {n}: {body}")
    table.add_columns({"said": asked, "other": (asked, ["body", "title", "n"])})
    table.backfill(["said", "other"], runner="inline")
    found = table.to_arrow()
    assert found["said"].to_pylist() == ["echo: {Cats} purr, 1: purr", "echo: {} bark, 2: bark", None]
    assert found["other"].to_pylist()[0] == "echo: {purr} Cats, 1: Cats"
    others = [chat("small", "Say it."), chat("small", "Say it.", template="{n}")]
    assert len({made.code_version for made in (asked, *others)}) == 3
    struct = extraction("small", "Who?", PERSON, template="{title} {body}", on_error=[Skip(ValueError)])
    assert struct.definition().input_columns == ("title", "body")
    for bad in ("no column", "{}", "{a!r}", "{a:>3}", "{"):
        with pytest.raises(InvalidInput, match="template="):
            chat("small", "Say it.", template=bad)


def test_functions_of_two_services_each_ask_theirs_and_say_what_the_api_does_not_know(
    server: OpenAIServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = database.create_table("docs", pa.table({"text": ["one", "two"]}))
    with OpenAIServer(api_keys=("sk-of-voyage",)) as second:
        monkeypatch.setenv("OPENAI_API_KEY_VOYAGE_EU", "sk-of-voyage")
        monkeypatch.setenv("OPENAI_BASE_URL_VOYAGE_EU", second.base_url)
        more: Any = {"input_type": "document", "extra_body": {"truncation": False}}
        documents = embeddings("small", 8, connection="voyage-eu", **more)
        view = table.query().select({"a": (documents, ["text"]), "b": (embed, ["text"])}).create_materialized_view(
            database, "both"
        )  # fmt: skip
        view.refresh(runner="inline")
        assert (second.counts().rows, server.counts().rows) == (2, 2)
        assert second.counts().last_request["input_type"] == "document"
        assert second.counts().last_request["truncation"] is False
        assert "input_type" not in server.counts().last_request
    assert documents.code_version == embeddings("small", 8, **more).code_version
    assert len({embeddings("small", 8, input_type=kind).code_version for kind in (None, "document", "query")}) == 3
    assert [
        file for file in Path(database.uri).rglob("*") if file.is_file() and b"sk-of-voyage" in file.read_bytes()
    ] == []
    monkeypatch.delenv("OPENAI_API_KEY_VOYAGE_EU")
    table.add([{"text": "three"}])
    with pytest.raises(GenevaError, match=r"no OPENAI_API_KEY_VOYAGE_EU .* connection='voyage-eu'"):
        view.refresh(runner="inline")


def test_a_batch_api_computes_what_the_other_functions_go_on_with(server: OpenAIServer, database: Database) -> None:
    rows = {"text": ["one", None, "three", "bad", ""], "title": ["a", "b", None, "c", None]}
    table = database.create_table("docs", pa.table(rows))
    server.change(fail_inputs={"bad": ["500", 1]})
    how: dict[str, Any] = {"poll_interval": 0.05, "on_error": [Skip(ConnectionError)]}
    vectors = batch_embeddings("small", 8, price_per_million_tokens=1_000, **how)
    said = batch_chat("small", "Say it.", template="{title}: {text}", prices_per_million_tokens=(1, 2), **how)
    table.add_columns({"vector": vectors, "said": said})
    result = table.backfill("vector", udf=vectors, runner="inline")
    assert (result.rows_computed, result.rows_failed) == (4, 1)
    assert result.usage.tokens == server.counts().tokens == 1 + 2
    assert result.usage.cost == pytest.approx(3 / 1_000)
    assert "500" in table.get_errors(column_name="vector")[0].message
    assert table.backfill("vector", udf=vectors, runner="inline").rows_computed == 1
    wanted = [embedding_of(text) if text else None for text in rows["text"]]
    assert table.to_arrow()["vector"].to_pylist() == wanted
    table.backfill("said", udf=said, runner="inline")
    assert table.to_arrow()["said"].to_pylist() == ["echo: a: one", "echo: b: ", "echo: : three", "echo: c: bad", None]
    assert (vectors.code_version, said.code_version) == (
        embeddings("small", 8).code_version,
        chat("small", "Say it.", template="{title}: {text}").code_version,
    )
    before = server.counts()
    table.alter_columns({"vector": embeddings("small", 8)})
    table.add([{"text": "late", "title": "d"}])
    assert table.backfill("vector", runner="inline").rows_computed == 1
    assert server.counts().batches == before.batches == 3


def test_a_batch_with_another_answer_fails_its_rows_only(server: OpenAIServer, database: Database) -> None:
    table = database.create_table("docs", pa.table({"text": ["one", None]}))
    made = batch_embeddings("small", 4, poll_interval=0.05, on_error=[Skip(ValueError)])
    table.add_columns({"vector": made})
    assert table.backfill("vector", udf=made, runner="inline").rows_failed == 1
    assert "a vector of 8 numbers, and dimensions=4" in table.get_errors()[0].message
    function = made.function
    handle = function.submit(pa.record_batch([["two"]], ["text"]), "a-key")
    assert function.find("a-key") == handle
    assert function.find("another") is None
    empty = function.submit(pa.record_batch([pa.array([None, ""])], ["text"]), "no-key")
    assert (function.poll(empty), function.fetch(empty)) == (True, [None, None])


def test_an_answer_that_does_not_fit_its_schema_is_a_failed_row_that_says_what_was_found(
    server: OpenAIServer, database: Database
) -> None:
    answers = {
        "Ann": '{"name": "Ann", "age": 3}', "Bob": '{"name": "Bob", "age": null}', "Cid": '{"name": "Cid"}',
        "Dan": '{"name": "Dan", "age": "nine"}', "Eve": "I cannot say.", "Fay": '{"name": null, "age": 1}',
        "Gus": '{"name": "Gus", "age": 300}',
    }  # fmt: skip
    server.change(chat_answers=answers)
    table = database.create_table("people", pa.table({"text": [*answers, None]}))
    table.add_columns({"person": person, "said": chat("small", "Say it.", prices_per_million_tokens=(1, 2))})
    result = table.backfill("person", runner="inline")
    assert (result.rows_computed, result.rows_failed) == (3, 5)
    found = [{"name": "Ann", "age": 3}, {"name": "Bob", "age": None}, None, None, None, None, None, None]
    assert table.to_arrow()["person"].to_pylist() == found
    told = [record.message for record in sorted(table.get_errors(), key=lambda record: record.row_address)]
    for message, wanted in zip(
        told,
        ["has no 'age'", "'nine', and not integer", "no JSON: I cannot", "'name' is None", "300 too large"],
        strict=True,
    ):
        assert wanted in message
    table.backfill("said", runner="inline")
    assert table.to_arrow()["said"].to_pylist() == [*answers.values(), None]
    with pytest.raises(InvalidInput, match="cannot answer with date32"):
        extraction("small", "When?", pa.struct([("day", pa.date32())]))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: chat("m", "i", prices_per_million_tokens=0.5), "prices_per_million_tokens=0.5"),  # type: ignore[arg-type]
        (lambda: chat("m", "i", prices_per_million_tokens=(1.0,)), "prices_per_million_tokens="),  # type: ignore[arg-type]
        (lambda: extraction("m", "i", PERSON, prices_per_million_tokens=(1, "a")), "prices_per_million_tokens="),  # type: ignore[arg-type]
        (lambda: embeddings("m", 3, price_per_million_tokens="1"), "price_per_million_tokens='1'"),  # type: ignore[arg-type]
        (lambda: embeddings("m", 0), "dimensions=0"),
        (lambda: images(224), "size=224"),  # type: ignore[arg-type]
        (lambda: images((224, 0)), "height=0"),
    ],
)
def test_a_parameter_that_is_not_valid_is_named(make: Any, setting: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(setting)):
        make()


@pytest.mark.parametrize(("fit", "corner"), [("pad", 0), ("fit", 200), ("stretch", 200)])
def test_images_become_tensors_or_encoded_images_of_one_size(fit: str, corner: int) -> None:
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (40, 20), (200, 100, 0)).save(written, "png")
    tensor = images((8, 8), fit=fit)
    assert tensor.data_type == pa.list_(pa.uint8(), 192)
    pixels = tensor(written.getvalue()).reshape(8, 8, 3)
    assert pixels[0, 0].tolist() == [corner, corner // 2, 0]
    assert pixels[4, 4].tolist() == [200, 100, 0]
    with Image.open(io.BytesIO(images((8, 4), output="webp", mode="L", fit=fit)(written.getvalue()))) as made:
        assert (made.size, made.format) == ((8, 4), "WEBP")
    assert tensor(None) is None


def test_all_kinds_of_pictures_keep_their_color_and_what_is_none_is_a_failure_with_words() -> None:
    from PIL import Image

    def written(picture: Any, kind: str, **more: Any) -> bytes:
        out = io.BytesIO()
        picture.save(out, kind, **more)
        return out.getvalue()

    def color(data: bytes) -> list[int]:
        return images((4, 4))(data).reshape(4, 4, 3)[1, 1].tolist()

    red, gray = Image.new("RGB", (9, 9), (250, 0, 0)), Image.fromarray(np.full((9, 9), 32_896, np.uint16))
    assert color(written(gray, "png")) == [128] * 3
    assert color(written(Image.new("CMYK", (9, 9), (0, 0, 0, 127)), "tiff")) == [128] * 3
    assert color(written(red, "gif", save_all=True, append_images=[Image.new("RGB", (9, 9))])) == [250, 0, 0]
    assert color(written(Image.new("LA", (9, 9), (128, 0)), "png")) == [128] * 3
    whole = written(Image.fromarray(np.random.default_rng(1).integers(0, 255, (99, 99, 3), np.uint8)), "png")
    unknown = written(red, "dds")
    for data, words in {
        b"no image": "8 bytes that begin with b'no image' are no image",
        b"": "0 bytes",
        whole[:900]: "image of 900 bytes cannot be decoded",
        written(Image.new("F", (9, 9), 0.5), "tiff"): "pixels of 32 bits",
        unknown[:80] + b"\4\0\0\0ABCD" + unknown[88:]: "cannot be decoded: Unimplemented pixel format",
    }.items():
        with pytest.raises(ValueError, match=words):
            color(data)


def test_sentences_are_embedded_by_a_local_model(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    table = database.create_table("docs", pa.table({"text": ["a time to laugh", None, ""]}))
    table.add_columns({"vector": sentence_embeddings(dimensions=64, normalize=True)})
    table.backfill("vector", runner="inline")
    vectors = table.to_arrow()["vector"].to_pylist()
    assert vectors[1:] == [None, [0] * 64]
    assert np.linalg.norm(vectors[0]) == pytest.approx(1, abs=1e-5)

    lengths = [3, 40, 1, 200, 12, 7, 90, 2] * 20
    texts = [" ".join(["a time to laugh"] * length) for length in lengths]
    several = database.create_table("several", pa.table({"text": texts}))
    made = {"sorted": sentence_embeddings(name="sorted"), "plain": sentence_embeddings(name="plain", batch_by=None)}
    several.add_columns(made)
    for column, function in made.items():
        several.backfill(column, udf=function, runner="inline")
    found = several.to_arrow()
    assert found["sorted"].equals(found["plain"]), "bit for bit"

    class Model:
        """Stands for sentence-transformers, which is too large to be installed for this test."""

        def __init__(self, name: str, truncate_dim: int) -> None:
            self.size = truncate_dim

        def encode(self, texts: list[str], **_: Any) -> Any:
            return np.ones((len(texts), self.size))

    with pytest.raises(InvalidInput, match="64, 128 or 256"):
        sentence_embeddings(dimensions=100)
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Model))
    made = sentence_embeddings("mini", 3)
    assert made(pa.array(["a", None])).to_pylist() == [[1, 1, 1], None]
