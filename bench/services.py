"""How much of a service's quota is used, and how many texts are paid after changes, kills and truncated answers?

Views of passages and of their embeddings are refreshed against a server on loopback, which enforces limits of requests
and tokens, and counts. A plain asyncio script embeds the same texts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_geneva import Database, RateLimit, View, connect
from airflow_geneva.functions import embeddings, text_chunks
from dags_examples import passage_udfs
from tests.support.openai_server import Counts, OpenAIServer, embedding_of

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "snippets" / "plain_embeddings.py"
_WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "then", "some", "other", "words", "follow", "it")
_SENTENCES, _PART, _IN_FLIGHT, _PER_REQUEST = 12, 0.1, 16, 64
_PER_MINUTE, _REQUESTS_PER_MINUTE, _WINDOW_SECONDS, _LATENCY = 600_000, 6_000, 6.0, 0.25

cut = text_chunks(size=240)
embed = embeddings(
    "small",
    8,
    batch_size=_PER_REQUEST,
    max_in_flight=_IN_FLIGHT,
    limit=RateLimit("service", tokens_per_minute=_PER_MINUTE, requests_per_minute=_REQUESTS_PER_MINUTE),
    price_per_million_tokens=1.0,
)
COLUMNS = {"text": "passage.text", "embedding": (embed, ["text"])}


def measure(folder: str, documents: int, kills: int, requests: int, runners: Sequence[str]) -> dict[str, Any]:
    """Return the server's counts for each change, for the script, and for the example DAG's own function."""
    found = dict[str, Any]()
    with _serving() as server:
        for runner in runners:
            found[f"first load, {runner}"] = _first_load(Path(folder) / runner, server, documents, runner)
        found["plain script"] = _script(Path(folder), server, documents)
        lived = connect(Path(folder) / runners[0])
        for name, change in _CHANGES.items():
            found[name] = _change(lived, server, change, documents)
        for name, measured in (("five kills", _killed), ("a cut answer", _cut)):
            found[name] = measured(Path(folder) / name.replace(" ", "_"), server, documents, kills)
    for runner in runners:
        found[f"example DAG, {runner}"] = _example(Path(folder) / f"example_{runner}", requests, runner)
    return found


@contextmanager
def _serving() -> Iterator[OpenAIServer]:
    limits = {"tokens_per_minute": _PER_MINUTE, "requests_per_minute": _REQUESTS_PER_MINUTE}
    with OpenAIServer(latency=_LATENCY, window_seconds=_WINDOW_SECONDS, **limits) as server:
        os.environ |= {"OPENAI_API_KEY": "sk-any", "OPENAI_BASE_URL": server.base_url}
        yield server


def text_of(document: int, edition: int = 0) -> str:
    drawn = random.Random(document * 1_000 + edition)
    sentences = (" ".join(drawn.choices(_WORDS, k=12)).capitalize() for _ in range(_SENTENCES))
    return " ".join(f"{sentence} {at} of {document}." for at, sentence in enumerate(sentences))


def _make(folder: Path, documents: int) -> Database:
    """Create documents and both views, as the example DAG does."""
    database = connect(folder)
    ids = range(documents)
    rows = {"id": list(ids), "path": [f"{at}.md" for at in ids], "text": [text_of(at) for at in ids]}
    docs = database.create_table("documents", pa.table(rows))
    passages = docs.query().select({"path": "path", "passage": (cut, ["text"])}).explode("passage")
    passages.create_materialized_view(database, "passages").refresh(runner="inline")
    database.open_table("passages").query().select(COLUMNS).create_materialized_view(database, "embedded")
    return database


def _views(database: Database) -> list[View]:
    return [database.open_view(name) for name in ("passages", "embedded")]


def _texts(database: Database) -> list[str]:
    return [row["text"] for row in database.open_view("passages").to_arrow()["passage"].to_pylist()]


def _check(database: Database) -> None:
    found = database.open_view("embedded").to_arrow()
    assert sorted(found["text"].to_pylist()) == sorted(_texts(database))
    assert found["embedding"].to_pylist() == [embedding_of(text) for text in found["text"].to_pylist()]


def _first_load(folder: Path, server: OpenAIServer, documents: int, runner: str) -> dict[str, Any]:
    database = _make(folder, documents)
    server.reset()
    _views(database)[1].refresh(runner=runner)
    _check(database)
    return _counted(server.counts(), due=len(_texts(database)), new=len(set(_texts(database))), loaded=True)


def _example(folder: Path, requests: int, runner: str) -> dict[str, Any]:
    """Load the tables of the example DAG with its unchanged function and its limit of requests."""
    limit = passage_udfs.embed.limit
    per_minute = (limit and limit.requests_per_minute) or 0.0

    def text(document: int) -> str:
        return " ".join(text_of(4 * document + part) for part in range(4))

    each = len(passage_udfs.passages.function(text(0)))
    ids = range(requests * (passage_udfs.embed.batch_size or 1) // each + 1)
    database = connect(folder)
    docs = database.create_table("documents", pa.table({"id": list(ids), "text": [text(at) for at in ids]}))
    passages = docs.query().select({"id": "id", "passage": (passage_udfs.passages, ["text"])}).explode("passage")
    passages.create_materialized_view(database, "passages").refresh(runner="inline")
    columns = {"id": "id", "text": "passage.text", "embedding": (passage_udfs.embed, ["text"])}
    view = database.open_table("passages").query().select(columns).create_materialized_view(database, "embedded")
    limits = {"requests_per_minute": per_minute, "window_seconds": _WINDOW_SECONDS}
    with OpenAIServer(latency=_LATENCY, dimensions=1_536, **limits) as server:
        os.environ |= {"OPENAI_API_KEY": "sk-any", "OPENAI_BASE_URL": server.base_url}
        view.refresh(runner=runner)
        counts = server.counts()
    due, new = view.to_arrow(["text"]).num_rows, len(counts.paid)
    return {**_counted(counts, due, new), **_used(counts.admitted, per_minute)}


def _script(folder: Path, server: OpenAIServer, documents: int) -> dict[str, Any]:
    given, taken = folder / "texts.json", folder / "vectors.json"
    texts = [text for at in range(documents) for text in _passages_of(text_of(at))]
    given.write_text(json.dumps(texts))
    server.reset()
    environment = {**os.environ, "TOKENS_PER_MINUTE": str(_PER_MINUTE)}
    subprocess.run([sys.executable, SCRIPT, given, taken], env=environment, check=True)
    assert json.loads(taken.read_text()) == [embedding_of(text) for text in texts]
    return _counted(server.counts(), due=len(texts), new=len(set(texts)), loaded=True)


def _passages_of(text: str) -> list[str]:
    return [chunk["text"] for chunk in cut.function(text)]


def _move(database: Database, documents: int) -> None:
    database.open_table("documents").lance.update({"path": "concat('moved/', path)"}, where=_some(documents))


def _edit_start(database: Database, documents: int) -> None:
    edited = {"text": "concat('Something new stands at the begin of document ', cast(id AS string), '. ', text)"}
    database.open_table("documents").lance.update(edited, where=_some(documents))


def _edit_end(database: Database, documents: int) -> None:
    edited = {"text": "concat(text, ' Something new stands at the end of document ', cast(id AS string), '.')"}
    database.open_table("documents").lance.update(edited, where=_some(documents))


def _copy(database: Database, documents: int) -> None:
    copied = database.open_table("documents").lance.to_table(filter="id < 30").to_pylist()
    rows = [{**row, "id": documents + row["id"], "path": f"copy/{row['path']}"} for row in copied]
    database.open_table("documents").add(rows)


def _some(documents: int) -> str:
    return f"id % {round(1 / _PART)} = 3 AND id < {documents}"


_CHANGES = {
    "10 % moved": _move,
    "10 % edited at the start": _edit_start,
    "10 % edited at the end": _edit_end,
    "30 copies": _copy,
}


def _change(database: Database, server: OpenAIServer, change: Any, documents: int) -> dict[str, Any]:
    before = set(_texts(database))
    change(database, documents)
    server.reset()
    passages, embedded = _views(database)
    passages.refresh(runner="inline")
    due = embedded.plan_refresh().rows_pending
    embedded.refresh(runner="inline")
    _check(database)
    return _counted(server.counts(), due=due, new=len(set(_texts(database)) - before))


def _killed(folder: Path, server: OpenAIServer, documents: int, kills: int) -> dict[str, Any]:
    """Kill the refresh repeatedly within the first ten seconds' quota, and then let it finish."""
    database = _make(folder, documents)
    server.reset()
    texts = _texts(database)
    within = min(_PER_MINUTE / 6, sum(len(text) for text in texts) / 4)
    command = [sys.executable, "-m", "bench.services", str(folder)]
    allowed = 0.0
    for kill in range(1, kills + 1):
        with subprocess.Popen(command, cwd=ROOT) as process:
            while (counts := server.counts(paid=False)).tokens < within * kill / (kills + 1):
                if process.poll() is not None:
                    raise RuntimeError(f"The refresh ended before kill {kill}.")
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        per_text = counts.tokens / counts.rows
        allowed += counts.most_concurrent * _PER_REQUEST + _PER_MINUTE / 60 / per_text
    database.open_view("embedded").refresh(runner="inline")
    _check(database)
    new = len(set(texts))
    return {**_counted(server.counts(), due=len(texts), new=new), "kills": kills, "allowed": round(allowed)}


def _cut(folder: Path, server: OpenAIServer, documents: int, kills: int) -> dict[str, Any]:
    database = _make(folder, documents // 10)
    server.reset()
    server.change(fail_inputs={_texts(database)[len(_texts(database)) // 2]: ["cut", 1]})
    database.open_view("embedded").refresh(runner="inline")
    server.change(fail_inputs={})
    _check(database)
    return _counted(server.counts(), due=len(_texts(database)), new=len(set(_texts(database))))


def _counted(counts: Counts, due: int, new: int, loaded: bool = False) -> dict[str, Any]:
    """Return the due and the paid rows, and for a load the used fraction of the quota without first and last tenth."""
    found = {"due": due, "new": new, "paid": counts.rows, "requests": counts.requests, "refused": counts.refused}
    found["in_flight"] = counts.most_concurrent
    return {**found, **_used(counts.admitted_tokens, _PER_MINUTE)} if loaded else found


def _used(admitted: Mapping[str, int], per_minute: float) -> dict[str, Any]:
    """Return the used fraction of a limit without the first and last tenth of the seconds, and the number of
    seconds."""
    by_second = {int(second): used for second, used in admitted.items()}
    seconds = range(min(by_second), max(by_second) + 1)
    inner = seconds[len(seconds) // 10 : -max(len(seconds) // 10, 1)] or seconds
    used = sum(by_second.get(second, 0) for second in inner) * 60 / (per_minute * len(inner))
    return {"used": used, "seconds": len(seconds)}


if __name__ == "__main__":
    connect(sys.argv[1]).open_view("embedded").refresh(runner="inline")
