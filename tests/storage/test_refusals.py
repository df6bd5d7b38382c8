"""Refused access has one list, which all who ask about errors of stores and catalogs share."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import airflow_geneva
from airflow_geneva.engine.storage.catalogs import asking, catalog_option
from airflow_geneva.engine.storage.engine_errors import describe_store_error, is_refused, is_unavailable
from airflow_geneva.engine.storage.files import freeze_options
from airflow_geneva.engine.storage.refusals import is_access_refused
from airflow_geneva.engine.storage.secrets import CATALOG
from airflow_geneva.engine.watch.watcher import TableWatcher
from airflow_geneva.errors import StorageError

BY_STORES = (
    "Server returned non-2xx status code: 403 Forbidden: <Code>InvalidAccessKeyId</Code>",
    "Server returned non-2xx status code: 400 Bad Request: <Error><Code>ExpiredToken</Code></Error>",
    "Server returned non-2xx status code: 401 Unauthorized",
    "response status: 403, no body",
    "The request signature we calculated does not match: SignatureDoesNotMatch",
    "An error occurred (AccessDenied) when calling the GetTable operation",
    "An error occurred (UnrecognizedClientException) when calling the GetTable operation",
    "the operation lacked the necessary privileges to complete for path docs.lance",
    "the operation lacked valid authentication credentials for path docs.lance",
    "HTTP 403: the token may not read this table",
)
BY_THE_SYSTEM = ("Operation not permitted (os error 1)", "Permission denied (os error 13)", "permission denied: /db")
PASSING = (
    "Server returned non-2xx status code: 503 Service Unavailable",
    "Server returned non-2xx status code: 404 Not Found",
    "error sending request for url (http://127.0.0.1:1)",
    "Too many open files (os error 24)",
    "part 403 of 500",
)
NAMED = ("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "UnrecognizedClient")


@pytest.mark.parametrize("text", BY_STORES)
def test_everyone_sees_that_a_store_refuses_access(text: str) -> None:
    error = OSError(text)
    assert all(says(error) for says in (is_access_refused, is_refused, is_unavailable, TableWatcher.is_permanent))
    assert "Correct the credentials" in describe_store_error(error)
    catalog = freeze_options({CATALOG: catalog_option("dir", {"root": "/db"})})
    with pytest.raises(StorageError, match="refuses to answer"), asking(catalog, "table 'docs'"):
        raise RuntimeError(text)


@pytest.mark.parametrize("text", BY_THE_SYSTEM)
def test_a_refusal_of_the_operating_system_is_no_matter_of_storage_options(text: str) -> None:
    error = OSError(text)
    assert all(says(error) for says in (is_access_refused, is_refused, is_unavailable, TableWatcher.is_permanent))
    assert "credentials" not in describe_store_error(error)
    assert is_access_refused(PermissionError("no"))


@pytest.mark.parametrize("text", PASSING)
def test_other_errors_are_no_refusal(text: str) -> None:
    assert not any(says(OSError(text)) for says in (is_access_refused, TableWatcher.is_permanent))


def test_no_other_module_names_a_refusal() -> None:
    package = Path(airflow_geneva.__file__).parent
    naming = set()
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in NAMED) else ():
            if isinstance(node, ast.Constant) and any(name in str(node.value) for name in NAMED):
                naming.add(file.relative_to(package).as_posix())
    assert naming == {"engine/storage/refusals.py"}
