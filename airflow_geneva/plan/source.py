"""What changed in the source of a view since its newest swap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from airflow_geneva.checkpoint.fragment import RowIds
from airflow_geneva.checkpoint.provenance import MOST_RUNS, Tried, runs_failed
from airflow_geneva.checkpoint.ranges import Offsets, Ranges
from airflow_geneva.checkpoint.snapshot import Snapshot, SourceFragment
from airflow_geneva.checkpoint.state import ColumnState
from airflow_geneva.plan.known import Knowledge
from airflow_geneva.plan.manifest import Columns, FragmentFiles, read_manifest, row_ids

if TYPE_CHECKING:
    import lance

VALUES = "view"
"""What values of a view count as in facts: the code that made them is compared as a whole."""


@dataclass(frozen=True, eq=False)
class ChangedFragment:
    """A source fragment with rows that the view does not reflect as they are.

    Args:
        files: the fragment.
        live: its live offsets.
        offsets, ids: all its live rows.
        rows: offsets of rows that are new or changed, or failed and are tried again.
        tried: rows that failed before.
    """

    files: FragmentFiles
    live: Ranges
    offsets: Offsets
    ids: RowIds
    rows: Ranges
    tried: Tried

    def ids_of(self, rows: Ranges) -> Ranges:
        """Row ids of some of its rows."""
        return Ranges.from_offsets(self.ids[rows.mask(self.offsets)].view(np.int64))


@dataclass
class SourceChanges:
    """How a source version differs from what a view reflects.

    Args:
        changed: fragments with rows to look at.
        gone: row ids that the view may not show any more as they are: deleted, or changed.
        fragments: what the next snapshot will say about all of the source's fragments, failures aside.
        notes: sentences for the reader.
    """

    changed: list[ChangedFragment] = field(default_factory=list)
    gone: Ranges = field(default_factory=Ranges.empty)
    fragments: list[SourceFragment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given_up: int = 0


def compare_source(
    dataset: lance.LanceDataset, columns: Columns, names: tuple[str, ...], snapshot: Snapshot | None
) -> SourceChanges:
    """Compare a source version with the snapshot of a view's newest swap; without one, everything is new.

    Args:
        dataset: the source at the version to refresh to.
        columns: every column that the view reads, as inputs.
        names: their names.
    """
    manifest = read_manifest(dataset, columns)
    state = ColumnState() if snapshot is None else snapshot.state(VALUES, columns.inputs_text)
    knowledge = Knowledge(dataset, columns, names, manifest, state)
    before = {} if snapshot is None else {f.signature: f for f in snapshot.fragments}
    found = SourceChanges()
    here: list[Ranges] = []
    kept: set[str] = set()
    for files in manifest.values():
        if files.live_rows == 0:
            continue
        then = before.get(files.signature)
        if then is not None and then.deletion == files.deletion and not _tried_again(then.failed):
            kept.add(files.signature)
            found.fragments.append(then)
            found.given_up += sum(len(rows) for _, rows in then.failed)
            continue
        fragment = _changed(files, knowledge)
        here.append(Ranges.from_offsets(fragment.ids.view(np.int64)))
        failed = tuple((runs, rows & fragment.live - fragment.rows) for runs, rows in fragment.tried)
        found.given_up += sum(len(rows) for _, rows in failed)
        found.fragments.append(
            SourceFragment(files.signature, files.deletion, fragment.live, here[-1], tuple(f for f in failed if f[1]))
        )
        if fragment.rows:
            found.changed.append(fragment)
    if before:
        lost = Ranges.union(f.ids for signature, f in before.items() if signature not in kept)
        renewed = Ranges.union(fragment.ids_of(fragment.rows) for fragment in found.changed)
        found.gone = (lost - Ranges.union(here)) | (renewed & Ranges.union(f.ids for f in before.values()))
    found.notes = knowledge.notes
    return found


def _changed(files: FragmentFiles, knowledge: Knowledge) -> ChangedFragment:
    offsets, ids = knowledge.rows(files)
    live = _live(files, offsets)
    known = knowledge.of(files) if knowledge.state.facts else {}
    unknown = live - Ranges.union(known.values())
    if unknown and knowledge.state.facts:
        for provenance, rows in knowledge.by_value(files, unknown).items():
            known[provenance] = known.get(provenance, Ranges.empty()) | rows
    tried = tuple((runs, rows & live) for runs, rows in runs_failed(known, VALUES))
    given_up = Ranges.union(rows for runs, rows in tried if runs >= MOST_RUNS)
    done = Ranges.union(rows for provenance, rows in known.items() if not provenance.failures)
    return ChangedFragment(files, live, offsets, ids, live - done - given_up, tried)


def _live(files: FragmentFiles, offsets: Offsets) -> Ranges:
    return Ranges.from_offsets(offsets) if files.deletion else Ranges.of(0, files.physical_rows)


def _tried_again(failed: Tried) -> bool:
    return any(runs < MOST_RUNS and rows for runs, rows in failed)


def where_they_lie(dataset: lance.LanceDataset, columns: Columns, wanted: Ranges) -> Iterator[ChangedFragment]:
    """The fragments in which rows with these row ids live."""
    for files in read_manifest(dataset, columns).values():
        if files.live_rows:
            offsets, ids = row_ids(dataset, files.id)
            live = _live(files, offsets)
            rows = Ranges.from_offsets(offsets[wanted.mask(ids.view(np.int64))])
            if rows:
                yield ChangedFragment(files, live, offsets, ids, rows, ())
