"""Run routes, which wait for reader processes, in threads that Airflow's API server does not share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar

from airflow_geneva.engine.storage.timeouts import StoreThreads

_T = TypeVar("_T")

_PATIENCE_SECONDS = 100.0
"""A request's turn, the start of a reader, and its answer; each reader's patience is shorter."""
_THREADS = StoreThreads("geneva-page")


def in_own_threads(answer: Callable[..., _T]) -> Callable[..., Awaitable[_T]]:
    """Run a route or a dependency, which may wait for a reader, in threads that Airflow's API server does not share."""

    @wraps(answer)
    async def wait(**values: Any) -> _T:
        return await _THREADS.run(_store_of(values), partial(answer, **values), _PATIENCE_SECONDS)

    return wait


def _store_of(values: Mapping[str, Any]) -> Hashable:
    """Return a key for the store that a request reads."""
    task = values.get("task")
    place = values.get("job", task.job if task else None)
    return place.location.database_uri if place else (values.get("conn_id"), values.get("dag_id"))
