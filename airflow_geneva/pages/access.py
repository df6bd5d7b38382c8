"""The objects that the user of a request may see, and the databases that Airflow's connections name.

A user who may read a DAG's task instances may see the jobs of that DAG. A user may see a table, and its jobs that no
DAG started, if the user may read the Airflow connection of its database, or the task instances of a DAG that names the
table as an asset.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Annotated, Any

from fastapi import Depends, Request

from airflow_geneva.database import Database
from airflow_geneva.engine.job.status import Job
from airflow_geneva.engine.storage.catalogs import catalog_uri
from airflow_geneva.engine.storage.timeouts import with_short_timeouts
from airflow_geneva.engine.storage.uri import is_local, without_credentials
from airflow_geneva.engine.views.definition import ViewDefinition
from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators._airflow_internals import (
    dags_of_assets,
    dags_that_write,
    may_read_connection,
    may_read_dag,
    may_trigger_dag,
    stored_connections,
    user_dependency,
)

_SCHEME = "lance://"
_VARIABLE = "AIRFLOW_CONN_"
_KEPT_SECONDS = 5.0


class CurrentUser:
    """The user of one request; caches the answers of Airflow's auth manager about this user."""

    def __init__(self, user: Any) -> None:
        self.user = user
        self.may_read_dag = cache(partial(may_read_dag, user))
        self.may_trigger_dag = cache(partial(may_trigger_dag, user))
        # A user who may read a connection may see everything in its database.
        self.may_read_connection = cache(partial(may_read_connection, user))

    def may_see_table(self, conn_id: str, table: str) -> bool:
        return self.may_read_connection(conn_id) or self._uses(conn_id, table)

    def may_see_database(self, conn_id: str) -> bool:
        """Whether the user may see any table of a connection's database."""
        return self.may_read_connection(conn_id) or any(
            self._uses(conn_id, table) for owner, table in dags_by_table() if owner == conn_id
        )

    def may_see_job(self, conn_id: str | None, job: Job) -> bool:
        """Whether the user may see a job of a connection's database; None if no connection names the database."""
        if job.airflow is not None:
            return self.may_read_dag(job.airflow.dag_id)
        return conn_id is not None and self.may_see_table(conn_id, job.table)

    def _uses(self, conn_id: str, table: str) -> bool:
        return any(map(self.may_read_dag, sorted(dags_by_table().get((conn_id, table), ()))))


def dags_by_table() -> Mapping[tuple[str, str], set[str]]:
    """Return, by connection and table, the DAGs that write, read, wait for or changed its asset; cached for seconds."""
    return _find_dags(int(time.monotonic() / _KEPT_SECONDS))


@lru_cache(maxsize=1)
def _find_dags(moment: int) -> Mapping[tuple[str, str], set[str]]:
    """Query Airflow's database; `moment` is the cache key."""
    found: dict[tuple[str, str], set[str]] = {}
    for uri, dag_id in dags_of_assets(_SCHEME):
        found.setdefault(table_of_asset(uri), set()).add(dag_id)
    return found


def table_of_asset(uri: str) -> tuple[str, str]:
    """Return the connection and the table that the URI of an asset names; both are empty if it names none."""
    if not uri.startswith(_SCHEME):
        return "", ""
    # The URI of a watched asset has a query string after the table.
    conn_id, _, table = uri.removeprefix(_SCHEME).partition("?")[0].rpartition("/")
    return conn_id, table


@lru_cache(maxsize=32)
def _find_writers(conn_id: str, moment: int) -> Sequence[tuple[str, str, bool]]:
    """Return the tables that DAGs write, with the DAG and whether it is paused; cached for seconds, for open pages."""
    beginning = f"{_SCHEME}{conn_id}/"
    return [(uri.removeprefix(beginning), dag_id, paused) for uri, dag_id, paused in dags_that_write(beginning)]


def viewer(request: Request, user: Annotated[Any, Depends(user_dependency())]) -> CurrentUser:
    """Return the user of a request; 401 without a login, 403 with an invalid token."""
    request.state.viewer = CurrentUser(user)
    return request.state.viewer  # type: ignore[no-any-return]


ViewerDep = Annotated[CurrentUser, Depends(viewer)]


def _known_connections() -> set[str]:
    """Return the connections that may be databases: in Airflow or the API server's environment, or named by assets."""
    given = {name.removeprefix(_VARIABLE).lower() for name in os.environ if name.startswith(_VARIABLE)}
    return stored_connections(LanceHook.conn_type) | given | {conn_id for conn_id, _ in dags_by_table()}


@lru_cache(maxsize=1)
def _find_databases(moment: int) -> Mapping[str, set[str]]:
    """Return the connections that name a database, by its URI without credentials; `moment` is the cache key."""
    found: dict[str, set[str]] = {}
    for conn_id in _known_connections():
        with suppress(Exception):  # an unreadable connection names no database
            hook = LanceHook(conn_id)
            if hook.is_lance:
                found.setdefault(without_credentials(hook.uri), set()).add(conn_id)
    return found


@dataclass(frozen=True)
class KnownDatabase:
    """A database as listed in the overview; its URI is shown only to users who may read the connection."""

    conn_id: str
    place: str | None = None
    error: str | None = None


def list_databases(viewer: CurrentUser) -> list[KnownDatabase]:
    """Return a sorted list of the databases of which a viewer may see a part; no database is read."""
    stored, named = stored_connections(LanceHook.conn_type), {conn_id for conn_id, _ in dags_by_table()}
    return [
        _describe(conn_id, viewer)
        for conn_id in sorted(_known_connections())
        # A connection in the environment may have any type; one that a DAG's asset names is a database.
        if viewer.may_see_database(conn_id) and (conn_id in stored | named or _is_lance(conn_id))
    ]


def _is_lance(conn_id: str) -> bool:
    try:
        return LanceHook(conn_id).is_lance
    except Exception:  # the type of an unreadable connection is unknown
        return False


def _describe(conn_id: str, viewer: CurrentUser) -> KnownDatabase:
    try:
        return KnownDatabase(conn_id, VisibleDatabase(conn_id, viewer, open_database(conn_id)).place)
    except Exception as error:  # list the other databases even if one fails
        return KnownDatabase(conn_id, error=str(error) if viewer.may_read_connection(conn_id) else "cannot be opened")


def open_database(conn_id: str, uri: str | None = None) -> Database:
    """Open the database of an Airflow connection, or another one, with short timeouts; Airflow masks its secrets."""
    hook = LanceHook(conn_id)
    if not hook.is_lance:
        raise InvalidInput(f"Airflow connection {conn_id!r} is not of type {LanceHook.conn_type!r}.")
    database = hook.get_database(uri)
    return replace(database, options=with_short_timeouts(database.uri, database.options))


@dataclass(frozen=True)
class Maintainer:
    """A DAG that keeps a table or view up to date, and whether the viewer may start a run of it."""

    dag_id: str
    paused: bool
    may_trigger: bool


@dataclass(frozen=True)
class VisibleDatabase:
    """The database of an Airflow connection, as a user sees it."""

    conn_id: str
    viewer: CurrentUser
    database: Database

    @staticmethod
    def open(conn_id: str, viewer: CurrentUser) -> VisibleDatabase:
        """Open a database like `open_database`; a local folder that does not exist is a StorageError."""
        opened = VisibleDatabase(conn_id, viewer, open_database(conn_id))
        if opened.missing is not None:
            raise StorageError(f"There is no folder {opened.missing} on the machine of the API server.")
        return opened

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

    def may_see(self, table: str) -> bool:
        return self.viewer.may_see_table(self.conn_id, table)

    def sources_of(self, definition: ViewDefinition | None) -> tuple[str, ...]:
        """Return the database of a view's source, if a connection names it and the viewer may see the source in it."""
        if definition is None:
            return ()
        uri, table = definition.source_database, definition.source_table
        named = _find_databases(int(time.monotonic() / _KEPT_SECONDS)).get(uri, ())
        return (uri,) if any(self.viewer.may_see_table(conn_id, table) for conn_id in sorted(named)) else ()

    def maintainers(self) -> dict[str, list[Maintainer]]:
        """Return, by table or view, the DAGs that write it and that the viewer may read."""
        found: dict[str, list[Maintainer]] = {}
        for table, dag_id, paused in _find_writers(self.conn_id, int(time.monotonic() / _KEPT_SECONDS)):
            if self.viewer.may_read_dag(dag_id):
                dag = Maintainer(dag_id, paused, self.viewer.may_trigger_dag(dag_id))
                found.setdefault(table, []).append(dag)
        return found

    def tables(self) -> list[str]:
        return [name for name in self.database.table_names() if self.may_see(name)]
