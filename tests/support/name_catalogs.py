"""Catalogs that know names and locations only: the Glue API of moto, and an Iceberg REST catalog over pyiceberg's own.

Both are real HTTP servers for the clients of `lance-namespace-impls`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from moto.server import ThreadedMotoServer
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.schema import Schema

from tests.support.catalog import TOKEN, Answer, serving
from tests.support.object_store import KEY, SECRET


@contextmanager
def glue() -> Iterator[dict[str, str]]:
    """Serve an empty Glue catalog, and yield the properties of its client."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"access_key_id": "key-of-glue", "secret_access_key": f"secret-of-{TOKEN}"}
        yield {"region": "us-east-1", "endpoint": f"http://{host}:{port}", **keys}
    finally:
        server.stop()


@contextmanager
def iceberg(folder: Path, endpoint: str) -> Iterator[dict[str, str]]:
    """Serve an empty Iceberg REST catalog, and yield the properties of its client."""
    keys = {"s3.access-key-id": KEY, "s3.secret-access-key": SECRET}
    store = {"s3.endpoint": endpoint, "s3.region": "us-east-1", **keys}
    kept = SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", **store)
    known: dict[tuple[type[Exception], ...], int] = {
        (NoSuchNamespaceError, NoSuchTableError): 404,
        (TableAlreadyExistsError,): 409,
    }

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        def as_json(status: int, content: Any) -> Answer:
            return status, {"Content-Type": "application/json"}, json.dumps(content).encode()

        if {name.lower(): value for name, value in headers.items()}.get("authorization") != f"Bearer {TOKEN}":
            return as_json(401, {"error": {"message": "No token", "type": "NotAuthorizedException", "code": 401}})
        try:
            return as_json(200, _answer(kept, method, urlsplit(path), json.loads(body or b"{}")))
        except Exception as error:
            status = next((status for kinds, status in known.items() if isinstance(error, kinds)), 500)
            kind = type(error).__name__
            return as_json(status, {"error": {"message": str(error), "type": kind, "code": status}})

    with serving(answer) as url:
        yield {"endpoint": url, "auth_token": TOKEN}


def _answer(catalog: SqlCatalog, method: str, path: Any, given: Mapping[str, Any]) -> Any:
    """Answer requests of the specification for Iceberg REST catalogs, in the form of its 2026 text."""
    parts = [tuple(unquote(unquote(part)).split("\x1f")) for part in path.path.split("/")[3:]]
    match method, parts:
        case "GET", []:
            return {"defaults": {}, "overrides": {}}
        case "GET", [("namespaces",)]:
            return {"namespaces": [] if path.query else catalog.list_namespaces()}
        case "POST", [("namespaces",)]:
            catalog.create_namespace(tuple(given["namespace"]))
            return given
        case "GET", [("namespaces",), within, ("tables",)]:
            found = catalog.list_tables(within)
            return {"identifiers": [{"namespace": one[:-1], "name": one[-1]} for one in found]}
        case "POST", [("namespaces",), within, ("tables",)]:
            schema = Schema.model_validate(given["schema"])
            make: Callable[..., Any] = catalog.create_table
            table = make((*within, given["name"]), schema, given["location"], properties=given["properties"])
        case "GET", [("namespaces",), within, ("tables",), (name,)]:
            table = catalog.load_table((*within, name))
        case "DELETE", [("namespaces",), within, ("tables",), (name,)]:
            catalog.drop_table((*within, name))
            return None
        case _:
            raise LookupError(f"This catalog has no route {method} {path.path}")
    return {"metadata-location": table.metadata_location, "metadata": json.loads(table.metadata.model_dump_json())}
