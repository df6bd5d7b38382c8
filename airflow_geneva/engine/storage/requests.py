"""Count the requests that this process makes to object stores, as pylance counts them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from airflow_geneva.engine.counts import StoreRequests
from airflow_geneva.engine.runtime import threading

_METRIC = "lance_object_store_requests_total"
_KINDS = {
    "get": "reads",
    "head": "reads",
    "put": "writes",
    "copy": "writes",
    "rename": "writes",
    "list": "lists",
    "delete": "deletes",
}
_NO_STORES = ("file", "memory", "shared-memory")


@cache
def count_requests() -> bool:
    """Begin to count; False if pylance cannot, or gives its metrics to another recorder: then nothing is counted."""
    register = getattr(_metrics(), "register_lance_metrics_recorder", lambda: False)
    return bool(register())


def _metrics() -> Any:
    from lance import otel

    return otel


def take_requests() -> StoreRequests:
    """Return the requests since the last call of this function: what reports them last, takes them.

    So each counts once, also if a process works on several jobs at the same time.
    """
    return _UNTAKEN.take()


def give_back(requests: StoreRequests) -> None:
    """Let requests of a job be taken again, by the job of which it is a part."""
    _UNTAKEN.give_back(requests)


class RequestMeter:
    """Adds up the requests that it takes; several threads may ask for the sum."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = StoreRequests()

    def __call__(self) -> StoreRequests:
        with self._lock:
            self._sum += take_requests()
            return self._sum


class _Untaken:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = StoreRequests()

    def take(self) -> StoreRequests:
        if not count_requests():
            return StoreRequests()
        with self._lock:
            before, self._taken = self._taken, _made()
            return _difference(self._taken, before)

    def give_back(self, requests: StoreRequests) -> None:
        with self._lock:
            self._taken = _difference(self._taken, requests)


def _difference(one: StoreRequests, other: StoreRequests) -> StoreRequests:
    return StoreRequests(**{kind: count - getattr(other, kind) for kind, count in vars(one).items()})


_UNTAKEN = _Untaken()


def _made() -> StoreRequests:
    """Return all requests since the process began to count."""
    found = Counter[str]()
    for point in _metrics().snapshot_lance_metrics():
        if point.name == _METRIC and not point.attributes.get("base", "").startswith(_NO_STORES):
            found[_KINDS.get(point.attributes["operation"], "reads")] += int(point.value)
    return StoreRequests(**found)
