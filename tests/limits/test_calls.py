"""Calls of UDFs within a limit, in jobs that call a server."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from airflow_geneva import RateLimit, RateLimited, Table, connect, report, udf
from airflow_geneva.engine.limits import calls as calls_module
from airflow_geneva.engine.limits.calls import calling, limited, retry_after
from airflow_geneva.engine.limits.limiter import limiter_of
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.limits.store import BudgetTable
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.error_policy import Skip
from airflow_geneva.errors import InvalidInput, JobFailed
from tests.support.openai_server import OpenAIServer, embedding_of

VECTOR = pa.list_(pa.float32(), 8)
MANY = RateLimit("service", requests_per_minute=60_000, tokens_per_minute=1e7)


@pytest.fixture(scope="module")
def running() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        yield server


@pytest.fixture
def server(running: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    before = running.settings
    monkeypatch.setenv("SERVICE", running.base_url)
    yield running
    running.change(**vars(before))
    running.reset()


def ask(texts: list[str]) -> list[list[float]]:
    """Call the service as a UDF does; it raises `urllib.error.HTTPError`, and reports what it used."""
    body = json.dumps({"input": texts}).encode()
    request = urllib.request.Request(
        f"{os.environ['SERVICE']}/embeddings", body, {"Authorization": "Bearer key", "Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        document = json.load(answer)
    report(tokens=document["usage"]["total_tokens"], cost=0.25)
    return [one["embedding"] for one in document["data"]]


def texts_table(folder: Path, count: int = 12) -> Table:
    db = connect(folder)
    return db.create_table("docs", pa.table({"text": [f"text {at} of many" for at in range(count)]}))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_call_that_is_answered_429_is_made_again_and_is_no_failure(
    tmp_path: Path, server: OpenAIServer, policy: str
) -> None:
    @udf(data_type=VECTOR, limit=MANY, on_error=policy)
    def embed(text: str) -> list[float]:
        return ask([text])[0]

    server.change(fail_inputs={"text 3": ["429", 2]}, retry_after=0.1)
    table = texts_table(tmp_path)
    table.add_columns({"v": embed})
    result = table.backfill("v", runner="inline")
    assert (result.rows_computed, result.rows_failed) == (12, 0)
    stored = table.to_arrow()
    assert stored["v"].to_pylist() == [embedding_of(text) for text in stored["text"].to_pylist()]
    counts = server.counts()
    assert (counts.requests, counts.failed, counts.most_paid) == (14, {"429": 2}, 1)


def test_async_calls_wait_and_are_made_again_while_others_go_on(tmp_path: Path, server: OpenAIServer) -> None:
    @udf(
        data_type=VECTOR,
        limit=RateLimit("async", requests_per_minute=60_000, concurrent=6),
        max_in_flight=12,
        on_error=[Skip(urllib.error.HTTPError)],
    )
    async def embed(text: str) -> list[float]:
        return (await asyncio.to_thread(ask, [text]))[0]

    server.change(fail_inputs={"text 3 ": ["429", 2], "text 7 ": "500"}, retry_after=0.1, latency=0.02, concurrent=6)
    table = texts_table(tmp_path, 40)
    table.add_columns({"v": embed})
    result = table.backfill("v", runner="inline")
    counts = server.counts()
    assert (result.rows_computed, result.rows_failed, counts.refused, counts.most_paid) == (39, 1, 0, 1)
    assert (result.usage.calls, result.usage.tokens) == (42, counts.tokens)
    [error] = table.get_errors()
    assert "in embed" in error.traceback
    assert "airflow_geneva" not in error.traceback


def test_other_failures_are_those_of_the_policy_and_name_the_function(tmp_path: Path, server: OpenAIServer) -> None:
    @udf(data_type=VECTOR, limit=MANY, on_error=[Skip(urllib.error.HTTPError)])
    def embed(text: str) -> list[float]:
        return ask([text])[0]

    server.change(fail_inputs={"text 3": "500"})
    table = texts_table(tmp_path)
    table.add_columns({"v": embed})
    result = table.backfill("v", runner="inline")
    assert result.rows_failed == 1
    [error] = table.get_errors()
    assert "in embed" in error.traceback
    assert "airflow_geneva" not in error.traceback


@pytest.mark.slow
def test_a_timeout_counts_from_the_begin_of_a_call_not_from_that_of_its_wait(
    tmp_path: Path, server: OpenAIServer
) -> None:
    @udf(data_type=VECTOR, limit=RateLimit("slow", requests_per_minute=20), timeout=2.0)
    def embed(text: str) -> list[float]:
        return ask([text])[0]

    table = texts_table(tmp_path, 2)
    table.add_columns({"v": embed})
    assert table.backfill("v", runner="inline").rows_computed == 2
    assert connect(tmp_path).table_names() == ["docs"]


def test_a_batch_is_one_request_and_tokens_are_learned(tmp_path: Path, server: OpenAIServer) -> None:
    @udf(data_type=VECTOR, limit=MANY, batch_size=4)
    def embed(text: pa.StringArray) -> pa.Array:
        return pa.array(ask(text.to_pylist()), VECTOR)

    server.change(chars_per_token=1.0)
    table = texts_table(tmp_path)
    table.add_columns({"v": embed})
    assert table.backfill("v", runner="inline").rows_computed == 12
    assert server.counts().requests == 3
    limiter = limiter_of(Storage.at(str(tmp_path)).folder("_geneva", "limits"), MANY)
    assert limiter.guesses["embed"].per_text == pytest.approx(4.0, rel=0.05)


def test_calls_that_are_refused_for_too_long_fail(
    tmp_path: Path, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    @udf(data_type=VECTOR, limit=MANY)
    def embed(text: str) -> list[float]:
        raise RateLimited(retry_after=0.2)

    monkeypatch.setattr(calls_module, "_GIVE_UP_SECONDS", 0.5)
    table = texts_table(tmp_path)
    table.add_columns({"v": embed})
    with pytest.raises(JobFailed, match="RateLimited"):
        table.backfill("v", runner="inline")


def test_a_query_that_is_evaluated_here_keeps_limits(tmp_path: Path) -> None:
    refused: list[str] = []

    @udf(data_type=pa.string(), limit=MANY)
    def echo(text: str) -> str:
        if not refused:
            refused.append(text)
            raise RateLimited(retry_after=0.01)
        return text

    table = texts_table(tmp_path)
    assert table.query().select({"v": echo}).to_arrow()["v"].to_pylist() == table.to_arrow()["text"].to_pylist()
    assert refused == ["text 0 of many"]


def test_a_429_is_known_by_what_exceptions_of_clients_have() -> None:
    def raised(**parts: object) -> Exception:
        error = ValueError("429")
        vars(error).update(parts)
        return error

    assert retry_after(RateLimited(retry_after=3)) == 3
    assert retry_after(RateLimited()) == 0
    assert retry_after(raised(status_code=500)) is None
    assert retry_after(raised(code="rate_limit_exceeded")) is None
    of_httpx = SimpleNamespace(status_code=429, headers={"Retry-After": "7", "retry-after-ms": "6500"})
    assert retry_after(raised(response=of_httpx)) == 6.5
    dates = {"Date": "Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT"}
    assert retry_after(raised(status=429, headers=dates)) == 30
    for wrong in ("soon", "-3", "nan", "GMT"):
        assert retry_after(raised(status=429, headers={"Retry-After": wrong})) == 0
    assert retry_after(raised(status=429, headers={"Retry-After": "inf"})) == 3600


@pytest.mark.parametrize(
    ("key", "limits"),
    [
        ("a/b", {"requests_per_minute": 1}),
        ("", {"requests_per_minute": 1}),
        ("a", {}),
        ("a", {"requests_per_minute": -1}),
        ("a", {"requests_per_minute": 0}),
        ("a", {"tokens_per_minute": float("nan")}),
        ("a", {"concurrent": 0}),
        ("a", {"concurrent": 1.5}),
    ],
)
def test_limits_that_limit_nothing_or_cannot_be_are_refused(key: str, limits: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="RateLimit"):
        RateLimit(key, **limits)  # type: ignore[arg-type]


def test_what_is_no_limit_or_no_number_is_refused() -> None:
    with pytest.raises(InvalidInput, match="RateLimit"):
        udf(limit=5)(ask)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="report"):
        report(tokens=-1)
    report(tokens=1)  # outside of a job


@pytest.mark.slow
def test_what_calls_report_is_in_the_result_the_status_and_the_cap(tmp_path: Path, server: OpenAIServer) -> None:
    @udf(data_type=VECTOR, limit=MANY, on_error="skip", cost=0.01)
    def embed(text: str) -> list[float]:
        return ask([text])[0]

    server.change(fail_inputs={"text 3": ["429", 2]}, retry_after=0.1)
    table = texts_table(tmp_path)
    table.add_columns({"v": embed})
    result = table.backfill("v", runner="inline", max_cost=1.0, batch_size=1)
    tokens = server.counts().tokens
    # Four calls reach the cap, by what they reported; two more were answered 429.
    assert (result.state, result.rows_computed) == ("PARTIAL", 4)
    assert (result.usage.calls, result.usage.tokens, result.usage.cost) == (6, tokens, 1.0)
    job = connect(tmp_path).job(result.job_id)
    assert job is not None
    assert job.usage == result.usage
    assert str(result.usage) in str(job)
    assert "6 calls of a service" in str(result)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_tokens_beyond_the_estimate_are_in_the_budget_when_the_call_has_ended(
    tmp_path: Path, is_async: bool, fails: bool
) -> None:
    table = TableLocation(str(tmp_path / "db" / "t.lance"), "t")
    limit = RateLimit("service", tokens_per_minute=60_000)

    def use(text: str) -> str:
        report(tokens=60_000)
        if fails:
            raise ValueError(text)
        return text

    async def use_later(text: str) -> str:
        return use(text)

    with calling(table, Meter()):
        function = limited(use_later if is_async else use, limit, "use", is_async)
        try:
            answer = function("of 12 chars.")
            assert (asyncio.run(answer) if is_async else answer) == "of 12 chars."
        except ValueError:
            assert fails
    budget = BudgetTable(table.limits, "service").read().budget
    assert 60 <= budget.tokens - budget.clock <= 65
