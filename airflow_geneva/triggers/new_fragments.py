"""Trigger that waits for rows that are new to a view, to a column or to the trigger itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from copy import copy
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_geneva.engine import api
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.timeouts import StoreThreads
from airflow_geneva.engine.storage.uri import normalize_uri
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._airflow_internals import state_store

if TYPE_CHECKING:
    from airflow_geneva.hooks.lance import LanceHook

SEEN = "airflow_geneva.seen"
"""Key of the watermark in Airflow's state of an asset."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 600.0
_STEP_TIMEOUT = 600.0
_RESUME_DELAY = 10.0
_CONNECTION_SECONDS = 600.0
_THREADS = StoreThreads("geneva-look")


class NewFragmentsTrigger(BaseEventTrigger):
    """Send an event when a table has new rows: repeatedly for an `AssetWatcher`, or once for a sensor.

    `assets.watched_lance_asset` returns an asset with its watcher; `NewFragmentsSensor` defers to this trigger.

    Every `poll_interval` it lists the table's versions, in a thread, and opens the table only if there is a new one. It
    waits if the table does not exist; in a table that was dropped and created again all rows are new. While the store
    cannot be reached, the pauses grow up to ten minutes. A watcher never stops; a sensor gets an error if waiting
    cannot help, because the store denies access or the connection does not exist.

    Events are hints: after a restart of the triggerer the last event may be sent again. Airflow 3.3 and later store the
    version of the last poll with the asset; in earlier versions, all rows are new to the first poll after a restart.

    Args:
        table: the table's name.
        lance_conn_id: the Airflow connection of the database; the triggerer reads it.
        database: another URI to use with that connection's storage options.
        since: `"view:<name>"`, `"column:<name>"`, or a version; None: the version of the trigger's last poll.
        changed_rows, min_new_rows, min_new_fragments, quiet_period, max_wait: as for `NewFragmentsSensor`, in seconds.
        poll_interval: seconds between two polls of the table's version.
        asset: name of the watched asset. Without it, two assets with equal triggers share one trigger, which then
            cannot store its version.
        once: end after one event, for a deferred task.

    Raises:
        InvalidInput: an argument is not valid, or the database's URI holds credentials.

    Example:
        ```python
        trigger = NewFragmentsTrigger(table="docs", since="view:long_docs", asset="new_docs")
        new_docs = Asset("new_docs", watchers=[AssetWatcher(name="new_docs", trigger=trigger)])
        ```
    """

    def __init__(
        self,
        table: str,
        lance_conn_id: str = "lance_default",
        database: str | None = None,
        since: str | None = None,
        changed_rows: bool = False,
        min_new_rows: int | None = None,
        min_new_fragments: int | None = None,
        quiet_period: float | None = None,
        max_wait: float | None = None,
        poll_interval: float = 60.0,
        asset: str | None = None,
        once: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lance_conn_id = lance_conn_id
        if database and "://" in database:
            normalize_uri(database)  # rejects credentials, which Airflow would store in its database
        self.database = database
        self.wanted = api.WaitCondition(
            table, since, changed_rows, min_new_rows, min_new_fragments, quiet_period, max_wait
        )
        if not poll_interval > 0:
            raise InvalidInput(f"poll_interval={poll_interval!r} is not valid. Give more than 0 seconds.")
        self.poll_interval = poll_interval
        self.asset = asset
        self.once = once

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and arguments that Airflow stores: plain values, no credentials."""
        given = {
            **asdict(self.wanted),
            "lance_conn_id": self.lance_conn_id,
            "database": self.database,
            "poll_interval": self.poll_interval,
            "asset": self.asset,
            "once": self.once,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            name: value for name, value in given.items() if value is not None and value is not False
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        # Not in the event loop, which these imports would block.
        await asyncio.to_thread(import_module, "airflow_geneva.hooks.lance")
        await asyncio.to_thread(getattr, api, "TableWatcher")
        from airflow_geneva.hooks.lance import LanceHook

        if self.once:
            # The task has just checked the table. Airflow fails a task that is resumed before its scheduler has noticed
            # the end of the process that deferred: https://github.com/apache/airflow/issues/71580
            await asyncio.sleep(_RESUME_DELAY)
        stored = await self._load_state()
        watch = api.TableWatcher(self.wanted, stored)
        hook: LanceHook | None = None
        logged, failures, stale_at = "", 0, 0.0
        while True:
            found, pause = None, self.poll_interval
            try:
                # Store the state only after the pause that follows an event: by then Airflow has the event.
                if watch.settled != stored:
                    await self._store_state(watch.settled)
                    stored = watch.settled
                # Read the connection again from time to time, and after a failure: its URI may have changed.
                if hook is None or time.monotonic() > stale_at:
                    hook = await LanceHook(self.lance_conn_id).aread()
                    stale_at = time.monotonic() + _CONNECTION_SECONDS
                # Use own threads: all triggers share Airflow's, and a store may never answer.
                step, store = partial(self._step, hook, watch), (self.lance_conn_id, self.database)
                found, watch = await _THREADS.run(store, step, _STEP_TIMEOUT)
                pause = watch.pause(pause, _now())
                failures = 0
            except Exception as error:
                hopeless, hook, failures = api.TableWatcher.is_permanent(error), None, failures + 1
                if hopeless and self.once:
                    yield _event({"error": mask_secrets(str(error))})
                    return
                pause = min(pause * 2 ** min(failures, 16), max(pause, _LONGEST_PAUSE))
                self.log.warning(
                    "Cannot check table %s, trying again in %.0f seconds: %s",
                    self.wanted.table,
                    pause,
                    mask_secrets(str(error)),
                )
            if found is not None and found.told != logged:
                logged = found.told
                self.log.info(logged)
            if found is not None and found.event is not None:
                yield _event(found.event)
                if self.once:
                    return
            await asyncio.sleep(max(pause, _SHORTEST_PAUSE))

    def _step(self, hook: LanceHook, watch: api.TableWatcher) -> tuple[api.Observation | None, api.TableWatcher]:
        """Check the table on a copy of the watch, and return both, so that a call that times out changes nothing."""
        from airflow_geneva.engine.storage.engine_errors import panics_as_errors

        after = copy(watch)
        with panics_as_errors():
            return after.step(hook.get_database(self.database), _now()), after

    async def _load_state(self) -> api.NewestVersions | None:
        """Return the state of the last poll, if Airflow stores it."""
        store = state_store(self)
        if store is None:
            return None
        try:
            kept = await store.aget(SEEN)
            return None if kept is None else api.NewestVersions.from_json(kept)
        except Exception as error:
            self.log.warning(
                "Cannot read the last seen version of table %s: %s", self.wanted.table, mask_secrets(str(error))
            )
            return None

    async def _store_state(self, settled: api.NewestVersions | None) -> None:
        store = state_store(self)
        if store is None or settled is None:
            return
        try:
            await store.aset(SEEN, settled.to_json())
        except Exception as error:
            # The cost is one redundant event after the next restart.
            self.log.warning(
                "Cannot store the last seen version of table %s: %s", self.wanted.table, mask_secrets(str(error))
            )


def _event(payload: dict[str, Any]) -> TriggerEvent:
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]


def _now() -> datetime:
    return datetime.now(timezone.utc)
