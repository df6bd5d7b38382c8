"""The Airflow plugin that adds the pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_geneva.links.job import PAGES, pages_root
from airflow_geneva.operators._airflow_internals import has_asset_pages

_App = Callable[..., Awaitable[None]]


class Pages:
    """The pages' ASGI app, imported at the first request.

    Airflow loads plugins in all of its processes, but only the API server shows pages. Also, lance must not be loaded
    before a process forks.
    """

    def __init__(self) -> None:
        self._app: _App | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            self._app = await asyncio.to_thread(_load)
        await self._app(scope, receive, send)


def _load() -> _App:
    from airflow_geneva.pages.app import app

    return app


_RUN = "dag_id={DAG_ID}&run_id={RUN_ID}"
_TASK = f"{_RUN}&task_id={{TASK_ID}}&map_index={{MAP_INDEX}}"
_APPS = [{"app": Pages(), "url_prefix": PAGES, "name": "Geneva"}]
_ADDRESSES = (
    ("Lance", "nav", "geneva", "/"),
    ("Geneva jobs", "dag", "geneva_dag", "/dag?dag_id={DAG_ID}"),
    ("Geneva jobs", "dag_run", "geneva_run", f"/run?{_RUN}"),
    ("Geneva job", "task_instance", "geneva_job", f"/task?{_TASK}"),
    *([("Lance table", "asset", "geneva_asset", "/asset?uri={ASSET_URI}")] if has_asset_pages() else []),
)
# Which assets and tasks get a tab. No field of a DAG or a run says whether it has tasks of this package.
_APPLIES_TO = {
    "asset": {"group": ["lance"]},
    "task_instance": {"task.template_fields": ["lance_conn_id", "plan_task_id"]},
}
_VIEWS = [
    {
        "name": name,
        "href": f"{pages_root()}{address}",
        "destination": destination,
        "url_route": route,
        "icon": f"{pages_root()}/static/icon.svg",
        **({"category": "browse"} if destination == "nav" else {}),
        **({"applies_to": _APPLIES_TO[destination]} if has_asset_pages() and destination in _APPLIES_TO else {}),
    }
    for name, destination, route, address in _ADDRESSES
]


class GenevaPlugin(AirflowPlugin):
    """Pages about jobs, tables and views, in Airflow's menu and in tabs of DAGs, runs, task instances and assets."""

    name = "geneva"
    fastapi_apps = _APPS
    external_views = _VIEWS
