"""The demo's DAG on a table of a catalog whose credentials end after 5 s: a minute on Spark, and a kill halfway."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from airflow_geneva import connect_namespace
from dags_examples.demo.verses import read_books
from tests.support.catalog import TOKEN, VendingCatalog
from tests.support.object_store import Bucket
from tests.support.stack import start_stack

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.crash, pytest.mark.soak]

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
SECONDS, LASTS = 5.0, 60.0
BATCH = 100
SLOW = """
import time

import pyarrow as pa

from airflow_geneva import udf
from embedding_udfs import embed


@udf(data_type=embed.data_type, batch_size={batch})
def slowly_embed(text: pa.StringArray) -> pa.FixedSizeListArray:
    time.sleep({pause})
    with open({calls!r}, "a") as calls:
        calls.write(len(text) * ".")
    return embed(text)
"""


def of_driver() -> list[psutil.Process]:
    """Return the processes of Spark applications, with the Python workers that they have started."""
    found = [process for process in psutil.process_iter(["cmdline"]) if "SparkSubmit" in str(process.info["cmdline"])]
    return [*found, *(child for process in found for child in process.children(recursive=True))]


def test_the_demo_outlives_credentials_of_seconds_and_the_kill_of_its_driver(
    java_home: str,
    new_airflow_db: Path,
    endpoint: str,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    books, calls = read_books(), tmp_path / "calls.txt"

    def done() -> int:
        return calls.stat().st_size if calls.exists() else 0

    verses = [verse for book in books for verse in book["text"].to_pylist()]
    # Of one core; the model itself takes some seconds.
    slow = SLOW.format(batch=BATCH, pause=LASTS * BATCH / len(verses), calls=str(calls))
    files = {
        "backfill_embeddings.py": (EXAMPLES / "backfill_embeddings.py").read_text(),
        "embedding_udfs/__init__.py": (EXAMPLES / "embedding_udfs" / "__init__.py").read_text(),
        "embedding_udfs/slow.py": slow,
        ".airflowignore": "udfs",
    }
    udfs = tmp_path / "udfs"
    for name in ("embedding_udfs/__init__.py", "embedding_udfs/slow.py"):
        (udfs / name).parent.mkdir(parents=True, exist_ok=True)
        (udfs / name).write_text(files[name])
    monkeypatch.syspath_prepend(str(udfs))
    from embedding_udfs import embed
    from embedding_udfs.slow import slowly_embed

    with VendingCatalog(endpoint, f"{bucket.uri}/warehouse", SECONDS).running() as catalog:
        database = connect_namespace("rest", catalog.properties)
        table = database.create_table("verses", pa.concat_tables(books), max_rows_per_file=500)
        table.add_columns({"embedding": slowly_embed})
        namespace = {"impl": "rest", "properties": catalog.properties}
        settings = {
            "AIRFLOW_CONN_LANCE_DEFAULT": json.dumps({"conn_type": "lance", "extra": {"namespace": namespace}}),
            "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[1]"}),
            "AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "1",
        }
        with start_stack(tmp_path / "home", new_airflow_db, files, settings) as stack:
            run = stack.trigger("backfill_embeddings")
            began = time.monotonic()
            killed = list[int]()

            def kill_halfway() -> None:
                if not killed and done() > len(verses) // 2:
                    killed.append(done())
                    for process in of_driver():
                        process.kill()

            assert stack.finish("backfill_embeddings", run, kill_halfway) == "success", stack.logs()
            lasted = time.monotonic() - began
            tries = {task["task_id"]: task["try_number"] for task in stack.tasks("backfill_embeddings", run)}
            logs = stack.logs()
        found = database.open_table("verses").to_arrow().select(["text", "embedding"])
    again = done() - len(verses)
    assert found["text"].to_pylist() == verses
    assert found["embedding"].combine_chunks() == embed(found["text"].combine_chunks())
    assert tries["backfill.shards.apply"] == 2
    assert lasted > LASTS
    assert catalog.refused == []
    assert not [secret for secret in (TOKEN, *catalog.secrets) if secret in logs]
    print(f"{lasted:.1f} s, killed at {killed[0]:,} of {len(verses):,} rows, {again:,} run again;"
          f" {len(catalog.secrets)} grants, {catalog.requests:,} requests to the store, 0 refused")  # fmt: skip
