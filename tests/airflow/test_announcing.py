"""Asset events where several tables, or very many events, belong to one asset."""

from __future__ import annotations

import importlib
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from airflow import __version__ as airflow_version
from airflow.models.asset import AssetEvent, AssetModel
from airflow.sdk import DAG, Param
from airflow.utils.session import create_session
from packaging.version import Version
from sqlalchemy import insert, select

from airflow_geneva import assets, connect
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.driving import Driver, events

pytestmark = pytest.mark.airflow

HERE = {"inline_below_rows": 10**9}


def test_a_table_that_is_dropped_and_made_again_is_announced_each_time(desk: Desk) -> None:
    """A table that is loaded anew every night comes to the same version every night."""
    name = desk.table.name
    with DAG(f"dag_{name}", schedule=None) as dag:
        BackfillTaskGroup(table=name, column="n", **HERE)
    for night in range(3):
        desk.database.drop_table(name)
        desk.table = desk.database.create_table(name, pa.table({"text": ["a", "b"]}))
        desk.define(n="length")
        run = Driver.trigger(dag).go()
        assert run.state == "success", run.errors
        told = events(desk.asset)
        assert [event["to_version"] for event in told] == [desk.table.version] * (night + 1)
        assert told[-1]["job_id"] == run.xcom("backfill.plan", "summary")["job_id"]
    again = Driver.trigger(dag).go()
    assert again.xcom("backfill.finish")["event"] is None


def test_a_view_that_is_dropped_and_made_again_is_announced_each_time(desk: Desk) -> None:
    desk.append("ab")
    view = f"v_{desk.table.name}"
    for times, where in enumerate(("text > 'a'", "text > 'b'", "text > 'a05'"), 1):
        with DAG(f"dag_{view}", schedule=None) as dag:
            define = CreateMaterializedViewOperator(
                task_id="define", view=view, table=desk.table.name, where=where, recreate=True
            )
            define >> RefreshTaskGroup(view=view, **HERE)
        run = Driver.trigger(dag).go()
        assert run.state == "success", run.errors
        assert len(events(f"lance_default/{view}")) == times


def test_tables_of_one_name_in_several_databases_are_announced_each(desk: Desk, tmp_path: Path) -> None:
    """The asset is named after the connection, whatever database its storage options are used with."""
    name = desk.table.name
    places = []
    for tenant in ("one", "other"):
        made = connect(tmp_path / tenant)
        table = made.create_table(name, pa.table({"text": ["a", "b"]}))
        table.add_columns({"n": importlib.import_module("geneva_dag_udfs").length})
        places.append(made)
    with DAG(f"dag_{name}", schedule=None, params={"place": Param("", type="string")}) as dag:
        BackfillTaskGroup(table=name, column="n", database="{{ params.place }}", **HERE)
    for tenants, place in enumerate(places, 1):
        Driver.trigger(dag, {"place": place.uri}).go()
        assert len(events(desk.asset)) == tenants
    # Each goes on from its own last event, also when that is not the newest one.
    places[0].open_table(name).add([{"text": "c"}])
    Driver.trigger(dag, {"place": places[0].uri}).go()
    first, _, third = events(desk.asset)
    assert third["from_version"] == first["to_version"]
    assert third["to_version"] == places[0].open_table(name).version


@pytest.mark.skipif(Version(airflow_version) < Version("3.2"), reason="events cannot be asked for by their number")
def test_a_column_that_was_never_announced_does_not_read_all_events_of_a_table(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("a")
    desk.define(n="length", m="longer")
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        BackfillTaskGroup("first", table=desk.table.name, column="n", **HERE)
    Driver.trigger(dag).go()
    [told] = events(desk.asset)
    source = {"source_dag_id": "x", "source_task_id": "x", "source_run_id": "x", "source_map_index": -1}
    last_year = datetime.now(timezone.utc) - timedelta(days=365)
    with create_session() as session:
        asset = session.scalar(select(AssetModel.id).where(AssetModel.name == desk.asset))
        event = {"asset_id": asset, "extra": {**told, "column": "other"}, "timestamp": last_year, **source}
        session.execute(insert(AssetEvent), [event] * 300)
    read: list[int] = []
    real = assets.asset_events

    def note(*given: Any) -> list[Any]:
        found = real(*given)
        read.append(len(found))
        return found

    monkeypatch.setattr(assets, "asset_events", note)
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        BackfillTaskGroup("second", table=desk.table.name, column="m", **HERE)
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert events(desk.asset)[-1]["column"] == "m"
    assert read[0] == 100
    assert sum(read) < 110, read
