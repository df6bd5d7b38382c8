"""Find the groups that a change of a source touches, and what the table `groups` says of them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.reader import ReadSize, RowBatch, read_fragment, windows
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.arrays import convert_array
from airflow_geneva.engine.lance_io.fragments import FragmentFiles, live_offsets
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.rows_by_id import rows_in_batches
from airflow_geneva.engine.plan.renumbered_rows import RenumberedRows
from airflow_geneva.engine.plan.swap_plan import ALL_ROW_IDS
from airflow_geneva.engine.runtime import uuid
from airflow_geneva.engine.views.definition import IS_SET, SOURCE_ROW_ID
from airflow_geneva.engine.views.group_keys import CountedKeys, Hashes, Keys
from airflow_geneva.engine.views.grouping import GROUP, HASH, ROWS, Grouping
from airflow_geneva.engine.views.rows import RowIdArray
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_LISTED = 512
_BITS_BEYOND = 65
"""Those of a UUID that a positive int64 has not."""
_SHOWN, _LONGEST = 60, 500
_NONE = np.empty(0, np.int64)
_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class RowChanges:
    """What changes in the table `rows` if it is brought to a version of the source.

    Args:
        source: that version.
        coming: the fragments of the source with rows that are new or changed, and the offsets of these.
        gone: ids of rows of the source that leave the table, perhaps to come back with other values.
        renumbered: rows that stay in it under another id.
    """

    source: lance.LanceDataset
    coming: Sequence[tuple[FragmentFiles, Ranges]]
    gone: Ranges
    renumbered: RenumberedRows

    @property
    def empty(self) -> bool:
        return not (self.coming or self.gone or self.renumbered)


@dataclass(frozen=True, eq=False)
class TouchedGroups:
    """The touched groups.

    Args:
        rows: those that have rows now, with the number of these: first those of which the table `groups` has a row.
        row_ids: the ids of these rows, which ascend.
        gone: the addresses of the rows of the table `groups` about groups that were touched.
        vanished: number of groups that have lost all of their rows.
        lost: the ids of the rows of the table `groups` about these.
    """

    rows: CountedKeys
    row_ids: RowIdArray
    gone: Offsets
    vanished: int
    lost: RowIdArray

    def check(self, grouping: Grouping, view: str) -> None:
        """Raise InvalidInput if a group has more rows than it may have."""
        most = grouping.max_group_rows
        if most is None or not len(self.rows) or int(self.rows.counts.max()) <= most:
            return
        at = int(self.rows.counts.argmax())
        key = {name: column[at].as_py() for name, column in zip(grouping.keys, self.rows.keys.columns, strict=True)}
        raise InvalidInput(
            f"The group {key} of view {view!r} has {int(self.rows.counts[at]):,} rows, and max_group_rows allows "
            f"{most:,}. Nothing was computed. Filter such rows out with where(...), or create the view with a larger "
            "max_group_rows."
        )

    def told(self, groups: lance.LanceDataset, keys: Sequence[str]) -> str:
        """Say how many groups are touched and why, and which group is the largest afterwards.

        Args:
            groups: the table `groups` before.
        """
        changed = len(self.row_ids)
        counts = f"{counted(len(self.rows) - changed, 'new group')}, {changed:,} with other rows"
        counts += f", {self.vanished:,} without rows now" if self.vanished else ""
        most, total, number = 0, int(self.rows.counts.sum()), len(self.rows)
        for batch in groups.scanner(columns=[ROWS], with_row_address=True).to_batches():
            stays = ~np.isin(batch.column("_rowaddr").to_numpy().astype(np.int64), self.gone)
            sizes = batch.column(ROWS).to_numpy()[stays]
            most, total, number = max(most, int(sizes.max(initial=0))), total + int(sizes.sum()), number + len(sizes)
        if not total:
            return counts
        if len(self.rows) and int(self.rows.counts.max()) >= most:
            at = int(self.rows.counts.argmax())
            most, columns = int(self.rows.counts[at]), [column[at : at + 1] for column in self.rows.keys.columns]
        else:
            found = groups.scanner(
                columns=list(keys), filter=f"`{ROWS}` = {most}", with_row_address=True, limit=len(self.gone) + 1
            ).to_table()
            stays = ~np.isin(found.column("_rowaddr").to_numpy().astype(np.int64), self.gone)
            columns = [found.column(name).filter(pa.array(stays))[:1] for name in keys]
        key = ", ".join(f"{name}={str(column[0])[:_SHOWN]}" for name, column in zip(keys, columns, strict=True))
        size = f"{most:,} of {counted(total, 'row')} ({most / total:.1%})"
        return f"{counts}; the largest of {counted(number, 'group')}, {key}, has {size}"[:_LONGEST]

    def table(self, schema: pa.Schema) -> pa.Table:
        """Return the rows of the table `groups`, which has this schema; they differ from all that it had before."""
        found, touched = self.rows, uuid.uuid4().int >> _BITS_BEYOND
        own = [found.hashes, found.counts, np.full(len(found), touched), found.shared]
        arrays = [*found.keys.columns, *map(pa.array, own)]
        return pa.Table.from_arrays(
            [convert_array(array, field.type) for array, field in zip(arrays, schema, strict=True)], schema=schema
        )


def find_touched(
    grouping: Grouping,
    changes: RowChanges,
    rows: lance.LanceDataset | None,
    groups: lance.LanceDataset | None,
    limit: int,
) -> TouchedGroups:
    """Find the touched groups; write nothing.

    Args:
        rows, groups: the newest versions of the two tables; None if they do not exist yet.
        limit: the bytes of keys to read at once.
    """
    source, keys = changes.source, grouping.keys
    coming = _coming(source, changes.coming, keys, limit)
    if rows is None or groups is None or changes.gone == ALL_ROW_IDS:
        there = _KnownGroups.none(source, keys) if groups is None else _KnownGroups.read(groups, keys, None)
        return there.touched(CountedKeys.joined([there.groups, coming]))
    leaving = np.concatenate([_NONE, *(hashes for _, hashes in _rows_with(rows, None, changes.gone, True))])
    touched = np.unique(np.concatenate((leaving, coming.hashes)))
    if not len(touched):
        return _KnownGroups.none(source, keys).touched(coming)
    there = _KnownGroups.read(groups, keys, touched)
    known = CountedKeys.joined([there.groups, coming])
    left = [*_rows_with(rows, touched, changes.gone, False)]
    ids, hashes = (np.concatenate([_NONE, *(part[at] for part in left)]) for at in (0, 1))
    # The hash tells the key only if one key has it; otherwise the source does.
    unclear = np.unique(np.concatenate((known.hashes[known.shared], np.setdiff1d(hashes, known.hashes))))
    is_unclear = np.isin(hashes, unclear)
    sorted_hashes = np.sort(hashes[~is_unclear])
    first, last = (np.searchsorted(sorted_hashes, known.hashes, side) for side in ("left", "right"))
    known = replace(known, counts=known.counts + last - first)
    if is_unclear.any():
        theirs = changes.renumbered.follow(ids[is_unclear])
        read = (_counted(batch, keys) for batch in rows_in_batches(source, theirs, keys))
        known = CountedKeys.joined([known, *read])
    return there.touched(known)


def _coming(
    source: lance.LanceDataset, coming: Iterable[tuple[FragmentFiles, Ranges]], keys: Sequence[str], limit: int
) -> CountedKeys:
    parts = [_no_keys(source, keys)]
    size = ReadSize.of(source, list(keys), limit)
    for files, due in coming:
        live = live_offsets(source, files)
        for batch in read_fragment(source, files, live, windows(due), list(keys), None, size, keys):
            parts.append(_of_due_rows(batch, due, keys))
            if len(parts) > _LISTED:
                parts = [CountedKeys.joined(parts)]
    return CountedKeys.joined(parts)


def _of_due_rows(batch: RowBatch, due: Ranges, keys: Sequence[str]) -> CountedKeys:
    mask, ids = batch.mask(due), batch.row_ids.view(np.int64)
    found = Keys.of(batch.columns.column(name) for name in keys)
    if mask is not None:
        found, ids = found.take(np.flatnonzero(mask)), ids[mask]
    return CountedKeys.of_rows(found, ids)


def _counted(batch: pa.RecordBatch, keys: Sequence[str]) -> CountedKeys:
    return CountedKeys.of_rows(
        Keys.of(batch.column(name) for name in keys), batch.column("_rowid").to_numpy().view(np.int64)
    )


def _no_keys(dataset: lance.LanceDataset, keys: Sequence[str]) -> CountedKeys:
    none = Keys.of(dataset.schema.empty_table().select(list(keys)).columns)
    return CountedKeys(none, _NONE, _NONE, _NONE)


@dataclass(frozen=True, eq=False)
class _KnownGroups:
    """Groups of which the table `groups` has a row, with the addresses and the ids of these."""

    groups: CountedKeys
    addresses: Offsets
    row_ids: RowIdArray

    @staticmethod
    def none(source: lance.LanceDataset, keys: Sequence[str]) -> _KnownGroups:
        return _KnownGroups(_no_keys(source, keys), _NONE, _NONE)

    @staticmethod
    def read(groups: lance.LanceDataset, keys: Sequence[str], hashes: Hashes | None) -> _KnownGroups:
        """Read the groups with one of these hashes, which ascend; None: all groups."""
        few = hashes is not None and len(hashes) <= _LISTED
        condition = f"`{GROUP}` IN ({','.join(map(str, hashes.tolist()))})" if few and hashes is not None else None
        scanner = groups.scanner(columns=[*keys, GROUP], filter=condition, with_row_address=True, with_row_id=True)
        found, parts = [_no_keys(groups, keys).keys], [(_NONE, _NONE, _NONE)]
        for batch in scanner.to_batches():
            of_row = batch.column(GROUP).to_numpy()
            here = np.arange(batch.num_rows) if hashes is None else np.flatnonzero(np.isin(of_row, hashes))
            found.append(Keys.of(batch.column(name) for name in keys).take(here))
            places, ids = (batch.column(name).to_numpy().astype(np.int64) for name in ("_rowaddr", "_rowid"))
            parts.append((of_row[here], places[here], ids[here]))
        joined, (of_group, addresses, row_ids) = Keys.joined(found), map(np.concatenate, zip(*parts, strict=True))
        count = len(joined)
        known = CountedKeys(joined, of_group, np.zeros(count, np.int64), np.full(count, _LAST))
        return _KnownGroups(known, addresses, row_ids)

    def touched(self, counted: CountedKeys) -> TouchedGroups:
        """Return the touched groups, which include these, with their rows; those without rows have vanished."""
        ids = np.full(len(counted), _LAST)
        ids[counted.positions(self.groups.keys)] = self.row_ids
        left = counted.counts > 0
        order = np.flatnonzero(left)[np.lexsort((counted.first[left], ids[left]))]
        ids = ids[order]
        stay = ids[ids < _LAST]
        lost = np.setdiff1d(self.row_ids, stay)
        return TouchedGroups(counted.take(order), stay, self.addresses, int((~left).sum()), lost)


def _rows_with(
    rows: lance.LanceDataset, hashes: Hashes | None, gone: Ranges, going: bool
) -> Iterator[tuple[RowIdArray, Hashes]]:
    """Yield ids and hashes of rows with one of these hashes, which ascend, that are going, or that are not."""
    if going and not gone:
        return
    few = hashes is not None and len(hashes) <= _LISTED
    listed = f"`{HASH}` IN ({','.join(map(str, hashes.tolist()))}) AND " if few and hashes is not None else ""
    for batch in rows.scanner(columns=[SOURCE_ROW_ID, HASH], filter=f"{listed}{IS_SET}").to_batches():
        ids, of_row = batch.column(SOURCE_ROW_ID).to_numpy(), batch.column(HASH).to_numpy()
        kept = gone.mask(ids) == going
        if hashes is not None and not few:
            kept &= np.isin(of_row, hashes)
        if kept.any():
            yield ids[kept], of_row[kept]
