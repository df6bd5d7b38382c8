"""Keep beside a deduplicated view what its refreshes need: a hash of each row of its source, and the clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.duplicates.clusters import Clusters
from airflow_geneva.engine.duplicates.kept import KEEP, find_clusters, kept_rows
from airflow_geneva.engine.duplicates.signatures import Signature
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.refresh import KeptRows
from airflow_geneva.engine.run.hidden import HiddenView
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.definition import IS_SET, ViewDefinition, source_columns
from airflow_geneva.engine.views.hidden import DUPLICATES, hidden_table
from airflow_geneva.engine.views.resolve import resolve_columns

if TYPE_CHECKING:
    import lance

_HASHES, _CLUSTERS = "hashes", "clusters"


def kept_at_refresh(view: TableLocation, definition: ViewDefinition, source: TableLocation) -> KeptRows | None:
    """Return what finds the rows that a view keeps of each cluster of duplicates; None if it keeps all."""
    deduplicate = definition.deduplicate
    if deduplicate is None:
        return None

    def kept(dataset: lance.LanceDataset) -> Ranges:
        hidden = _hidden(view, definition, dataset, source)
        hashes = hidden.refreshed(int(dataset.version))

        def read(names: Sequence[str]) -> pa.Table:
            return hashes.scanner(columns=list(names), filter=IS_SET, scan_in_order=True).to_table()

        if not Signature.of(deduplicate).bands:
            found = find_clusters(read, dataset, deduplicate, Clusters.none())
        else:
            store = CheckpointStore(hidden.location.checkpoints.folder(_CLUSTERS))
            known = _known(store)
            found = find_clusters(read, dataset, deduplicate, known)
            if not found.equals(known):
                store[_CLUSTERS] = found.to_batch()
                fault_point("duplicates.clustered")
        return Ranges.from_offsets(kept_rows(found, read, deduplicate))

    return kept


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
    return HiddenView(hidden_table(view, DUPLICATES, _HASHES), hashed, outputs.schema, source)
