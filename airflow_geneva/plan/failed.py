"""Which rows of a column hold no value because the UDF failed on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.checkpoint.state import load_state
from airflow_geneva.plan.known import Knowledge
from airflow_geneva.plan.manifest import columns_of, live_offsets, read_manifest
from airflow_geneva.storage import Storage

if TYPE_CHECKING:
    import lance


def failed_addresses(
    dataset: lance.LanceDataset, checkpoints: Storage, column: str, inputs: Sequence[str]
) -> Iterator[int]:
    """Row addresses, at a table version, of the rows the UDF failed on last.

    Args:
        inputs: the columns it is computed from.
    """
    columns = columns_of(dataset, inputs, (), column)
    state = load_state(checkpoints, columns.output[0]).about(columns.inputs_text)
    manifest = read_manifest(dataset, columns)
    knowledge = Knowledge(dataset, columns, (*inputs, column), manifest, state)
    for files in manifest.values():
        known = knowledge.of(files)
        if files.signature not in state.facts:
            live = live_offsets(dataset, files)
            known.update(knowledge.by_value(files, live - Ranges.union(known.values())))
        failed = Ranges.union(rows for provenance, rows in known.items() if provenance.failures)
        if failed:
            yield from (
                files.id << 32 | offset for offset in (failed & live_offsets(dataset, files)).offsets().tolist()
            )
