"""Answers of services: what cannot be matched to what was asked is no value, and no answer takes much memory."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, Retry, Skip, connect
from airflow_geneva.engine.storage.documents import Expansion
from airflow_geneva.errors import BatchFailed
from airflow_geneva.functions import answers, batch_chat, batch_embeddings, chat, embeddings, extraction
from airflow_geneva.functions.answers import (
    CutAnswer,
    ForeignAnswer,
    RefusedAnswer,
    TooLarge,
    lines_of,
    match_lines,
    read_completion,
    read_cut_vectors,
    read_vector,
    read_vectors,
    vector_of,
)
from tests.support.marks import slow_after
from tests.support.openai_server import WRONG, OpenAIServer, embedding_of

TEXTS = [f"text {at:03}" for at in range(100)]
embed = embeddings("small", 8, batch_size=100, on_error="fail")
skipping = embeddings("small", 8, batch_size=100, on_error=[Skip(ValueError)])


@pytest.fixture(scope="module")
def running() -> Iterator[OpenAIServer]:
    with OpenAIServer() as started:
        yield started


@pytest.fixture
def server(running: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> OpenAIServer:
    running.begin()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-any")
    monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
    return running


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return connect(tmp_path / "db")


def vectors_of(made: Any, texts: list[str]) -> list[Any]:
    found: list[Any] = asyncio.run(made(pa.array(texts))).to_pylist()
    return found


@pytest.mark.parametrize("way", WRONG)
def test_a_complete_answer_that_does_not_match_its_texts_is_asked_again_in_halves(
    server: OpenAIServer, way: str
) -> None:
    server.change(fail_inputs={"text 040": [way, 1]})
    assert vectors_of(embed, TEXTS) == [embedding_of(text) for text in TEXTS]
    counts = server.counts()
    assert (counts.requests, counts.rows, counts.failed) == (3, 200, {way: 1})


@pytest.mark.parametrize("way", ["fewer", "hole", "more", "twice", "from one", "negative", "quoted"])
def test_a_text_that_never_has_its_vector_fails_alone(server: OpenAIServer, database: Database, way: str) -> None:
    table = database.create_table("docs", pa.table({"text": TEXTS}))
    table.add_columns({"vector": skipping})
    server.change(fail_inputs={"text 040": way})
    assert table.backfill("vector", runner="inline").rows_failed == 1
    assert table.to_arrow()["vector"].to_pylist() == [embedding_of(one) if one[5:] != "040" else None for one in TEXTS]
    [failed] = table.get_errors()
    assert "vectors for 1 texts" in failed.message
    # Half of the texts again, then a quarter, ...: and each at most once when the engine looks for the failing row.
    assert server.counts().rows < 4 * len(TEXTS)


def test_a_service_that_numbers_no_vector_right_is_asked_for_one_text_at_a_time_and_the_log_says_so(
    server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.change(fail_inputs={"text": "unnumbered"})
    assert vectors_of(embed, TEXTS[:12]) == [embedding_of(text) for text in TEXTS[:12]]
    assert "returned 12 vectors for 12 texts, or not numbered as the texts are. None is used" in caplog.text
    server.change(fail_inputs={"text": "from one"})
    with pytest.raises(RefusedAnswer, match=r"'small' at http.* returned 1 vectors for 1 texts, or not numbered"):
        vectors_of(embed, TEXTS[:12])


def item(index: Any, embedding: Any) -> dict[str, Any]:
    return {"object": "embedding", "index": index, "embedding": embedding}


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


# Each is the vector of the second of three texts.
NO_VECTORS: dict[str, Any] = {
    "too short": [1.0],
    "too long": [1.0, 2.0, 3.0],
    "empty": [],
    "NaN": [1.0, math.nan],
    "infinite": [1.0, math.inf],
    "beyond float32": [1.0, 1e300],
    "a huge integer": [1.0, 10**400],
    "quoted": ["1.0", "2.0"],
    "null": [1.0, None],
    "bool": [True, False],
    "nested": [[1.0], [2.0]],
    "packed NaN": packed(1, math.nan),
    "packed too short": packed(1),
    "half a number": base64.b64encode(b"12345678"[:6]).decode(),
    "no base64": "!!!!",
    "text": "vector",
    "missing": None,
    "a number": 1.0,
    "an object": {"0": 1.0, "1": 2.0},
}


@pytest.mark.parametrize("name", NO_VECTORS)
def test_what_is_no_vector_of_the_right_length_concerns_its_text_only(name: str) -> None:
    data = [item(0, packed(1, 2)), item(1, NO_VECTORS[name]), item(2, [3, 4.5])]
    body = bytearray(json.dumps({"data": data}).encode())
    assert {at: vector.tolist() for at, vector in read_vectors(body, 3, 2).taken.items()} == {0: [1, 2], 2: [3, 4.5]}
    assert {at: vector.tolist() for at, vector in read_cut_vectors(body[:-2], 3, 2).taken.items()} == {
        0: [1, 2], 2: [3, 4.5],
    }  # fmt: skip


FOREIGN: dict[str, bytes] = {
    "nothing": b"",
    "a page": b"<html>Welcome</html>",
    "no object": b"[]",
    "an error": b'{"error": {"message": "no"}}',
    "data that is no list": b'{"data": {"0": 1}}',
    "a word for data": b'{"data": "x"}',
    "not UTF-8": b'{"data": [\xff\xfe]}',
    "a nest": b'{"data": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "many values": b'{"data": [' + b"[]," * 200_000 + b"0]}",
    "many numbers": b'{"data": [{"index": 0, "embedding": [' + b"0," * 200_000 + b"0]}]}",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_of_the_api_is_no_answer(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((ForeignAnswer, RefusedAnswer)):
            read_vectors(bytearray(FOREIGN[name]), 2, 2)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "usage", [None, [], {}, {"prompt_tokens": -5}, {"prompt_tokens": "7"}, {"prompt_tokens": 1e300}]
)
def test_tokens_that_cannot_be_are_not_counted(usage: Any) -> None:
    data = [item(0, packed(1, 2))]
    assert read_vectors(bytearray(json.dumps({"data": data, "usage": usage}).encode()), 1, 2).tokens == 0


def test_an_answer_that_is_cut_is_used_for_what_it_holds() -> None:
    data = [item(at, packed(at, at)) for at in (2, 0, 1)]
    body = bytearray(json.dumps({"object": "list", "data": data, "usage": {"prompt_tokens": 3}}).encode())
    ends = [body.index(packed(at, at).encode()) + len(packed(at, at)) + 2 for at in (2, 0, 1)]
    for size in range(body.index(b"[") + 1, len(body)):
        with pytest.raises((CutAnswer, ForeignAnswer)):
            read_vectors(body[:size], 3, 2)
        whole = sum(end <= size for end in ends)
        assert list(read_cut_vectors(body[:size], 3, 2).taken) == [2, 0, 1][:whole]
    assert read_vectors(body, 3, 2).tokens == 3
    for wrong in ([item(0, packed(1, 1)), item(0, packed(2, 2))], [item(3, packed(1, 1))], [item(None, packed(1, 1))]):
        cut = bytearray(json.dumps({"data": wrong}).encode()[:-2])
        assert read_cut_vectors(cut, 3, 2).taken == {}


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"raw_answer": ("<html>Welcome</html>", 1)}, LookupError, "not of OpenAI's API: .*most end in /v1"),
        ({"raw_answer": ("{}", 1)}, LookupError, "not of OpenAI's API"),
        ({"raw_answer": ("[", 500_000)}, LookupError, "not of OpenAI's API"),
        ({"raw_answer": ("1234567890", 20_000_000)}, ValueError, "an answer of more than .* bytes"),
        ({"raw_answer": ("1234567890", 20_000_000), "raw_status": 400}, ValueError, "more than 1,048,576 bytes"),
        ({"raw_answer": ("1234567890", 20_000_000), "raw_status": 500}, ConnectionError, "more than 1,048,576 bytes"),
        ({"raw_answer": ("\x1f\x0b", 9), "raw_headers": {"content-encoding": "gzip"}}, LookupError, "it is damaged"),
        ({"raw_answer": ("\x1f\x0b", 9), "raw_headers": {"content-encoding": "br"}}, LookupError, "is compressed"),
        ({"raw_answer": ("1234567890", 20_000_000), "gzip": True}, ValueError, "an answer of more than .* bytes"),
        ({"raw_answer": ("1234567890", 20_000_000), "gzip": True, "raw_status": 500}, ConnectionError, "more than 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("made", slow_after(1, [embed, chat("small", "Say it.")]), ids=["embeddings", "chat"])
def test_an_answer_of_something_else_takes_little_memory_and_says_what_to_check(
    server: OpenAIServer, made: Any, settings: Any, kind: type[Exception], words: str
) -> None:
    server.change(**settings)

    async def ask() -> None:
        await (made(pa.array(["hello"])) if made is embed else made.function("hello"))

    tracemalloc.start()
    try:
        with pytest.raises(kind, match=words):
            asyncio.run(ask())
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_an_answer_that_a_proxy_compressed_is_read(server: OpenAIServer) -> None:
    server.change(gzip=True)
    assert vectors_of(embed, TEXTS) == [embedding_of(text) for text in TEXTS]


def test_a_compressed_answer_of_any_size_is_expanded_in_pieces_and_its_end_is_noticed() -> None:
    for size in (0, 1, 65_535, 65_536, 65_537, 300_000):
        packed = gzip.compress(b"x" * size)
        whole, cut = Expansion(), Expansion()
        pieces = [piece for at in range(0, len(packed), 7) for piece in whole.pieces(packed[at : at + 7])]
        assert (sum(map(len, pieces)), whole.ended) == (size, True)
        assert max(map(len, pieces), default=0) <= 65_536
        list(cut.pieces(packed[:-1]))
        assert not cut.ended


@pytest.mark.parametrize("index", [None, "missing"])
def test_vectors_without_numbers_are_in_the_order_of_the_texts(index: Any) -> None:
    items = [item(index, packed(at, at)) for at in range(3)]
    if index == "missing":
        items = [{"embedding": one["embedding"]} for one in items]
    body = bytearray(json.dumps({"data": items}).encode())
    assert [read_vectors(body, 3, 2).taken[at].tolist() for at in range(3)] == [[0, 0], [1, 1], [2, 2]]
    for texts in (2, 4):
        with pytest.raises(RefusedAnswer):
            read_vectors(body, texts, 2)
    assert read_cut_vectors(body[:-2], 3, 2).taken == {}
    assert read_vector({"data": items[1:2]}, 2).tolist() == [1, 1]


def choice(index: Any = 0, **message: Any) -> dict[str, Any]:
    return {"index": index, "message": {"role": "assistant", "content": "yes", **message}, "finish_reason": "stop"}


NO_COMPLETIONS: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "no choices": {},
    "choices that are no list": {"choices": {"0": choice()}},
    "no choice": {"choices": []},
    "two choices": {"choices": [choice(), choice(1)]},
    "another choice": {"choices": [choice(1)]},
    "a word": {"choices": ["yes"]},
    "no message": {"choices": [{"index": 0}]},
    "a number for a text": {"choices": [choice(content=1)]},
    "parts for a text": {"choices": [choice(content=[{"type": "text", "text": "yes"}])]},
    "a refusal that is no text": {"choices": [choice(refusal={})]},
    "a refusal": {"choices": [choice(refusal="I cannot.")]},
    "a cut text": {"choices": [{**choice(), "finish_reason": "length"}]},
    "a filtered text": {"choices": [{**choice(content=None), "finish_reason": "content_filter"}]},
}


@pytest.mark.parametrize("name", NO_COMPLETIONS)
def test_what_is_no_whole_text_of_one_choice_is_a_failure(name: str) -> None:
    with pytest.raises((ForeignAnswer, ValueError)):
        read_completion(NO_COMPLETIONS[name]).text("small")
    assert read_completion({"choices": [choice()]}).text("small") == "yes"
    assert read_completion({"choices": [choice(1, content="b"), choice(0)]}, 2).text("small") == "yes"


def test_an_extraction_that_is_nested_too_deeply_is_a_failed_row(server: OpenAIServer, database: Database) -> None:
    server.change(chat_answers={"deep": "[" * 200_000, "fine": '{"name": "Ann"}'})
    table = database.create_table("people", pa.table({"text": ["deep", "fine"]}))
    person = extraction("small", "Who?", pa.struct({"name": pa.string()}), on_error=[Skip(ValueError)])
    table.add_columns({"person": person})
    assert table.backfill("person", runner="inline").rows_failed == 1
    assert table.to_arrow()["person"].to_pylist() == [None, {"name": "Ann"}]


@pytest.mark.parametrize("how", ["fewer", "renumbered", "twice", "unknown"])
@pytest.mark.parametrize(
    "make",
    slow_after(
        1, [lambda **how: batch_embeddings("small", 8, **how), lambda **how: batch_chat("small", "Say it.", **how)]
    ),
    ids=["embeddings", "chat"],
)
def test_a_completed_batch_that_does_not_match_its_requests_is_refused_as_a_whole(
    server: OpenAIServer, database: Database, make: Any, how: str
) -> None:
    table = database.create_table("docs", pa.table({"text": ["a", "b", None, "d"]}))
    server.change(batch_answers=how)
    made = make(poll_interval=0.05, on_error=[Skip(BatchFailed)])
    table.add_columns({"value": made})
    assert table.backfill("value", udf=made, runner="inline").rows_failed == 3
    assert table.to_arrow()["value"].to_pylist() == [None] * 4
    assert "is not used: it answered" in table.get_errors()[0].message
    server.change(batch_answers="")
    assert table.backfill("value", udf=made, runner="inline").rows_computed == 3
    assert table.to_arrow()["value"].null_count == 1


def test_a_batch_that_does_not_match_is_submitted_again_if_a_rule_says_so(
    server: OpenAIServer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = database.create_table("docs", pa.table({"text": ["a", "b"]}))
    server.change(batch_answers="renumbered")
    made = batch_embeddings("small", 8, poll_interval=0.05, on_error=[Retry(BatchFailed, attempts=2, backoff=0.01)])
    table.add_columns({"vector": made})
    fetch = made.function.fetch

    def repair(handle: Any) -> Any:
        try:
            return fetch(handle)
        finally:
            server.change(batch_answers="")

    monkeypatch.setattr(made.function, "fetch", repair)
    assert table.backfill("vector", udf=made, runner="inline").rows_computed == 2
    assert table.to_arrow()["vector"].to_pylist() == [embedding_of("a"), embedding_of("b")]
    assert server.counts().batches == 2


def test_lines_of_a_file_are_bounded_in_size_and_number() -> None:
    whole = b'{"custom_id": "0"}\n\n{"custom_id": "1"}\r\n{"custom_id": "2"}'
    for size in (1, 5, 100):
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert [line["custom_id"] for line in lines_of(parts, 3)] == ["0", "1", "2"]
    with pytest.raises(RefusedAnswer, match="more than 2 answers"):
        list(lines_of([whole], 2))
    with pytest.raises(TooLarge):
        list(lines_of((b"x" * 65_536 for _ in range(10_000_000)), 3))
    with pytest.raises(ForeignAnswer):
        list(lines_of([b"<html>\n"], 3))


@pytest.mark.parametrize("line", [None, [], "x", {}, {"custom_id": 0}, {"custom_id": "1.0"}, {"custom_id": ["0"]}])
def test_a_line_of_no_request_is_refused(line: Any) -> None:
    with pytest.raises(RefusedAnswer, match="without being asked"):
        match_lines([line], ["0", "1"], dict, complete=False)


def test_a_batch_that_expired_is_used_for_what_it_holds() -> None:
    assert match_lines([{"custom_id": "1"}], ["0", "1"], bool, complete=False) == {"1": True}


def test_a_vector_is_of_numbers_or_of_their_bytes() -> None:
    for given in ([1, 2.5], packed(1, 2.5)):
        found = vector_of(given)
        assert found is not None
        assert (found.tolist(), found.dtype) == ([1, 2.5], "float32")
    assert answers.bytes_of_vectors(2_048, 3_072) < 256 << 20
