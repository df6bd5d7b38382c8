"""Find values that no job of their table computed: of a copy, a clone, a backup, or another writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.provenance import ADOPTED
from airflow_geneva.engine.choices import OnUnknownValues, undecided
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.blobs import is_blob, scan_descriptors
from airflow_geneva.engine.lance_io.filters import selected_offsets
from airflow_geneva.engine.lance_io.fragments import OFFSET_BITS, open_fragment
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.storage.engine_errors import lacks_data_file
from airflow_geneva.engine.views.definition import IS_SET
from airflow_geneva.errors import UnknownValues

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.plan.model import BackfillSpec
    from airflow_geneva.engine.udf.settings import UdfDefinition
    from airflow_geneva.engine.views.state import CommittedViewState

_Find: TypeAlias = "Callable[[lance.LanceDataset, list[int]], dict[int, Ranges]]"
"""Returns the rows of some fragments that hold a value."""

_AT_ONCE = 64
"""Fragments of which one scan reads the column."""
_ENOUGH = 1_000_000
"""Rows with a value after which a plan that stops counts no more."""


def filled_rows(
    dataset: lance.LanceDataset, columns: Sequence[str], unknown: Mapping[int, Ranges]
) -> Iterator[tuple[int, Ranges]]:
    """Yield fragments with those of the given rows in which one of the columns is not NULL; read these columns only.

    Rows whose values lie in a data file that is gone have none.
    """
    filled = " OR ".join(f"`{name}` IS NOT NULL" for name in columns)
    find: _Find = partial(selected_offsets, where=filled)
    if dataset.data_storage_version == "2.0" and any(is_blob(dataset.schema.field(name)) for name in columns):
        find = partial(_filled_blobs, columns=columns)
    ids = list(unknown)
    for begin in range(0, len(ids), _AT_ONCE):
        for fragment, rows in _selected(dataset, ids[begin : begin + _AT_ONCE], find).items():
            if there := rows & unknown[fragment]:
                yield fragment, there


def _selected(dataset: lance.LanceDataset, fragment_ids: list[int], find: _Find) -> dict[int, Ranges]:
    try:
        return find(dataset, fragment_ids)
    except Exception as error:
        if not lacks_data_file(error):
            raise
        if len(fragment_ids) == 1:
            return {}
        return {at: rows for one in fragment_ids for at, rows in _selected(dataset, [one], find).items()}


def _filled_blobs(dataset: lance.LanceDataset, fragment_ids: list[int], columns: Sequence[str]) -> dict[int, Ranges]:
    """Return the rows with a value; a descriptor of storage version 2.0 says NULL by a position without a size."""
    fragments = [open_fragment(dataset, one) for one in fragment_ids]
    rows = scan_descriptors(dataset, list(columns), fragments=fragments, with_row_address=True).to_table()
    filled = np.zeros(rows.num_rows, np.bool_)
    for name in columns:
        values = rows.column(name).combine_chunks()
        there = values.is_valid()
        if is_blob(dataset.schema.field(name)):
            empty = pc.and_(pc.equal(values.field("size"), 0), pc.not_equal(values.field("position"), 0))
            there = pc.and_(there, pc.invert(empty))
        filled |= pc.fill_null(there, False).to_numpy(zero_copy_only=False)
    at = rows.column("_rowaddr").to_numpy().astype(np.int64)[filled]
    return {int(one): Ranges.from_offsets(at[at >> 32 == one] & OFFSET_BITS) for one in np.unique(at >> 32)}


def check_unknown_values(spec: BackfillSpec, filled: Iterator[tuple[int, Ranges]], own: UdfDefinition | None) -> None:
    """Stop a backfill before it replaces values whose origin is recorded in no ledger of the table.

    Args:
        filled: the rows that are due and hold a value, by fragment.
        own: the column's definition.
    """
    rows = 0
    for _, there in filled:
        rows += len(there)
        if rows >= _ENOUGH:
            break
    if not rows:
        return
    code = f"version {spec.udf_version}"
    if own is not None and own.name == spec.udf_name and own.version != spec.udf_version:
        code = f"version {own.version} by its definition, and {code} by the code of today"
    elif own is not None and own.version == spec.udf_version:
        code += ", as in its definition"
    raise UnknownValues(
        f"Column {spec.column!r} of table {spec.table_name!r} holds values that no job of this table computed: "
        f"{'at least ' if rows >= _ENOUGH else ''}{counted(rows, 'row')}. So it is in a clone, a copy of rows, a "
        f"backup without _checkpoints, and if another program wrote the values. UDF {spec.udf_name!r} is {code}. "
        'Keep the column as it is, as if this code had computed it: on_unknown_values="adopt". Keep the values, and '
        'compute the rows that are NULL: "fill". Compute these rows again: "recompute". '
        "db.copy_table(...) makes a copy of a table together with what its jobs recorded."
    )


def answers_unknown_view(view_state: CommittedViewState, view: str, on_unknown_values: str) -> bool:
    """Return whether to adopt the rows of a view that lacks the record of what they were computed from.

    Raises:
        UnknownValues: the user did not say what to do with the rows.
    """
    match OnUnknownValues(on_unknown_values):
        case OnUnknownValues.ADOPT:
            return True
        case OnUnknownValues.RECOMPUTE | OnUnknownValues.FILL:  # a request for a view has no `fill`
            return False
        case OnUnknownValues.ERROR:
            pass
        case other:
            undecided(other)
    rows = view_state.dataset.count_rows(filter=IS_SET)
    if not rows:
        return False
    raise UnknownValues(
        f"View {view!r} shows {counted(rows, 'row')}, and beside it nothing says from which rows of its source they "
        "were computed. So it is in a clone, and in a backup without _checkpoints. Keep the rows, if they are those "
        f'of its query at version {view_state.newest.source_version} of the source: on_unknown_values="adopt". Compute '
        'all again: "recompute". db.copy_table(...) makes a copy together with what was recorded.'
    )


def cannot_adopt(view: str, why: str) -> UnknownValues:
    return UnknownValues(
        f"The rows of view {view!r} cannot be adopted: {why}. Copy _checkpoints/state from the view that it was copied "
        'from, or compute all rows again with on_unknown_values="recompute".'
    )


def adopted_note(rows: int, version: str) -> str:
    many = counted(rows, "row")
    return f"{ADOPTED}: {many}, with values that no job of this table computed, count as version {version}."
