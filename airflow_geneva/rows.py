"""Rows as users hand them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

RowData: TypeAlias = "pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]"


def as_table(data: RowData, schema: pa.Schema | None) -> pa.Table:
    """Rows as an Arrow table.

    Args:
        data: an Arrow table or batch, or a list of dicts.
        schema: of the dicts; None: found from their values.
    """
    import pyarrow as pa

    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.table(data)
    return pa.Table.from_pylist(list(data), schema=schema)
