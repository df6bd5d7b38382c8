"""The table `groups` of a view of groups: create it, and replace the rows of touched groups in one commit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.commit.view_swap import replace_rows, without_rows
from airflow_geneva.engine.lance_io.arrays import DATA_STORAGE_VERSION
from airflow_geneva.engine.lance_io.conflicts import create_new
from airflow_geneva.engine.lance_io.data_file import DataFileWriter
from airflow_geneva.engine.lance_io.fragments import stored_row_ids
from airflow_geneva.engine.lance_io.indexes import Index
from airflow_geneva.engine.lance_io.pylance_internals import count_fragments
from airflow_geneva.engine.lance_io.row_ranges import Offsets
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.group_tables import GroupsCommit
from airflow_geneva.engine.views.rows import RowIdArray

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.commit")

_ROWS_PER_FILE = 1 << 20
_MOST_FRAGMENTS = 32
_INDEXED_ROWS = 200_000
_UNINDEXED_PART = 4


def create_groups(location: TableLocation, schema: pa.Schema) -> lance.LanceDataset:
    """Create the table without rows, unless it exists; return its newest version."""
    import lance

    def create() -> lance.LanceDataset:
        return lance.write_dataset(
            schema.empty_table(),
            location.uri,
            mode="create",
            enable_stable_row_ids=True,
            data_storage_version=DATA_STORAGE_VERSION,
            **pylance_access(location.options),
        )

    if not location.exists():
        create_new(f"table {location.name!r}", create, location.exists)
    return location.open()


def without_groups(schema: pa.Schema) -> lance.LanceDataset:
    """Return a table without rows that is in memory only, for a plan of the first refresh."""
    import lance

    return lance.write_dataset(schema.empty_table(), "memory://", enable_stable_row_ids=True)


def replace_groups(
    location: TableLocation,
    groups: lance.LanceDataset,
    gone: Mapping[int, Offsets],
    rows: pa.Table,
    row_ids: RowIdArray,
    commit: GroupsCommit,
) -> lance.LanceDataset:
    """Remove rows and add others in one commit, which conflicts with every other one; return the new version.

    Args:
        groups: the newest version.
        gone: the addresses of the rows to remove, by fragment.
        row_ids: the ids of the first rows, which the removed rows had; the others get new ids.

    Raises:
        OSError: another refresh committed meanwhile; see `is_conflict`.
    """
    import lance

    planned = PlannedTable.of(location, groups).stamped(location.options)
    removed, updated, anchor = without_rows(groups, gone, Counter())
    all_rows = len(removed) == len(groups.get_fragments())

    def transaction() -> lance.Transaction:
        added = list(_written(groups, rows, row_ids))
        if all_rows:
            operation: Any = lance.LanceOperation.Overwrite(groups.lance_schema, added)
        else:
            operation = replace_rows(groups, removed, updated + anchor, added)
        return lance.Transaction(groups.version, operation, transaction_properties=commit.properties)

    return planned.commit_transaction(
        location.options, transaction, before="groups.before", after="groups.after", at_once=all_rows
    )


def _written(groups: lance.LanceDataset, rows: pa.Table, row_ids: RowIdArray) -> Iterator[Any]:
    from lance.fragment import DataFile, FragmentMetadata

    for at in range(0, rows.num_rows, _ROWS_PER_FILE):
        part = rows.slice(at, _ROWS_PER_FILE)
        writer = DataFileWriter(groups, part.schema)
        for batch in part.combine_chunks().to_batches():
            writer.write(batch)
        ids, files = stored_row_ids(row_ids[at : at + _ROWS_PER_FILE]), [DataFile.create(groups, writer.finish())]
        yield FragmentMetadata(id=0, files=files, physical_rows=part.num_rows, row_id_meta=ids)


def has_many_fragments(table: lance.LanceDataset) -> bool:
    return count_fragments(table) > _MOST_FRAGMENTS


def compact(location: TableLocation) -> None:
    """Write the rows of a hidden table into few fragments; rows keep their ids. No user compacts it."""
    with _unimportant(location, "compacted"):
        location.open().optimize.compact_files(target_rows_per_fragment=_ROWS_PER_FILE)


def index_column(location: TableLocation, column: str) -> None:
    """Index a column of a large hidden table; bring the index up to date when many rows are not in it."""
    with _unimportant(location, "indexed"):
        table = location.open()
        found = [index for index in Index.read(table) if index.columns == (column,)]
        if not found and table.count_rows() >= _INDEXED_ROWS:
            table.create_scalar_index(column, "BTREE")
        for index in found:
            if index.unindexed_rows * _UNINDEXED_PART > index.rows:
                table.optimize.optimize_indices(index_names=[index.name], **index.options_to_update())


@contextmanager
def _unimportant(location: TableLocation, what: str) -> Iterator[None]:
    """Log an error of pylance: results are right without, and the next refresh tries again."""
    try:
        with engine_errors():
            yield
    except EngineError as error:
        logger.warning("Table %r could not be %s: %s", location.name, what, error)


def by_fragment(addresses: Offsets) -> dict[int, Offsets]:
    """Return the addresses of rows by fragment."""
    places = addresses >> 32
    return {int(at): addresses[places == at] for at in np.unique(places)}
