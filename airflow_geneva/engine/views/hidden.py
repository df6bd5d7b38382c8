"""The tables that a view keeps in its own folder: no database lists them, and they go with the view."""

from __future__ import annotations

import pyarrow as pa

from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.storage.catalogs import catalog_uri
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.outages import StorageOptions
from airflow_geneva.engine.storage.uri import join
from airflow_geneva.errors import InvalidInput

GROUPS, DUPLICATES = "_groups", "_duplicates"
"""The folders with the hidden tables of a view of groups, and of a deduplicated view."""

_TOUCHED, _LONGEST = "touched", 500


def hidden_table(view: TableLocation, folder: str, name: str) -> TableLocation:
    """Return the location of a hidden table; `InvalidInput` if the view is in a catalog."""
    check_may_hide(view.name, view.options)
    return TableLocation(join(view.uri, folder, f"{name}.lance"), name, view.options)


def hashes_table(view: TableLocation) -> TableLocation:
    """Return the location of the hidden view with the hashes of the rows that a deduplicated view compares."""
    return hidden_table(view, DUPLICATES, "hashes")


def clusters_store(view: TableLocation) -> CheckpointStore:
    """Return where a deduplicated view keeps the clusters of these rows."""
    return CheckpointStore(hashes_table(view).checkpoints.folder("clusters"))


def write_touched(store: CheckpointStore, told: str) -> None:
    """Record which clusters the newest change touched."""
    store[_TOUCHED] = pa.record_batch({_TOUCHED: [told]})


def read_touched(store: CheckpointStore) -> str:
    """Return what `write_touched` recorded; "" if nothing is."""
    try:
        return str(store[_TOUCHED].column(_TOUCHED)[0])[:_LONGEST]
    except (LookupError, ValueError):
        return ""


def hidden_tables(table: TableLocation) -> list[TableLocation]:
    """Return the hidden tables that a table has; none unless it is a view that needs some."""
    found = []
    for folder in (GROUPS, DUPLICATES):
        names = Storage(join(table.uri, folder), table.options).list_folder()[0]
        found += [hidden_table(table, folder, name.removesuffix(".lance")) for name in names if name.endswith(".lance")]
    return [one for one in found if one.exists()]


def check_may_hide(view: str, options: StorageOptions) -> None:
    """Raise InvalidInput for a view with hidden tables in a catalog."""
    if catalog_uri(options) is not None:
        raise InvalidInput(
            f"View {view!r} groups or deduplicates rows, and its database is a catalog, which would have to name the "
            "tables that the view keeps for that, too. Create it in a folder: connect(uri)."
        )
