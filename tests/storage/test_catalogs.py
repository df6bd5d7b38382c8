"""Tables in a catalog: pylance's own namespace server over a folder, by HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lance.namespace import RestAdapter
from lance_namespace import (
    CreateNamespaceRequest,
    DeregisterTableRequest,
    RegisterTableRequest,
)

from airflow_geneva import Database, connect, connect_namespace, udf
from airflow_geneva.engine.storage.catalogs import catalog_option, catalog_uri
from airflow_geneva.engine.storage.secrets import CATALOG, secret_values
from airflow_geneva.errors import InvalidInput, JobFailed, StorageError, TableRemade
from tests.support.processes import as_another_process

TOKEN = "the-token-of-the-catalog"


@udf(data_type=pa.int64())
def doubled(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 2)


@pytest.fixture(params=["false", "true"], ids=["versions of Lance", "versions of the catalog"])
def db(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A catalog that is asked by HTTP, whose commits go through Lance, or through the catalog."""
    settings = {"root": str(tmp_path), "table_version_tracking_enabled": request.param}
    with RestAdapter("dir", settings, port=0) as server:
        uri = f"http://127.0.0.1:{server.port}"
        db = connect_namespace("rest", {"uri": uri, "headers.Authorization": f"Bearer {TOKEN}"})
        db.lance.create_namespace(CreateNamespaceRequest(id=["prod"]))
        yield db


def numbers(*xs: int) -> pa.Table:
    return pa.table({"id": pa.array(xs, pa.int64()), "x": pa.array(xs, pa.int64())})


def test_a_column_and_a_view_of_a_table_in_a_catalog_are_computed_and_followed(db: Database, tmp_path: Path) -> None:
    table = db.create_table("prod.docs", numbers(*range(30)), max_rows_per_file=10)
    table.add_columns({"y": doubled})
    assert table.backfill("y", runner="inline").rows_computed == 30
    view = (
        table.query().where("x > 5").select({"id": "id", "z": (doubled, ["x"])}).create_materialized_view(db, "prod.v")
    )
    assert view.refresh(runner="inline").rows_computed == 24
    table.add(numbers(99))
    again = db.open_table("prod.docs")
    assert again.backfill("y", runner="inline").rows_computed == 1
    assert db.open_view("prod.v").refresh(runner="inline").rows_computed == 1
    assert again.to_arrow()["y"].to_pylist() == [2 * x for x in (*range(30), 99)]
    assert sorted(view.to_arrow()["z"].to_pylist()) == [2 * x for x in (*range(6, 30), 99)]
    assert db.table_names() == db.table_names(["prod"]) == ["prod.docs", "prod.v"]
    assert [job.target for job in db.jobs()] == ["prod.v", "prod.docs.y", "prod.v", "prod.docs.y"]
    assert [job.id for job in db.jobs(table="prod.v")] == [db.jobs()[0].id, db.jobs()[2].id]
    assert db.job(db.jobs()[3].id).state == "DONE"
    assert db.lance.namespace_id() in repr(db.lance)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 30
    assert not [content for content in written if TOKEN.encode() in content]
    db.drop_table("prod.v")
    assert db.table_names() == ["prod.docs"]
    assert not any("prod$v" in path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("rewrite", [False, True])
def test_tables_and_views_are_copied_within_a_catalog_out_of_it_and_into_it(
    db: Database, tmp_path: Path, rewrite: bool
) -> None:
    table = db.create_table("docs", numbers(*range(30)), max_rows_per_file=10)
    table.add_columns({"y": doubled})
    table.backfill("y", runner="inline")
    view = table.query().select({"id": "id", "z": (doubled, ["x"])}).create_materialized_view(db, "v")
    view.refresh(runner="inline")
    folder = connect(tmp_path / "folder")
    out = folder.copy_table(table, rewrite=rewrite)
    copies = [db.copy_table("docs", "prod.docs", rewrite=rewrite), out, db.copy_table(out, "prod.back", rewrite)]
    for copy in copies:
        assert copy.plan_backfill("y").rows_pending == 0
        copy.add(numbers(99))
        assert copy.backfill("y", runner="inline").rows_computed == 1
    if not rewrite:
        assert db.copy_table("v", "prod.v").plan_refresh().rows_pending == 0
        assert folder.copy_table(view).plan_refresh().rows_pending == 1


@pytest.mark.parametrize("how", ["renamed", "dropped", "made again"])
@pytest.mark.parametrize("at", ["staged.written", "commit.before"])
def test_a_table_that_its_catalog_names_no_longer_is_left_as_it_is(
    db: Database, monkeypatch: pytest.MonkeyPatch, at: str, how: str
) -> None:
    table = db.create_table("prod.docs", numbers(*range(30)))
    table.add_columns({"y": doubled})
    place = Path(table.uri).name
    done: list[str] = []

    def passing(name: str) -> None:
        if name != at or done:
            return
        done.append(name)
        if how == "renamed":
            db.lance.deregister_table(DeregisterTableRequest(id=["prod", "docs"]))
            db.lance.register_table(RegisterTableRequest(id=["prod", "papers"], location=place))
        else:
            db.drop_table("prod.docs")
        if how == "made again":
            db.create_table("prod.docs", numbers(*range(30))).add_columns({"y": doubled})

    for module in ("lance_io.data_file", "lance_io.table_versions"):
        monkeypatch.setattr(f"airflow_geneva.engine.{module}.fault_point", passing)
    with pytest.raises((TableRemade, JobFailed), match="may also have been moved, renamed or dropped"):
        table.backfill("y", runner="inline")
    assert done
    if how != "dropped":
        left = db.open_table({"renamed": "prod.papers", "made again": "prod.docs"}[how])
        assert left.to_arrow()["y"].null_count == 30


def test_what_a_catalog_does_not_have_is_told(db: Database) -> None:
    db.create_table("prod.docs", numbers(1))
    with pytest.raises(InvalidInput, match=r"no table 'prod.doc' in namespace://rest/http://127.*mean 'prod.docs'"):
        db.open_table("prod.doc")
    with pytest.raises(InvalidInput, match=r"'prod.docs' already exists in namespace://rest/http"):
        db.create_table("prod.docs", numbers(1))
    with pytest.raises(InvalidInput, match="not a table name"):
        db.open_table("prod..docs")
    # A table whose first rows cannot be written is not left behind.
    stream = pa.RecordBatchReader.from_batches(numbers(1).schema, (1 / 0 for _ in "a"))
    with pytest.raises(ZeroDivisionError):
        db.create_table("prod.half", stream)
    assert db.table_names() == ["prod.docs"]


def test_a_catalog_that_cannot_be_opened_or_asked_says_so_without_a_secret() -> None:
    with pytest.raises(InvalidInput, match=r"kind 'nix'.*'rest', 'dir' or the path of a class"):
        connect_namespace("nix", {"token": TOKEN})
    with pytest.raises(InvalidInput, match=r"kind 'rest'.*\['token'\].*'uri'") as told:
        connect_namespace("rest", {"token": TOKEN})
    assert TOKEN not in str(told.value)
    with pytest.raises(InvalidInput, match=r"'uri' of the catalog is not valid.*holds a user"):
        connect_namespace("rest", {"uri": "https://me:secret@catalog.example"})
    with pytest.raises(InvalidInput, match=r"text, which \['port'\] are not"):
        connect_namespace("rest", {"port": 8181})  # type: ignore[dict-item]
    away = connect_namespace("rest", {"uri": "http://127.0.0.1:1", "headers.Authorization": f"Bearer {TOKEN}"})
    with pytest.raises(StorageError, match=r"namespace://rest/http://127.0.0.1:1 does not answer") as unanswered:
        away.table_names()
    assert TOKEN not in str(unanswered.value)
    assert TOKEN not in repr(away.location)


def test_the_secrets_of_a_catalog_are_known_and_its_address_is_none() -> None:
    properties = {"uri": "https://catalog.example", "headers.Authorization": f"Bearer {TOKEN}", "warehouse": "w"}
    options = dict(connect_namespace("rest", properties, {"aws_region": "eu-west-1"}).options)
    assert secret_values(options) == [f"Bearer {TOKEN}", TOKEN]
    assert not secret_values(dict(connect_namespace("rest", {"uri": "https://catalog.example"}).options))


@pytest.mark.slow
def test_values_of_a_lance_table_are_loaded_into_one_of_a_catalog(db: Database, tmp_path: Path) -> None:
    table = db.create_table("prod.docs", pa.table({"id": [1, 2]}))
    beside = db.create_table("prod.given", pa.table({"id": [1], "a": ["beside"]}))
    elsewhere = connect(tmp_path / "folder").create_table("docs", pa.table({"id": [2], "b": ["elsewhere"]}))
    for source in (beside, elsewhere, elsewhere.uri, elsewhere.lance):
        table.load_columns(source, on="id", runner="inline")
    assert table.to_arrow().select(["a", "b"]).to_pylist() == [
        {"a": "beside", "b": None}, {"a": None, "b": "elsewhere"}
    ]  # fmt: skip


def test_headers_and_settings_of_the_store_do_not_name_a_catalog(tmp_path: Path) -> None:
    settings = {"storage.endpoint": "http://127.0.0.1:1", "storage.uri": "http://127.0.0.1:2"}
    for name in ("one", "other"):
        db = connect_namespace("dir", {"root": str(tmp_path / name), **settings})
        assert db.uri == f"namespace://dir/{tmp_path / name}"
    properties = {"headers.uri": TOKEN, "unity.endpoint": "https://unity.example"}
    assert catalog_uri(((CATALOG, catalog_option("unity", properties)),)) == "namespace://unity/https://unity.example"


@pytest.mark.parametrize("view_in", ["folder", "catalog", "another catalog"])
def test_the_source_of_a_view_may_lie_in_another_catalog_that_is_named(
    db: Database, tmp_path: Path, view_in: str
) -> None:
    with RestAdapter("dir", {"root": str(tmp_path / "other")}, port=0) as server:
        folder = connect(tmp_path / "folder")
        other = connect_namespace("rest", {"uri": f"http://127.0.0.1:{server.port}", "headers.X-Key": "another-secret"})
        source_db, view_db = {
            "folder": (db, folder), "catalog": (folder, db), "another catalog": (other, db)
        }[view_in]  # fmt: skip
        if source_db is other:
            other.lance.create_namespace(CreateNamespaceRequest(id=["prod"]))
        name, view_name = (
            f"prod.{part}" if place is not folder else part for part, place in (("docs", source_db), ("v", view_db))
        )
        source = source_db.create_table(name, numbers(1, 2, 3))
        view = source.query().select({"id": "id", "z": (doubled, ["x"])}).create_materialized_view(view_db, view_name)
        assert view.view_definition.source_database == source_db.uri
        assert view.refresh(runner="inline").rows_computed == 3
        as_another_process()
        source.add(numbers(4))
        with pytest.raises(InvalidInput, match=r"names a source in another database.*allow it"):
            view_db.open_view(view_name).refresh(runner="inline")
        if source_db is not folder:
            with pytest.raises(
                InvalidInput, match=r"in another catalog.*whose properties are not known.*connect_namesp"
            ):
                view_db.open_view(view_name, sources=[source_db.uri]).refresh(runner="inline")
        again = view_db.open_view(view_name, sources=[source_db])
        assert again.refresh(runner="inline").rows_computed == 1
        assert sorted(again.to_arrow()["z"].to_pylist()) == [2, 4, 6, 8]
        assert secret_values(dict(again.location.options)) == [
            *([] if view_in == "folder" else [f"Bearer {TOKEN}", TOKEN]),
            *{"folder": [f"Bearer {TOKEN}", TOKEN], "catalog": [], "another catalog": ["another-secret"]}[view_in],
        ]
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert not [text for text in written if TOKEN.encode() in text or b"another-secret" in text]


def test_a_folder_has_no_namespaces(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a folder of tables and has no namespace"):
        connect(tmp_path).table_names(["prod"])
