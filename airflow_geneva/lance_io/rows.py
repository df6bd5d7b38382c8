"""Convert the user's rows to Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

RowData: TypeAlias = "pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]"


def as_table(data: RowData, schema: pa.Schema | None, rows_per_file: int | None = None) -> pa.Table:
    """Return rows as an Arrow table that pylance can write.

    Args:
        data: an Arrow table or batch, or a list of dicts.
        schema: schema of the dicts; None: inferred from their values.
        rows_per_file: maximum rows per data file; None: pylance's default.
    """
    import pyarrow as pa

    from airflow_geneva.lance_io.arrays import cut_for_files

    if isinstance(data, pa.Table):
        rows = data
    elif isinstance(data, pa.RecordBatch):
        rows = pa.table(data)
    else:
        rows = pa.Table.from_pylist(list(data), schema=schema)
    return cut_for_files(rows, rows_per_file)
