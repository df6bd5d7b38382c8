"""Azurite, a server of Azure Blob Storage, instead of the S3 server: `make test-all STORE=azurite`."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from collections.abc import Iterator

import pytest
from pyarrow.fs import AzureFileSystem, FileSelector

from tests.support.object_store import KEY, SECRET, db
from tests.support.stack import START_SECONDS, wait_for

__all__ = ["bucket", "db", "endpoint", "options"]


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server in a separate process on a free port; yield the address of an account."""
    # By default it refuses clients that are newer than itself.
    command = [
        "azurite-blob",
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    folder = tmp_path_factory.mktemp("server")
    accounts = {"AZURITE_ACCOUNTS": f"{KEY}:{SECRET}"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **accounts})

    def listens() -> re.Match[str] | None:
        assert server.poll() is None, (folder / "log").read_text()
        return re.search(r"successfully listens on (\S+)", (folder / "log").read_text())

    try:
        wait_for(lambda: listens() is not None, START_SECONDS, "Azurite")
        found = listens()
        assert found
        yield f"{found[1]}/{KEY}"
    finally:
        server.kill()
        server.wait()


class Container:
    """A container, accessed without the engine; the counterpart of `Bucket` for S3."""

    def __init__(self, endpoint: str) -> None:
        authority = endpoint.removeprefix("http://").partition("/")[0]
        places = {"blob_storage_authority": authority, "blob_storage_scheme": "http"}
        places |= {"dfs_storage_authority": authority, "dfs_storage_scheme": "http"}
        self.files = AzureFileSystem(KEY, account_key=SECRET, **places)
        self.name = f"container-{uuid.uuid4().hex[:8]}"
        self.uri = f"az://{self.name}"
        self.files.create_dir(self.name)

    def objects(self, part: str = "") -> dict[str, bytes]:
        found = self.files.get_file_info(FileSelector(self.name, recursive=True))
        paths = [info.path for info in found if info.is_file and part in info.path.partition("/")[2]]
        return {path.partition("/")[2]: self.files.open_input_stream(path).read() for path in paths}

    def put(self, name: str, data: bytes) -> None:
        with self.files.open_output_stream(f"{self.name}/{name}") as stream:
            stream.write(data)


@pytest.fixture
def bucket(endpoint: str) -> Container:
    return Container(endpoint)


@pytest.fixture
def options(endpoint: str) -> dict[str, str]:
    return {
        "azure_storage_account_name": KEY,
        "azure_storage_account_key": SECRET,
        "azure_storage_endpoint": endpoint,
        "allow_http": "true",
    }
