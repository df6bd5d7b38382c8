"""The Lance databases that Airflow knows, and which of them a user may see."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from airflow_geneva.database import Database
from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators._airflow_internals import stored_connections
from airflow_geneva.pages.access import CurrentUser, dags_by_table
from airflow_geneva.storage.timeouts import with_short_timeouts
from airflow_geneva.storage.uri import is_local, without_credentials

_VARIABLE = "AIRFLOW_CONN_"


@dataclass(frozen=True)
class KnownDatabase:
    """A database as the overview lists it.

    Args:
        conn_id: its Airflow connection.
        place: its URI if the viewer may read the connection, else None.
        error: why the connection cannot be used, or None.
    """

    conn_id: str
    place: str | None = None
    error: str | None = None


def list_databases(viewer: CurrentUser) -> list[KnownDatabase]:
    """List the databases of which a viewer may see something, sorted.

    A connection is known if it is stored in Airflow, if the API server has it in its environment, or if a DAG
    names one of its tables as an asset. No database is opened.
    """
    stored = stored_connections(LanceHook.conn_type)
    given = {name.removeprefix(_VARIABLE).lower() for name in os.environ if name.startswith(_VARIABLE)}
    named = {conn_id for conn_id, _ in dags_by_table()}
    found = []
    for conn_id in sorted(stored | given | named):
        # A connection in the environment may have any type; one that a DAG names is a database.
        if viewer.may_see_database(conn_id) and (conn_id in stored | named or _is_lance(conn_id)):
            found.append(_describe(conn_id, viewer))
    return found


def _is_lance(conn_id: str) -> bool:
    try:
        return LanceHook(conn_id).is_lance
    except Exception:  # its type is unknown if it cannot be read
        return False


def _describe(conn_id: str, viewer: CurrentUser) -> KnownDatabase:
    try:
        database = open_database(conn_id)
    except Exception as error:  # list the other databases even if one fails
        return KnownDatabase(conn_id, error=str(error) if viewer.may_read_connection(conn_id) else "cannot be opened")
    return KnownDatabase(conn_id, place_of(database, conn_id, viewer))


def place_of(database: Database, conn_id: str, viewer: CurrentUser) -> str | None:
    """Return a database's URI without credentials; None if the viewer may not read its connection."""
    return without_credentials(database.uri) if viewer.may_read_connection(conn_id) else None


def missing_folder(database: Database) -> str | None:
    """Return the folder of a local database that does not exist on the API server's machine; None if it exists."""
    return database.uri if is_local(database.uri) and not os.path.isdir(database.uri) else None


def open_database(conn_id: str, uri: str | None = None) -> Database:
    """Open the database of an Airflow connection with short timeouts; Airflow masks its secrets from now on.

    Args:
        uri: another database to use with the connection's storage options.

    Raises:
        InvalidInput: there is no such connection, or it has another type.
    """
    hook = LanceHook(conn_id)
    if not hook.is_lance:
        raise InvalidInput(f"Airflow connection {conn_id!r} is not of type {LanceHook.conn_type!r}.")
    database = hook.get_database(uri)
    return replace(database, options=with_short_timeouts(database.uri, database.options))


def open_existing_database(conn_id: str) -> Database:
    """Open a database like `open_database`, and check that a local folder exists.

    Raises:
        InvalidInput: there is no such connection, or it has another type.
        StorageError: it is a local folder that does not exist on this machine.
    """
    database = open_database(conn_id)
    if missing_folder(database) is not None:
        raise StorageError(f"There is no folder {database.uri} on the machine of the API server.")
    return database


def visible_tables(database: Database, conn_id: str, viewer: CurrentUser) -> list[str]:
    """Return the names of the tables and views that a viewer may see, sorted."""
    return [name for name in database.table_names() if viewer.may_see_table(conn_id, name)]
