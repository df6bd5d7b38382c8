"""An S3 server with a bucket, and a database in it. It answers a conditional PUT with 412, as Amazon's does."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.database import Database

KEY, SECRET = "AKIA-the-key-id", "the-very-secret-key"
SERVER = Path(__file__).with_name("s3_server.py")

_metrics: dict[str, str] = {}


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own process on a free port; it ends with its standard input."""
    folder = tmp_path_factory.mktemp("server")
    server = subprocess.Popen(
        [sys.executable, str(SERVER), KEY, SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        ports = server.stdout.readline().split()
        assert ports, f"the server did not start, see {folder}/server.log"
        url, metrics = (f"http://127.0.0.1:{int(port)}" for port in ports)
        _metrics[url] = f"{metrics}/metrics"
        yield url
    finally:
        server.stdin.close()
        server.wait(timeout=120)


def count_requests(endpoint: str) -> int:
    """Return how many requests about objects the server has answered."""
    with urllib.request.urlopen(_metrics[endpoint]) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(line.rpartition(" ")[2]) for line in lines if line.startswith("SeaweedFS_s3_request_total{"))


class Bucket:
    """A bucket, looked at without the engine."""

    def __init__(self, endpoint: str) -> None:
        self.client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
        )
        self.name = f"bucket-{uuid.uuid4().hex[:8]}"
        self.client.create_bucket(Bucket=self.name)

    def objects(self, part: str = "") -> dict[str, bytes]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        names = [item["Key"] for page in pages for item in page.get("Contents", ()) if part in item["Key"]]
        return {name: self.client.get_object(Bucket=self.name, Key=name)["Body"].read() for name in names}

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=data)


@pytest.fixture
def bucket(endpoint: str) -> Bucket:
    return Bucket(endpoint)


@pytest.fixture
def options(endpoint: str) -> dict[str, str]:
    return {
        "aws_endpoint": endpoint,
        "aws_region": "us-east-1",
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "allow_http": "true",
    }


@pytest.fixture
def db(bucket: Bucket, options: dict[str, str]) -> Database:
    return connect(f"s3://{bucket.name}/some/db", storage_options=options)


def numbers(*xs: int) -> pa.Table:
    return pa.table({"id": pa.array(xs, pa.int64()), "x": pa.array(xs, pa.int64())})
