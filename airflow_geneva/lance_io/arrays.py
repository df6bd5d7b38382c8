"""Convert Arrow values without changing them: copy slices, change the layout, combine batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.lance_io.arrow_types import storage_type

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_FILE = 1 << 20


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """Combine a table into one record batch and keep its schema metadata."""
    combined = table.combine_chunks().to_batches()
    if len(combined) == 1:
        return combined[0]
    if not combined:
        return pa.record_batch([pa.nulls(0, field.type) for field in table.schema], schema=table.schema)
    return pa.concat_batches(combined)


def copy_if_sliced(values: pa.Array) -> pa.Array:
    """Copy a nested array that starts inside its buffers, because pylance cannot write it; return others unchanged."""
    return pa.concat_arrays([values]) if _parts(values) and _is_sliced(values) else values


def copy_sliced_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Apply `copy_if_sliced` to every column of a batch."""
    return pa.record_batch([copy_if_sliced(column) for column in batch.columns], schema=batch.schema)


def cut_for_files(table: pa.Table, rows_per_file: int | None) -> pa.Table:
    """Split a table into batches that end where pylance starts a new file.

    pylance cannot write a batch that it has to slice itself.

    Args:
        rows_per_file: most rows in a file; None: pylance's default.
    """
    size = rows_per_file or _ROWS_PER_FILE
    parts = (table.slice(start, size) for start in range(0, len(table), size))
    batches = [copy_sliced_columns(batch) for part in parts for batch in part.to_batches()]
    return pa.Table.from_batches(batches, schema=table.schema)


def _is_sliced(values: pa.Array) -> bool:
    # pylance handles values that end before their buffers do.
    if values.offset:
        return True
    if len(values) and hasattr(values, "offsets") and values.offsets[0].as_py():
        return True
    return any(_is_sliced(part) for part in _parts(values))


def _parts(values: pa.Array) -> list[pa.Array]:
    found = values.type
    if isinstance(found, pa.BaseExtensionType):
        return _parts(values.storage)
    if pt.is_struct(found):
        return [values.field(at) for at in range(found.num_fields)]
    if pt.is_map(found):
        return [values.keys, values.items]
    if pt.is_list(found) or pt.is_large_list(found) or pt.is_fixed_size_list(found):
        return [values.values]
    return []


def to_storage(values: pa.Array) -> pa.Array:
    """Remove extension types, which not every process has registered, and keep the buffers."""
    return _retyped(values, storage_type(values.type))


def convert_array(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Convert an array to another type that holds the same values, for example to an extension type or another layout.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: the type cannot hold the values.
    """
    if values.type == data_type:
        return _retyped(values, data_type)
    stored, wanted = to_storage(values), storage_type(data_type)
    return _retyped(stored if stored.type == wanted else stored.cast(wanted), data_type)


def _retyped(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    # Arrow ignores the names of list and map items when it compares types; pylance does not.
    same = values.type == data_type and str(values.type) == str(data_type)
    return values if same else pa.array(_Retyped(values, data_type))


class _Retyped:
    """Give :func:`pyarrow.array` the buffers of an array with another type of the same storage."""

    def __init__(self, values: pa.Array, data_type: pa.DataType) -> None:
        self.values = values
        self.data_type = data_type

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self.data_type.__arrow_c_schema__(), self.values.__arrow_c_array__()[1]


RowData: TypeAlias = "pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]"


def as_table(data: RowData, schema: pa.Schema | None, rows_per_file: int | None = None) -> pa.Table:
    """Return rows as an Arrow table that pylance can write.

    Args:
        data: an Arrow table or batch, or a list of dicts.
        schema: schema of the dicts; None: inferred from their values.
        rows_per_file: maximum rows per data file; None: pylance's default.
    """
    import pyarrow as pa

    if isinstance(data, pa.Table):
        rows = data
    elif isinstance(data, pa.RecordBatch):
        rows = pa.table(data)
    else:
        rows = pa.Table.from_pylist(list(data), schema=schema)
    return cut_for_files(rows, rows_per_file)
