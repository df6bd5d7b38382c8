"""Wait in the triggerer for rows that a view, a column or this trigger itself has not seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from copy import copy
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_geneva.errors import InvalidInput, without_secrets
from airflow_geneva.patience import Threads
from airflow_geneva.triggers._wanted import Wanted
from airflow_geneva.uri import normalize_uri

if TYPE_CHECKING:
    from airflow_geneva.hooks.lance import LanceHook
    from airflow_geneva.triggers._looking import Look, Stamps, Watch

SEEN = "airflow_geneva.seen"
"""Key of the watermark in the state that Airflow keeps of an asset."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 600.0
_PATIENCE_SECONDS = 600.0
_BEFORE_WAKING_SECONDS = 10.0
_CONNECTION_SECONDS = 600.0
_THREADS = Threads("geneva-look")


class NewFragmentsTrigger(BaseEventTrigger):
    """Send an event when a table has rows that nobody has seen: again and again behind an `AssetWatcher`, or once.

    `assets.watched_lance_asset` makes an asset with its watcher; `NewFragmentsSensor` defers to this trigger.

    Every `poll_interval` it lists the table's versions, in a thread, and opens the table only if there is a new one. A
    table that is not there is waited for; one that was dropped and made again is new as a whole. While the store cannot
    be reached the pauses grow, up to ten minutes. A watcher never gives up; a sensor is told when it makes no sense to
    wait, because the store refuses, or because there is no such connection.

    Events are hints: after a restart of the triggerer the last one may be sent again. Airflow 3.3 and later keep what
    was seen last beside the asset; before, the first look after a restart finds everything new.

    Args:
        table: the table's name.
        lance_conn_id: the Airflow connection of the database, which is read in the triggerer.
        database: another URI to use with that connection's storage options.
        since: `"view:<name>"`, `"column:<name>"`, or a version; None for what the trigger itself saw last.
        changed_rows: rows that were updated or deleted count too.
        min_new_rows, min_new_fragments: wait for so many.
        quiet_period: wait until the table has had no new version for so many seconds.
        max_wait: do not wait for all that any more once something has been there for so many seconds.
        poll_interval: seconds between two looks at the table's version.
        asset: name of the asset that is watched. Without it, two assets with equal triggers share one, which then
            cannot keep what it saw.
        once: end after one event, for a task that waits.

    Raises:
        InvalidInput: what is waited for makes no sense, or the database's URI holds credentials.

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
            normalize_uri(database)  # refuses credentials, which Airflow would keep in its database
        self.database = database
        self.wanted = Wanted(table, since, changed_rows, min_new_rows, min_new_fragments, quiet_period, max_wait)
        if not poll_interval > 0:
            raise InvalidInput(f"poll_interval={poll_interval!r} makes no sense. Give more than 0 seconds.")
        self.poll_interval = poll_interval
        self.asset = asset
        self.once = once

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """What Airflow keeps of it: plain values, and no credential among them."""
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
        await asyncio.to_thread(_load)
        from airflow_geneva.hooks.lance import LanceHook
        from airflow_geneva.triggers._looking import Watch, is_hopeless

        if self.once:
            # The task has just looked. Airflow fails a task that is woken before its scheduler has taken note of the
            # end of the process that deferred: https://github.com/apache/airflow/issues/71580
            await asyncio.sleep(_BEFORE_WAKING_SECONDS)
        stored = await self._recall()
        watch = Watch(self.wanted, stored)
        hook: LanceHook | None = None
        told, failures, stale_at = "", 0, 0.0
        while True:
            found, pause = None, self.poll_interval
            try:
                # Not before the pause after an event: by now Airflow has it, whatever happens to the triggerer.
                if watch.settled != stored:
                    await self._remember(watch.settled)
                    stored = watch.settled
                # Read again once in a while, and after a failure: it may name another place by now.
                if hook is None or time.monotonic() > stale_at:
                    hook = await LanceHook(self.lance_conn_id).aread()
                    stale_at = time.monotonic() + _CONNECTION_SECONDS
                # In threads of its own: Airflow's are for all triggers, and a store may never answer.
                step, store = partial(self._step, hook, watch), (self.lance_conn_id, self.database)
                found, watch = await _THREADS.run(store, step, _PATIENCE_SECONDS)
                pause = watch.pause(pause, _now())
                failures = 0
            except Exception as error:
                hopeless, hook, failures = is_hopeless(error), None, failures + 1
                if hopeless and self.once:
                    yield _event({"error": without_secrets(str(error))})
                    return
                pause = min(pause * 2 ** min(failures, 16), max(pause, _LONGEST_PAUSE))
                self.log.warning(
                    "Cannot look at table %s, trying again in %.0f seconds: %s",
                    self.wanted.table,
                    pause,
                    without_secrets(str(error)),
                )
            if found is not None and found.told != told:
                told = found.told
                self.log.info(told)
            if found is not None and found.event is not None:
                yield _event(found.event)
                if self.once:
                    return
            await asyncio.sleep(max(pause, _SHORTEST_PAUSE))

    def _step(self, hook: LanceHook, watch: Watch) -> tuple[Look | None, Watch]:
        """Look, and what is known then; what comes too late is forgotten, and has changed nothing."""
        after = copy(watch)
        return after.step(hook.get_database(self.database), _now()), after

    async def _recall(self) -> Stamps | None:
        """What was seen last, if Airflow keeps it."""
        from airflow_geneva.triggers._looking import Stamps

        store = getattr(self, "asset_state_store", None)
        if store is None:
            return None
        try:
            kept = await store.aget(SEEN)
            return None if kept is None else Stamps.from_json(kept)
        except Exception as error:
            self.log.warning("Cannot read what was seen of table %s last: %s", self.wanted.table, error)
            return None

    async def _remember(self, settled: Stamps | None) -> None:
        store = getattr(self, "asset_state_store", None)
        if store is None or settled is None:
            return
        try:
            await store.aset(SEEN, settled.to_json())
        except Exception as error:
            # It costs an event too many after the next restart.
            self.log.warning("Cannot keep what was seen of table %s last: %s", self.wanted.table, error)


def _load() -> None:
    """Import what takes long to import, so that the loop finds it there."""
    import airflow_geneva.hooks.lance
    import airflow_geneva.triggers._looking  # noqa: F401


def _event(payload: dict[str, Any]) -> TriggerEvent:
    return TriggerEvent(payload)  # type: ignore[no-untyped-call]


def _now() -> datetime:
    return datetime.now(timezone.utc)
