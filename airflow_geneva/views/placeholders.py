"""Create a view with placeholder rows, which hold a source row's id and no values yet."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from airflow_geneva.errors import InvalidInput
from airflow_geneva.faults import fault_point
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.views.definition import IS_SET, SOURCE_ROW_ID
from airflow_geneva.views.row_order import RowIdArray

PLACEHOLDER_FIELDS = pa.schema([pa.field(SOURCE_ROW_ID, pa.int64()), pa.field(IS_SET, pa.bool_())])
"""The system columns of a view. They come first, so their field ids are 0 and 1."""

CREATED_FROM = "geneva.view.created_from"
"""Transaction property of a view's first version: the source version that the placeholders were made from."""

DATA_STORAGE_VERSION = "2.2"


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
            storage_options=location.storage_options,
        )
    except OSError as error:
        if location.exists():
            raise _taken(location) from error
        raise
    fault_point("view.staged")
    if location.exists():
        raise _taken(location)
    whole = pa.schema([*PLACEHOLDER_FIELDS, *schema], metadata=schema.metadata)
    made = lance.LanceDataset.commit(
        location.uri,
        lance.Transaction(
            read_version=0,
            operation=lance.LanceOperation.Overwrite(whole, fragments),
            transaction_properties={CREATED_FROM: str(source_version)},
        ),
        storage_options=location.storage_options,
        enable_stable_row_ids=True,
    )
    if made.version != 1:
        # Another process created the table a moment ago; Lance then overwrites it instead of failing.
        location.open(made.version - 1).restore()  # type: ignore[no-untyped-call]
        raise _taken(location)


def _taken(location: TableLocation) -> InvalidInput:
    return InvalidInput(
        f"Table {location.name!r} already exists at {location.uri}. Choose another name for the view, or open the "
        f"existing table: db.open_table({location.name!r})."
    )
