"""A session on a Spark Connect server for one try of a task; the server continues when its client dies."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from airflow_geneva.engine.runtime import uuid
from airflow_geneva.errors import GenevaError, InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_geneva.engine.plan.model import JobSpec

_USUAL_PORT = 15002
_SESSION_ENDED = re.compile(r"INVALID_HANDLE\.SESSION_(?:CLOSED|CHANGED|NOT_FOUND)")


def is_connect(session: SparkSession) -> bool:
    """Whether a session is a client of a Spark Connect server, which may serve others too."""
    return type(session).__module__.startswith("pyspark.sql.connect")


@contextmanager
def explaining_ended_session() -> Iterator[None]:
    """Raise `InvalidInput` with the calls that make a new session if a server has ended the session of this block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GenevaError) or not _SESSION_ENDED.search(str(error)):
            raise
        raise InvalidInput(
            "The server has ended the Spark Connect session: it ends a session that is idle for an hour "
            "(spark.connect.session.manager.defaultSessionTimeout), and a server that was started again knows none. "
            "Make a new one, SparkSession.active().stop() and "
            'SparkSession.builder.remote("sc://HOST:PORT").getOrCreate(), then run again: computed rows are kept.'
        ) from error


def check_demands(spec: JobSpec) -> None:
    """Refuse UDFs that request resources which a running server cannot provide."""
    for name, value in (("num_gpus", spec.num_gpus), ("memory", spec.memory)):
        if value:
            raise InvalidInput(
                f"{name}={value} is asked for, by the job or its UDF, which a Spark Connect server that runs already "
                "cannot provide. Use a Spark connection for spark-submit, or leave it out and size the server for it."
            )


def check_reachable(url: str, seconds: float = 10.0) -> None:
    """Raise ConnectionError if nothing listens at a server's address; PySpark itself would try for minutes."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _USUAL_PORT
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        raise ConnectionError(
            f"No Spark Connect server answers at {host}:{port} ({error}). Start it, or correct the Spark connection."
        ) from error


@contextmanager
def open_try(url: str, task: str, try_number: int) -> Iterator[SparkSession]:
    """Open the session of one try of a task, after ending the work that earlier tries may have left running.

    Args:
        url: the server's, ``sc://...``; may hold a token, so it is never logged.
        task: identifies the task for all its tries.

    Raises:
        ConnectionError: the server cannot be reached.
    """
    check_reachable(url)
    for earlier in range(1, try_number):
        with suppress(Exception):  # the server may have forgotten it, or have been started again
            left = _open(url, task, earlier)
            left.interruptAll()
            left.stop()
    session = _open(url, task, try_number)
    try:
        yield session
    finally:
        with suppress(Exception):  # the result is written; a session that stays is ended by the server
            session.stop()


def _open(url: str, task: str, try_number: int) -> SparkSession:
    from pyspark.sql import SparkSession

    session_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{task}/{try_number}")
    # PySpark takes a slash in a parameter for a part of the path, and repeats the parameters in its error.
    address, _, parameters = url.partition("/;")
    parameters = f"{parameters};session_id={session_id}".replace("/", "%2F").lstrip(";")
    try:
        return SparkSession.builder.remote(f"{address.rstrip('/')}/;{parameters}").create()
    except ValueError:
        raise InvalidInput("PySpark cannot read the Spark connection: check its host, port and extra.") from None
