"""What a table names is opened only in the places of a job: blobs, base paths. Cases are lines of tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from lance import blob_array, blob_field
from lance.blob import Blob, BlobDescriptorArrayBuilder
from lance.file import LanceFileWriter
from lance.fragment import DataFile

from airflow_geneva import Database, Table, View, connect, udf
from airflow_geneva.engine.commit.column import ShardCommitter
from airflow_geneva.engine.lance_io.blobs import scan_bytes
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.functions import read_file
from tests.support.elsewhere import point_elsewhere
from tests.support.object_store import Bucket

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = b"a secret of the worker"
REFUSED = "lies in no place that may be opened"


@udf(data_type=pa.int64())
def size(image: bytes) -> int | None:
    assert image != SECRET
    return None if image is None else len(image)


@udf(data_type=pa.large_binary())
def copy(image: bytes) -> bytes:
    return image


@udf(data_type=pa.int64())
def size_of_text(text: str) -> int:
    return len(text)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the machine, which lies in no database."""
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "secret"


@pytest.fixture
def db(tmp_path: Path) -> Database:
    return connect(tmp_path / "db")


def make_photos(db: Database, blobs: list[Any], name: str = "photos") -> Table:
    """A table whose blobs are as given: bytes, or a URI, which Lance is told to keep."""
    schema = pa.schema([pa.field("id", pa.int64()), blob_field("image")])
    rows = pa.table({"id": range(len(blobs)), "image": blob_array(blobs)}).cast(schema)
    return db.create_table(name, rows, allow_external_blob_outside_bases=True)


def backfill(table: Table) -> Any:
    table.add_columns({"n": size})
    table.backfill("n", runner="inline")
    return table.to_arrow(["n"]).column("n").to_pylist()


def refresh(table: Table) -> Any:
    view = table.query().select({"copied": (copy, ["image"])}).create_materialized_view(name="copies")
    view.refresh(runner="inline")
    return view.to_arrow(["copied"]).column("copied").to_pylist()


def refresh_by_name(table: Table) -> Any:
    table.query().select(["id", "image"]).create_materialized_view(name="same").refresh(runner="inline")


def refresh_with_sql(table: Table) -> Any:
    view = table.query().select({"text": "arrow_cast(image, 'Utf8')"}).create_materialized_view(name="texts")
    view.refresh(runner="inline")


def query(table: Table) -> Any:
    return table.query().to_arrow().column("image").to_pylist()


def query_with_function(table: Table) -> Any:
    return table.query().select({"copied": (copy, ["image"])}).to_arrow().column("copied").to_pylist()


def estimate(table: Table) -> Any:
    table.add_columns({"n": size})
    return table.plan_backfill("n").estimate(sample=2)


WAYS: tuple[Callable[[Table], Any], ...] = (
    backfill, refresh, refresh_by_name, refresh_with_sql, query, query_with_function, estimate,
)  # fmt: skip


def told(table: Table, read: Callable[[Table], Any]) -> str:
    with pytest.raises((GenevaError, OSError, ValueError)) as raised:
        read(table)
    return str(raised.value)


@pytest.mark.parametrize("read", WAYS, ids=lambda read: read.__name__)
def test_a_blob_that_names_a_file_of_the_machine_is_not_read(
    db: Database, secret: Path, read: Callable[[Table], Any]
) -> None:
    table = make_photos(db, [b"an image", secret.as_uri()])
    message = told(table, read)
    assert SECRET.decode() not in message
    assert read is refresh_with_sql or (REFUSED in message and "'image' of table 'photos'" in message)
    for file in (f for f in Path(db.uri).rglob("*") if f.is_file()):
        assert SECRET not in file.read_bytes()


@pytest.mark.parametrize("read", [backfill, refresh, query, query_with_function], ids=lambda read: read.__name__)
def test_a_blob_in_an_allowed_place_is_read(tmp_path: Path, read: Callable[[Table], Any]) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").write_bytes(b"an image")
    db = connect(tmp_path / "db", allowed_places=[tmp_path / "images"])
    table = make_photos(db, [b"12345678", (tmp_path / "images/1.jpg").as_uri(), None])
    if read is refresh or read is query_with_function:
        table.lance.delete("image IS NULL")
    found = read(table)
    assert found in ([8, 8, None], [b"12345678", b"an image", None], [b"12345678", b"an image"])


def test_a_blob_in_the_database_is_read(db: Database, tmp_path: Path) -> None:
    (tmp_path / "db/images").mkdir(parents=True)
    (tmp_path / "db/images/1.jpg").write_bytes(b"an image")
    inside = (tmp_path / "db/images/1.jpg").as_uri()
    assert query(make_photos(db, [Blob.from_uri(inside, 3, 5), b"x"])) == [b"image", b"x"]
    assert query(make_photos(db, [inside, b"x"], "again")) == [b"an image", b"x"]


def write_descriptors(table: Table, rows: list[tuple[int, int, str]]) -> None:
    """Replace the blobs of a table by descriptors that only a program of another person writes: kind, base and URI."""
    dataset, builder = table.lance, BlobDescriptorArrayBuilder("image")
    for _ in rows:
        builder.append_managed("a", 0, 1)
    kind = builder.field.type
    given = {"kind": [row[0] for row in rows], "blob_id": [row[1] for row in rows], "uri": [row[2] for row in rows]}
    given |= {"position": [0] * len(rows), "blob_size": [len(SECRET)] * len(rows)}
    parts = [pa.array(given[f.name], f.type) if f.name in given else pa.nulls(len(rows), f.type) for f in kind]
    made = pa.StructArray.from_arrays(parts, fields=list(kind))
    with LanceFileWriter(f"{table.uri}/data/made.lance", pa.schema([builder.field]), version="2.2") as writer:
        writer.write_batch(pa.record_batch([made], schema=pa.schema([builder.field])))
    group = lance.LanceOperation.DataReplacementGroup(0, DataFile.create(dataset, "made.lance"))
    lance.LanceDataset.commit(
        table.uri, lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
    )


@pytest.mark.parametrize(
    ("kind", "base", "uri"),
    [
        (3, 0, "FILE://{}"),
        (3, 0, "file:{}"),
        (3, 0, "{}"),
        (3, 0, "/tmp/../{}"),
        (3, 0, "file-object-store://{}"),
        (3, 0, "file+uring://{}"),
        (3, 0, "file://localhost{}"),
        (3, 0, "file://{}?x=1"),
        (3, 0, "file://{}#x"),
        (3, 0, "../secret"),
        (3, 0, "~/../..{}"),
        (3, 1, "{}"),
        (3, 1, "file://{}"),
        (3, 1, "../secret"),
        (3, 1, "%2e%2e/secret"),
        (3, 1, "in/../../secret"),
    ],
)
def test_a_descriptor_that_no_library_writes_is_not_followed(
    tmp_path: Path, secret: Path, kind: int, base: int, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path / "base")
    db = connect(tmp_path / "db", allowed_places=[tmp_path / "base"])
    bases = [lance.DatasetBasePath(str(tmp_path / "base"), name="base")]
    table = db.create_table("photos", pa.table({"id": [1]}), initial_bases=bases)
    table.lance.add_columns(pa.schema([blob_field("image")]))
    write_descriptors(table, [(kind, base, uri.format(secret))])
    with pytest.raises(InvalidInput, match=REFUSED):
        query(table)


def test_nested_blobs_are_checked_too(db: Database, secret: Path) -> None:
    blobs = blob_array([b"an image", secret.as_uri(), None])
    structs = pa.StructArray.from_arrays([blobs], fields=[blob_field("image")])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), blobs)
    for name, values in (("structs", structs), ("lists", lists)):
        table = db.create_table(name, pa.table({"nested": values}), allow_external_blob_outside_bases=True)
        with pytest.raises(InvalidInput, match=REFUSED):
            scan_bytes(table.lance, ["nested"])
        with pytest.raises(InvalidInput, match=REFUSED):
            scan_bytes(table.lance, {"x": '"NESTED" IS NULL'})
        assert scan_bytes(table.lance, ["nested"], limit=1).to_table().num_rows == 1


def test_descriptors_of_columns_that_are_not_read_are_not_looked_at(db: Database, secret: Path) -> None:
    table = make_photos(db, [b"an image", secret.as_uri()])
    assert table.query().select(["id"]).to_arrow().column("id").to_pylist() == [0, 1]
    assert table.to_arrow().num_rows == 2  # as descriptors


def make_other(tmp_path: Path) -> Table:
    """A table of another database, which the jobs of `db` have no business with."""
    return connect(tmp_path / "other").create_table("people", {"id": [1, 2], "password": ["a", "b"]})


def elsewhere(db: Database, tmp_path: Path) -> Table:
    other, table = make_other(tmp_path), db.create_table("docs", {"id": [9], "password": ["c"]})
    point_elsewhere(table, other)
    return table


def test_a_table_whose_rows_lie_in_another_database_is_not_opened(db: Database, tmp_path: Path) -> None:
    table = elsewhere(db, tmp_path)
    assert lance.dataset(table.uri).to_table().column("password").to_pylist() == ["a", "b"]
    for read in (
        lambda: db.open_table("docs"),
        lambda: table.to_arrow(),
        lambda: table.query().to_arrow(),
        lambda: table.backfill("n"),
        lambda: table.load_columns({"id": [1]}, on="id"),
        lambda: db.create_table("copy", {"id": [1], "password": ["x"]}).load_columns(table, on="id"),
    ):
        with pytest.raises(InvalidInput, match=f"The manifest of version 3 of table 'docs' names .*{REFUSED}"):
            read()
    allowed = connect(db.uri, allowed_places=[tmp_path / "other"])
    assert allowed.open_table("docs").to_arrow().column("password").to_pylist() == ["a", "b"]


def test_a_view_does_not_copy_rows_of_another_database(db: Database, tmp_path: Path) -> None:
    table = db.create_table("docs", {"id": [9], "password": ["c"]})
    view = table.query().select(["id"]).create_materialized_view(name="ids")
    point_elsewhere(table, make_other(tmp_path))
    with pytest.raises(InvalidInput, match=REFUSED):
        view.refresh(runner="inline")
    with pytest.raises(InvalidInput, match=REFUSED):
        view.plan_refresh()
    assert (
        connect(db.uri, allowed_places=[tmp_path / "other"]).open_view("ids").refresh(runner="inline").rows_computed
        == 2
    )


def test_a_manifest_that_is_changed_after_the_plan_is_not_followed(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other, before = db.create_table("docs", {"id": [9], "password": ["c"]}), make_other(tmp_path), []
    commit = ShardCommitter.commit

    def commit_later(self: ShardCommitter, *given: Any, **more: Any) -> Any:
        before.append(point_elsewhere(table, other))
        return commit(self, *given, **more)

    monkeypatch.setattr(ShardCommitter, "commit", commit_later)
    table.add_columns({"n": (size_of_text, ["password"])})
    with pytest.raises(GenevaError, match=REFUSED):
        table.backfill("n", runner="inline")
    assert len(before) == 1


def test_what_is_committed_meanwhile_is_not_read(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lance commits on a version that nobody has opened, and returns it."""
    table, other = db.create_table("docs", {"id": [9], "password": ["c"]}), make_other(tmp_path)
    table.add_columns({"n": (size_of_text, ["password"])})
    commit, named = lance.LanceDataset.commit, lance.DatasetBasePath(other.uri, is_dataset_root=True)

    def commit_later(*given: Any, **more: Any) -> lance.LanceDataset:
        monkeypatch.setattr(lance.LanceDataset, "commit", commit)
        lance.dataset(table.uri).add_bases([named])
        return commit(*given, **more)

    monkeypatch.setattr(lance.LanceDataset, "commit", commit_later)
    with pytest.raises(GenevaError, match=REFUSED):
        table.backfill("n", runner="inline")


@pytest.mark.parametrize(
    "base", ["{}/../other/people.lance", "file://{}/../other/people.lance", "../other/people.lance"]
)
def test_however_a_base_path_is_written_it_is_resolved(
    db: Database, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "db" if (tmp_path / "db").exists() else tmp_path)
    table = db.create_table("docs", {"id": [9], "password": ["c"]})
    monkeypatch.chdir(db.uri)
    point_elsewhere(table, make_other(tmp_path), base.format(db.uri))
    with pytest.raises(InvalidInput, match=REFUSED):
        db.open_table("docs")


def test_shallow_clones_in_the_database_go_on_working(db: Database) -> None:
    table = make_photos(db, [b"one", b"three"])
    table.lance.shallow_clone(f"{db.uri}/clone.lance", table.version)
    clone = db.open_table("clone")
    assert [base.path for base in clone.lance.base_paths().values()] == [table.uri]
    assert backfill(clone) == [3, 5]
    view = clone.query().select({"copied": (copy, ["image"])}).create_materialized_view(name="copies")
    view.refresh(runner="inline")
    assert sorted(view.to_arrow().column("copied").to_pylist()) == [b"one", b"three"]


def test_the_source_of_a_view_may_name_the_databases_that_the_user_named(tmp_path: Path) -> None:
    """A view in one database of a table in a second one, which was cloned from a third."""
    third = connect(tmp_path / "third").create_table("docs", {"id": [1, 2]})
    second = connect(tmp_path / "second", allowed_places=[tmp_path / "third"])
    Path(second.uri).mkdir()
    third.lance.shallow_clone(f"{second.uri}/clone.lance", third.version)
    first = connect(tmp_path / "first")
    second.open_table("clone").query().select({"twice": "id * 2"}).create_materialized_view(first, "doubled")
    with pytest.raises(InvalidInput, match=REFUSED):
        first.open_view("doubled", sources=[tmp_path / "second"]).refresh(runner="inline")
    view = first.open_view("doubled", sources=[tmp_path / "second", tmp_path / "third"])
    assert view.refresh(runner="inline").rows_computed == 2
    assert isinstance(view, View)


@pytest.mark.slow
@pytest.mark.parametrize(
    "uri", ["{secret}", "s3://{bucket}/other/image", "s3://{bucket}/db-2/image", "s3://nobody/db/image"]
)
def test_a_blob_of_a_table_on_a_store_names_neither_a_file_nor_another_folder(
    bucket: Bucket, options: dict[str, str], secret: Path, uri: str
) -> None:
    for key in ("other/image", "db-2/image", "db/images/1"):
        bucket.put(key, SECRET)
    db = connect(f"{bucket.uri}/db", options)
    table = make_photos(db, [b"an image", uri.format(secret=secret.as_uri(), bucket=bucket.name)])
    for read in (backfill, refresh, query):
        assert REFUSED in told(table, read)
    assert query(make_photos(db, [f"{bucket.uri}/db/images/1"], "inside")) == [SECRET]


@pytest.mark.slow
def test_a_base_path_in_another_bucket_or_folder_is_not_opened(
    bucket: Bucket, options: dict[str, str], tmp_path: Path
) -> None:
    db = connect(f"{bucket.uri}/db", options)
    table = db.create_table("docs", {"id": [1, 2]})
    for place in (f"{bucket.uri}/db-2/docs.lance", f"S3://{bucket.name}/other.lance", str(tmp_path)):
        named = lance.DatasetBasePath(place, is_dataset_root=True)
        lance.dataset(table.uri, storage_options=options).add_bases([named])
        with pytest.raises(InvalidInput, match=f"names .*which {REFUSED}"):
            db.open_table("docs")
        lance.LanceDataset.drop(table.uri, storage_options=options)
        table = db.create_table("docs", {"id": [1, 2]})
    table.lance.shallow_clone(f"{db.uri}/clone.lance", table.version, storage_options=options)
    assert db.open_table("clone").to_arrow().column("id").to_pylist() == [1, 2]


@pytest.mark.spark
def test_executors_read_blobs_in_allowed_places_only(spark: SparkSession, db: Database, secret: Path) -> None:
    table = make_photos(db, [b"an image", secret.as_uri()])
    table.add_columns({"copied": (copy, ["image"])})
    with pytest.raises(GenevaError, match=REFUSED):
        table.backfill("copied", runner="spark")
    allowed = connect(db.uri, allowed_places=[secret.parent]).open_table("photos")
    allowed.backfill("copied", runner="spark")
    assert allowed.to_arrow(["copied"]).column("copied").to_pylist() == [b"an image", SECRET]


@pytest.mark.spark
def test_executors_read_files_in_allowed_places_only(spark: SparkSession, db: Database, secret: Path) -> None:
    links = db.create_table("links", {"uri": [secret.as_uri()]})
    links.add_columns({"file": (read_file(), ["uri"])})
    with pytest.raises(GenevaError, match=REFUSED):
        links.backfill("file", runner="spark")
    allowed = connect(db.uri, allowed_places=[secret.parent]).open_table("links")
    allowed.backfill("file", runner="spark")
    assert allowed.to_arrow(["file"]).column("file").to_pylist() == [SECRET]


@pytest.mark.spark
def test_executors_read_the_source_of_a_view_in_the_places_of_its_plan(spark: SparkSession, tmp_path: Path) -> None:
    third = connect(tmp_path / "third").create_table("docs", {"id": [1, 2]})
    second = connect(tmp_path / "second", allowed_places=[tmp_path / "third"])
    Path(second.uri).mkdir()
    third.lance.shallow_clone(f"{second.uri}/clone.lance", third.version)
    first = connect(tmp_path / "first")
    second.open_table("clone").query().select({"twice": "id * 2"}).create_materialized_view(first, "doubled")
    view = first.open_view("doubled", sources=[tmp_path / "second", tmp_path / "third"])
    assert view.refresh(runner="spark").rows_computed == 2
