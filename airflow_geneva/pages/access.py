"""Authorization: what the user of a request may see.

A user who may read a DAG's task instances may see the jobs of that DAG. A user may see a table, and its jobs that no
DAG started, if the user may read the Airflow connection of its database, or the task instances of a DAG that names the
table as an asset.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Depends, Request

from airflow_geneva.job.status import Job
from airflow_geneva.operators._airflow_internals import (
    dags_of_assets,
    may_read_connection,
    may_read_dag,
    user_dependency,
)

_SCHEME = "lance://"
_KEPT_SECONDS = 5.0


class CurrentUser:
    """The user of one request; caches the answers of Airflow's auth manager.

    Args:
        user: the user that Airflow's auth manager returned for the token.
    """

    def __init__(self, user: Any) -> None:
        self._user = user
        self._dags: dict[str, bool] = {}
        self._connections: dict[str, bool] = {}

    def may_read_dag(self, dag_id: str) -> bool:
        """Whether the user may read a DAG's task instances."""
        if dag_id not in self._dags:
            self._dags[dag_id] = may_read_dag(self._user, dag_id)
        return self._dags[dag_id]

    def may_read_connection(self, conn_id: str) -> bool:
        """Whether the user may read an Airflow connection, and so everything in its database."""
        if conn_id not in self._connections:
            self._connections[conn_id] = may_read_connection(self._user, conn_id)
        return self._connections[conn_id]

    def may_see_table(self, conn_id: str, table: str) -> bool:
        """Whether the user may see a table or view."""
        return self.may_read_connection(conn_id) or self._uses(conn_id, table)

    def may_see_database(self, conn_id: str) -> bool:
        """Whether the user may see any table of a connection's database."""
        if self.may_read_connection(conn_id):
            return True
        return any(self._uses(conn_id, table) for owner, table in dags_by_table() if owner == conn_id)

    def may_see_job(self, conn_id: str | None, job: Job) -> bool:
        """Whether the user may see a job.

        Args:
            conn_id: the connection of its database; None if no connection names it.
        """
        if job.airflow is not None:
            return self.may_read_dag(job.airflow.dag_id)
        return conn_id is not None and self.may_see_table(conn_id, job.table)

    def _uses(self, conn_id: str, table: str) -> bool:
        return any(map(self.may_read_dag, sorted(dags_by_table().get((conn_id, table), ()))))


def dags_by_table() -> Mapping[tuple[str, str], set[str]]:
    """Return the DAGs that write, read, wait for or changed a table, by connection and table; cached for seconds.

    They are found by their assets: see :func:`airflow_geneva.assets.lance_asset`. Permissions are not cached.
    """
    return _find_dags(int(time.monotonic() / _KEPT_SECONDS))


@lru_cache(maxsize=1)
def _find_dags(moment: int) -> Mapping[tuple[str, str], set[str]]:
    """Query Airflow's database; `moment` is the cache key."""
    found: dict[tuple[str, str], set[str]] = {}
    for uri, dag_id in dags_of_assets(_SCHEME):
        # The URI of a watched asset has a query string after the table.
        conn_id, _, table = uri.removeprefix(_SCHEME).partition("?")[0].rpartition("/")
        found.setdefault((conn_id, table), set()).add(dag_id)
    return found


def viewer(request: Request, user: Annotated[Any, Depends(user_dependency())]) -> CurrentUser:
    """Return the user of a request; 401 without a login, 403 with an invalid token."""
    request.state.viewer = CurrentUser(user)
    return request.state.viewer  # type: ignore[no-any-return]


ViewerDep = Annotated[CurrentUser, Depends(viewer)]
