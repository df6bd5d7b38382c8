"""Bring the source rows of groups together by a shuffle: what its two sides read, send and take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.apply.group_columns import GroupColumns
from airflow_geneva.engine.apply.reader import ReadSize, read_rows
from airflow_geneva.engine.apply.sorted_rows import SortedRows, packed, unpacked
from airflow_geneva.engine.lance_io.arrays import rows_at, single_batch
from airflow_geneva.engine.lance_io.fragments import FragmentFiles, live_offsets
from airflow_geneva.engine.views.definition import OutputColumn
from airflow_geneva.engine.views.group_keys import Hashes, Keys, hash_keys
from airflow_geneva.engine.views.grouping import GROUP, Grouping

if TYPE_CHECKING:
    import lance

AT, ID = "__geneva_at", "__geneva_id"
"""Columns of a row on its way: the address of its group in the table `groups`, and the row's id."""

Interval = tuple[int, int]
"""The addresses of groups from one to before another one."""
Numbers = npt.NDArray[np.int64]

_PIECE_ROWS = 1 << 18
_SENT_BYTES = 1 << 20
"""The most bytes of rows to send in one message."""


@dataclass(frozen=True, eq=False)
class ShuffleColumns:
    """The columns of a row on its way: those that the view reads, and those by which rows are sorted.

    Args:
        columns: all that the view reads of rows.
    """

    grouping: Grouping
    columns: GroupColumns

    @staticmethod
    def of(grouping: Grouping, columns: Sequence[OutputColumn]) -> ShuffleColumns:
        return ShuffleColumns(grouping, GroupColumns.of(columns, {column.name for column in columns}))

    @cached_property
    def reads(self) -> dict[str, str]:
        """What is read of each row of the source: SQL by name."""
        order = {f"order_{at}": f"`{name}`" for at, (name, _) in enumerate(self.grouping.order)}
        return {**self.columns.projection, **order}

    @cached_property
    def keys(self) -> dict[str, str]:
        return {f"key_{at}": f"`{name}`" for at, name in enumerate(self.grouping.keys)}

    @property
    def by(self) -> list[tuple[str, str]]:
        order = [(f"order_{at}", way) for at, (_, way) in enumerate(self.grouping.order)]
        return [(AT, "ascending"), *order, (ID, "ascending")]


@dataclass(frozen=True, eq=False)
class GroupPlaces:
    """The places of groups: which interval of addresses each belongs to, by its hash; 16 bytes of each are held.

    Args:
        hashes: ascend.
        addresses: of the rows of the table `groups`.
        starts: where the intervals begin; they ascend.
    """

    hashes: Hashes
    addresses: Numbers
    starts: Numbers
    order: Numbers

    @staticmethod
    def read(groups: lance.LanceDataset, intervals: Sequence[Interval]) -> GroupPlaces:
        """Read the hashes of the groups in some intervals, which are apart."""
        starts, ends = (np.array(side, np.int64) for side in zip(*intervals, strict=True))
        order = np.argsort(starts)
        hashes, addresses = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for batch in groups.scanner(columns=[GROUP], with_row_address=True).to_batches():
            found = batch.column("_rowaddr").to_numpy().astype(np.int64)
            at = np.searchsorted(starts[order], found, "right") - 1
            kept = (at >= 0) & (found < ends[order][at])
            hashes.append(batch.column(GROUP).to_numpy()[kept])
            addresses.append(found[kept])
        all_hashes, all_addresses = np.concatenate(hashes), np.concatenate(addresses)
        by_hash = np.argsort(all_hashes, kind="stable")
        return GroupPlaces(all_hashes[by_hash], all_addresses[by_hash], starts[order], order)

    def of_rows(self, keys: Keys) -> tuple[Numbers, Numbers]:
        """Return the positions of the rows whose groups are in an interval, and the addresses of their groups."""
        hashes = hash_keys(keys)
        if not len(self.hashes):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        rows = np.flatnonzero(self.hashes[at] == hashes)
        return rows, self.addresses[at[rows]]

    def intervals_of(self, addresses: Numbers) -> Numbers:
        return self.order[np.searchsorted(self.starts, addresses, "right") - 1]


@dataclass(frozen=True, eq=False)
class Sender:
    """Reads pieces of the source, and sends their rows to the intervals of their groups.

    Args:
        limit: the bytes of rows to hold at once.
    """

    source: lance.LanceDataset
    shuffled: ShuffleColumns
    places: GroupPlaces
    limit: int

    def send(self, pieces: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, bytes]]:
        """Yield rows by the number of their interval; a piece is a fragment with a range of offsets."""
        held, size = list[pa.RecordBatch](), 0
        for rows in self._rows(pieces):
            held.append(rows)
            size += rows.nbytes
            if size > self.limit:
                yield from self._cut(single_batch(pa.Table.from_batches(held)))
                held, size = [], 0
        if held:
            yield from self._cut(single_batch(pa.Table.from_batches(held)))

    def _rows(self, pieces: Iterable[tuple[int, int, int]]) -> Iterator[pa.RecordBatch]:
        columns = {**self.shuffled.reads, **self.shuffled.keys}
        size = ReadSize.of(self.source, columns, self.limit // 2)
        fragments = {fragment.fragment_id: fragment for fragment in self.source.get_fragments()}
        for number, start, end in pieces:
            fragment = fragments[number]
            deleted = fragment.num_deletions
            files = FragmentFiles(
                number, fragment.physical_rows, "deleted" if deleted else "", deleted, (), (), (), 0
            )  # fmt: skip
            live = live_offsets(self.source, files)
            for batch in read_rows(
                self.source, files, live, (start, end), columns, self.shuffled.grouping.where, size
            ):  # fmt: skip
                keys = Keys.of(batch.columns.column(name) for name in self.shuffled.keys)
                rows, addresses = self.places.of_rows(keys)
                if batch.selected is not None:
                    kept = batch.selected[rows]
                    rows, addresses = rows[kept], addresses[kept]
                if len(rows):
                    sent = rows_at(batch.columns.select(list(self.shuffled.reads)), pa.array(rows))
                    yield sent.append_column(AT, pa.array(addresses)).append_column(
                        ID, pa.array(batch.row_ids[rows].astype(np.int64))
                    )

    def _cut(self, rows: pa.RecordBatch) -> Iterator[tuple[int, bytes]]:
        interval = self.places.intervals_of(rows.column(AT).to_numpy())
        order = np.argsort(interval, kind="stable")
        most = max(_SENT_BYTES * rows.num_rows // max(rows.nbytes, 1), 1)
        numbers, firsts = np.unique(interval[order], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
            for at in range(0, len(part), most):
                yield number, packed(rows_at(rows, pa.array(part[at : at + most])))


def pieces_of(source: lance.LanceDataset, fewest: int) -> list[tuple[int, int, int]]:
    """Cut the fragments of a source into pieces to read, if possible not fewer than a number."""
    fragments = [(one.fragment_id, one.physical_rows) for one in source.get_fragments()]
    total = sum(rows for _, rows in fragments)
    size = max(min(_PIECE_ROWS, -(-total // max(fewest, 1))), 1)
    return [(number, at, min(at + size, rows)) for number, rows in fragments for at in range(0, rows, size)]


class ShuffledRows:
    """The rows that a task received, which it takes in the order of their groups.

    Args:
        shuffled: their columns.
    """

    def __init__(self, shuffled: ShuffleColumns, limit: int) -> None:
        self._shuffled, self._limit = shuffled, limit
        self._streams: dict[Interval, _Stream] = {}

    def receive(self, interval: Interval, messages: Iterable[bytes]) -> None:
        """Take the rows of all groups in an interval; those beyond the limit go to a temporary file."""
        rows = SortedRows.of(map(unpacked, messages), self._shuffled.by, self._limit)
        self._streams[interval] = _Stream(rows)

    def take(self, addresses: Numbers, columns: Mapping[str, str]) -> tuple[pa.RecordBatch, Numbers, Numbers] | None:
        """Return the rows of groups at some addresses, which ascend: columns, ids, and the position of the group.

        Return None if they did not come, or were taken before.
        """
        if not len(addresses):
            return None
        first, last = int(addresses[0]), int(addresses[-1])
        stream = next((one for (start, end), one in self._streams.items() if start <= first and last < end), None)
        rows = None if stream is None else stream.until(first, last)
        if rows is None:
            return None
        theirs = rows.column(AT).to_numpy()
        at = np.minimum(np.searchsorted(addresses, theirs), len(addresses) - 1)
        kept = np.flatnonzero(addresses[at] == theirs)
        if len(kept) < len(theirs):
            rows, at = rows_at(rows, pa.array(kept)), at[kept]
        names = {text: name for name, text in self._shuffled.columns.projection.items()}
        found = [rows.column(names[text]) for text in columns.values()]
        if not found:
            return pa.record_batch([rows.column(ID)], names=[ID]), rows.column(ID).to_numpy(), at
        return pa.record_batch(found, names=list(columns)), rows.column(ID).to_numpy(), at


class _Stream:
    """The rows of an interval, which are taken once."""

    def __init__(self, rows: SortedRows) -> None:
        self._batches, self._rest, self._taken = iter(rows), list[pa.RecordBatch](), -1

    def until(self, first: int, last: int) -> pa.RecordBatch | None:
        """Return the next rows up to an address, perhaps with some before the first; None if it was passed."""
        if first <= self._taken:
            return None
        found = list[pa.RecordBatch]()
        while True:
            batch = self._rest.pop() if self._rest else next(self._batches, None)
            if batch is None:
                break
            addresses = batch.column(AT).to_numpy()
            start, end = np.searchsorted(addresses, first), np.searchsorted(addresses, last, "right")
            if end > start:
                found.append(batch[start:end])
            if end < len(addresses):
                self._rest.append(batch[end:])
                break
        self._taken = last
        return single_batch(pa.Table.from_batches(found)) if found else None
