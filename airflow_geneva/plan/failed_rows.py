"""Find the rows that hold no value because a UDF failed on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.facts import load_state
from airflow_geneva.checkpoint.view_snapshot import Snapshot
from airflow_geneva.lance_io.fragments import Columns, FragmentFiles, columns_of, field_ids, live_offsets, read_manifest
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.computed_rows import ComputedRows
from airflow_geneva.plan.previous_inputs import PreviousInputs
from airflow_geneva.plan.source_changes import VIEW_VERSION
from airflow_geneva.storage.files import Storage

if TYPE_CHECKING:
    import lance


def failed_addresses(dataset: lance.LanceDataset, checkpoints: Storage, column: str) -> Iterator[int]:
    """Yield the row addresses, at a table version, of the rows whose last UDF call failed."""
    columns = Columns((), (), field_ids(dataset, column))
    state = load_state(checkpoints, columns.output[0])
    for inputs in sorted(state.other_inputs("")):
        asked = PreviousInputs.of(dataset, columns, state, inputs)
        for files in asked.manifest.values():
            yield from _failed(dataset, files, asked.computed_rows, asked.comparable)


def failed_source_addresses(dataset: lance.LanceDataset, reads: Sequence[str], snapshot: Snapshot) -> Iterator[int]:
    """Yield the row addresses, at a version of a view's source, of the rows on which a UDF of the view failed last.

    Args:
        reads: the columns that the view reads.
        snapshot: the source as the view reflects it.
    """
    columns = columns_of(dataset, reads, (), None)
    manifest = read_manifest(dataset, columns)
    state = snapshot.state(VIEW_VERSION, columns.inputs_text)
    computed_rows = ComputedRows(dataset, columns, tuple(reads), manifest, state)
    for files in manifest.values():
        yield from _failed(dataset, files, computed_rows, comparable=True)


def _failed(
    dataset: lance.LanceDataset, files: FragmentFiles, computed_rows: ComputedRows, comparable: bool
) -> Iterator[int]:  # fmt: skip
    known = computed_rows.of(files)
    live = live_offsets(dataset, files)
    if files.signature not in computed_rows.state.facts and comparable:
        known.update(computed_rows.by_value(files, live - Ranges.union(known.values())))
    failed = live & Ranges.union(rows for provenance, rows in known.items() if provenance.failures)
    yield from (files.id << 32 | offset for offset in failed.offsets().tolist())
