"""Which rows of a column hold no value because the UDF failed on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.checkpoint.state import load_state
from airflow_geneva.plan.former import FormerInputs
from airflow_geneva.plan.manifest import Columns, field_ids, live_offsets
from airflow_geneva.storage import Storage

if TYPE_CHECKING:
    import lance


def failed_addresses(dataset: lance.LanceDataset, checkpoints: Storage, column: str) -> Iterator[int]:
    """Row addresses, at a table version, of the rows the UDF failed on last, whatever its inputs are called now."""
    columns = Columns((), (), field_ids(dataset, column))
    state = load_state(checkpoints, columns.output[0])
    for inputs in sorted(state.other_inputs("")):
        asked = FormerInputs.of(dataset, columns, state, inputs)
        for files in asked.manifest.values():
            known = asked.knowledge.of(files)
            live = live_offsets(dataset, files)
            if files.signature not in asked.knowledge.state.facts and asked.comparable:
                known.update(asked.knowledge.by_value(files, live - Ranges.union(known.values())))
            failed = live & Ranges.union(rows for provenance, rows in known.items() if provenance.failures)
            yield from (files.id << 32 | offset for offset in failed.offsets().tolist())
