"""Convert rows that a user passes to Arrow data that pylance can write."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import (
    castable,
    convert_array,
    convert_exactly,
    copy_sliced_columns,
    is_string,
)
from airflow_geneva.engine.lance_io.conflicts import create_new
from airflow_geneva.engine.lance_io.sound_arrays import sound, unsound_rows
from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_values
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.engine_errors import is_panic
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput, StorageError

if TYPE_CHECKING:
    import lance

_ROWS_PER_FILE = 1 << 20
_DIGITS = 76
_ABOUT_ROWS = ("LanceError(Schema)", "LanceError(Arrow)", "Append with different schema")
_RUST = re.compile(r",?( location:)? [\w./-]*/rust/\S+$")


class ArrowStream(Protocol):
    """An object with Arrow's stream interface, such as a pandas or polars data frame."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


RowData: TypeAlias = "pa.Table | pa.RecordBatch | ArrowStream | Mapping[str, Any] | Iterable[Mapping[str, Any]]"


def as_rows(
    data: RowData, schema: pa.Schema | None, rows_per_file: int | None = None
) -> pa.Table | pa.RecordBatchReader:
    """Convert rows to a form that pylance can write; a stream stays a stream.

    Args:
        schema: types of columns; the rows may have other types, and may lack columns.

    Raises:
        InvalidInput: the data are not rows, or do not fit the types.
    """
    if schema is not None and not isinstance(schema, pa.Schema):
        raise InvalidInput(
            f"schema={schema!r:.200} is no Arrow schema. Give one, such as pa.schema({{'n': pa.int64()}})."
        )
    try:
        rows = _rows_of(data, schema)
    except InvalidInput:
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"The rows cannot be converted to Arrow: {error}. Give a schema, or correct them."
        ) from error
    _check_names(rows.schema)
    stream = rows if isinstance(rows, pa.RecordBatchReader) else rows.to_reader()
    cut = _cut_for_files(stream, rows_per_file)
    return cut if stream is rows else cut.read_all()


def fit_schema(rows: pa.Table | pa.RecordBatchReader, schema: pa.Schema) -> pa.Table | pa.RecordBatchReader:
    """Give rows exactly the columns of a schema; columns that they lack are NULL.

    Raises:
        InvalidInput: a column is not in the schema, or its values do not fit; for a stream, while it is read.
    """
    if unknown := [name for name in rows.schema.names if name not in schema.names]:
        raise InvalidInput(f"The data have the columns {unknown}, which the schema lacks. Add them to the schema.")
    if rows.schema.equals(schema, check_metadata=True):
        return rows

    def fitted(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for field in schema:
            found = field.name in batch.schema.names
            values = batch.column(field.name) if found else pa.nulls(batch.num_rows, field.type)
            try:
                columns.append(_as_type(values, field.type))
            except (pa.ArrowException, TypeError) as error:
                raise InvalidInput(
                    f"Column {field.name!r} of type {values.type} does not fit {field.type} of the schema: {error}"
                ) from error
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    if isinstance(rows, pa.RecordBatchReader):
        return pa.RecordBatchReader.from_batches(schema, map(fitted, rows))
    return pa.Table.from_batches(map(fitted, rows.to_batches()), schema)


class RowErrors:
    """Raises the errors of rows that a library reads from a stream as they are; the library converts them to text.

    Args:
        kind: errors of other kinds are left to the library.
    """

    def __init__(self, kind: type[Exception] = Exception) -> None:
        self._kind = kind
        self._raised: list[Exception] = []

    def reader(self, schema: pa.Schema, rows: Iterable[pa.RecordBatch]) -> pa.RecordBatchReader:
        """Return the stream for the library, which must be read inside of the `with` block."""

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                yield from rows
            except self._kind as error:
                self._raised.append(error)
                raise

        return pa.RecordBatchReader.from_batches(schema, batches())

    def __enter__(self) -> RowErrors:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and self._raised:
            raise self._raised[0] from None


def write_rows(rows: pa.Table | pa.RecordBatchReader, location: TableLocation, **options: Any) -> None:
    """Write rows to a table with pylance; a table in a catalog must be declared there.

    Raises:
        InvalidInput: the rows do not fit the table; pylance's own message names lines of its source code.
    """
    import lance

    access = pylance_access(location.options)
    # In a catalog, pylance itself asks where the table lies.
    uri = None if "table_id" in access else location.uri
    try:
        with RowErrors() as errors:
            stream = errors.reader(rows.schema, rows) if isinstance(rows, pa.RecordBatchReader) else rows
            lance.write_dataset(stream, uri, **access, **options)
    except BaseException as error:  # a panic of pylance is no Exception
        if is_panic(error):
            raise StorageError(f"Cannot write rows to table {location.name!r}: pylance panicked: {error}") from error
        if not isinstance(error, OSError) or not str(error).startswith(_ABOUT_ROWS):
            raise
        why = _RUST.sub("", str(error))
        raise InvalidInput(f"The rows do not fit table {location.name!r}: {why}") from error


def table_in_memory(schema: pa.Schema, **options: Any) -> lance.LanceDataset:
    """Return an empty table, whose fields have the ids that Lance gives those of every new table with the schema."""
    import lance

    return lance.write_dataset(schema.empty_table(), "memory://", **options)


def create_with_rows(rows: pa.Table | pa.RecordBatchReader, location: TableLocation, new: bool, **options: Any) -> bool:
    """Create a table as `write_rows` does, again if the store refused it for a moment.

    Args:
        new: whether the table must not exist; else one that another writer created meanwhile is overwritten.

    Returns:
        False if another writer created it meanwhile.

    Raises:
        CommitConflict: the store refused every attempt.
        StorageError: the store refused the first attempt, which read the stream of rows.
    """
    attempts = iter([rows]) if isinstance(rows, pa.RecordBatchReader) else repeat(rows)

    def create() -> bool:
        unread = next(attempts, None)
        if unread is None:
            raise StorageError(
                f"Table {location.name!r} was not created: {location.uri} refused it, because another write to it was "
                "in progress, after the stream of rows had been read. Give the stream again, or an Arrow table."
            )
        write_rows(unread, location, **options)
        return True

    exists = location.exists if new else lambda: False
    return create_new(f"table {location.name!r}", create, exists) is not None


def differences(wanted: pa.Schema, found: pa.Schema) -> list[str]:
    """Describe which columns a table lacks, or has with another type."""
    return [
        f"{field.name}: no such column" if field.name not in found.names
        else f"{field.name}: {found.field(field.name).type}, not {field.type}"
        for field in wanted
        if field.name not in found.names or found.field(field.name).type != field.type
    ]  # fmt: skip


def _rows_of(data: Any, schema: pa.Schema | None) -> pa.Table | pa.RecordBatchReader:
    if isinstance(data, (pa.Table, pa.RecordBatchReader)):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.table(data)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(data, pandas.DataFrame):
        # An index without a name is only a row number.
        made = pa.Table.from_pandas(data, preserve_index=any(name is not None for name in data.index.names))
        return _named_columns(dict(zip(made.column_names, made.columns, strict=True)), schema)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data)
    if isinstance(data, Mapping):
        return _named_columns(data, schema)
    rows = list(data) if isinstance(data, Iterable) and not isinstance(data, (str, bytes)) else [data]
    if not all(isinstance(row, Mapping) for row in rows):
        raise InvalidInput(
            f"Data of type {type(data).__name__} are no rows. Give an Arrow table or a stream of batches, a data frame "
            "of pandas or polars, a dict of columns, or a list of dicts."
        )
    names = dict.fromkeys([*(schema.names if schema else ()), *(name for row in rows for name in row)])
    return _named_columns({name: [row.get(name) for row in rows] for name in names}, schema)


def _named_columns(columns: Mapping[str, Any], schema: pa.Schema | None) -> pa.Table:
    """Make a table of columns, with the fields of a schema where it has them."""
    known = {} if schema is None else {field.name: field for field in schema}
    arrays = {str(name): _column(str(name), values, known.get(name)) for name, values in columns.items()}
    fields = [known.get(name, pa.field(name, array.type)) for name, array in arrays.items()]
    return pa.Table.from_arrays(list(arrays.values()), schema=pa.schema(fields, schema and schema.metadata))


def _column(name: str, values: Any, field: pa.Field | None) -> pa.Array | pa.ChunkedArray:
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        return _converted(name, values, None if field is None else field.type)
    if field is None or values.type == field.type:
        return values
    found = _sound_column(name, values)
    if isinstance(found, pa.Array):
        return _as_type(found, field.type)
    return pa.chunked_array([_as_type(chunk, field.type) for chunk in found.chunks], field.type)


def _converted(name: str, values: Any, kind: pa.DataType | None) -> pa.Array:
    """Convert values to a type, or to the one that pyarrow finds for them; refuse what a conversion would change."""
    found: pa.Array | None = None
    if isinstance(values, Iterable) and not _is_array(values) and not isinstance(values, (list, str, bytes, Mapping)):
        values = list(values)
    if kind is None:
        _check_decimals(values)
        found = pa.array(values)
        if not found.type.num_fields and not pt.is_temporal(found.type):
            return found
        kind = found.type
    if not isinstance(values, list):
        if getattr(getattr(values, "dtype", None), "kind", "") != "O":
            return _as_type(pa.array(values), kind)
        # pandas marks missing objects by NaN.
        values = [None if isinstance(value, float) and value != value else value for value in values]
    if pt.is_integer(kind):
        with suppress(pa.ArrowException, TypeError, OverflowError):
            found = pa.array(values)
        if found is not None and pt.is_floating(found.type):
            return found.cast(kind)  # numbers of JSON, without a fraction
    try:
        return array_from_values(values, kind)
    except OutputMismatch as mismatch:
        where = "" if mismatch.row_index is None else f", row {mismatch.row_index}"
        raise pa.ArrowInvalid(f"column {name!r}{where}: {mismatch}") from mismatch


def _is_array(values: Any) -> bool:
    return any(hasattr(values, name) for name in ("dtype", "__arrow_c_array__", "__arrow_c_stream__"))


def _check_decimals(values: Any) -> None:
    """Refuse decimals on which pyarrow would end the process when it looks for their type."""
    decimals = [value for value in values if isinstance(value, Decimal)] if isinstance(values, list) else []
    if any(abs(value.adjusted()) > _DIGITS for value in decimals):
        raise pa.ArrowInvalid(f"a decimal has more than {_DIGITS} digits")


def _as_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert an array to a type; pyarrow's error if values would change."""
    found = values.type
    if castable(found, kind):
        return convert_exactly(values, kind)
    zones = pt.is_timestamp(found) and pt.is_timestamp(kind)
    if zones or (is_string(found) and pt.is_decimal(kind)):  # of text, pyarrow makes other decimals
        raise pa.ArrowInvalid(f"values of {found} are not {kind}{', which differs by its time zone' if zones else ''}")
    made = convert_array(values, kind)
    if not is_string(found) and not convert_array(made, found).equals(values):
        raise pa.ArrowInvalid(f"values of {found} would change as {kind}")
    return made


def _check_names(schema: pa.Schema) -> None:
    if "" in schema.names:
        raise InvalidInput(
            f"Column {schema.names.index('') + 1} of the rows has the name '', by which Lance cannot read it. Give it "
            "another name."
        )


def sound_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows that pylance can write and read back; `InvalidInput` for arrays that are not valid."""
    columns = [_sound_column(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    return pa.record_batch(columns, schema=batch.schema)


def _sound_column(name: str, values: Any) -> Any:
    try:
        return sound(values)
    except pa.ArrowInvalid as error:
        chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        found = [rows[0] for chunk in chunks if len(rows := unsound_rows(chunk))]
        where = f", first in row {found[0]} of its batch" if found else ""
        raise InvalidInput(f"The array of column {name!r} is not valid{where}: {error}. Correct it.") from error


def _cut_for_files(rows: pa.RecordBatchReader, rows_per_file: int | None) -> pa.RecordBatchReader:
    """Split batches where pylance starts a new file: pylance fails to write batches that it has to slice itself."""
    size = _ROWS_PER_FILE if rows_per_file is None else rows_per_file
    if not isinstance(size, int) or size < 1:
        raise InvalidInput(f"max_rows_per_file={size!r} is not valid: give a number of rows, at least 1.")

    def batches() -> Iterator[pa.RecordBatch]:
        room = size
        for batch in map(sound_columns, rows):
            while batch.num_rows > room:
                yield copy_sliced_columns(batch.slice(0, room))
                batch, room = batch.slice(room), size
            room -= batch.num_rows
            yield copy_sliced_columns(batch)

    return pa.RecordBatchReader.from_batches(rows.schema, batches())
