"""Spark's UI and its event log, as they are while a real driver computes: what they show, and what they must not."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.airflow.conftest import Desk
from tests.support.desk import connect_lance, make_dag, texts
from tests.support.driving import Driver

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

PAGES = ("/jobs/", "/stages/", "/storage/", "/environment/", "/executors/", "/SQL/", "/SQL/execution/?id=0")
REST = ("environment", "jobs", "stages", "allexecutors", "sql?details=true&planDescription=true")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def look(desk: Desk, until: float) -> dict[str, str]:
    """Read all pages of the driver's UI while the UDF waits, which it does until this has ended."""
    try:
        while not (found := [shard.spark_ui for job in desk.database.jobs() for shard in job.shards if shard.spark_ui]):
            assert time.monotonic() < until
            time.sleep(0.2)
        [address] = found
        [application] = json.loads(get(f"{address}/api/v1/applications"))
        rest = f"/api/v1/applications/{application['id']}"
        while not json.loads(get(f"{address}{rest}/jobs")):
            assert time.monotonic() < until
            time.sleep(0.2)
        return {page: get(f"{address}{page}") for page in (*PAGES, *(f"{rest}/{name}" for name in REST))}
    finally:
        desk.mend()


def test_no_credential_shows_in_the_ui_or_in_the_event_log(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connect_lance(monkeypatch, desk, aws_secret_access_key="planted-key", aws_region="eu-west-1")
    logs = tmp_path / "events"
    logs.mkdir()
    desk.append("a")
    desk.define(n="watched")
    desk.break_at("watched", once=True)
    conf = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": logs.as_uri(), "spark.eventLog.compress": "false"}
    spark_submit = {"conf": conf, "env_vars": {"TOKEN": "planted-token"}}
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look, desk, time.monotonic() + 300)
        run = Driver.trigger(make_dag(desk, inline_below_rows=0, spark_submit=spark_submit)).go()
        pages = looking.result()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("a"), 3)
    assert all("spark.app.name" in text for page, text in pages.items() if page.endswith("/environment"))
    assert "/jobs/job/kill/" not in pages["/jobs/"]
    events = "".join(path.read_text() for path in logs.rglob("*") if path.is_file())
    assert "SparkListenerEnvironmentUpdate" in events
    assert [name for name, text in {**pages, "event log": events}.items() if "planted" in text] == []
