"""Whether a table has something that a view, a column or a reader has not seen: cheaper than a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from airflow_geneva.checkpoint.provenance import Provenance
from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.checkpoint.snapshot import Snapshot
from airflow_geneva.checkpoint.state import ColumnState, load_state
from airflow_geneva.plan.known import Knowledge
from airflow_geneva.plan.manifest import FragmentFiles, columns_of, garbage_collector_off, live_offsets, read_manifest
from airflow_geneva.plan.source import ChangedFragment, compare_source
from airflow_geneva.storage import Storage, is_engine_error

if TYPE_CHECKING:
    import lance

_CREATED, _UPDATED = "_row_created_at_version", "_row_last_updated_at_version"


@dataclass(frozen=True)
class Unseen:
    """What somebody has not seen of a table.

    Args:
        fragments: fragments with such rows.
        deletions: whether rows that were seen are gone; asked only where it matters.
    """

    fragments: int
    deletions: bool = False

    def __bool__(self) -> bool:
        return bool(self.fragments) or self.deletions


def unseen_by_view(
    dataset: lance.LanceDataset, reads: Sequence[str], snapshot: Snapshot | None, changed_rows: bool
) -> Unseen:
    """What a view does not reflect of its source. Rows that failed are no news.

    Args:
        dataset: the source.
        reads: the columns that the view reads.
        snapshot: what the view reflects; None for nothing.
        changed_rows: rows that were updated or deleted count too.
    """
    if snapshot is None:
        return Unseen(_inhabited(dataset))
    if snapshot.source_version == dataset.version:
        return Unseen(0)
    with garbage_collector_off():
        found = compare_source(dataset, columns_of(dataset, reads, (), None), tuple(reads), snapshot)
    before = Ranges.union(fragment.ids for fragment in snapshot.fragments)
    if not changed_rows:
        return Unseen(sum(bool(_ids(fragment) - before) for fragment in found.changed))
    renewed = Ranges.union(fragment.ids_of(fragment.rows) for fragment in found.changed)
    return Unseen(sum(bool(_ids(fragment)) for fragment in found.changed), bool(found.gone - renewed))


def _ids(fragment: ChangedFragment) -> Ranges:
    """Row ids of the rows that are new or changed, and not only to be tried again."""
    return fragment.ids_of(fragment.rows - Ranges.union(rows for _, rows in fragment.tried))


def unseen_by_column(
    dataset: lance.LanceDataset, checkpoints: Storage, inputs: Sequence[str], column: str
) -> Unseen:  # fmt: skip
    """Fragments with rows for whose inputs, as they are now, the UDF has not been asked.

    Rows that failed have been tried; rows that a filter left out have not been.

    Args:
        checkpoints: the table's ``_checkpoints`` folder.
        inputs: the input columns.
    """
    with garbage_collector_off():
        columns = columns_of(dataset, inputs, (), column)
        manifest = read_manifest(dataset, columns)
        state = load_state(checkpoints, columns.output[0]).about(columns.inputs_text)
        knowledge = Knowledge(dataset, columns, (*inputs, column), manifest, state)
        return Unseen(sum(_lacks(dataset, files, state, knowledge) for files in manifest.values() if files.live_rows))


def _lacks(dataset: lance.LanceDataset, files: FragmentFiles, state: ColumnState, knowledge: Knowledge) -> bool:
    facts = (fact for fact in state.facts.get(files.signature, ()) if Provenance.of(fact.what) is not None)
    if any(fact.rows is None or fact.live_under == files.deletion for fact in facts):
        return False
    unknown = live_offsets(dataset, files) - Ranges.union(knowledge.of(files).values())
    return bool(unknown and unknown - Ranges.union(knowledge.by_value(files, unknown).values()))


def unseen_since(dataset: lance.LanceDataset, version: int, changed_rows: bool) -> Unseen:
    """Fragments with rows that came after a version; without stable row ids, fragments that came after it.

    Args:
        changed_rows: rows that were updated or deleted since count too.
    """
    if dataset.version <= version:
        return Unseen(0)
    try:
        then: lance.LanceDataset | None = dataset.checkout_version(version)
    except BaseException as error:
        if not is_engine_error(error):
            raise
        # It was cleaned up. Rows say themselves when they came, but nobody knows which ones are gone.
        then = None
    old = set() if then is None else {fragment.fragment_id for fragment in then.get_fragments()}
    new = [fragment for fragment in dataset.get_fragments() if fragment.fragment_id not in old]
    if not dataset.has_stable_row_ids:
        return Unseen(len(new), changed_rows and (then is None or then.count_rows() > dataset.count_rows()))
    created = [_after(fragment, _CREATED, version) for fragment in new]
    if not changed_rows:
        return Unseen(sum(map(bool, created)))
    updated = [_after(fragment, _UPDATED, version) for fragment in new]
    gone = then is None or then.count_rows() + sum(created) > dataset.count_rows()
    return Unseen(sum(bool(rows) for rows in updated), gone)


def _after(fragment: lance.LanceFragment, column: str, version: int) -> int:
    """How many rows of a fragment came, or were updated, after a version."""
    batches = fragment.scanner(columns=[column]).to_batches()
    return sum(int(np.count_nonzero(batch.column(0).to_numpy() > version)) for batch in batches)


def _inhabited(dataset: lance.LanceDataset) -> int:
    """How many fragments have rows."""
    metadata = (fragment.metadata for fragment in dataset.get_fragments())
    return sum(found.num_rows > 0 for found in metadata)
