"""The same values in another form: not sliced, of another layout, or in one batch."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.arrow_types import storage_type

_ROWS_PER_FILE = 1 << 20


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """The rows of a table as one record batch, schema metadata kept."""
    combined = table.combine_chunks().to_batches()
    if len(combined) == 1:
        return combined[0]
    if not combined:
        return pa.record_batch([pa.nulls(0, field.type) for field in table.schema], schema=table.schema)
    return pa.concat_batches(combined)


def unsliced(values: pa.Array) -> pa.Array:
    """Values as pylance can write them: copied where a nested array begins inside of its buffers, else as they are."""
    return pa.concat_arrays([values]) if _parts(values) and _is_sliced(values) else values


def without_slices(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows as pylance can write them."""
    return pa.record_batch([unsliced(column) for column in batch.columns], schema=batch.schema)


def cut_for_files(table: pa.Table, rows_per_file: int | None) -> pa.Table:
    """Rows in batches that pylance need not cut where a new file begins: it cannot write what it cuts either.

    Args:
        rows_per_file: most rows of a file; None: pylance's own number.
    """
    size = rows_per_file or _ROWS_PER_FILE
    parts = (table.slice(start, size) for start in range(0, len(table), size))
    batches = [without_slices(batch) for part in parts for batch in part.to_batches()]
    return pa.Table.from_batches(batches, schema=table.schema)


def _is_sliced(values: pa.Array) -> bool:
    # That values end before their buffers do is no trouble to pylance.
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
    """The same buffers without the extension types, which not every process knows."""
    return _retyped(values, storage_type(values.type))


def fitted(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Values as an array of another type that holds the same: extension types are put on, and layouts changed.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: the type does not hold them.
    """
    if values.type == data_type:
        return _retyped(values, data_type)
    stored, wanted = to_storage(values), storage_type(data_type)
    return _retyped(stored if stored.type == wanted else stored.cast(wanted), data_type)


def _retyped(values: pa.Array, data_type: pa.DataType) -> pa.Array:
    # Types are equal whatever the items of a list or map are called, and pylance insists on the names.
    same = values.type == data_type and str(values.type) == str(data_type)
    return values if same else pa.array(_Retyped(values, data_type))


class _Retyped:
    """The buffers of an array under a type of the same storage, to be taken up by :func:`pyarrow.array`."""

    def __init__(self, values: pa.Array, data_type: pa.DataType) -> None:
        self.values = values
        self.data_type = data_type

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self.data_type.__arrow_c_schema__(), self.values.__arrow_c_array__()[1]
