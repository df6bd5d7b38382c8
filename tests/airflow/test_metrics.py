"""The metrics of jobs, sent by Airflow through OpenTelemetry to a collector."""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from opentelemetry import metrics

from airflow_geneva.engine.counts import StoreRequests
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.operators import RefreshDatabaseOperator, _metrics
from airflow_geneva.operators._metrics import _COUNTED as COUNTED, _REQUESTS as REQUESTS, send_metrics_of_job
from airflow_geneva.task_groups import BackfillTaskGroup
from tests.airflow.conftest import Desk
from tests.support.collector import Collector, collecting, settings
from tests.support.counting import double
from tests.support.desk import ROWS, make_dag
from tests.support.driving import Driver
from tests.support.tables import MakeTable

otel_logger = pytest.importorskip("airflow.sdk.observability.metrics.otel_logger", reason="came with Airflow 3.2")
stats = pytest.importorskip("airflow.sdk.observability.stats", reason="came with Airflow 3.2")

pytestmark = pytest.mark.airflow

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = Path(_metrics.__file__)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector to which the tasks of this process send, as a task of a worker does."""
    from airflow.sdk._shared.observability.metrics.base_stats_logger import NoStatsLogger
    from airflow.sdk._shared.observability.metrics.otel_logger import flush_otel_metrics

    with collecting() as found:
        for name, value in settings(found).items():
            monkeypatch.setenv(name, value)
        stats.initialize(factory=otel_logger.get_otel_logger, export_legacy_names=False)
        try:
            yield found
        finally:
            stats.initialize(factory=NoStatsLogger, export_legacy_names=True)
            atexit.unregister(flush_otel_metrics)
            metrics.get_meter_provider().shutdown()  # type: ignore[attr-defined]


@pytest.mark.core
def test_a_job_sends_what_it_did_how_long_it_took_and_how_fresh_its_values_are(
    desk: Desk, collector: Collector
) -> None:
    desk.append("a")
    desk.define(n="length")
    name = desk.table.name
    with DAG(f"metrics_{name}", schedule=None) as dag:
        BackfillTaskGroup(table=name, column="n", inline_below_rows=10**9)
    began = time.time()
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    metrics.get_meter_provider().force_flush()  # type: ignore[attr-defined]
    tags = {"table": name, "target": f"{name}.n"}
    sent = {one.removeprefix("airflow.geneva."): collector.sum(one, **tags) for one in collector.names()}
    assert sent["rows_run"] == sent["rows_computed"] == ROWS
    assert sent["rows_failed"] == sent["rows_reused"] == sent["rows_due"] == 0
    assert collector.sum("airflow.geneva.jobs", state="DONE", runner="spark", **tags) == 1
    assert 0 < sent["function_busy"] <= 1
    assert 0 < sent["step_duration.apply"] <= sent["job_duration"] < 1e3 * (time.time() - began)
    assert 0 < sent["staleness"] < time.time() - began + 60


def test_a_job_that_fails_and_goes_on_and_whose_finish_runs_again_is_counted_once(
    desk: Desk, collector: Collector
) -> None:
    desk.append("ab")
    desk.define(n="length")
    name = desk.table.name
    desk.break_at("b05")
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "failed"
    desk.mend()
    run.clear("backfill.shards.apply").go()
    assert run.state == "success", run.errors
    run.clear("backfill.finish").go()
    assert run.state == "success", run.errors
    metrics.get_meter_provider().force_flush()  # type: ignore[attr-defined]
    [job] = desk.database.jobs(table=name)
    assert (job.state, job.rows_computed) == ("DONE", 2 * ROWS)
    assert collector.sum("airflow.geneva.rows_run", table=name) == job.rows_run == len(desk.calls())
    assert collector.sum("airflow.geneva.rows_computed", table=name) == 2 * ROWS
    assert collector.sum("airflow.geneva.jobs", table=name, state="FAILED") == 1
    assert collector.sum("airflow.geneva.jobs", table=name, state="DONE") == 1


def test_a_task_that_computes_all_columns_sends_the_metrics_of_each_job(desk: Desk, collector: Collector) -> None:
    desk.append("ab")
    desk.define(n="length", u="upper")
    name = desk.table.name
    desk.break_at("b05")
    with DAG(f"all_{name}", schedule=None) as dag:
        RefreshDatabaseOperator(task_id="all", runner="inline")
    run = Driver.trigger(dag).go()
    assert run.state == "failed"
    metrics.get_meter_provider().force_flush()  # type: ignore[attr-defined]
    assert collector.sum("airflow.geneva.jobs", target=f"{name}.n", state="FAILED", runner="inline") == 1
    assert collector.sum("airflow.geneva.jobs", target=f"{name}.u", state="DONE", runner="inline") == 1
    assert collector.sum("airflow.geneva.rows_computed", target=f"{name}.u") == 2 * ROWS
    assert collector.sum("airflow.geneva.rows_due", target=f"{name}.u") == 0


@pytest.mark.parametrize(("state", "sends"), [("DONE", True), ("PARTIAL", False), ("FAILED", False)])
def test_a_view_is_as_fresh_as_its_source_was_and_only_once_a_job_has_done_all(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, state: str, sends: bool
) -> None:
    view = make_table(3).query().create_materialized_view(name="v")
    job_id = view.refresh(runner="inline").job_id
    folder, spec = JobFolder.of(view.location.checkpoints, job_id), view.plan_refresh().spec
    folder.write_result(state, BackfillResult(job_id, state).to_json(), None, 0)
    source, now = spec.tables[0].written / 1e9, spec.tables[0].written / 1e9 + 5
    assert source < spec.tables[1].written / 1e9, "the view was written after its source"
    gauges: dict[str, float] = {}
    said = SimpleNamespace(incr=nothing, timing=nothing, gauge=lambda name, value, tags: gauges.update({name: value}))
    monkeypatch.setattr(_metrics, "Stats", said)
    monkeypatch.setattr(_metrics, "_wanted", lambda: True)
    monkeypatch.setattr(_metrics, "time", SimpleNamespace(time=lambda: now))
    send_metrics_of_job(folder)
    assert gauges.get("geneva.staleness") == (pytest.approx(5) if sends else None)
    assert "geneva.rows_due" in gauges


def nothing(*_given: object, **_more: object) -> None:
    pass


def test_the_page_and_the_dashboard_name_the_metrics_that_are_sent() -> None:
    named = re.findall(r'"geneva\.(\w+)', SOURCE.read_text())
    sent = {*named, *COUNTED, *REQUESTS, "cost", "function_busy"}
    page = set(re.findall(r"^\| `geneva\.(\w+)", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    assert page == sent
    queries = re.findall(r"airflow_geneva_(\w+)", (DOCS / "snippets" / "dashboard.json").read_text())
    endings = r"_(total|milliseconds_(sum|count)|(plan|spark|apply|commit|finish)_milliseconds_(sum|count))$"
    assert {re.sub(endings, "", query) for query in queries} == sent


@pytest.mark.parametrize("noted", [[1], {"rows_run": "x"}, {"rows_run": None}, "x", 7])
def test_a_damaged_note_of_what_was_sent_fails_no_task(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, noted: object
) -> None:
    table = make_table(3)
    table.add_columns({"y": double})
    folder = JobFolder.of(table.location.checkpoints, table.backfill("y", runner="inline").job_id)
    folder.update_record(sent=noted)
    counted: dict[str, int] = {}

    def count(name: str, rows: int = 1, **_tags: object) -> None:
        counted[name] = rows

    said = SimpleNamespace(incr=count, timing=nothing, gauge=nothing)
    monkeypatch.setattr(_metrics, "Stats", said)
    monkeypatch.setattr(_metrics, "_wanted", lambda: True)
    send_metrics_of_job(folder)
    assert counted["geneva.rows_run"] == 3


def test_requests_to_the_store_are_sent_when_a_job_ends_in_another_way(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(3)
    table.add_columns({"y": double})
    result = table.backfill("y", runner="inline")
    folder, sent = JobFolder.of(table.location.checkpoints, result.job_id), list[tuple[str, int]]()

    def end(state: str, requests: StoreRequests) -> None:
        folder.write_result(state, replace(result, state=state, store_requests=requests).to_json())
        send_metrics_of_job(folder)

    def count(name: str, number: int = 1, **_tags: object) -> None:
        sent.extend([(name, number)] if name.startswith("geneva.store_") else ())

    monkeypatch.setattr(_metrics, "Stats", SimpleNamespace(incr=count, timing=nothing, gauge=nothing))
    monkeypatch.setattr(_metrics, "_wanted", lambda: True)
    end("FAILED", StoreRequests(reads=7, lists=1))
    end("FAILED", StoreRequests(reads=9, lists=3))  # `finish` ran again
    end("DONE", StoreRequests(reads=10, writes=2, lists=1))
    reads, writes, lists, deletes = (f"geneva.{name}" for name in REQUESTS)
    assert sent == [
        (reads, 7),
        (writes, 0),
        (lists, 1),
        (deletes, 0),
        (reads, 3),
        (writes, 2),
        (lists, 0),
        (deletes, 0),
    ]
