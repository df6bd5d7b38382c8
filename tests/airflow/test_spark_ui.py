"""A DAG that calls a service, on a real driver: what its UI and event log show meanwhile, and what they must not."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.airflow.conftest import Desk, Logs
from tests.support.desk import connect_lance
from tests.support.driving import DagBag, Driver
from tests.support.openai_server import OpenAIServer, embedding_of

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
PAGES = ("/jobs/", "/stages/", "/storage/", "/environment/", "/executors/", "/SQL/", "/SQL/execution/?id=0")
REST = ("environment", "jobs", "stages", "allexecutors", "sql?details=true&planDescription=true")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def look(desk: Desk, server: OpenAIServer) -> dict[str, str]:
    """Read all pages of the driver's UI while the service has the UDF wait, which it does until this has ended."""
    until = time.monotonic() + 300
    try:
        while not (found := [shard.spark_ui for job in desk.database.jobs() for shard in job.shards if shard.spark_ui]):
            assert time.monotonic() < until
            time.sleep(0.2)
        [address] = found
        [application] = json.loads(get(f"{address}/api/v1/applications"))
        rest = f"/api/v1/applications/{application['id']}"
        while not json.loads(get(f"{address}{rest}/jobs")) or not server.counts().failed:
            assert time.monotonic() < until
            time.sleep(0.2)
        return {page: get(f"{address}{page}") for page in (*PAGES, *(f"{rest}/{name}" for name in REST))}
    finally:
        server.change(fail_inputs={})


def test_the_search_example_runs_on_spark_and_no_credential_shows_anywhere(
    desk: Desk, logs: Logs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AIRFLOW__GENEVA__INLINE_BELOW_ROWS", "1000")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    connect_lance(monkeypatch, desk, aws_secret_access_key="planted-key", aws_region="eu-west-1")
    events = tmp_path / "events"
    events.mkdir()
    conf = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": events.as_uri(), "spark.eventLog.compress": "false"}
    dag = DagBag(EXAMPLES / "search_documents.py").dags["search_documents"]
    apply = dag.get_task("embed.shards.apply")
    apply.inline_below_rows, apply.conf, apply.env_vars = 0, conf, {"TOKEN": "planted-token"}
    documents = desk.database.create_table("documents", [{"id": row, "text": f"Verse {row}."} for row in range(6)])
    with OpenAIServer(api_keys=("planted-service-key",), dimensions=1536) as server, ThreadPoolExecutor(1) as pool:
        service = {"conn_type": "openai", "password": "planted-service-key", "host": server.base_url}
        monkeypatch.setenv("AIRFLOW_CONN_OPENAI_DEFAULT", json.dumps(service))
        server.change(fail_inputs={"Verse": "429"}, retry_after=0.2)
        looking = pool.submit(look, desk, server)
        first = Driver.trigger(dag, {"question": "Verse 4."}).go()
        pages = looking.result()
        assert first.state == "success", first.errors
        jobs = [desk.database.job(job.id) for job in desk.database.jobs()]
        [shard] = [shard for job in jobs for shard in job.shards if shard.spark_start]
        assert all(vars(shard.spark_start).values()), "each part of Spark's start is measured"
        assert shard.spark_start.seconds <= dict(shard.seconds)["apply"]
        assert any("6 rows computed on Spark" in line for line in logs.by_task["embed.shards.apply[0]"])
        assert first.xcom("search")[0] == {"id": 4, "text": "Verse 4.", "_distance": 0.0}
        rows = desk.database.open_table("embedded_passages").to_arrow().to_pylist()
        assert all(row["embedding"] == embedding_of(row["text"], 1536) for row in rows)

        documents.add([{"id": 6, "text": "One more."}])
        apply.inline_below_rows = 1000
        second = Driver.trigger(dag, {"question": "One more."}).go()
        assert second.xcom("search")[0]["id"] == 6
        assert server.counts().paid == {f"Verse {row}.": 1 + (row == 4) for row in range(6)} | {"One more.": 2}
    assert all("spark.app.name" in text for page, text in pages.items() if page.endswith("/environment"))
    assert "/jobs/job/kill/" not in pages["/jobs/"]
    event_log = "".join(path.read_text() for path in events.rglob("*") if path.is_file())
    assert "SparkListenerEnvironmentUpdate" in event_log
    shown = {**pages, "event log": event_log, **{task: "\n".join(lines) for task, lines in logs.by_task.items()}}
    for run in (first, second):
        for task in ("plan", "finish"):
            shown[f"{run.run_id} {task}"] = json.dumps([run.xcom(f"embed.{task}"), run.rendered(f"embed.{task}")])
    shown["summary"] = json.dumps(first.xcom("embed.plan", "summary"))
    shown["apply"] = json.dumps(
        [first.xcom("embed.shards.apply", map_index=0), first.rendered("embed.shards.apply", 0)]
    )
    assert [name for name, text in shown.items() if "planted" in text] == []
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    assert [path for path in files if b"planted" in path.read_bytes()] == []
