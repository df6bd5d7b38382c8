"""What the tasks of a DAG run cost on an object store: requests, and how many of them had to wait for another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from airflow.sdk import DAG

from airflow_geneva import connect
from airflow_geneva.engine.storage.requests import take_requests
from airflow_geneva.task_groups import RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.desk import connect_lance, make_dag, make_view
from tests.support.driving import Driver
from tests.support.latency import SlowProxy
from tests.support.object_store import Bucket
from tests.support.processes import as_another_process

pytestmark = [pytest.mark.airflow, pytest.mark.slow]


@pytest.fixture
def proxy(endpoint: str) -> Iterator[SlowProxy]:
    with SlowProxy(endpoint, 0.05).running() as running:
        yield running


@pytest.fixture
def far_desk(
    desk: Desk, bucket: Bucket, proxy: SlowProxy, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Desk:
    """A desk whose tasks reach the store through the proxy, each with the caches of a new process."""
    database = connect(f"s3://{bucket.name}/db", options)
    table = database.create_table(desk.table.name, desk.table.to_arrow().schema.empty_table())
    for module in ("lance_io.staged_files", "run.column", "run.view"):  # a slow run looks once more
        monkeypatch.setattr(f"airflow_geneva.engine.{module}._FRESH_SECONDS", 600.0)
    far, run = replace(desk, database=database, table=table), Driver._run
    connect_lance(monkeypatch, far, **{**options, "aws_endpoint": proxy.url})

    def run_in_a_new_process(driver: Driver, ti: Any, kill: str | None) -> None:
        as_another_process()
        take_requests()  # the process before has ended without reporting them
        run(driver, ti, kill)

    monkeypatch.setattr(Driver, "_run", run_in_a_new_process)
    return far


def dag_of(desk: Desk, kind: str) -> DAG:
    if kind == "column":
        desk.define(n="length")
        return make_dag(desk)
    make_view(desk)
    with DAG(f"refresh_{desk.table.name}", schedule=None) as dag:
        RefreshTaskGroup(view="v", inline_below_rows=10**9)
    return dag


@pytest.mark.parametrize(("kind", "here", "tasks"), [("column", (62, 36), (88, 65)), ("view", (82, 48), (116, 82))])
def test_a_run_of_one_new_row(
    far_desk: Desk,
    proxy: SlowProxy,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    here: tuple[int, int],
    tasks: tuple[int, int],
) -> None:
    """Most requests, and most that wait for another, of all tasks: in the plan task, and in tasks of their own."""
    far_desk.append("abcd")
    dag = dag_of(far_desk, kind)
    group = "backfill" if kind == "column" else "refresh"

    def measured(most: tuple[int, int]) -> Driver:
        run = Driver.trigger(dag)
        with proxy.counting() as requests:
            run.go()
        assert run.state == "success", run.errors
        [job, *_] = far_desk.database.jobs(table=far_desk.table.name if kind == "column" else "v")
        # A task does not report what it requests after its report: the metrics page says how many that are.
        missed = requests.by_kind.total - job.store_requests.total
        assert 0 <= missed <= 35, f"{job.store_requests} of {requests.by_kind}"
        needed = requests.needed()
        told = f"{len(needed)} requests, depth {needed.depth}:\n" + "\n".join(map(str, needed))
        assert len(needed) <= most[0], told
        assert needed.depth <= most[1], told
        return run

    assert Driver.trigger(dag).go().state == "success"
    far_desk.table.add(pa.table({"text": ["e00"]}))
    assert measured(tasks).states()[f"{group}.shards.apply"] == ["success"]
    monkeypatch.delenv("AIRFLOW__GENEVA__INLINE_BELOW_SECONDS")
    far_desk.table.add(pa.table({"text": ["f00"]}))
    assert measured(here).states()[f"{group}.shards.apply"] == "skipped"
