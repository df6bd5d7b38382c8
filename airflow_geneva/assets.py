"""A Lance table as an Airflow asset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from airflow.sdk import Asset, AssetWatcher

from airflow_geneva.engine.storage.uri import check_name
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._airflow_internals import asset_events, batching_schedule

if TYPE_CHECKING:
    from airflow.sdk.definitions.asset import BaseAsset

logger = logging.getLogger("airflow_geneva.lineage")

PRODUCER = "airflow_geneva"
_GROUP = "lance"  # Airflow 3.4 shows the plugin's tab on the assets of this group
_NEWEST_EVENTS = 100
_CLOCKS_DIFFER = timedelta(hours=1)


def lance_asset(table: str, lance_conn_id: str = "lance_default") -> Asset:
    """Return the asset of a table or view. Each finished backfill or refresh that changed the table sends one event.

    The event's extra holds `table`, `column` (None for a view), `from_version`, `to_version`, `commit`, `job_id`,
    `state` and row counts; for a view also `source` and `source_version`. `commit` identifies the commit that wrote
    `to_version`: a table that was dropped and created again counts its versions from 1.

    Args:
        table: the table's or view's name in the database.
        lance_conn_id: the Airflow connection of the database.

    Example:
        ```python
        @dag(schedule=one_run_per_batch(lance_asset("docs")))
        ```
    """
    name = f"{lance_conn_id}/{check_name(table, 'table')}"
    return Asset(name=name, uri=f"lance://{name}", group=_GROUP)


def watched_lance_asset(
    table: str,
    lance_conn_id: str = "lance_default",
    *,
    since: str | None = None,
    changed_rows: bool = False,
    min_new_rows: int | None = None,
    min_new_fragments: int | None = None,
    quiet_period: timedelta | float | None = None,
    max_wait: timedelta | float | None = None,
    poll_interval: timedelta | float = 60,
) -> Asset:
    """Return an asset that gets an event when a table has new rows from any writer; the triggerer polls the table.

    This is a different asset from `lance_asset(table)`, which gets the events of backfills and refreshes. Each set of
    conditions gives a separate asset, because Airflow stops watching an asset when a DAG names it without its watcher,
    or with another one. The `poll_interval` is no condition: an asset stays the same when it is tuned, so give it the
    same one in all DAGs. For both kinds of events schedule on `watched_lance_asset(...) | lance_asset(...)`.

    The first poll sends an event if there are rows that were not seen. `new_fragments` parses an event. Works with
    Airflow 3.1 and later; from 3.3 on a restart of the triggerer does not send the last event again.

    Args:
        table: the table's name in the database; the table need not exist yet.
        lance_conn_id: the Airflow connection of the database.
        since: `"view:<name>"` or `"column:<name>"`: events report rows that this view or column has not seen, as for
            `NewFragmentsSensor`. None: events report rows that arrived since the last event.
        changed_rows, min_new_rows, min_new_fragments, quiet_period, max_wait: as for `NewFragmentsSensor`.
        poll_interval: pause between two polls of the table's version.

    Raises:
        InvalidInput: an argument is not valid.

    Example:
        ```python
        @dag(schedule=one_run_per_batch(watched_lance_asset("docs", since="view:long_docs")))
        ```
    """
    from airflow_geneva.triggers.new_fragments import NewFragmentsTrigger

    wanted: dict[str, Any] = {
        "since": since,
        "changed_rows": changed_rows,
        "min_new_rows": min_new_rows,
        "min_new_fragments": min_new_fragments,
        "quiet_period": seconds(quiet_period),
        "max_wait": seconds(max_wait),
    }
    ways = {name: f"{given:.15g}" if isinstance(given, float) else given for name, given in wanted.items() if given}
    ways["watch"] = "new_rows"  # Airflow drops a part of a URI's query that has no value
    name = f"{lance_asset(table, lance_conn_id).name}?{urlencode(sorted(ways.items()), safe=':')}"
    pause = seconds(poll_interval) or 0.0
    trigger = NewFragmentsTrigger(table, lance_conn_id, asset=name, poll_interval=pause, **wanted)
    watcher = AssetWatcher(name="new_fragments", trigger=trigger)
    return Asset(name=name, uri=f"lance://{name}", group=_GROUP, watchers=[watcher])


def one_run_per_batch(assets: BaseAsset | Collection[BaseAsset]) -> Any:
    """Return the schedule of a DAG that runs once for all asset events that arrived since its last run.

    A refresh or backfill computes everything that is due, so one run is enough for any number of events. Airflow 3.4
    starts one run for each event unless the schedule or `[scheduler] batch_asset_events` asks for batches: this
    returns `AssetTriggeredTimetable(assets, batch_asset_events=True)`. Airflow 3.1 to 3.3 always batch events: this
    returns `assets`.

    Args:
        assets: as for `DAG(schedule=...)`: an asset, a condition such as `a | b`, or a list of assets, all of which
            must have an event.

    Raises:
        InvalidInput: one of them is a name.

    Example:
        ```python
        @dag(schedule=one_run_per_batch(lance_asset("docs") | watched_lance_asset("docs")), max_active_runs=1)
        ```
    """
    given = [assets] if isinstance(assets, str) or not isinstance(assets, Collection) else assets
    if names := [one for one in given if isinstance(one, str)]:
        raise InvalidInput(f"{names[0]!r:.80} is a name and no asset. Give lance_asset(...), for example.")
    return batching_schedule(assets)


def seconds(period: timedelta | float | None) -> float | None:
    """Return a period as seconds."""
    return period.total_seconds() if isinstance(period, timedelta) else None if period is None else float(period)


def new_fragments(event: Any) -> dict[str, Any] | None:
    """Return the payload of a `NewFragmentsTrigger` or `NewFragmentsSensor`; None for any other event.

    The payload holds `table`, `since`, `from_version` (None if nothing was seen before), `version`, the number of
    `fragments` with unseen rows, `fragment_ids` (the first hundred), `new_rows`, `changed_rows` and `deleted_rows`.

    Args:
        event: an asset event from `triggering_asset_events`, its extra, or the sensor's return value.
    """
    said = getattr(event, "extra", event)
    if isinstance(said, Mapping) and isinstance(said.get("payload"), Mapping):
        said = said["payload"]  # Airflow wraps a trigger's payload
    return dict(said) if isinstance(said, Mapping) and {"table", "version", "fragment_ids"} <= said.keys() else None


def announced_version(
    asset: Asset, column: str | None, is_ours: Callable[[int, str | None], bool], since: datetime | None
) -> int | None:
    """Return the table version up to which a column's changes were announced; None if there was no event yet.

    Queries Airflow, so it works only inside a running task.

    Args:
        column: None for a view.
        is_ours: whether an event's `to_version` and `commit` belong to this very table.
        since: older events are read only if they are among the newest hundred, because there may be any number.
    """
    asked: set[tuple[int, str | None]] = set()
    for event in _newest_first(asset, since):
        extra = event.extra or {}
        version, commit = extra.get("to_version"), extra.get("commit")
        if extra.get("producer") != PRODUCER or extra.get("column") != column or not isinstance(version, int):
            continue
        if (version, commit) not in asked and is_ours(version, commit):
            return version
        asked.add((version, commit))
    return None


def _newest_first(asset: Asset, since: datetime | None) -> Iterator[Any]:
    newest = asset_events(asset, _NEWEST_EVENTS)
    yield from newest
    if len(newest) == _NEWEST_EVENTS:
        yield from asset_events(asset, None, since and since - _CLOCKS_DIFFER)


def to_openlineage(asset: Asset, lineage_context: Any) -> Any:
    """Return the OpenLineage dataset of an asset of this package: its table; None if the table cannot be found.

    Args:
        asset: from `lance_asset` or `watched_lance_asset`.
        lineage_context: passed by Airflow's OpenLineage provider; not used.
    """
    # Airflow loads this module in every process that parses DAGs: import the rest only when needed.
    from openlineage.client.event_v2 import Dataset

    from airflow_geneva.operators._lance_task import open_database
    from airflow_geneva.operators._openlineage import dataset_name

    parts = urlsplit(asset.uri)
    try:
        location = open_database(parts.netloc, None).location(parts.path.strip("/"))
    except Exception as error:  # lineage must not fail a task
        logger.debug("No table found for asset %s: %s", asset.uri, error)
        return None
    return Dataset(*dataset_name(location.uri))
