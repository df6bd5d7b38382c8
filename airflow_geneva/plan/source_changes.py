"""Find out what changed in the source of a view since its newest swap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.facts import ColumnState
from airflow_geneva.checkpoint.provenance import MOST_RUNS, PriorFailures, prior_failures_of, rows_that
from airflow_geneva.checkpoint.reuse import RowIdLookup
from airflow_geneva.checkpoint.view_snapshot import Snapshot, SourceFragment
from airflow_geneva.lance_io.fragments import FragmentFiles, columns_of, read_manifest, row_ids
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.computed_rows import ComputedRows

if TYPE_CHECKING:
    import lance

VIEW_VERSION = "view"
"""UDF version in facts about a view's values; the planner compares the code of a view's UDFs separately."""


@dataclass(frozen=True, eq=False)
class ChangedFragment:
    """A source fragment with rows that the view does not reflect yet, or on which a UDF failed and runs again."""

    files: FragmentFiles
    live: Ranges
    ids: Ranges
    rows: Ranges
    tried: PriorFailures
    look_up: RowIdLookup

    def ids_of(self, rows: Ranges) -> Ranges:
        if rows == self.live or not rows:
            return self.ids if rows else rows
        offsets, ids = self.look_up()
        return Ranges.from_offsets(ids[rows.mask(offsets)])


@dataclass
class SourceChanges:
    """The differences between a source version and what a view reflects.

    Args:
        gone: ids of rows that were deleted or changed, so that the view must not show their old values.
        fragments: all fragments of the source for the next snapshot, without new failures.
    """

    changed: list[ChangedFragment] = field(default_factory=list)
    gone: Ranges = field(default_factory=Ranges.empty)
    fragments: list[SourceFragment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given_up: int = 0


def compare_source(dataset: lance.LanceDataset, names: tuple[str, ...], snapshot: Snapshot | None) -> SourceChanges:
    """Compare a source version with the snapshot of a view's newest swap; without a snapshot, all rows are new."""
    columns = columns_of(dataset, names, (), None)
    state = ColumnState() if snapshot is None else snapshot.state(VIEW_VERSION, columns.inputs_text)
    computed_rows = ComputedRows(dataset, columns, names, state)
    before = {} if snapshot is None else {f.signature: f for f in snapshot.fragments}
    found = SourceChanges()
    here: list[Ranges] = []
    kept: set[str] = set()
    for files in computed_rows.manifest.values():
        if files.live_rows == 0:
            continue
        then = before.get(files.signature)
        again = then is not None and any(runs < MOST_RUNS and rows for runs, rows in then.failed)
        if then is not None and then.deletion == files.deletion and not again:
            kept.add(files.signature)
            found.fragments.append(then)
            found.given_up += sum(len(rows) for _, rows in then.failed)
            continue
        fragment = _changed(files, computed_rows, before)
        here.append(fragment.ids)
        failed = tuple((runs, rows & fragment.live - fragment.rows) for runs, rows in fragment.tried)
        found.given_up += sum(len(rows) for _, rows in failed)
        found.fragments.append(
            SourceFragment(
                files.signature, files.deletion, fragment.live, fragment.ids, tuple(f for f in failed if f[1])
            )
        )
        if fragment.rows:
            found.changed.append(fragment)
    if before:
        lost = Ranges.union(f.ids for signature, f in before.items() if signature not in kept)
        found.gone = lost - Ranges.union(here)
        if found.changed:
            renewed = Ranges.union(fragment.ids_of(fragment.rows) for fragment in found.changed)
            found.gone = found.gone | (renewed & Ranges.union(f.ids for f in before.values()))
    found.notes = computed_rows.notes
    return found


def _changed(
    files: FragmentFiles, computed_rows: ComputedRows, before: Mapping[str, SourceFragment]
) -> ChangedFragment:
    ids, live = _ids_before_compaction(files, computed_rows, before), Ranges.of(0, files.physical_rows)
    if ids is None:
        offsets, row_ids = computed_rows.rows(files)
        ids = Ranges.from_offsets(row_ids)
        live = Ranges.from_offsets(offsets) if files.deletion else live
    known = computed_rows.resolve(files, live)
    tried = tuple((runs, rows & live) for runs, rows in prior_failures_of(known, VIEW_VERSION))
    given_up = Ranges.union(rows for runs, rows in tried if runs >= MOST_RUNS)
    done = rows_that(known, lambda provenance: not provenance.failures)
    return ChangedFragment(files, live, ids, live - done - given_up, tried, partial(computed_rows.rows, files))


def _ids_before_compaction(
    files: FragmentFiles, computed_rows: ComputedRows, before: Mapping[str, SourceFragment]
) -> Ranges | None:  # fmt: skip
    """Return the row ids of a fragment that the snapshot has, or that was compacted from such fragments; else None."""
    then = before.get(files.signature)
    if then is not None:
        return then.ids if then.deletion == files.deletion else None
    compaction = computed_rows.compaction_of(files)
    if compaction is None or not compaction.alone or files.deletion:
        return None
    parents = [parent for parent in compaction.replaced if parent.live_rows]
    parts = [ids for p in parents if (ids := _ids_before_compaction(p, computed_rows, before)) is not None]
    return Ranges.union(parts) if len(parts) == len(parents) else None


def fragments_of_rows(dataset: lance.LanceDataset, names: tuple[str, ...], wanted: Ranges) -> Iterator[ChangedFragment]:
    for files in read_manifest(dataset, columns_of(dataset, names, (), None)).values():
        if files.live_rows:
            offsets, ids = found = row_ids(dataset, files.id)
            live = Ranges.from_offsets(offsets)
            rows = Ranges.from_offsets(offsets[wanted.mask(ids)])
            if rows:
                every = Ranges.from_offsets(ids)
                yield ChangedFragment(files, live, every, rows, (), lambda found=found: found)  # type: ignore[misc]
