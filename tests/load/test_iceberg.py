"""Values are loaded from a table of Iceberg, at the snapshot that was planned, in this process and on Spark."""

from __future__ import annotations

import json
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table as Iceberg
from pyiceberg.types import DoubleType

from airflow_geneva.engine.load import iceberg
from airflow_geneva.engine.load.request import LoadRequest, plan_from
from airflow_geneva.engine.load.source import LoadSource, open_source
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.storage.places import with_places
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


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_table_with_deletes_and_another_schema_is_loaded_as_pyiceberg_reads_it(
    table: Table, source: Iceberg, tmp_path: Path, runner: str, request: pytest.FixtureRequest
) -> None:
    if runner == "spark":
        request.getfixturevalue("spark")
    first = min(task.file.file_path for task in source.scan().plan_files())
    delete_by(source, tmp_path / "iceberg", file_path=[first], pos=pa.array([0], pa.int64()))  # row 0, 10 or 20
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
    plan = plan_from(table.location, LoadRequest(source, "id"))
    job = PlannedJob(table.location, record_plan(plan, table.location), opened=plan.opened)
    source.append(features(range(30, 40)))
    source.delete("id < 10")
    found = LoadSource.from_json(plan.spec.source)
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
    plan = plan_from(table.location, LoadRequest(source, "id"))
    assert "a-secret" not in f"{plan.spec.to_json()} {plan.spec}"
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


def rewrite(source: Iceberg, change: Callable[[dict[str, Any]], None]) -> str:
    """Write metadata as anyone can who may write the table's folder, and return its path."""
    path = Path(source.metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    change(metadata)
    made = path.with_name("00099-made.metadata.json")
    made.write_text(json.dumps(metadata))
    return str(made)


@pytest.mark.parametrize(
    "properties",
    [
        {"py-io-impl": "tests.load.test_iceberg.Ran"},
        {"py-io-impl": "subprocess.Popen"},
        {"s3.retry-strategy-impl": "tests.load.test_iceberg.Ran"},
        {"s3.endpoint": "http://127.0.0.1:9", "s3.access-key-id": "k", "s3.session-token": "t"},
        {"warehouse": "/"},
    ],
)
@pytest.mark.parametrize("place", ["metadata", "catalog", "object"])
def test_no_property_of_a_table_chooses_code_endpoint_or_credentials(
    table: Table,
    source: Iceberg,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    properties: dict[str, str],
    place: str,
) -> None:
    made = rewrite(source, lambda metadata: metadata["properties"].update(properties))
    given: Any = made
    if place == "catalog":
        with sqlite3.connect(tmp_path / "catalog.db") as catalog:
            catalog.execute("UPDATE iceberg_tables SET metadata_location = ?", [f"file://{made}"])
        monkeypatch.setattr("pyiceberg.catalog.load_catalog", {"warehouse": catalog_at(tmp_path)}.__getitem__)
        given = "warehouse.sold.features"
    elif place == "object":  # as pyiceberg itself loads it
        metadata = FromInputFile.table_metadata(source.io.new_input(made))
        files = PyArrowFileIO({**source.catalog.properties, **metadata.properties})
        given = Iceberg(source.name(), metadata, f"file://{made}", files, source.catalog)
    opened = open_source(given, None if place == "object" else "iceberg", ())
    files = opened._iceberg(())._table.io
    assert files.properties == ({} if place == "metadata" else catalog_at(tmp_path).properties)
    assert type(files).__name__ == "Files"
    assert table.load_columns(given, on="id", format=None if place == "object" else "iceberg").rows_loaded == 30
    assert not RAN


RAN: list[Any] = []


class Ran:
    """What a table of Iceberg may name, and what must not be called."""

    def __init__(self, *given: Any) -> None:
        RAN.append(given)


def test_credentials_of_the_connection_do_not_go_to_an_endpoint_of_the_table(source: Iceberg) -> None:
    options = (("aws_access_key_id", "k"), ("aws_secret_access_key", "s"), ("aws_session_token", "t"))
    made = rewrite(source, lambda metadata: metadata["properties"].update({"s3.endpoint": "http://127.0.0.1:9"}))
    properties = iceberg.iceberg_properties("s3://bucket/t/metadata/v1.metadata.json", options)
    found = iceberg.open_iceberg(made, properties, iceberg.iceberg_places(made, properties, options))
    assert found._table.io.properties == dict(properties)
    assert found._table.metadata.properties["s3.endpoint"] == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    "named",
    [
        "{elsewhere}", "file://{elsewhere}", "file://{inside}/../../../../elsewhere", "file://localhost{elsewhere}",
        "s3://bucket/list.avro", "oss://bucket/list.avro", "gs://bucket/list.avro", "hdfs://host/list.avro",
        "file://{inside}/link/elsewhere", "FILE://{elsewhere}", "http://127.0.0.1:9/list.avro",
    ],
)  # fmt: skip
def test_a_manifest_list_elsewhere_is_not_opened(source: Iceberg, tmp_path: Path, named: str) -> None:
    inside = Path(source.metadata_location.removeprefix("file://")).parent
    first = source.current_snapshot()
    assert first is not None
    (tmp_path / "elsewhere").write_bytes(Path(first.manifest_list.removeprefix("file://")).read_bytes())
    (inside / "link").symlink_to(tmp_path)

    def change(metadata: dict[str, Any]) -> None:
        for snapshot in metadata["snapshots"]:
            snapshot["manifest-list"] = named.format(elsewhere=tmp_path / "elsewhere", inside=inside)

    made = rewrite(source, change)
    with pytest.raises(InvalidInput, match=r"The Iceberg table .* names .* lies in no place that may be opened"):
        open_source(made, "iceberg", ())
    if "elsewhere" in named:
        allowed = with_places((), [str(tmp_path)])
        if not named.startswith(("file://localhost", "FILE")):  # which pyiceberg takes for a folder of this name
            assert open_source(made, "iceberg", allowed).state[0].endswith(" 3")


def test_files_elsewhere_are_refused_when_the_load_is_planned(table: Table, source: Iceberg, tmp_path: Path) -> None:
    outside = Path(tempfile.mkdtemp(dir=tmp_path.parent))
    delete_by(source, outside, file_path=["x"], pos=pa.array([0], pa.int64()))
    with pytest.raises(InvalidInput, match=r"delete-file_path-pos.parquet', which lies in no place"):
        plan_from(table.location, LoadRequest(source, "id"))


def test_a_hint_of_the_version_does_not_lead_out_of_the_folder(source: Iceberg, tmp_path: Path) -> None:
    metadata = Path(source.metadata_location.removeprefix("file://"))
    (tmp_path / "v9.metadata.json").write_bytes(metadata.read_bytes())
    for hint in ("../../../../v9", f"{tmp_path}/v9", "../../../../v9.metadata.json"):
        (metadata.parent / "version-hint.text").write_text(hint)
        with pytest.raises(InvalidInput):
            open_source(str(metadata.parents[1]), "iceberg", ())
