"""Find what changed in groups since a function that can be folded was called on them: the rows to add and to remove.

A view has a hidden column beside each column of such a function: the state of each group, how many rows it is of, and
at which version of the table `rows` they were its rows. A row of that table never changes, and is created anew with a
new version if a value that the view reads changes. So the rows of a group that were created after that version are new,
and if their number and that of the state make up the number of rows now, nothing else has changed. Otherwise rows were
removed: those that an earlier version of the table has, and this one has not.

The state is a cache. If it is missing, of other code, or of rows that are not certain, all rows are added to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.apply.group_calls import call_arguments, fold_alias
from airflow_geneva.engine.apply.group_rows import GroupRows, cut_groups, read_groups
from airflow_geneva.engine.apply.reader import RowBatch
from airflow_geneva.engine.apply.source_rows import take_rows
from airflow_geneva.engine.counts import LOST_ROWS, NEW_STATE, OTHER_CODE, UNCLEAR
from airflow_geneva.engine.lance_io.fragments import newest_row
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.engine.views.definition import IS_SET, SOURCE_ROW_ID, FoldColumn
from airflow_geneva.engine.views.group_keys import Hashes
from airflow_geneva.engine.views.grouping import HASH, TABLE_ID
from airflow_geneva.engine.views.rows import HeldRows, RowIdArray

if TYPE_CHECKING:
    import lance

_CREATED = "_row_created_at_version"
_LISTED = 4_096
_MOST_HELD = 2 << 20
_PART_WORTH_A_SCAN = 20
_NONE = np.empty(0, np.int64)
_COLUMNS = (SOURCE_ROW_ID, HASH, _CREATED, "_rowid")
_READ: dict[str, Any] = {"columns": list(_COLUMNS[:3]), "with_row_id": True}
Lengths = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of the table `rows`: their ids in the source, hashes, the versions that created them, and their own ids."""

    ids: RowIdArray
    hashes: Hashes
    created: RowIdArray
    own: RowIdArray

    @staticmethod
    def read(rows: lance.LanceDataset, hashes: Hashes, count: int, after: int | None = None) -> _Rows:
        """Read the rows with one of these hashes, perhaps only those that were created after a version.

        Args:
            count: the number of rows that they have, as far as it is known.
        """
        how = _READ if count * _PART_WORTH_A_SCAN < rows.count_rows() else {**_READ, "use_scalar_index": False}
        wanted, parts = np.unique(hashes), list[pa.RecordBatch]()
        since = "" if after is None else f" AND {_CREATED} > {after}"
        for at in range(0, len(wanted), _LISTED):
            listed = ",".join(map(str, wanted[at : at + _LISTED].tolist()))
            parts += rows.scanner(**how, filter=f"`{HASH}` IN ({listed}) AND {IS_SET}{since}").to_batches()
        return _Rows._sorted(parts)

    @staticmethod
    def created_after(rows: lance.LanceDataset, version: int) -> _Rows | None:
        """Read the rows that were created after a version; None if there are very many.

        Of the fragments without such rows, only the metadata is read.
        """
        places = [one for one in rows.get_fragments() if (found := newest_row(one)) is None or found > version]
        if not places:
            return _Rows._sorted([])
        condition, parts, count = f"{_CREATED} > {version} AND {IS_SET}", list[pa.RecordBatch](), 0
        for batch in rows.scanner(**_READ, filter=condition, fragments=places, use_scalar_index=False).to_batches():
            parts.append(batch)
            count += batch.num_rows
            if count > _MOST_HELD:
                return None
        return _Rows._sorted(parts)

    @staticmethod
    def _sorted(batches: Iterable[pa.RecordBatch]) -> _Rows:
        parts = [(_NONE,) * 4]
        for batch in batches:
            parts.append(tuple(batch.column(name).to_numpy().astype(np.int64) for name in _COLUMNS))
        found = [np.concatenate(part) for part in zip(*parts, strict=True)]
        order = np.argsort(found[1], kind="stable")
        return _Rows(*(part[order] for part in found))

    def of(self, hash: int) -> slice:
        first, last = (np.searchsorted(self.hashes, hash, side) for side in ("left", "right"))
        return slice(int(first), int(last))


@dataclass(frozen=True, eq=False)
class RowsBefore:
    """The table `rows` as it was before the refresh, and the source version that it showed then."""

    rows: lance.LanceDataset
    source_version: int


@dataclass(eq=False)
class _Change:
    """What the call on each of some groups gets."""

    why: list[str]
    added: list[RowIdArray]
    removed: list[RowIdArray]


@dataclass(eq=False)
class GroupFolds:
    """Adds to batches of groups what calls of functions get that can be folded.

    Args:
        view: the planned version of the view, which has the states.
        columns: those of such functions.
        group_rows: finds all rows of groups.
        before: for functions that remove rows; None if it is not known.
        limit: the bytes of row ids to look up at once, and of states to hold.
    """

    view: lance.LanceDataset
    columns: Sequence[FoldColumn]
    group_rows: GroupRows
    before: RowsBefore | None
    limit: int
    _stamps: dict[str, int] = field(default_factory=dict, init=False)
    _new: tuple[int, _Rows | None] | None = field(default=None, init=False)
    _fitting: RowsPerBudget = field(init=False)

    def __post_init__(self) -> None:
        self._fitting = RowsPerBudget(self.limit)

    def add(self, batches: Iterable[RowBatch], due: Ranges) -> Iterator[RowBatch]:
        for groups in batches:
            mask = groups.mask(due)
            hashes, sizes, shared = read_groups(groups)
            sizes = sizes if mask is None else np.where(mask, sizes, 0)
            for first, last in cut_groups(sizes, lambda: self.limit // 32):
                for start, end in cut_groups(np.ones(last - first, np.int64), lambda: self._fitting.rows):
                    at = slice(first + start, first + end)
                    yield self._with_changes(groups.part(at.start, at.stop), hashes[at], sizes[at], shared[at])

    def _with_changes(self, groups: RowBatch, hashes: Hashes, sizes: Lengths, shared: Mask) -> RowBatch:
        held = self._states(groups.row_ids.view(np.int64))
        names, arrays = list(groups.columns.schema.names), list(groups.columns.columns)
        changes = {
            column.name: self._change(column, held[column.name], hashes, sizes, shared) for column in self.columns
        }
        whole = np.zeros(len(sizes), np.bool_)
        for change in changes.values():
            whole |= np.array([bool(why) for why in change.why]) & (sizes > 0)
        every = self._every_row(groups, sizes, whole)
        for column in self.columns:
            change, states = changes[column.name], held[column.name]
            added = [
                every[at] if why else ids for at, (why, ids) in enumerate(zip(change.why, change.added, strict=True))
            ]
            names.append(fold_alias(column.name))
            arrays.append(
                call_arguments(
                    pc.struct_field(states, "state"), added, change.removed, sizes, change.why,
                    (self.rows_version, self._stamp(column), 0 if self.before is None else self.before.source_version),
                )
            )  # fmt: skip
        found = pa.record_batch(arrays, names=names)
        return RowBatch(groups.start, groups.end, groups.offsets, groups.row_ids, found, groups.selected)

    @property
    def rows_version(self) -> int:
        return int(self.group_rows.rows.version)

    def _stamp(self, column: FoldColumn) -> int:
        """Identify the table `rows`, which may be made anew, and the code of a column with its inputs and its state."""
        if column.name not in self._stamps:
            table = (self.group_rows.rows.schema.metadata or {}).get(TABLE_ID.encode(), b"").decode()
            kind = self.view.schema.field(column.state).type
            self._stamps[column.name] = int(md5(f"{table} {column.code} {kind}")[:15], 16)
        return self._stamps[column.name]

    @cached_property
    def _held(self) -> HeldRows:
        return HeldRows.of(self.view)

    def _states(self, groups: RowIdArray) -> dict[str, pa.StructArray]:
        """Return the states that the view has of groups, by column; NULL if it has none."""
        own = self._held.row_ids_of(groups)
        known = np.flatnonzero(own >= 0)
        at = pa.array(np.cumsum(own >= 0) - 1, mask=own < 0)
        if not len(known):
            return {one.name: pa.nulls(len(groups), self.view.schema.field(one.state).type) for one in self.columns}
        ordered = np.unique(own[known])
        read = take_rows(self.view, ordered, {f"state_{n}": f"`{one.state}`" for n, one in enumerate(self.columns)})
        self._fitting.record(len(ordered), read.nbytes)
        back = pa.array(np.searchsorted(ordered, own[known])).take(at)
        return {one.name: read.column(f"state_{n}").take(back) for n, one in enumerate(self.columns)}

    def _change(
        self, column: FoldColumn, states: pa.StructArray, hashes: Hashes, sizes: Lengths, shared: Mask
    ) -> _Change:
        """Find for each group the rows that were added to its state's, and removed from them, or why there are none."""
        count = len(sizes)
        rows, as_of, stamp = (
            np.asarray(pc.fill_null(pc.struct_field(states, name), -1)) for name in ("rows", "as_of", "stamp")
        )
        there = np.asarray(states.is_valid())
        unclear = shared | (as_of > self.rows_version)
        whys = np.select([~there, stamp != self._stamp(column), unclear], [NEW_STATE, OTHER_CODE, UNCLEAR], "").tolist()
        change = _Change(whys, [_NONE] * count, [_NONE] * count)
        folds = [at for at in range(count) if not whys[at] and sizes[at]]
        if not folds:
            return change
        new = self._created_after(int(as_of[folds].min()), hashes[folds])
        lost = []
        for at in folds:
            part = new.of(int(hashes[at]))
            change.added[at] = new.ids[part][new.created[part] > as_of[at]]
            if rows[at] + len(change.added[at]) != sizes[at]:
                change.why[at] = LOST_ROWS
                lost.append(at)
        if lost and column.removes and self.before is not None:
            self._find_removed(change, lost, rows, as_of, hashes, sizes, self.before)
        return change

    def _created_after(self, version: int, hashes: Hashes) -> _Rows:
        """Return the rows with one of these hashes that were created after a version, and perhaps others."""
        if self._new is None or self._new[0] > version:
            self._new = version, _Rows.created_after(self.group_rows.rows, version)
        return self._new[1] or _Rows.read(self.group_rows.rows, hashes, 0, version)

    def _find_removed(
        self, change: _Change, lost: Sequence[int], rows: Lengths, as_of: RowIdArray, hashes: Hashes, sizes: Lengths,
        before: RowsBefore,
    ) -> None:  # fmt: skip
        """Find the rows that groups have lost, where that is certain and less than all of their rows."""
        count = int(sizes[list(lost)].sum())
        now, then = (_Rows.read(one, hashes[list(lost)], count) for one in (self.group_rows.rows, before.rows))
        for at in lost:
            here, there = now.of(int(hashes[at])), then.of(int(hashes[at]))
            stays, was = now.created[here] <= as_of[at], then.created[there] <= as_of[at]
            kept, had = now.own[here][stays], then.own[there][was]
            gone = ~np.isin(had, kept)
            # All rows of the state are known, and those that are left are among them.
            certain = len(had) == rows[at] and len(had) - int(gone.sum()) == len(kept)
            if certain and int(gone.sum()) + len(change.added[at]) < sizes[at]:
                change.why[at] = ""
                change.removed[at] = then.ids[there][was][gone]

    def _every_row(self, groups: RowBatch, sizes: Lengths, whole: Mask) -> list[RowIdArray]:
        """Return the ids of all rows of some groups."""
        found = [_NONE] * len(sizes)
        if whole.any():
            ids, lengths = self.group_rows.ids_of(groups, np.where(whole, sizes, 0))
            ends = np.cumsum(lengths)
            for at in np.flatnonzero(whole).tolist():
                found[at] = ids[ends[at] - lengths[at] : ends[at]]
        return found
