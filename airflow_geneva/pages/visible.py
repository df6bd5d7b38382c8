"""A database as a user sees it: what reads it needs neither Airflow nor the process that knows the user's rights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from airflow_geneva.database import Database
from airflow_geneva.engine import api
from airflow_geneva.engine.storage.catalogs import catalog_uri
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import is_local, without_credentials
from airflow_geneva.errors import StorageError


class Viewer:
    """The user of one request, and what Airflow's auth manager says about this user."""

    may_read_dag: Callable[[str], bool]
    may_read_connection: Callable[[str], bool]
    may_see_table: Callable[[str, str], bool]
    """Whether the user may see a table of a connection's database."""
    may_see_source: Callable[[str, str], bool]
    """Whether a connection names a database, given by its URI, and the user may see a table of it."""

    def may_see_job(self, conn_id: str | None, job: api.Job) -> bool:
        """Whether the user may see a job of a connection's database; None if no connection names the database."""
        if job.airflow is not None:
            return self.may_read_dag(job.airflow.dag_id)
        return conn_id is not None and self.may_see_table(conn_id, job.table)


class Owner(Viewer):
    """Who reads a database with its own credentials, and may see everything in it and in `sources`, which are URIs."""

    def __init__(self, sources: Collection[str] = ()) -> None:
        self.may_read_dag = self.may_read_connection = lambda name: True
        self.may_see_table = lambda conn_id, table: True
        self.may_see_source = lambda uri, table: uri in sources


@dataclass(frozen=True)
class VisibleDatabase:
    """The database of an Airflow connection, as a user sees it."""

    conn_id: str
    viewer: Viewer
    database: Database

    @property
    def place(self) -> str | None:
        """The URI without credentials; None if the viewer may not read the connection."""
        return without_credentials(self.database.uri) if self.viewer.may_read_connection(self.conn_id) else None

    @property
    def in_catalog(self) -> bool:
        return catalog_uri(self.database.options) is not None

    @property
    def missing(self) -> str | None:
        """The folder of a local database that does not exist on the API server's machine; None if it exists."""
        uri = self.database.uri
        return uri if is_local(uri) and not os.path.isdir(uri) else None

    def reach(self) -> Database:
        """Return the database; `StorageError` if it is a local folder that does not exist."""
        if self.missing is not None:
            raise StorageError(f"There is no folder {self.missing} on the machine of the API server.")
        return self.database

    def locate(self, table: str) -> TableLocation:
        """Return the location of a table, which may not exist."""
        return self.reach().location(table)

    def may_see(self, table: str) -> bool:
        return self.viewer.may_see_table(self.conn_id, table)

    def sources_of(self, definition: api.ViewDefinition | None) -> tuple[str, ...]:
        """Return the database of a view's source, if a connection names it and the viewer may see the source in it."""
        if definition is None:
            return ()
        uri = definition.source_database
        return (uri,) if self.viewer.may_see_source(uri, definition.source_table) else ()

    def tables(self) -> list[str]:
        return [name for name in self.reach().table_names() if self.may_see(name)]
