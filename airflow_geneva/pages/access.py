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
from airflow_geneva.engine.storage.timeouts import with_short_timeouts
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.errors import InvalidInput
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators._airflow_internals import (
    dags_of_assets,
    dags_that_write,
    may_read_connection,
    may_read_dag,
    may_read_xcoms,
    may_trigger_dag,
    stored_connections,
    user_dependency,
)
from airflow_geneva.pages.visible import Viewer, VisibleDatabase

_SCHEME = "lance://"
_VARIABLE = "AIRFLOW_CONN_"
_KEPT_SECONDS = 5.0


class CurrentUser(Viewer):
    """The user of one request; caches the answers of Airflow's auth manager about this user."""

    def __init__(self, user: Any) -> None:
        self.user = user
        self.may_read_dag = cache(partial(may_read_dag, user))
        self.may_read_xcoms = cache(partial(may_read_xcoms, user))
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

    def may_see_source(self, uri: str, table: str) -> bool:
        named = _find_databases(int(time.monotonic() / _KEPT_SECONDS)).get(uri, ())
        return any(self.may_see_table(conn_id, table) for conn_id in sorted(named))

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
        return KnownDatabase(conn_id, visible_database(conn_id, viewer).place)
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


def visible_database(conn_id: str, viewer: CurrentUser) -> VisibleDatabase:
    """Return the database of a connection as a user sees it; nothing of it is read."""
    return VisibleDatabase(conn_id, viewer, open_database(conn_id))


def maintainers(conn_id: str, viewer: CurrentUser) -> dict[str, list[Maintainer]]:
    """Return, by table or view of a database, the DAGs that write it and that the viewer may read."""
    found: dict[str, list[Maintainer]] = {}
    for table, dag_id, paused in _find_writers(conn_id, int(time.monotonic() / _KEPT_SECONDS)):
        if viewer.may_read_dag(dag_id):
            dag = Maintainer(dag_id, paused, viewer.may_trigger_dag(dag_id))
            found.setdefault(table, []).append(dag)
    return found
