"""The Airflow checks of `airflow-geneva doctor`: the two connections, and the port of the API server."""

from __future__ import annotations

import os
import socket
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from airflow.providers.common.compat.sdk import AirflowNotFoundException, conf
from airflow.sdk import BaseHook

from airflow_geneva.engine.storage.documents import LARGEST_BYTES, parse
from airflow_geneva.engine.storage.uri import is_local
from airflow_geneva.errors import InvalidInput
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.spark.submit import SparkMaster

_SECONDS = 2.0
_LOCAL = ("localhost", "127.0.0.1")
_LANCE = '{"conn_type": "lance", "host": "/path/to/database"}'
_SPARK = '{"conn_type": "spark", "host": "local[2]"}'

Finding = tuple[str, str | None]
"""The finding, and the command or step that corrects it; None if no action is needed."""


def check_lance_connection(conn_id: str = "lance_default") -> Finding:
    """List the tables of a Lance connection; a local folder need not exist yet."""
    hook = LanceHook(conn_id)
    try:
        uri = hook.uri
    except InvalidInput as error:
        return f"{conn_id}: {str(error).partition('. ')[0]}.", _correct(conn_id, _LANCE)
    if is_local(uri) and not os.path.exists(uri):
        place = next(parent for parent in Path(uri).parents if parent.exists())
        if os.access(place, os.W_OK):
            return f"{conn_id}: {uri} (no database yet)", None
        return f"{conn_id}: {uri} cannot be created in {place}", _correct(conn_id, _LANCE)
    well, message = hook.test_connection()
    return f"{conn_id}: {message}", None if well else _correct(conn_id, _LANCE)


def check_spark_connection(conn_id: str = "spark_default") -> Finding:
    """Check the master of a Spark connection, or connect to the server of a Spark Connect connection."""
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return f"{conn_id}: Airflow connection {conn_id!r} does not exist.", _correct(conn_id, _SPARK)
    host = (connection.host or "").removeprefix("sc://")
    if connection.conn_type == "spark_connect":
        if _listens(host, connection.port or 15002):
            return f"{conn_id}: a server listens at sc://{host}:{connection.port or 15002}", None
        server = f"airflow-geneva spark-server --port {connection.port or 15002}"
        return f"{conn_id}: no server listens at sc://{host}:{connection.port or 15002}", server
    try:
        master = SparkMaster.parse(connection.host or str(connection.conn_type), f"Airflow connection {conn_id!r}")
    except InvalidInput as error:
        return f"{conn_id}: {error}", _correct(conn_id, _SPARK)
    return f"{conn_id}: {master.url}", None


def check_port() -> Finding:
    """Is the port of Airflow's API server free, or Airflow's own, and do tasks call the same one?"""
    port, base_url = conf.getint("api", "port"), str(conf.get("api", "base_url", fallback="") or "")
    address = urlsplit(base_url)
    if address.hostname in _LOCAL and (address.port or 80) != port:
        found = f"Airflow listens on port {port}, and its tasks call it at {base_url}"
        return found, _use_port(port)
    if not _listens("127.0.0.1", port):
        return f"{port} is free", None
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v2/version", timeout=_SECONDS) as answer:  # http only
            return f"{port}: Airflow {parse(answer.read(LARGEST_BYTES))['version']} answers", None
    except (URLError, OSError, HTTPException, ValueError, LookupError, TypeError):
        free = next((other for other in range(port + 1, port + 100) if not _listens("127.0.0.1", other)), port + 1)
        return f"{port} is used by another program", _use_port(free)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_SECONDS):
            return True
    except OSError:
        return False


def _correct(conn_id: str, connection: str) -> str:
    """Return how to define a connection, or where to correct the stored one; a variable would only hide it."""
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    if variable not in os.environ and _exists(conn_id):
        return f"correct {conn_id} where it is stored, in Airflow's UI or the secrets backend, as {connection}"
    return f"export {variable}='{connection}'"


def _exists(conn_id: str) -> bool:
    try:
        BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return False
    return True


def _use_port(port: int) -> str:
    return f"export AIRFLOW__API__PORT={port} AIRFLOW__API__BASE_URL=http://127.0.0.1:{port}"
