"""Count the rows of a table that are new for a view, a column or a reader; cheaper than a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot
from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    FragmentFiles,
    garbage_collector_off,
    live_offsets,
    open_fragment,
    row_ids,
)
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.pylance_internals import path_of, written_at
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.table_versions import manifest_of, open_version_or_none
from airflow_geneva.engine.plan.due_columns import Decisions
from airflow_geneva.engine.plan.refresh import columns_then, compare_source
from airflow_geneva.engine.plan.shared_files import computed_from_current_inputs
from airflow_geneva.engine.storage.files import Storage

if TYPE_CHECKING:
    import lance

_MOST_FILES = 16
_CREATED, _UPDATED = "_row_created_at_version", "_row_last_updated_at_version"
Mask = npt.NDArray[np.bool_]
# A field id that no file has: these manifests are only compared by their rows.
_NO_COLUMNS = Columns((), (), (-1,))


@dataclass(frozen=True, eq=False)
class NewRows:
    """The rows of a table that are new, changed or deleted since an observer last read it.

    Args:
        rows: physical offsets of new or changed rows, by fragment id; may include deleted rows.
        changed_rows, deleted_rows: 0 if the caller did not ask for them; None if unknown.
        version: the version that the observer last read; 0: none, None: it did not read a single version.
    """

    rows: Mapping[int, Ranges] = field(default_factory=dict)
    new_rows: int = 0
    changed_rows: int = 0
    deleted_rows: int | None = 0
    version: int | None = 0

    def __bool__(self) -> bool:
        return bool(self.rows) or self.deleted_rows != 0

    @property
    def fragments(self) -> tuple[int, ...]:
        return tuple(sorted(self.rows))

    @property
    def row_count(self) -> int:
        return self.new_rows + self.changed_rows + (self.deleted_rows or 0)


def new_rows_for_view(
    dataset: lance.LanceDataset, reads: Sequence[str], snapshot: Snapshot | None, changed_rows: bool
) -> NewRows:  # fmt: skip
    """Find the source rows that a view does not reflect; rows that failed do not count."""
    if snapshot is None:
        return all_rows_as_new(dataset)
    with garbage_collector_off():
        columns, _ = columns_then(dataset, tuple(reads), snapshot)
        found = compare_source(dataset, tuple(reads), snapshot, Decisions.none())
        if _is_another_table(dataset, columns, snapshot):
            return all_rows_as_new(dataset)
    before = Ranges.union(fragment.ids for fragment in snapshot.fragments if found.changed)
    rows: dict[int, Ranges] = {}
    new = changed = 0
    for fragment in found.changed:
        # Exclude rows that only run again because they failed.
        news = fragment.rows - Ranges.union(rows for _, rows in fragment.tried)
        offsets, ids = fragment.look_up()
        came = Ranges.from_offsets(offsets[~before.mask(ids)]) & news
        new += len(came)
        if changed_rows:
            changed += len(news) - len(came)
        if kept := news if changed_rows else came:
            rows[fragment.files.id] = kept
    renewed = Ranges.union(fragment.ids_of(fragment.rows) for fragment in found.changed)
    deleted = len(found.gone - renewed) if changed_rows else 0
    return NewRows(rows, new, changed, deleted, snapshot.source_version)


def _is_another_table(
    dataset: lance.LanceDataset, columns: Columns, snapshot: Snapshot
) -> bool:  # fmt: skip
    """Whether the source was dropped and created again, so that its versions and row ids name other rows."""
    seen = {fragment.signature for fragment in snapshot.fragments}
    if not seen or not seen.isdisjoint(read_manifest(dataset, columns).signatures.to_pylist()):
        return False
    if dataset.version < snapshot.source_version:
        return True
    then = open_version_or_none(dataset, snapshot.source_version)
    if then is None:
        return False
    return seen.isdisjoint(read_manifest(then, columns).signatures.to_pylist())


def new_rows_for_column(
    dataset: lance.LanceDataset, checkpoints: Storage, inputs: Sequence[str], column: str
) -> NewRows:  # fmt: skip
    """Find the rows on whose current inputs the UDF has not run, including rows that a filter left out."""
    with garbage_collector_off():
        computed_rows = computed_from_current_inputs(dataset, checkpoints, inputs, column)
        rows, known = dict[int, Ranges](), computed_rows.state
        for files in computed_rows.manifest.values():
            if not files.live_rows or (files.output and known.of_all_rows(files.signature, files.deletion)):
                continue
            live = live_offsets(dataset, files)
            if lacking := live - Ranges.union(computed_rows.resolve(files, live).values()):
                rows[files.id] = lacking
    return NewRows(rows, new_rows=sum(map(len, rows.values())), version=None)


def new_rows_since(dataset: lance.LanceDataset, version: int, changed_rows: bool) -> NewRows:
    """Find the rows that are new or changed since a version; without stable row ids, the rows of newer fragments.

    Values that were written into existing fragments do not count, because they may belong to any column. If the version
    is newer than the table's newest one, the table was dropped and created again.
    """
    if dataset.version == version:
        return NewRows(version=version)
    if dataset.version < version:
        return all_rows_as_new(dataset)
    # If the version was cleaned up, rows still record the version that created them, but deleted rows are unknown.
    then = open_version_or_none(dataset, version)
    before = {} if then is None else read_manifest(then, _NO_COLUMNS)
    now = read_manifest(dataset, _NO_COLUMNS)
    if not dataset.has_stable_row_ids:
        later = [files for files in now.values() if files.live_rows and files.id not in before]
        new = sum(files.live_rows for files in later)
        gone = sum(files.live_rows for files in before.values()) + new - sum(files.live_rows for files in now.values())
        deleted = 0 if not changed_rows else None if then is None else gone
        return NewRows(_whole(later), new, deleted_rows=deleted, version=version)
    there = _EarlierRows()
    if then is not None:
        for files in before.values():
            if files.live_rows and not _same(files, now.get(files.id)):
                there.add(files.id, *_rows(then, files.id)[1:])
    rows, new, changed, here = {}, 0, 0, []
    for files in now.values():
        if not files.live_rows or _same(files, before.get(files.id)):
            continue
        offsets, ids, created, updated = _rows(dataset, files.id)
        came = created > version if then is None else ~there.ids.mask(ids)
        other = np.zeros_like(came)
        if changed_rows:
            other = ~came & (updated > version if then is None else there.differs(files.id, ids, updated))
        new, changed = new + int(came.sum()), changed + int(other.sum())
        if (came | other).any():
            rows[files.id] = Ranges.from_offsets(offsets[came | other])
        here.append(Ranges.from_offsets(ids))
    lost = None if then is None else len(there.ids - Ranges.union(here))
    return NewRows(rows, new, changed, lost if changed_rows else 0, version)


@dataclass
class _EarlierRows:
    """Rows of fragments that have changed since, stored as ranges because there may be millions."""

    by_fragment: dict[int, Ranges] = field(default_factory=dict)
    by_update: dict[int, list[Ranges]] = field(default_factory=dict)

    @cached_property
    def ids(self) -> Ranges:
        return Ranges.union(self.by_fragment.values())

    def add(self, fragment: int, ids: Offsets, created: Offsets, updated: Offsets) -> None:
        self.by_fragment[fragment] = Ranges.from_offsets(ids)
        for version in np.unique(updated):
            self.by_update.setdefault(int(version), []).append(Ranges.from_offsets(ids[updated == version]))

    def differs(self, fragment: int, ids: Offsets, updated: Offsets) -> Mask:
        """Return a mask of the rows that were updated since, or whose update a restore has undone; both move rows."""
        same = self.by_fragment.get(fragment, Ranges.empty()).mask(ids)
        for version in np.unique(updated):
            then = Ranges.union(self.by_update.get(int(version), ()))
            same |= (updated == version) & then.mask(ids)
        return ~same


def _same(files: FragmentFiles, other: FragmentFiles | None) -> bool:
    return other is not None and other.deletion == files.deletion


def all_rows_as_new(dataset: lance.LanceDataset) -> NewRows:
    with garbage_collector_off():
        inhabited = [files for files in read_manifest(dataset, _NO_COLUMNS).values() if files.live_rows]
    return NewRows(_whole(inhabited), new_rows=sum(files.live_rows for files in inhabited))


def _whole(fragments: Iterable[FragmentFiles]) -> dict[int, Ranges]:
    return {files.id: Ranges.of(0, files.physical_rows) for files in fragments}


def sample_files(dataset: lance.LanceDataset) -> tuple[tuple[str, ...], int]:
    """Return suffixes of the unique names of some data files, and the highest fragment id."""
    with garbage_collector_off():
        fragments = dataset.get_fragments()
        chosen = fragments[:: -(-len(fragments) // _MOST_FILES) or 1]
        files = tuple(_end(fragment.metadata.files[0]) for fragment in chosen if fragment.metadata.files)
        return files, max((fragment.fragment_id for fragment in fragments), default=-1)


def is_recreated(dataset: lance.LanceDataset, files: Sequence[str], highest_fragment_id: int) -> bool:
    """Whether a table was created again: a compaction may also replace all files, but its fragments have higher ids."""
    with garbage_collector_off():
        fragments = dataset.get_fragments()
        there = {_end(file) for fragment in fragments for file in fragment.metadata.files}
        begun_again = any(fragment.fragment_id <= highest_fragment_id for fragment in fragments)
    return not files or (begun_again and there.isdisjoint(files))


def _end(file: lance.fragment.DataFile) -> str:
    return path_of(file).removesuffix(".lance")[-12:]


def first_version(dataset: lance.LanceDataset, unseen: NewRows) -> int:
    """Return a version no later than the first one with unseen changes; exact for new rows."""
    earliest = 1 if unseen.version is None else unseen.version + 1
    if not dataset.has_stable_row_ids or unseen.deleted_rows != 0:
        return earliest
    found = int(dataset.version)
    for id, rows in unseen.rows.items():
        offsets, _, created, updated = _rows(dataset, id)
        # A column has no version that was read: an updated row is due since its update.
        came = updated if unseen.version is None else np.where(created < earliest, updated, created)
        found = min(found, int(came[rows.mask(offsets)].min()))
        if found <= earliest:
            return earliest
    return found


def committed_at(dataset: lance.LanceDataset, version: int) -> datetime:
    """Return when a version was committed; if it was cleaned up, when the next remaining version was."""
    left = None if version == dataset.version else open_version_or_none(dataset, version)
    if left is None:
        kept = [reference["version"] for reference in dataset.version_refs()]
        left = manifest_of(dataset, min(found for found in (*kept, dataset.version) if found >= version))
    return datetime.fromtimestamp(written_at(left) / 1e9, timezone.utc)


def _rows(dataset: lance.LanceDataset, fragment: int) -> tuple[Offsets, Offsets, Offsets, Offsets]:
    """Read offsets and ids of a fragment's live rows, and the versions that created and last updated them."""
    offsets, ids = row_ids(dataset, fragment)
    table = open_fragment(dataset, fragment).scanner(columns=[_CREATED, _UPDATED]).to_table()
    created, updated = (table.column(name).to_numpy().astype(np.int64) for name in (_CREATED, _UPDATED))
    return offsets, ids.view(np.int64), created, updated
