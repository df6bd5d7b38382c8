"""Values are loaded from a table of Iceberg, at the snapshot that was planned, in this process and on Spark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table as Iceberg
from pyiceberg.types import DoubleType

from airflow_geneva.engine.load import iceberg
from airflow_geneva.engine.load.request import LoadRequest, plan_load
from airflow_geneva.engine.load.source import LoadSource, open_source
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from tests.support.iceberg import catalog_at, delete_by, make_iceberg
from tests.support.tables import MakeTable

RUNNERS = ["inline", pytest.param("spark", marks=pytest.mark.spark)]


def features(ids: range) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "caption": [f"c{one}" for one in ids]})


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    return make_table(40, per_fragment=10)


@pytest.fixture
def source(tmp_path: Path) -> Iceberg:
    """30 rows in three files."""
    return make_iceberg(tmp_path, features(range(30)), files=3)


def values(table: Table, *columns: str) -> dict[int, Any]:
    rows = table.lance.to_table(columns=["id", *columns]).to_pylist()
    return {row["id"]: row[columns[0]] if len(columns) == 1 else tuple(map(row.get, columns)) for row in rows}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_table_with_deletes_and_another_schema_is_loaded_as_pyiceberg_reads_it(
    table: Table, source: Iceberg, tmp_path: Path, runner: str, request: pytest.FixtureRequest
) -> None:
    if runner == "spark":
        request.getfixturevalue("spark")
    first = min(task.file.file_path for task in source.scan().plan_files())
    delete_by(source, tmp_path, file_path=[first], pos=pa.array([0], pa.int64()))  # row 0, 10 or 20
    source.delete("id = 4")
    source.overwrite(pa.table({"id": [5, 6], "caption": ["five", "six"]}), overwrite_filter="id = 5 or id = 6")
    with source.update_schema() as change:
        change.rename_column("caption", "title")
        change.add_column("score", DoubleType())
    source.append(pa.table({"id": [35], "title": ["c35"], "score": [0.5]}))
    expected = {row["id"]: (row["title"], row["score"]) for row in source.scan().to_arrow().to_pylist()}
    assert len(expected) == 29
    assert (expected[5], expected[35]) == (("five", None), ("c35", 0.5))
    result = table.load_columns(source, on="id", runner=runner)
    assert (result.rows_loaded, result.rows_missing) == (29, 11)
    assert values(table, "title", "score") == {one: expected.get(one, (None, None)) for one in range(40)}
    assert table.schema.field("title").type == pa.string()
    if runner == "inline":
        assert table.load_columns(source, on="id", runner=runner).commits == ()


def test_a_planned_load_reads_the_snapshot_of_the_plan_in_another_process_too(table: Table, source: Iceberg) -> None:
    plan = plan_load(table.location, LoadRequest(source, "id")).plan
    job = PlannedJob(table.location, record_plan(plan, table.location), opened=plan.opened)
    source.append(features(range(30, 40)))
    source.delete("id < 10")
    found = LoadSource.from_json(plan.work.source)
    assert (found.version, found.paths[0].endswith(".metadata.json")) == (source.snapshots()[2].snapshot_id, True)
    schema = found.schema(())
    read = [row for part in range(found.parts()) for batch in found.read(part, schema, ()) for row in batch.to_pylist()]
    assert sorted(row["id"] for row in read) == list(range(30))
    assert read == [row for part in range(3) for batch in found.read(part, schema, ()) for row in batch.to_pylist()]
    for shard in plan.shards:
        job.apply(shard, Udfs({}))
    assert job.finish([job.commit(shard) for shard in plan.shards]).rows_loaded == 30


@pytest.mark.parametrize("place", ["metadata", "folder", "catalog"])
def test_a_table_is_named_by_its_files_or_in_a_catalog(
    table: Table, source: Iceberg, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    name = source.metadata_location.removeprefix("file://")
    if place == "folder":  # as catalogs of Hadoop leave it
        (Path(name).parent / "version-hint.text").write_text(Path(name).name)
        name = str(Path(name).parents[1])
    elif place == "catalog":
        monkeypatch.setattr("pyiceberg.catalog.load_catalog", {"warehouse": catalog_at(tmp_path)}.__getitem__)
        name = "warehouse.sold.features"
    assert table.load_columns(name, on="id", format="iceberg", runner="inline").rows_loaded == 30
    assert values(table, "caption")[29] == "c29"


def test_no_property_of_a_catalog_reaches_a_plan(table: Table, source: Iceberg) -> None:
    source.io.properties["s3.secret-access-key"] = "a-secret"
    plan = plan_load(table.location, LoadRequest(source, "id")).plan
    assert "a-secret" not in f"{plan.work.to_json()} {plan.work}"
    found = open_source(source, None, ())
    assert ("s3.secret-access-key", "a-secret") in (found.properties or ())
    assert "a-secret" not in repr(found) + found.to_json()


def test_storage_options_open_a_table_where_its_own_properties_are_not_known() -> None:
    options = (("aws_access_key_id", "k"), ("aws_secret_access_key", "s"), ("aws_endpoint", "http://store"))
    expected = {"s3.access-key-id": "k", "s3.secret-access-key": "s", "s3.endpoint": "http://store"}
    assert dict(iceberg.iceberg_properties("s3a://bucket/t/v1.metadata.json", options)) == expected
    assert iceberg.iceberg_properties("/warehouse/t/v1.metadata.json", options) == ()
    with pytest.raises(InvalidInput, match="read with the machine's own identity"):
        iceberg.iceberg_properties("gs://bucket/t/v1.metadata.json", (("google_service_account_key", "secret"),))


def test_what_pyiceberg_cannot_read_is_said_before_any_work(table: Table, source: Iceberg, tmp_path: Path) -> None:
    version = table.version
    with pytest.raises(InvalidInput, match=r"needs the name of one table as the source, not a list"):
        table.load_columns(["a", "b"], on="id", format="iceberg")
    with pytest.raises(InvalidInput, match=r"Cannot read the Iceberg table .*nowhere.*Name its metadata file"):
        table.load_columns(tmp_path / "nowhere", on="id", format="iceberg")
    delete_by(source, tmp_path, id=pa.array([7], pa.int64()))
    with pytest.raises(InvalidInput, match=r"does not yet support equality deletes.* format=\"spark\"\.") as refused:
        table.load_columns(source, on="id", runner="inline")
    assert source.metadata_location in str(refused.value)
    assert table.version == version


def test_a_table_without_rows_is_loaded(table: Table, tmp_path: Path) -> None:
    empty = catalog_at(tmp_path).create_table("sold.empty", features(range(1)).schema)
    assert table.load_columns(empty, on="id", runner="inline").rows_missing == 40


def test_without_pyiceberg_the_extra_is_named(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    with pytest.raises(InvalidInput, match=r"pip install 'airflow-geneva\[iceberg\]'"):
        table.load_columns("v1.metadata.json", on="id", format="iceberg")
