"""The server that other tests call: what it answers, keeps, fails and counts."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.openai_server import OpenAIServer, embedding_of


@pytest.fixture(scope="module")
def running() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server


@pytest.fixture
def server(running: OpenAIServer) -> Iterator[OpenAIServer]:
    before = running.settings
    yield running
    running.change(**vars(before))
    running.reset()


class Client:
    """A connection that is kept alive."""

    def __init__(self, server: OpenAIServer, key: str = "secret") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self.headers = {"Authorization": f"Bearer {key}"}

    def ask(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any, dict[str, str]]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        self.connection.request(method, f"/v1/{path}", data, self.headers)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read()), {name.lower(): value for name, value in answer.getheaders()}

    def embed(self, *texts: str) -> tuple[int, Any, dict[str, str]]:
        return self.ask("embeddings", {"model": "m", "input": list(texts)})


def test_it_answers_embeddings_and_chats_and_counts_what_was_paid(server: OpenAIServer) -> None:
    client = Client(server)
    _, document, _ = client.embed("one", "two two two")
    assert [one["embedding"] for one in document["data"]] == [embedding_of("one"), embedding_of("two two two")]
    assert document["usage"]["total_tokens"] == 4
    _, document, _ = client.ask("chat/completions", {"messages": [{"role": "user", "content": "one"}]})
    assert document["choices"][0]["message"]["content"] == "echo: one"
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
    asked = {"messages": [{"role": "user", "content": "x"}], "response_format": {"json_schema": {"schema": schema}}}
    _, document, _ = client.ask("chat/completions", asked)
    assert json.loads(document["choices"][0]["message"]["content"]) == {"name": "x", "size": 1}
    counts = server.counts()
    assert (counts.requests, counts.rows, counts.paid_again, counts.most_paid) == (3, 4, 1, 2)
    assert counts.tokens == 4 + 17 + 17


def test_limits_hold_for_each_key_and_say_when_to_come_again(server: OpenAIServer) -> None:
    server.change(requests_per_minute=2, tokens_per_minute=10)
    first, second = Client(server, "first"), Client(server, "second")
    assert [first.embed("a")[0] for _ in range(3)] == [200, 200, 429]
    status, _, headers = second.embed("a" * 40)
    assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, "0")
    status, _, headers = second.embed("a")
    assert status == 429
    assert 55 <= int(headers["retry-after"]) <= 60
    assert server.counts().refused == 2
    server.reset()
    server.change(requests_per_minute=None, tokens_per_minute=None, concurrent=0)
    assert first.embed("a")[0] == 429


def test_it_fails_at_will(server: OpenAIServer) -> None:
    server.change(fail_inputs={"slow": ["429", 1], "broken": "500", "half": "cut", "never": "hang"}, retry_after=3)
    client = Client(server)
    assert [client.embed(text)[0] for text in ("slow", "slow", "broken", "broken")] == [429, 200, 500, 500]
    with pytest.raises(http.client.IncompleteRead):
        client.embed("half")
    impatient = Client(server)
    impatient.connection.timeout = 0.2
    with pytest.raises(TimeoutError):
        impatient.embed("never")
    server.change(fail_inputs={}, fail_rate={"500": 1.0})
    assert Client(server).embed("fine")[0] == 500
    counts = server.counts()
    assert counts.failed == {"429": 1, "500": 3, "cut": 1, "hang": 1}
    assert counts.paid == {"slow": 1, "half": 1}
    server.change(api_keys=("known",))
    assert Client(server, "unknown").embed("x")[0] == 401


def test_a_batch_is_submitted_once_and_answered_later(server: OpenAIServer) -> None:
    server.change(batch_seconds=0, fail_inputs={"broken": "500"})
    client = Client(server)
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for text in ("fine", "broken")
    ]
    _, file, _ = client.ask("files", "\n".join(map(json.dumps, lines)).encode())
    _, batch, _ = client.ask("batches", {"input_file_id": file["id"], "endpoint": "/v1/embeddings"})
    _, batch, _ = client.ask(f"batches/{batch['id']}", method="GET")
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
    _, answered, _ = client.ask(f"files/{batch['output_file_id']}/content", method="GET")
    assert (answered["custom_id"], answered["response"]["body"]["data"][0]["embedding"]) == (
        "fine",
        embedding_of("fine"),
    )
    assert (server.counts().batches, server.counts().paid) == (1, {"fine": 1})
