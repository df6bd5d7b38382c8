"""Select the rows of a query, ordered by row id or by a hash of seed and row id, and create a view with placeholders.

A placeholder row holds a source row's id and no values yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.arrays import DATA_STORAGE_VERSION
from airflow_geneva.engine.lance_io.conflicts import create_new
from airflow_geneva.engine.lance_io.fragments import open_fragment
from airflow_geneva.engine.lance_io.sql_text import read_sql
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.definition import IS_SET, SOURCE_ROW_ID
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

PLACEHOLDER_FIELDS = pa.schema([pa.field(SOURCE_ROW_ID, pa.int64()), pa.field(IS_SET, pa.bool_())])
"""The system columns of a view. They come first, so their field ids are 0 and 1."""

CREATED_FROM = "geneva.view.created_from"
"""Transaction property of a view's first version: the source version of the placeholders."""

RowIdArray: TypeAlias = npt.NDArray[np.int64]
HashArray: TypeAlias = npt.NDArray[np.uint64]

_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_CHUNK = 1 << 16
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows that a view holds: the ids of their source rows, ascending, and their own row ids."""

    source_ids: RowIdArray
    row_ids: RowIdArray

    @staticmethod
    def of(view: lance.LanceDataset, fragments: Iterable[int] | None = None) -> HeldRows:
        """Read the rows of some fragments of a view; None: all fragments."""
        chosen = None if fragments is None else [open_fragment(view, at) for at in fragments]
        ids, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        if chosen is None or chosen:
            scanner = view.scanner(columns=[SOURCE_ROW_ID], filter=IS_SET, with_row_id=True, fragments=chosen)
            for batch in scanner.to_batches():
                ids.append(batch.column(SOURCE_ROW_ID).to_numpy())
                rows.append(batch.column("_rowid").to_numpy().astype(np.int64))
        found = np.concatenate(ids)
        # A stable sort keeps the order of the rows that one source row became.
        order = np.argsort(found, kind="stable")
        return HeldRows(found[order], np.concatenate(rows)[order])

    def row_ids_of(self, source_ids: RowIdArray) -> RowIdArray:
        """Return the row id of the first row of each source row; -1 if the view holds none of it."""
        if not len(self.source_ids):
            return np.full(len(source_ids), -1)
        at = np.minimum(np.searchsorted(self.source_ids, source_ids), len(self.source_ids) - 1)
        return np.where(self.source_ids[at] == source_ids, self.row_ids[at], -1)


def shuffle_hashes(seed: int, row_ids: RowIdArray) -> HashArray:
    """Return the hash of each row id, which orders a shuffled query; the seed is 0 to 2**64 - 1."""
    return _hashed(seed, row_ids.copy())


def row_ids_of(seed: int, hashes: HashArray) -> RowIdArray:
    """Return the row ids for these hashes; overwrites the array."""
    start = _start(seed)
    inverse = np.uint64(pow(_GAMMA, -1, _WORD))
    for part in _parts(hashes):
        _unmix(part)
        part -= start
        part *= inverse
    return hashes.view(np.int64)


def order_row_ids(
    row_ids: RowIdArray, shuffle_seed: int | None, limit: int | None = None, offset: int = 0
) -> RowIdArray:
    """Return matching row ids in a query's order, cut to its limit and offset; overwrites the array."""
    stop = len(row_ids) if limit is None else min(offset + limit, len(row_ids))
    if offset >= stop:
        return row_ids[:0]
    keys: RowIdArray | HashArray = row_ids if shuffle_seed is None else _hashed(shuffle_seed, row_ids)
    if stop < len(keys):
        keys.partition(stop - 1)
        keys = keys[:stop].copy()
    keys.sort()
    chosen = keys[offset:]
    return chosen.view(np.int64) if shuffle_seed is None else row_ids_of(shuffle_seed, chosen.view(np.uint64))


def _hashed(seed: int, row_ids: RowIdArray) -> HashArray:
    hashes = row_ids.view(np.uint64)
    start = _start(seed)
    for part in _parts(hashes):
        part *= np.uint64(_GAMMA)
        part += start
        _mix(part)
    return hashes


def _start(seed: int) -> np.uint64:
    state = np.array([(seed + _GAMMA) % _WORD], np.uint64)
    _mix(state)
    return np.uint64((int(state[0]) + _GAMMA) % _WORD)


def _parts(values: HashArray) -> Iterator[HashArray]:
    """Split an array into views that fit into the processor's cache."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def _mix(values: HashArray) -> None:
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)


def _unmix(values: HashArray) -> None:
    values ^= (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    values *= np.uint64(pow(_SECOND, -1, _WORD))
    values ^= (values >> np.uint64(27)) ^ (values >> np.uint64(54))
    values *= np.uint64(pow(_FIRST, -1, _WORD))
    values ^= (values >> np.uint64(30)) ^ (values >> np.uint64(60))


def select_row_ids(
    dataset: lance.LanceDataset,
    where: str | None,
    shuffle_seed: int | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> Iterator[RowIdArray]:
    """Yield the row ids of a query in batches: filtered, ordered by row id or shuffled, then offset and limited.

    Row ids that are already in ascending order, as they are until rows are updated, are streamed. Otherwise all
    matching row ids are held in memory, 8 bytes each.

    Args:
        dataset: one version of the source; without stable row ids, row ids are row addresses.
        shuffle_seed: seed of the order; None: order by row id.
    """
    if limit == 0:
        return
    if shuffle_seed is None and _ascending(dataset):
        yield from _cut(_scan(dataset, where), limit, offset)
        return
    held = np.empty(dataset.count_rows(), np.int64)
    count = 0
    for part in _scan(dataset, where):
        held[count : count + len(part)] = part
        count += len(part)
    chosen = order_row_ids(held[:count], shuffle_seed, limit, offset)
    for start in range(0, len(chosen), _BATCH_ROWS):
        yield chosen[start : start + _BATCH_ROWS]


def _scan(dataset: lance.LanceDataset, where: str | None) -> Iterator[RowIdArray]:
    """Yield row ids in the table's order; without a filter, no column is read."""
    read_sql(where or "")
    scanner = dataset.scanner(
        columns=[], filter=where, with_row_id=True, batch_size=_BATCH_ROWS, scan_in_order=True, batch_readahead=4
    )
    for batch in scanner.to_batches():
        if batch.num_rows:
            yield batch.column("_rowid").to_numpy().view(np.int64)


def _ascending(dataset: lance.LanceDataset) -> bool:
    last = -1
    for part in _scan(dataset, None):
        if part[0] <= last or not bool(np.all(part[1:] > part[:-1])):
            return False
        last = int(part[-1])
    return True


def _cut(parts: Iterator[RowIdArray], limit: int | None, offset: int) -> Iterator[RowIdArray]:
    skip, left = offset, limit
    for part in parts:
        kept = part[skip:] if left is None else part[skip : skip + left]
        skip = max(0, skip - len(part))
        if len(kept):
            yield kept
        if left is not None:
            left -= len(kept)
            if left == 0:
                return


def create_view(
    location: TableLocation,
    schema: pa.Schema,
    row_ids: Iterable[RowIdArray],
    max_rows_per_fragment: int,
    source_version: int,
) -> None:
    """Create a view's table with its placeholders in one commit; if the process dies before it, there is no table.

    Only the system columns have data files: Lance returns NULL for columns without a file. `schema` has the other
    columns, nullable, and the schema metadata.
    """
    import lance
    from lance.fragment import write_fragments

    if location.exists():
        raise _taken(location)
    # Remove checkpoints of an earlier view of this name whose removal did not complete.
    for name in location.checkpoints.list_files():
        location.checkpoints.delete(name)
    parts = ([pa.array(part), pa.repeat(False, len(part))] for part in row_ids)
    batches = (pa.record_batch(part, schema=PLACEHOLDER_FIELDS) for part in parts)
    try:
        fragments = write_fragments(
            pa.RecordBatchReader.from_batches(PLACEHOLDER_FIELDS, batches),
            location.uri,
            schema=PLACEHOLDER_FIELDS,
            mode="create",
            max_rows_per_file=max_rows_per_fragment,
            enable_stable_row_ids=True,
            data_storage_version=DATA_STORAGE_VERSION,
            **pylance_access(location.options),
        )
    except OSError as error:
        if location.exists():
            raise _taken(location) from error
        raise
    fault_point("view.staged")
    if location.exists():
        raise _taken(location)
    whole = pa.schema([*PLACEHOLDER_FIELDS, *schema], metadata=schema.metadata)

    def commit() -> lance.LanceDataset:
        return lance.LanceDataset.commit(
            location.uri,
            lance.Transaction(
                read_version=0,
                operation=lance.LanceOperation.Overwrite(whole, fragments),
                transaction_properties={CREATED_FROM: str(source_version)},
            ),
            **location.access,
            enable_stable_row_ids=True,
        )

    made = create_new(f"view {location.name!r}", commit, location.exists)
    if made is None:
        raise _taken(location)
    if made.version != 1:
        # Another process created the table a moment ago; Lance has overwritten it instead of failing.
        location.open(made.version - 1).restore()  # type: ignore[no-untyped-call]
        raise _taken(location)


def _taken(location: TableLocation) -> InvalidInput:
    return InvalidInput(
        f"Table {location.name!r} already exists at {location.uri}. Choose another name for the view, or open the "
        f"existing table: db.open_table({location.name!r})."
    )
