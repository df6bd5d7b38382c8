"""Executors through a catalog whose credentials end after seconds, and of which one is killed."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from lance_namespace import CreateNamespaceRequest

from airflow_geneva import connect_namespace
from tests.spark.spark_udfs import seen, slow_and_dies_once_at_700
from tests.support.catalog import TOKEN, VendingCatalog
from tests.support.object_store import Bucket

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow]

ROWS = int(os.environ.get("GENEVA_CATALOG_ROWS", "3000"))
SECONDS = float(os.environ.get("GENEVA_CATALOG_SECONDS", "2"))


def test_executors_renew_credentials_and_a_killed_one_costs_little(
    spark: SparkSession, bucket: Bucket, endpoint: str, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    data = pa.table({"x": pa.array(range(ROWS)), "log": pa.array([log] * ROWS)})
    with VendingCatalog(endpoint, f"{bucket.uri}/warehouse", SECONDS).running() as catalog:
        db = connect_namespace("rest", catalog.properties)
        db.lance.create_namespace(CreateNamespaceRequest(id=["prod"]))
        table = db.create_table("prod.numbers", data, max_rows_per_file=ROWS // 6)
        table.add_columns({"y": slow_and_dies_once_at_700})
        began = time.monotonic()
        result = table.backfill("y", runner="spark", checkpoint_interval=0.5, task_size=250)
        took = time.monotonic() - began
        assert took > 2 * SECONDS
        assert (result.state, result.rows_computed) == ("DONE", ROWS)
        values = table.to_arrow()
        assert values["y"].to_pylist() == [2 * x for x in values["x"].to_pylist()]
        assert catalog.refused == []
        runs = Counter(seen(log))
        assert runs[700] == 2
        again = sum(count - 1 for count in runs.values())
        print(f"{took:.1f} s, {len(catalog.secrets)} grants, {catalog.requests} requests, {again} rows ran twice")
        kept = [content.decode("latin-1") for content in bucket.objects().values()]
        assert not [secret for secret in (TOKEN, *catalog.secrets) for text in kept if secret in text]
