"""Keep beside a deduplicated view what its refreshes need: a hash of each row of its source, and the clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.duplicates.clusters import Clusters
from airflow_geneva.engine.duplicates.kept import KEEP, find_clusters, hash_rows, kept_rows
from airflow_geneva.engine.duplicates.signatures import Signature
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.rows_by_id import rows_in_order
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.run.hidden import HiddenView
from airflow_geneva.engine.run.view import plan
from airflow_geneva.engine.storage.files import in_threads
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.definition import IS_SET, ViewDefinition, source_columns, visible_columns
from airflow_geneva.engine.views.hidden import clusters_store, hashes_table, write_touched
from airflow_geneva.engine.views.resolve import resolve_columns
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_CLUSTERS = "clusters"
_TOUCHED = "touched clusters: "

ROW_ID, CLUSTER, DUPLICATE_OF = "row_id", "cluster", "duplicate_of"
"""The columns that describe each row of a cluster."""


def plan_deduplicated(
    view: TableLocation,
    definition: ViewDefinition,
    source: TableLocation,
    request: RefreshRequest,
    newest: lance.LanceDataset,
) -> Plan:
    """Plan to run the refresh of a deduplicated view: find the rows that it keeps; see `plan_refresh`."""
    deduplicate, notes = definition.deduplicate, list[str]()
    assert deduplicate is not None

    def kept(dataset: lance.LanceDataset) -> Ranges:
        hidden = _hidden(view, definition, dataset, source)
        hashes = hidden.refreshed(int(dataset.version))
        read, store = partial(_read, hashes), clusters_store(view)
        near = bool(Signature.of(deduplicate).bands)
        known = _known(store) if near else Clusters.none()
        found = find_clusters(read, dataset, deduplicate, known)

        def save() -> None:
            if near and not found.equals(known):
                told = f"{_TOUCHED}{found.told(known)}"
                write_touched(store, told)
                store[_CLUSTERS] = found.to_batch()
                fault_point("duplicates.clustered")
                notes.append(f"{told}.")

        def keep() -> Ranges:
            return Ranges.from_offsets(kept_rows(found, read, deduplicate))

        steps: list[Callable[[], Any]] = [save, keep]
        rows: Ranges = in_threads(lambda step: step(), steps)[1]
        return rows

    found = plan(view, definition, source, request, newest, kept)
    return replace(found, notes=(*found.notes, *notes))


def read_duplicates(
    view: TableLocation, definition: ViewDefinition, source: TableLocation, columns: Sequence[str]
) -> pa.Table:
    """Return the clusters of several rows; see :meth:`airflow_geneva.view.View.duplicates`."""
    deduplicate, name = definition.deduplicate, view.name
    if deduplicate is None:
        raise InvalidInput(f"View {name!r} keeps all rows of its query: it was created without deduplicate().")
    snapshot, newest = CommittedViewState(view, view.open()).snapshot, source.open()
    at = None if snapshot is None else open_version_or_none(newest, snapshot.source_version)
    if at is None:
        raise InvalidInput(
            f"Which rows of {definition.source_table!r} view {name!r} left out is not known: no refresh of it has "
            "ended, or the version that it shows was cleaned up. Refresh it first."
        )
    if missing := sorted({*columns} - {*visible_columns(at.schema)}):
        raise InvalidInput(f"Table {source.name!r} has no column {missing[0]!r}.")
    if taken := sorted({*columns} & {ROW_ID, CLUSTER, DUPLICATE_OF}):
        raise InvalidInput(f"{taken[0]!r} is a column of the result already. Leave it out of columns.")
    hidden = _hidden(view, definition, at, source)
    hashes = hidden.showing(int(at.version))
    # They may be lost, or those of a refresh that has not ended.
    read = hash_rows(at, definition.where, deduplicate) if hashes is None else partial(_read, hashes)
    known = _known(clusters_store(view)) if Signature.of(deduplicate).bands else Clusters.none()
    found = find_clusters(read, at, deduplicate, known)
    kept = kept_rows(found, read, deduplicate)
    several = found.several
    ids, first = found.ids[several], found.first[several]
    stays = np.isin(ids, kept)
    order = np.lexsort((ids, ~stays, first))
    ids, first, stays = ids[order], first[order], stays[order]
    of = ids[np.maximum.accumulate(np.where(stays, np.arange(len(ids)), 0))]
    told = {ROW_ID: pa.array(ids), CLUSTER: pa.array(first), DUPLICATE_OF: pa.array(of, mask=stays)}
    rows = rows_in_order(at, ids, columns) if len(ids) and columns else None
    values = at.schema.empty_table().select(list(columns)) if rows is None else pa.Table.from_batches([rows])
    return pa.table({**told, **dict(zip(values.column_names, values.columns, strict=True))})


def _read(hashes: lance.LanceDataset, names: Sequence[str]) -> pa.Table:
    return hashes.scanner(columns=list(names), filter=IS_SET, scan_in_order=True).to_table()


def _known(store: CheckpointStore) -> Clusters:
    """Read the clusters of an earlier refresh, which are true of the rows that they name, whatever the version."""
    try:
        return Clusters.from_batch(store[_CLUSTERS])
    except (KeyError, ValueError):
        return Clusters.none()


def _hidden(
    view: TableLocation, definition: ViewDefinition, dataset: lance.LanceDataset, source: TableLocation
) -> HiddenView:
    """Return the view of the hashes of the rows that a view's filter selects."""
    deduplicate = definition.deduplicate
    assert deduplicate is not None
    signature = Signature.of(deduplicate)
    specs: list[tuple[Any, Any]] = [(signature.names, (signature.function, list(deduplicate.on)))]
    if deduplicate.keep_column is not None:
        specs.append((KEEP, f"`{deduplicate.keep_column}`"))
    outputs = resolve_columns(dataset, source.name, specs)
    there = dataset.schema.names
    reads = {*outputs.reads, *definition.filter_columns(there)}
    hashed = ViewDefinition(
        source_table=definition.source_table,
        source_database=definition.source_database,
        source_version=int(dataset.version),
        stable_row_ids=definition.stable_row_ids,
        where=definition.where,
        columns=outputs.columns,
        all_columns=False,
        shuffle_seed=None,
        limit=None,
        offset=0,
        explode=None,
        reads=source_columns(dataset, [name for name in there if name in reads]),
    )
    return HiddenView(hashes_table(view), hashed, outputs.schema, source)
