"""The columns that a load takes from its source, and the keys of the table, as both are joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import is_list, map_leaves, storage_type
from airflow_geneva.engine.lance_io.fragments import open_fragment
from airflow_geneva.engine.lance_io.rows import sound_columns
from airflow_geneva.engine.load.source import PART_BITS, LoadSource
from airflow_geneva.engine.load.stores import Options
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_NEAREST = {16: 1e-3, 32: 1e-6, 64: 1e-14}
"""The part of a decimal by which the nearest floating number may differ from it, by its bits."""
ADDRESS, ROW_ID, FOUND = "address", "row_id", "found"


@dataclass(frozen=True)
class SourceMapping:
    """A source with the columns that a load takes from it.

    Args:
        keys: the key columns: their types in the source, and those in the table.
        values: the columns to load, in the same way.
        on_duplicate: which row of several with one key counts: ``error``, ``first`` or ``last``.
    """

    source: LoadSource
    options: Options
    keys: Mapping[str, tuple[pa.DataType, pa.DataType]]
    values: Mapping[str, tuple[pa.DataType, pa.DataType]]
    on_duplicate: str

    @property
    def carried(self) -> list[pa.DataType]:
        """The types of the values during the join."""
        return [carried_as(kind) for _, kind in self.values.values()]

    def batches(self, part: int, with_values: bool = True) -> Iterator[pa.RecordBatch]:
        """Read a part: keys ``k0``..., values ``v0``... and the number of each row, without rows that lack a key."""
        schema = pa.schema([(name, kind) for name, (kind, _) in self._columns(with_values).items()])
        at = part << PART_BITS
        for batch in self.source.read(part, schema, self.options):
            yield self.carry(batch, at, with_values)
            at += batch.num_rows

    def carry(self, batch: pa.RecordBatch, at: int, with_values: bool = True) -> pa.RecordBatch:
        """Convert rows of the source, whose numbers begin with `at`, to the rows that `batches` yields."""
        columns = self._columns(with_values).items()
        batch = sound_columns(batch)
        converted = [_carried(batch.column(name), name, kind) for name, (_, kind) in columns]
        numbers = pa.array(np.arange(at, at + batch.num_rows))
        return pa.RecordBatch.from_arrays([*converted, numbers], schema=self.schema(with_values))

    def _columns(self, with_values: bool) -> dict[str, tuple[pa.DataType, pa.DataType]]:
        return {**self.keys, **(self.values if with_values else {})}

    def schema(self, with_values: bool = True) -> pa.Schema:
        keys = [(f"k{at}", carried_as(kind)) for at, (_, kind) in enumerate(self.keys.values())]
        values = [(f"v{at}", kind) for at, kind in enumerate(self.carried)] if with_values else []
        return pa.schema([*keys, *values, ("number", pa.int64())])

    def reader(self, with_values: bool = True) -> pa.RecordBatchReader:
        """Read all parts."""
        parts = range(self.source.parts())
        batches = (batch for part in parts for batch in self.batches(part, with_values))
        return pa.RecordBatchReader.from_batches(self.schema(with_values), batches)


def carried_as(kind: pa.DataType) -> pa.DataType:
    """Return the type that has the values of a type, and that engines which join know."""

    def leaf(one: pa.DataType) -> pa.DataType:
        one = one.value_type if pt.is_dictionary(one) else one
        if pt.is_duration(one):
            return pa.int64()  # DuckDB would read an interval of months, days and microseconds
        return pa.float32() if pt.is_float16(one) else one

    return map_leaves(storage_type(kind), leaf)


def _carried(values: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    """Convert values of the source to the type of the table's column, as the join carries it."""
    return _cast(_cast(values, name, kind), name, carried_as(kind))


def _cast(values: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    if values.type == kind:
        return values
    try:
        made = values.cast(kind)
        if _is_rounded(values, made):
            raise pa.ArrowInvalid("Casting would round values, or make them infinite")
    except pa.ArrowException as error:
        raise InvalidInput(
            f"Values of column {name!r} of the source, which are {values.type}, cannot be loaded as {kind}: {error}. "
            "Convert them before."
        ) from error
    return made


def _is_rounded(values: pa.Array, made: pa.Array) -> bool:
    """Whether a cast lost what Arrow does not refuse to lose: digits of a decimal, or the size of a floating number."""
    if is_list(values.type) and is_list(made.type):
        return _is_rounded(values.flatten(), made.flatten())
    if not pt.is_floating(values.type) or not len(values):
        return False
    if pt.is_decimal(made.type):
        exact, nearest = values.cast(pa.float64()), _NEAREST[values.type.bit_width]
        error = pc.abs(pc.subtract(made.cast(pa.float64()), exact))
        return bool(pc.any(pc.greater(error, pc.multiply(pc.abs(exact), nearest))).as_py())
    infinite = pt.is_floating(made.type) and made.type.bit_width < values.type.bit_width
    return infinite and bool(pc.any(pc.and_(pc.is_inf(made), pc.is_finite(values))).as_py())


@dataclass(frozen=True)
class TableKeys:
    """The keys of the selected rows of a table, for a check or a join; tasks of Spark get it, credentials too."""

    location: TableLocation
    version: int
    on: tuple[str, ...]
    fragments: tuple[int, ...]
    where: str | None

    def read(self, part: slice = slice(None)) -> pa.RecordBatchReader:
        """Read the keys of a part of the fragments, as `read_keys` does."""
        return read_keys(self.location.open(self.version), self.on, self.fragments[part], self.where)


def read_keys(
    dataset: lance.LanceDataset, on: Sequence[str], fragments: Sequence[int], where: str | None
) -> pa.RecordBatchReader:
    """Read the addresses, row ids and keys of the selected rows of fragments."""
    schema = key_schema([dataset.schema.field(name).type for name in on])

    def batches() -> Iterator[pa.RecordBatch]:
        chosen = [open_fragment(dataset, fragment) for fragment in fragments]
        if not chosen:
            return
        scanner = dataset.scanner(
            columns=list(on), filter=where, fragments=chosen, with_row_id=True, with_row_address=True
        )
        for batch in scanner.to_batches():
            address = batch.column("_rowaddr").to_numpy().astype(np.int64)
            ids = batch.column("_rowid").to_numpy().astype(np.int64)
            keys = [
                _cast(batch.column(name), name, field.type) for name, field in zip(on, list(schema)[2:], strict=True)
            ]
            yield pa.RecordBatch.from_arrays([pa.array(address), pa.array(ids), *keys], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def key_schema(types: Sequence[pa.DataType]) -> pa.Schema:
    keys = ((f"k{at}", carried_as(kind)) for at, kind in enumerate(types))
    return pa.schema([(ADDRESS, pa.int64()), (ROW_ID, pa.int64()), *keys])
