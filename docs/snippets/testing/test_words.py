"""Tests of the functions and DAGs of the quick start, without a scheduler, Spark or a paid service."""

# --8<-- [start:function]
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest
import text_udfs
from text_udfs import count_words

from airflow_geneva import connect
from airflow_geneva.functions import embeddings


def test_the_function() -> None:
    assert count_words("the quick brown fox") == 4


# --8<-- [end:function]


# --8<-- [start:column]
def test_new_rows_are_computed_and_others_are_not(tmp_path: Path) -> None:
    table = connect(tmp_path).create_table("docs", pa.table({"text": ["a b", "c"]}))
    table.add_columns({"words": count_words})
    assert table.backfill("words", runner="inline").rows_computed == 2
    table.add(pa.table({"text": ["d e f"]}))
    assert table.backfill("words", runner="inline").rows_computed == 1
    assert table.to_arrow()["words"].to_pylist() == [2, 1, 3]


# --8<-- [end:column]


# --8<-- [start:dag]
def test_the_dag_can_be_parsed() -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(Path(text_udfs.__file__).with_name("count_words.py")))
    assert not bag.import_errors
    assert {"define", "backfill.plan", "backfill.finish"} <= set(bag.dags["count_words"].task_ids)


# --8<-- [end:dag]


# --8<-- [start:service]
class Answers(BaseHTTPRequestHandler):
    """A service that answers every text with its length."""

    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        vectors = [{"index": at, "embedding": [float(len(text))] * 4} for at, text in enumerate(texts)]
        body = json.dumps({"data": vectors, "usage": {"prompt_tokens": 1, "total_tokens": 1}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        yield
        server.shutdown()


def test_embeddings_without_paying(tmp_path: Path, service: None) -> None:
    table = connect(tmp_path).create_table("docs", pa.table({"text": ["a", "bbb"]}))
    table.add_columns({"embedding": (embeddings("text-embedding-3-small", 4), ["text"])})
    assert table.backfill("embedding", runner="inline").rows_computed == 2
    assert table.to_arrow()["embedding"].to_pylist() == [[1.0] * 4, [3.0] * 4]


# --8<-- [end:service]
