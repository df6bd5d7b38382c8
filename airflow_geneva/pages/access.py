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

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import ConnectionDetails, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.models.asset import (
    AssetEvent,
    AssetModel,
    DagScheduleAssetReference,
    TaskInletAssetReference,
    TaskOutletAssetReference,
)
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.utils.session import create_session
from fastapi import Depends, Request
from sqlalchemy import select

from airflow_geneva.job.status import Job

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
            self._dags[dag_id] = get_auth_manager().is_authorized_dag(
                method="GET",
                access_entity=DagAccessEntity.TASK_INSTANCE,
                details=DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id)),
                user=self._user,
            )
        return self._dags[dag_id]

    def may_read_connection(self, conn_id: str) -> bool:
        """Whether the user may read an Airflow connection, and so everything in its database."""
        if conn_id not in self._connections:
            self._connections[conn_id] = get_auth_manager().is_authorized_connection(
                method="GET",
                details=ConnectionDetails(conn_id=conn_id, team_name=Connection.get_team_name(conn_id)),
                user=self._user,
            )
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
    references = [
        (TaskOutletAssetReference.asset_id, TaskOutletAssetReference.dag_id),
        (TaskInletAssetReference.asset_id, TaskInletAssetReference.dag_id),
        (DagScheduleAssetReference.asset_id, DagScheduleAssetReference.dag_id),
        # A table whose name is a template is known only by its events.
        (AssetEvent.asset_id, AssetEvent.source_dag_id),
    ]
    with create_session() as session:
        for asset_id, dag_id in references:
            query = select(AssetModel.uri, dag_id).join(AssetModel, AssetModel.id == asset_id)
            named = query.where(AssetModel.uri.startswith(_SCHEME), dag_id.is_not(None)).distinct()
            for uri, dag in session.execute(named):
                # The URI of a watched asset has a query string after the table.
                conn_id, _, table = uri.removeprefix(_SCHEME).partition("?")[0].rpartition("/")
                found.setdefault((conn_id, table), set()).add(str(dag))
    return found


def viewer(request: Request, user: GetUserDep) -> CurrentUser:
    """Return the user of a request; 401 without a login, 403 with an invalid token."""
    request.state.viewer = CurrentUser(user)
    return request.state.viewer  # type: ignore[no-any-return]


ViewerDep = Annotated[CurrentUser, Depends(viewer)]
