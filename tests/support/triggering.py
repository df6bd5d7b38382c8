"""`NewFragmentsTrigger` in an event loop, a store with configurable answers, and a listener."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from airflow.triggers.base import TriggerEvent

from airflow_geneva.triggers import NewFragmentsTrigger

POLL = 0.02
PATIENCE = 60
QUIET = 0.3
"""Long enough for a dozen polls."""


class Store:
    """The asset state of Airflow 3.3, in memory; each use is recorded."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.written = 0

    async def aget(self, key: str) -> Any:
        return json.loads(json.dumps(self.kept.get(key)))

    async def aset(self, key: str, value: Any) -> None:
        self.kept[key] = value
        self.written += 1


class Listener:
    """A trigger that runs as in the triggerer, and its events."""

    def __init__(self, trigger: NewFragmentsTrigger, store: Store | None = None) -> None:
        if store is not None:
            trigger.asset_state_store = store  # type: ignore[assignment]
        self.events: AsyncIterator[TriggerEvent] = trigger.run()
        self.next: asyncio.Task[TriggerEvent] | None = None

    async def event(self) -> dict[str, Any]:
        """Return the next event, without a time limit."""
        self.next = self.next or asyncio.ensure_future(anext(self.events))  # type: ignore[arg-type]
        found = await asyncio.wait_for(self.next, PATIENCE)
        self.next = None
        json.dumps(found.payload)
        return dict(found.payload)

    async def silent(self) -> bool:
        """Return whether there is no event for a while."""
        self.next = self.next or asyncio.ensure_future(anext(self.events))  # type: ignore[arg-type]
        done, _ = await asyncio.wait({self.next}, timeout=QUIET)
        return not done

    async def stop(self) -> None:
        """Run it as the triggerer does."""
        if self.next is not None:
            self.next.cancel()
            await asyncio.gather(self.next, return_exceptions=True)


def trigger(table: str, **settings: Any) -> NewFragmentsTrigger:
    return NewFragmentsTrigger(table, **{"poll_interval": POLL, "asset": "some", **settings})


def play(story: Callable[[], Any]) -> None:
    asyncio.run(story())


def connect_to(monkeypatch: pytest.MonkeyPatch, endpoint: str, **more: str) -> None:
    options = {
        "aws_access_key_id": "AKIAPLANTED", "aws_secret_access_key": "planted-secret", "aws_region": "us-east-1",
        "aws_endpoint": endpoint, "allow_http": "true", "client_max_retries": "0", **more,
    }  # fmt: skip
    connection = {"conn_type": "lance", "host": "s3://lake/db", "extra": {"storage_options": options}}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_REMOTE", json.dumps(connection))
