"""A catalog that hands out credentials which end after seconds, while jobs last longer."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from lance_namespace import CreateNamespaceRequest

from airflow_geneva import Database, connect_namespace, udf
from airflow_geneva.engine.storage.outages import PATIENCE
from airflow_geneva.errors import InvalidInput, NoSuchTable, StorageError
from tests.support.catalog import TOKEN, VendingCatalog
from tests.support.name_catalogs import glue, iceberg
from tests.support.object_store import CATALOGS, KEY, SECRET, Bucket, numbers, options_of

pytestmark = pytest.mark.slow

SECONDS = 2.0


@pytest.fixture
def catalog(bucket: Bucket, endpoint: str) -> Iterator[VendingCatalog]:
    with VendingCatalog(endpoint, f"{bucket.uri}/warehouse", SECONDS).running() as running:
        yield running


@pytest.fixture
def db(catalog: VendingCatalog) -> Database:
    db = connect_namespace("rest", catalog.properties)
    db.lance.create_namespace(CreateNamespaceRequest(id=["prod"]))
    return db


@udf(data_type=pa.int64(), batch_size=10)
def slowly(x: pa.Int64Array) -> pa.Int64Array:
    time.sleep(0.3)
    return pa.array([2 * value.as_py() for value in x], pa.int64())


@pytest.mark.parametrize("kind", ["column", "view"])
def test_a_job_that_outlives_its_credentials_uses_none_that_has_ended_and_writes_none(
    catalog: VendingCatalog, db: Database, bucket: Bucket, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG)
    table = db.create_table("prod.docs", numbers(*range(200)), max_rows_per_file=50)
    began, job = time.monotonic(), {"runner": "inline", "checkpoint_interval": 0.5}
    if kind == "column":
        table.add_columns({"y": slowly})
        result = table.backfill("y", concurrency=1, **job)  # type: ignore[call-overload]
        found = table.to_arrow()["y"]
    else:
        view = table.query().select({"id": "id", "y": (slowly, ["x"])}).create_materialized_view(db, "prod.v")
        result = view.refresh(concurrency=1, **job)  # type: ignore[arg-type]
        found = view.to_arrow()["y"]
    assert time.monotonic() - began > 2 * SECONDS
    assert (result.state, result.rows_computed) == ("DONE", 200)
    assert sorted(found.to_pylist()) == [2 * x for x in range(200)]
    assert db.jobs()[0].state == "DONE"
    assert catalog.refused == []
    secrets = [TOKEN, *catalog.secrets]
    assert len(secrets) > 10
    texts = [content.decode("latin-1") for content in bucket.objects().values()] + [caplog.text, repr(db), repr(table)]
    assert len(texts) > 20
    assert not [secret for secret in secrets for text in texts if secret in text]


def test_a_store_that_refuses_and_a_catalog_that_refuses_are_told_without_a_secret(
    catalog: VendingCatalog, db: Database
) -> None:
    db.create_table("prod.docs", numbers(1))
    catalog.seconds = -100.0
    with pytest.raises(Exception, match=r"(?i)privileges|expired") as refused:
        db.open_table("prod.docs").to_arrow()
    assert not [secret for secret in [TOKEN, *catalog.secrets] if secret in str(refused.value)]
    other = connect_namespace("rest", {**catalog.properties, "headers.Authorization": "Bearer of-someone-else"})
    with pytest.raises(
        StorageError, match=r"refuses to answer about table 'prod.docs'.*Correct the properties"
    ) as told:
        other.location("prod.docs")
    assert "of-someone-else" not in str(told.value)


def test_an_outage_of_the_catalog_is_waited_for(catalog: VendingCatalog, db: Database) -> None:
    db.create_table("prod.docs", numbers(1))
    patient = connect_namespace("rest", catalog.properties, {PATIENCE: "30"})
    catalog.failing = 3
    assert patient.open_table("prod.docs").version == 1
    assert catalog.failing == 0


@pytest.mark.parametrize("kind", ["glue", "iceberg"])
def test_a_catalog_that_knows_names_only_is_a_database(
    kind: str, bucket: Bucket, endpoint: str, tmp_path: Path, java_home: str
) -> None:
    """Its client is of `lance-namespace-impls`, with errors of its own, and deletes no files."""
    with glue() if kind == "glue" else iceberg(tmp_path, endpoint) as properties:
        db = connect_namespace(kind, {**properties, "root": f"{bucket.uri}/lake"}, options_of(endpoint))
        assert db.uri == f"namespace://{kind}/{properties['endpoint']}"
        lake = ["prod"] if kind == "glue" else ["lake", "prod"]
        about = {"location": f"{bucket.uri}/lake/prod"}
        db.lance.create_namespace(CreateNamespaceRequest(id=lake, properties=about))
        name, other = (".".join([*lake, last]) for last in ("docs", "v"))
        with pytest.raises(NoSuchTable, match="Tables: none"):
            db.open_table(name)
        table = db.create_table(name, numbers(*range(30)), max_rows_per_file=10)
        table.add_columns({"y": slowly})
        assert table.backfill("y", runner="inline").rows_computed == 30
        view = table.query().select({"id": "id", "z": "y + 1"}).create_materialized_view(db, other)
        assert view.refresh(runner="inline").rows_computed == 30
        table.add(numbers(*range(30, 40)))
        runner = "spark" if kind == "glue" else "inline"
        assert table.backfill("y", runner=runner).rows_computed == 10
        assert view.refresh(runner=runner).rows_computed == 10
        assert sorted(view.to_arrow()["z"].to_pylist()) == [2 * x + 1 for x in range(40)]
        assert db.table_names(lake[:1]) == [name, other]
        assert {job.target for job in db.jobs(table=name)} == {f"{name}.y"}
        db.drop_table(other)
        assert db.table_names(lake) == [name]
        assert not bucket.objects("/v/")
        assert db.open_table(name).count_rows() == 40
        assert not [one for one in bucket.objects().values() if TOKEN.encode() in one]
        if kind == "glue":
            assert db.table_names() == [name]
        else:
            with pytest.raises(InvalidInput, match="Must specify at least the warehouse"):
                db.table_names()
            wrong = {**properties, "auth_token": "of-someone-else"}
            with pytest.raises(StorageError, match="refuses to answer"):
                connect_namespace(kind, wrong, options_of(endpoint)).location(name)


def test_the_catalog_of_seaweedfs_names_tables_in_its_own_way(endpoint: str) -> None:
    """A catalog of another maker: it lists whole ids, has no tables at its root, and vends no keys here."""
    key = f"{KEY}-of-administrator"
    properties = {"uri": CATALOGS[endpoint], "headers.x-api-key": f"{key}:{SECRET}"}
    db = connect_namespace("rest", properties, {**options_of(endpoint), "aws_access_key_id": key})
    lake = f"lake-{uuid.uuid4().hex[:8]}"
    for parts in ([lake], [lake, "prod"]):
        db.lance.create_namespace(CreateNamespaceRequest(id=parts))
    table = db.create_table(f"{lake}.prod.docs", numbers(*range(30)), max_rows_per_file=10)
    table.add_columns({"y": slowly})
    assert table.backfill("y", runner="inline").rows_computed == 30
    view = table.query().select({"id": "id", "z": "y + 1"}).create_materialized_view(db, f"{lake}.prod.v")
    assert view.refresh(runner="inline").rows_computed == 30
    assert db.table_names([lake]) == [f"{lake}.prod.docs", f"{lake}.prod.v"]
    assert set(db.table_names([lake])) <= set(db.table_names())
    assert [job.target for job in db.jobs(table=view.name)] == [view.name]
    db.drop_table(view.name)
    assert db.table_names([lake, "prod"]) == [table.name]
