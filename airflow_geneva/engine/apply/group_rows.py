"""Read the source rows of groups, in order, and join what is computed of them to the batches of a view of groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.apply.group_calls import LARGE_GROUP
from airflow_geneva.engine.apply.group_columns import GroupColumns
from airflow_geneva.engine.apply.reader import RowBatch
from airflow_geneva.engine.apply.shuffled_rows import ShuffledRows
from airflow_geneva.engine.apply.sorted_rows import sort_batches
from airflow_geneva.engine.apply.source_rows import take_rows
from airflow_geneva.engine.lance_io.arrays import rows_at, single_batch, sortable
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.runtime import threading
from airflow_geneva.engine.views.definition import IS_SET, SOURCE_ROW_ID
from airflow_geneva.engine.views.group_keys import Hashes, Keys
from airflow_geneva.engine.views.grouping import GROUP, HASH, ROWS, SHARED, Grouping
from airflow_geneva.engine.views.rows import RowIdArray
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    import lance

_GROUP, _ROWS, _SHARED, _KEY, _ORDER = (f"__geneva_{name}" for name in ("group", "rows", "shared", "key_", "order_"))
_LISTED = 4_096
_MOST_ROWS = 1 << 18
_MOST_HELD = 2 << 20
_WORTH_A_SCAN = 1_000
"""Rows of the table `rows` for each hash that is looked up in it, below which a scan is faster than its index."""
_SCANS_WORTH_SORTING = 4
"""Scans of the table `rows` that take as long as sorting it."""
_PART_WORTH_A_SCAN = 20
"""The part of the rows in a group from which a scan takes less memory than the index."""
_BYTES_A_ROW = 16
_SCANNED = 1 << 20
"""Rows that are scanned at once: Arrow hashes what is looked up for each batch anew."""


def read_groups(groups: RowBatch) -> tuple[Hashes, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return of a batch of groups the hashes, the numbers of rows, and which share a hash with another group."""
    batch = groups.columns
    shared: npt.NDArray[np.bool_] = batch.column(_SHARED).to_numpy(zero_copy_only=False)
    return batch.column(_GROUP).to_numpy(), batch.column(_ROWS).to_numpy(), shared


def group_reads(keys: Sequence[str]) -> dict[str, str]:
    """Return what is read of the table `groups` to find the source rows of its groups: SQL by alias."""
    named = {_GROUP: GROUP, _ROWS: ROWS, _SHARED: SHARED, **{f"{_KEY}{at}": key for at, key in enumerate(keys)}}
    return {alias: f"`{name}`" for alias, name in named.items()}


@dataclass(frozen=True, eq=False)
class GroupRows:
    """Joins the source rows of groups to batches of groups.

    Args:
        rows: the planned version of the table `rows`, which has the hash of the key of each source row.
        source: the planned version of the source.
        limit: the bytes of source rows to join at once; the rows of one group are always joined together.
        shuffled: the rows that came by a shuffle; others are read by their ids.
    """

    rows: lance.LanceDataset
    source: lance.LanceDataset
    grouping: Grouping
    limit: int
    shuffled: ShuffledRows | None = None
    _fitting: RowsPerBudget = field(init=False)
    _scans: Iterator[int] = field(default_factory=count, init=False)
    _sorting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fitting", RowsPerBudget(self.limit))

    def add(self, batches: Iterable[RowBatch], fragment: int, due: Ranges, columns: GroupColumns) -> Iterator[RowBatch]:
        """Yield batches of groups with what is computed of their rows, and smaller ones if the groups are large.

        Args:
            fragment: that of the groups.
            due: offsets of the groups that are computed; others get no rows.

        Raises:
            StorageError: a row that the plan found is not there any more.
        """
        for groups in batches:
            mask = groups.mask(due)
            sizes = groups.columns.column(_ROWS).to_numpy()
            sizes = sizes if mask is None else np.where(mask, sizes, 0)
            if not columns.needs_rows:
                yield _with_columns(groups, columns.compute(None, np.empty(0, np.int64), sizes))
                continue
            if self.shuffled is not None and columns.reads_rows:
                yield from self._received(groups, sizes, fragment, columns)
                continue
            for start, end in cut_groups(sizes, lambda: self.limit // _BYTES_A_ROW):
                if end == start + 1 and sizes[start]:
                    ids = self._ids_with(int(groups.columns.column(_GROUP).to_numpy()[start]), int(sizes[start]))
                    yield self._joined(groups.part(start, end), sizes[start:end], columns, ids, None)
                    continue
                found = self._rows_of(groups.columns.column(_GROUP).to_numpy()[start:end], sizes[start:end])
                for first, last in cut_groups(sizes[start:end], lambda: min(self._fitting.rows, _MOST_ROWS)):
                    part = groups.part(start + first, start + last)
                    yield self._joined(part, sizes[start + first : start + last], columns, *found.of(first, last))

    def _joined(
        self,
        groups: RowBatch,
        sizes: npt.NDArray[np.int64],
        columns: GroupColumns,
        ids: RowIdArray,
        group: RowIdArray | None,
    ) -> RowBatch:
        """Join the rows with some ids; `group` is the position of the group of each; None if there is one group."""
        batch, order = groups.columns, self.grouping.order if columns.needs_order(sizes[sizes > 0]) else []
        shared = bool(np.any(batch.column(_SHARED).to_numpy(zero_copy_only=False)[sizes > 0]))
        aliases = columns.projection if columns.reads_rows else {}
        reads = {**aliases, **{f"{_ORDER}{at}": f"`{name}`" for at, (name, _) in enumerate(order)}}
        if shared:
            reads |= {f"{_KEY}{at}": f"`{name}`" for at, name in enumerate(self.grouping.keys)}
        # Rows are read in the order of their ids, and then sorted.
        if group is None and not shared:
            ids.sort()
        else:
            group = np.zeros(len(ids), np.int64) if group is None else group
            ascending = np.argsort(ids, kind="stable")
            ids, group = ids[ascending], group[ascending]
        rows = self._read(ids, reads) if reads and len(ids) else None
        if shared and rows is not None and group is not None:
            ids, group, rows = self._with_equal_keys(batch, rows, ids, group)
        lengths = np.array([len(ids)]) if group is None else np.bincount(group, minlength=batch.num_rows)
        self._check(lengths, sizes)
        by = [] if rows is None else [rows.column(f"{_ORDER}{at}") for at in range(len(order))]
        if by or group is not None:
            sorted_by = rows_in_order(group, by, [way for _, way in order][: len(by)], ids)
            rows = None if rows is None else rows_at(rows, pa.array(sorted_by))
            ids = ids if batch.num_rows == 1 and sizes[0] >= LARGE_GROUP else ids[sorted_by]
        if rows is not None:
            self._fitting.record(len(ids), rows.nbytes + 8 * len(ids))
        if columns.reads_rows:
            rows = self._read(ids, aliases) if rows is None else rows.select(list(aliases))
        return _with_columns(
            groups, columns.compute(rows if columns.reads_rows else None, ids, lengths.astype(np.int64))
        )

    def _received(
        self, groups: RowBatch, sizes: npt.NDArray[np.int64], fragment: int, columns: GroupColumns
    ) -> Iterator[RowBatch]:
        """Join the rows that came by a shuffle, and read those that did not."""
        assert self.shuffled is not None
        addresses = (fragment << 32) + groups.offsets.astype(np.int64)
        for start, end in cut_groups(sizes, lambda: min(self._fitting.rows, _MOST_ROWS)):
            part, of_part = groups.part(start, end), sizes[start:end]
            wanted = np.flatnonzero(of_part)
            taken = self.shuffled.take(addresses[start:end][wanted], columns.projection)
            if taken is None:
                found = self._rows_of(groups.columns.column(_GROUP).to_numpy()[start:end], of_part)
                yield self._joined(part, of_part, columns, found.ids, found.group)
                continue
            rows, ids, group = taken
            self._check(np.bincount(wanted[group], minlength=len(of_part)), of_part)
            self._fitting.record(len(ids), rows.nbytes + 8 * len(ids))
            ids = np.sort(ids) if len(of_part) == 1 and of_part[0] >= LARGE_GROUP else ids
            yield _with_columns(part, columns.compute(rows, ids, of_part))

    def _check(self, lengths: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        if not np.array_equal(lengths, sizes):
            raise StorageError(
                f"The rows of groups are not those that the plan has counted in {self.rows.uri}. Run it again: a new "
                "plan counts them anew."
            )

    def ids_of(self, groups: RowBatch, sizes: npt.NDArray[np.int64]) -> tuple[RowIdArray, npt.NDArray[np.int64]]:
        """Return the ids of the rows of the groups that have a size, in the order of these, and their numbers."""
        batch = groups.columns
        found = self._rows_of(batch.column(_GROUP).to_numpy(), sizes)
        ids, group = found.ids, found.group
        if len(ids) and bool(np.any(batch.column(_SHARED).to_numpy(zero_copy_only=False)[sizes > 0])):
            reads = {f"{_KEY}{at}": f"`{name}`" for at, name in enumerate(self.grouping.keys)}
            ids, group, _ = self._with_equal_keys(batch, self._read(ids, reads), ids, group)
        lengths = np.bincount(group, minlength=len(sizes)).astype(np.int64)
        self._check(lengths, sizes)
        return ids, lengths

    def _read(self, ids: RowIdArray, reads: Mapping[str, str]) -> pa.RecordBatch:
        """Read source rows in the order of the given ids."""
        if not len(ids):
            scanner = self.source.scanner(columns=dict(reads), limit=0, with_row_id=True)
            return single_batch(scanner.to_table()).select(list(reads))
        ascends = bool((ids[1:] > ids[:-1]).all())
        distinct, at = (ids, ids) if ascends else np.unique(ids, return_inverse=True)
        try:
            read = take_rows(self.source, distinct, reads)
        except KeyError as error:
            raise StorageError(
                f"Version {self.source.version} of {self.source.uri} lacks rows of its groups: {error}. Run it again: "
                "a new plan looks at what the source has."
            ) from error
        return read if ascends else rows_at(read, pa.array(at.ravel()))

    def _ids_with(self, hash: int, size: int) -> RowIdArray:
        """Return the ids of the rows with one hash, of which `size` are expected; holds 8 bytes of each."""
        scanner = self.rows.scanner(
            columns=[SOURCE_ROW_ID],
            filter=f"`{HASH}` = {hash} AND {IS_SET}",
            use_scalar_index=size * _PART_WORTH_A_SCAN < self._count,
            batch_readahead=1,
            io_buffer_size=self.limit // 4,
        )
        found, at = np.empty(size, np.int64), 0
        for batch in scanner.to_batches():
            ids = batch.column(SOURCE_ROW_ID).to_numpy()
            if at + len(ids) > len(found):  # another group has the hash, too
                found = np.concatenate([found[:at], np.empty(at + len(ids), np.int64)])
            found[at : at + len(ids)] = ids
            at += len(ids)
        return found[:at]

    def _rows_of(self, hashes: Hashes, sizes: npt.NDArray[np.int64]) -> _RowsOfGroups:
        """Find the rows with the hashes of the groups that have a size."""
        wanted = np.flatnonzero(sizes)
        wanted = wanted[np.argsort(hashes[wanted], kind="stable")]
        ordered = hashes[wanted]
        ids, found = self._with_hashes(np.unique(ordered))
        first, last = (np.searchsorted(ordered, found, side) for side in ("left", "right"))
        group = wanted[_each(first, last)]
        by_group = np.argsort(group, kind="stable")
        return _RowsOfGroups(np.repeat(ids, last - first)[by_group], group[by_group])

    def _with_hashes(self, hashes: Hashes) -> tuple[RowIdArray, Hashes]:
        """Return ids and hashes of the rows with one of these hashes, which ascend."""
        if len(hashes) > _LISTED and self._count <= _MOST_HELD:
            return self._held.within(hashes)
        if len(hashes) * _WORTH_A_SCAN > self._count:
            if next(self._scans) >= _SCANS_WORTH_SORTING:
                with self._sorting:
                    found = self._sorted
                return found.within(hashes)
            found = self._scan(IS_SET, pa.array(hashes))
            return found.ids, found.hashes
        parts = [_HeldHashes.none()]
        for at in range(0, len(hashes), _LISTED):
            listed = ",".join(map(str, hashes[at : at + _LISTED].tolist()))
            parts.append(self._scan(f"`{HASH}` IN ({listed}) AND {IS_SET}"))
        return np.concatenate([one.ids for one in parts]), np.concatenate([one.hashes for one in parts])

    @cached_property
    def _count(self) -> int:
        return int(self.rows.count_rows())

    @cached_property
    def _held(self) -> _HeldHashes:
        found = self._scan(IS_SET)
        order = np.argsort(found.hashes, kind="stable")
        return _HeldHashes(found.ids[order], found.hashes[order])

    @cached_property
    def _sorted(self) -> _HeldHashes:
        """All rows in the order of their hashes, in a file without a name."""
        total, at = self.rows.count_rows(IS_SET), 0
        with TemporaryFile() as file:
            for batch in sort_batches(self._batches(IS_SET), [(HASH, "ascending")], self.limit):
                for first, name in ((0, SOURCE_ROW_ID), (total, HASH)):
                    os.pwrite(file.fileno(), batch.column(name).to_numpy().tobytes(), 8 * (first + at))
                at += batch.num_rows
            both = np.memmap(file, np.int64, "r", shape=(2, total)) if total else np.empty((2, 0), np.int64)
        return _HeldHashes(both[0], both[1])

    def _batches(self, filter: str) -> Iterator[pa.RecordBatch]:
        return self.rows.scanner(columns=[SOURCE_ROW_ID, HASH], filter=filter, batch_size=_SCANNED).to_batches()

    def _scan(self, filter: str, among: pa.Array | None = None) -> _HeldHashes:
        parts = [_HeldHashes.none()]
        for batch in self._batches(filter):
            ids, hashes = batch.column(SOURCE_ROW_ID).to_numpy(), batch.column(HASH).to_numpy()
            if among is not None:
                kept = np.asarray(pc.is_in(batch.column(HASH), among))
                ids, hashes = ids[kept], hashes[kept]
            parts.append(_HeldHashes(ids, hashes))
        return _HeldHashes(np.concatenate([one.ids for one in parts]), np.concatenate([one.hashes for one in parts]))

    def _with_equal_keys(
        self, batch: pa.RecordBatch, rows: pa.RecordBatch, ids: RowIdArray, group: RowIdArray
    ) -> tuple[RowIdArray, RowIdArray, pa.RecordBatch]:
        """Leave out the rows that have the hash of a group, but not its key."""
        names = [f"{_KEY}{at}" for at in range(len(self.grouping.keys))]
        theirs = Keys.of(batch.column(name) for name in names).take(group)
        kept = np.flatnonzero(Keys.of(rows.column(name) for name in names).equals(theirs))
        return ids[kept], group[kept], rows_at(rows, pa.array(kept))


def _with_columns(groups: RowBatch, made: Mapping[str, pa.Array]) -> RowBatch:
    batch = groups.columns
    names = [name for name in batch.schema.names if name not in (_GROUP, _ROWS, _SHARED) and _KEY not in name]
    arrays = [*(batch.column(name) for name in names), *made.values()]
    found = pa.record_batch(arrays, names=[*names, *made])
    return RowBatch(groups.start, groups.end, groups.offsets, groups.row_ids, found, groups.selected)


def rows_in_order(
    group: RowIdArray | None, by: Sequence[pa.Array], directions: Sequence[str], ids: RowIdArray
) -> RowIdArray:  # fmt: skip
    """Return the positions of rows sorted by group, then by columns, and then by row id; NULL comes last.

    Args:
        group: the position of the group of each row; None if there is one group.
        directions: ``ascending`` or ``descending`` for each of the columns `by`.
    """
    if not by:
        return np.lexsort((ids,) if group is None else (ids, group))
    names = [str(at) for at in range(len(by))]
    of_group = {} if group is None else {"group": pa.array(group)}
    rows = pa.table({**of_group, **dict(zip(names, map(sortable, by), strict=True)), "id": pa.array(ids)})
    directed = zip(names, directions, strict=True)
    keys = [*((name, "ascending") for name in of_group), *directed, ("id", "ascending")]
    found: RowIdArray = pc.sort_indices(rows, sort_keys=keys).to_numpy().astype(np.int64)
    return found


def cut_groups(sizes: npt.NDArray[np.int64], most: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Cut groups into parts of at most `most` rows, asked for each part, or of one group; a large one is alone."""
    ends, at = np.cumsum(sizes), 0
    large = np.append(np.flatnonzero(sizes >= LARGE_GROUP), len(sizes))
    while at < len(sizes):
        before, next_large = int(ends[at - 1]) if at else 0, int(large[np.searchsorted(large, at)])
        until = max(min(int(np.searchsorted(ends, before + most(), "right")), next_large), at + 1)
        yield at, until
        at = until


def _each(first: RowIdArray, last: RowIdArray) -> RowIdArray:
    """Return the numbers of all ranges from `first` to `last`, one range after another."""
    lengths = last - first
    starts = np.cumsum(lengths) - lengths
    found: RowIdArray = np.repeat(first - starts, lengths) + np.arange(lengths.sum())
    return found


@dataclass(frozen=True, eq=False)
class _RowsOfGroups:
    """The ids of the rows of groups, with the position of each row's group, in the order of these."""

    ids: RowIdArray
    group: RowIdArray

    def of(self, first: int, last: int) -> tuple[RowIdArray, RowIdArray]:
        """Return the rows of the groups at some positions, which then count from 0."""
        start, end = np.searchsorted(self.group, (first, last)).tolist()
        return self.ids[start:end], self.group[start:end] - first


@dataclass(frozen=True, eq=False)
class _HeldHashes:
    """Ids of source rows with the hashes of their keys."""

    ids: RowIdArray
    hashes: Hashes

    @staticmethod
    def none() -> _HeldHashes:
        return _HeldHashes(np.empty(0, np.int64), np.empty(0, np.int64))

    def within(self, hashes: Hashes) -> tuple[RowIdArray, Hashes]:
        """Return the rows with one of these hashes, if all hashes ascend."""
        at = _each(*(np.searchsorted(self.hashes, hashes, side) for side in ("left", "right")))
        return self.ids[at], self.hashes[at]
