"""What a run costs on an object store: its requests, and how many of them had to wait for another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import Database, connect, udf
from airflow_geneva.engine.job.status import Job
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.watch.conditions import WaitCondition
from airflow_geneva.engine.watch.watcher import TableWatcher
from airflow_geneva.pages.tables import describe_table, freshness
from tests.support.latency import SlowProxy
from tests.support.object_store import Bucket, numbers

pytestmark = pytest.mark.slow

FRAGMENTS = 8


@udf(data_type=pa.int64())
def doubled(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 2)


@pytest.fixture
def proxy(endpoint: str) -> Iterator[SlowProxy]:
    with SlowProxy(endpoint, 0.05).running() as running:
        yield running


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "first", "nothing", "one_row"),
    [("column", (51, 26), (6, 5), (36, 21)), ("view", (55, 30), (9, 7), (42, 23))],
)
def test_a_run_makes_no_more_requests_than_it_did(
    bucket: Bucket,
    proxy: SlowProxy,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    first: tuple[int, int],
    nothing: tuple[int, int],
    one_row: tuple[int, int],
) -> None:
    """Most requests, and most that wait for another; they fall as runs get better, and never rise."""
    for module in ("lance_io.staged_files", "run.column", "run.view"):  # a slow run looks once more
        monkeypatch.setattr(f"airflow_geneva.engine.{module}._FRESH_SECONDS", 600.0)
    db = connect(f"s3://{bucket.name}/db", storage_options=options)
    table = db.create_table("docs", numbers(*range(FRAGMENTS * 10)), max_rows_per_file=10)
    if kind == "column":
        table.add_columns({"y": doubled})
    else:
        table.query().select({"id": "id", "y": (doubled, ["x"])}).create_materialized_view(db, "v")

    def measured(most: tuple[int, int]) -> Any:
        through = connect(f"s3://{bucket.name}/db", storage_options={**options, "aws_endpoint": proxy.url})
        with proxy.counting() as requests:
            if kind == "column":
                opened = through.open_table("docs")
                result = opened.backfill("y", runner="inline")
            else:
                result = through.open_view("v").refresh(runner="inline")
        needed = requests.needed()
        told = "\n".join(map(str, needed))
        assert len(needed) <= most[0], f"{len(needed)} requests:\n{told}"
        assert needed.depth <= most[1], f"depth {needed.depth}:\n{told}"
        return result

    assert measured(first).rows_computed == FRAGMENTS * 10
    assert measured(nothing).rows_computed == 0
    table.add(numbers(1_000))
    assert measured(one_row).rows_computed == 1


@pytest.fixture
def still(bucket: Bucket, options: dict[str, str]) -> Database:
    """A table and a view that are up to date."""
    db = connect(f"s3://{bucket.name}/db", storage_options=options)
    table = db.create_table("docs", numbers(*range(10)))
    table.add_columns({"y": doubled})
    view = table.query().select({"id": "id", "y": (doubled, ["x"])}).create_materialized_view(db, "v")
    table.backfill("y", runner="inline")
    view.refresh(runner="inline")
    return db


@pytest.mark.parametrize(("since", "tables"), [(None, 1), ("1", 1), ("column:y", 1), ("view:v", 2)])
def test_a_poll_lists_the_versions_of_each_table_and_nothing_else_while_there_is_no_new_one(
    bucket: Bucket, proxy: SlowProxy, still: Database, since: str | None, tables: int
) -> None:
    through = connect(still.uri, storage_options={**dict(still.options), "aws_endpoint": proxy.url})
    watcher = TableWatcher(WaitCondition("docs", since, changed_rows=True, min_new_rows=1_000))
    now = datetime.now(timezone.utc)
    assert watcher.step(through, now) is not None
    with proxy.counting() as requests:
        assert watcher.step(through, now) is None
    told = "\n".join(map(str, requests))
    assert (len(requests), requests.depth) == (tables, 1), told
    assert all("list-type" in request.path for request in requests), told
    # A table that was created again may have as many versions as before.
    rows, version = still.open_table("docs").to_arrow(), still.open_table("docs").version
    still.drop_table("docs")
    again = still.create_table("docs", rows.slice(0, 1))
    while again.version < version:
        again.add(rows.slice(0, 1))
    found = watcher.step(through, now)
    assert found is not None
    assert f"Version {version} of table docs" in found.told


@pytest.mark.airflow
def test_a_poke_of_the_sensor_is_a_poll(
    bucket: Bucket, proxy: SlowProxy, still: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_geneva.sensors import NewFragmentsSensor

    options = {**dict(still.options), "aws_endpoint": proxy.url}
    connection = {"conn_type": "lance", "host": still.uri, "extra": {"storage_options": options}}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps(connection))
    sensor = NewFragmentsSensor(task_id="wait", table="docs", since="view:v")
    assert not sensor.poke({}).is_done  # type: ignore[typeddict-item]
    monkeypatch.setattr(proxy, "seconds", 1.0)  # both requests begin within it, also on a busy machine
    with proxy.counting() as requests:
        assert not sensor.poke({}).is_done  # type: ignore[typeddict-item]
    monkeypatch.setattr(proxy, "seconds", 0.05)
    assert (len(requests), requests.depth) == (2, 1), "\n".join(map(str, requests))
    still.open_table("docs").add(numbers(100))
    assert sensor.poke({}).xcom_value["new_rows"] == 1  # type: ignore[typeddict-item,index]


@pytest.mark.parametrize(("name", "tables"), [("docs", 1), ("v", 2)])
def test_a_page_counts_again_only_when_a_table_has_a_new_version_or_a_job_has_begun_or_ended(
    bucket: Bucket, proxy: SlowProxy, still: Database, name: str, tables: int
) -> None:
    through = connect(still.uri, storage_options={**dict(still.options), "aws_endpoint": proxy.url})

    def pending() -> int:
        location = through.location(name)
        described = describe_table(location)
        [item] = described.computed
        return freshness(location, replace(item, job=newest.get(name)), opened=described.dataset).pending

    newest = dict[str, Job]()
    assert pending() == 0
    with proxy.counting() as requests:
        assert pending() == 0
    told = "\n".join(map(str, requests))
    assert (len(requests), requests.depth) == (tables, tables), told
    still.open_table("docs").add(numbers(100))
    assert pending() == 1
    newest[name] = still.jobs(table=name)[0]
    with proxy.counting() as requests:
        assert pending() == 1
    assert len(requests) > tables


STAGED = 200


@pytest.mark.parametrize("kind", ["column", "view"])
@pytest.mark.parametrize(("interval", "each"), [(0.0, 2), (1_000.0, 1)], ids=["loose", "packed"])
def test_a_staged_fragment_costs_its_commit_and_the_next_plan_two_requests_and_one_if_its_checkpoint_is_packed(
    bucket: Bucket, proxy: SlowProxy, options: dict[str, str], kind: str, interval: float, each: int
) -> None:
    near = connect(f"s3://{bucket.name}/db", storage_options=options)
    far = connect(near.uri, storage_options={**options, "aws_endpoint": proxy.url})
    table = near.create_table("docs", numbers(*range(STAGED)), max_rows_per_file=1)
    if kind == "column":
        table.add_columns({"y": doubled})
        name, plan = "docs", table.plan_backfill("y", checkpoint_interval=interval)
    else:
        query = table.query().select({"id": "id", "y": (doubled, ["x"])})
        name, plan = "v", query.create_materialized_view(near, "v").plan_refresh(checkpoint_interval=interval)
    saved, [shard] = record_plan(plan, near.location(name)), plan.shards
    PlannedJob(near.location(name), saved).apply(shard, Udfs({"y": doubled}))
    with proxy.counting() as requests:
        again = far.open_table("docs").plan_backfill("y") if kind == "column" else far.open_view("v").plan_refresh()
    told = "\n".join(map(str, requests))
    assert (again.rows_pending, again.rows_to_run) == (STAGED, 0)
    assert len(requests) <= each * STAGED + 30, told
    assert requests.depth <= 60, told
    with proxy.counting() as requests:
        result = PlannedJob(far.location(name), saved).commit(shard)
    told = "\n".join(map(str, requests))
    assert (result.rows_computed, result.rows_left, result.fragments) == (STAGED, 0, STAGED)
    assert len(requests) <= each * STAGED + 60, told
    assert requests.depth <= 80, told


@udf(data_type=pa.int64())
def trebled(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 3)


def test_a_promotion_makes_no_more_requests_than_it_did(
    bucket: Bucket, proxy: SlowProxy, options: dict[str, str]
) -> None:
    """At 50 ms a round trip it is made, or undone, within a second."""
    db = connect(f"s3://{bucket.name}/db", storage_options=options)
    table = db.create_table("docs", numbers(*range(FRAGMENTS * 10)), max_rows_per_file=10)
    db.create_table("other", numbers(1))
    table.add_columns({"y": doubled, "z": trebled})
    table.backfill(["y", "z"], runner="inline")
    opened = connect(f"s3://{bucket.name}/db", storage_options={**options, "aws_endpoint": proxy.url}).open_table(
        "docs"
    )
    for column, keep_as in (("z", "w"), ("w", "z")):
        with proxy.counting() as requests:
            opened.promote_column(column, to="y", keep_as=keep_as)
        told = "\n".join(map(str, requests))
        assert len(requests) <= 22, f"{len(requests)} requests:\n{told}"
        assert requests.depth <= 14, f"depth {requests.depth}:\n{told}"
