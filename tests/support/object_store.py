"""An S3-compatible server with a bucket, and a database in it."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import boto3
import pyarrow as pa
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from airflow_geneva import connect
from airflow_geneva.database import Database

KEY, SECRET = "AKIA-the-key-id", "the-very-secret-key"
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own process on a free port; it ends with its standard input."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path_factory.mktemp("server"),
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.stdin.close()
        server.wait(timeout=120)


class Bucket:
    """A bucket, looked at without the engine."""

    def __init__(self, endpoint: str) -> None:
        self.client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
        )
        self.name = f"bucket-{uuid.uuid4().hex[:8]}"
        for _ in range(50):
            try:
                self.client.create_bucket(Bucket=self.name)
                return
            except (BotoCoreError, ClientError):
                time.sleep(0.1)
        raise AssertionError("the server did not start")

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
