"""A Lance table as an Airflow asset."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Asset
from airflow.sdk.execution_time.context import InletEventsAccessors

from airflow_geneva.storage import check_name

PRODUCER = "airflow_geneva"
_NEWEST_EVENTS = 100


def lance_asset(table: str, lance_conn_id: str = "lance_default") -> Asset:
    """The asset that stands for a table or view; a finished backfill or refresh that changed it sends one event to it.

    The event's extra holds `table`, `column` (None for a view), `from_version`, `to_version`, `job_id`, `state` and row
    counts; that of a view also `source` and `source_version`.

    Args:
        table: the table's or view's name in the database.
        lance_conn_id: the Airflow connection of the database.

    Example:
        ```python
        @dag(schedule=lance_asset("docs"))
        ```
    """
    name = f"{lance_conn_id}/{check_name(table, 'table')}"
    return Asset(name=name, uri=f"lance://{name}")


def announced_version(asset: Asset, column: str | None) -> int | None:
    """The table version up to which a column's changes were announced; None when there was no event yet.

    Asks Airflow, so it works inside of a running task only.

    Args:
        column: None for a view.
    """
    events = InletEventsAccessors([asset])[asset].ascending(False)
    newest = list(events.limit(_NEWEST_EVENTS))
    found = _to_version(newest, column)
    if found is None and len(newest) == _NEWEST_EVENTS:
        found = _to_version(list(InletEventsAccessors([asset])[asset].ascending(False)), column)
    return found


def _to_version(events: list[Any], column: str | None) -> int | None:
    for event in events:
        extra = event.extra or {}
        version = extra.get("to_version")
        if extra.get("producer") == PRODUCER and extra.get("column") == column and isinstance(version, int):
            return version
    return None
