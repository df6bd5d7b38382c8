"""Join the keys of a table with a source in this process, by DuckDB, which spills to disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import map_leaves, storage_type
from airflow_geneva.engine.lance_io.fragments import open_fragment
from airflow_geneva.engine.load.source import PART_BITS, LoadSource, Options
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

ADDRESS, ROW_ID, FOUND = "address", "row_id", "found"
_MEMORY = "400MB"
_SHOWN = 5
_BATCH_ROWS = 8_192


@dataclass(frozen=True)
class Delivery:
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
        asked = {**self.keys, **(self.values if with_values else {})}
        schema = pa.schema([(name, kind) for name, (kind, _) in asked.items()])
        at = part << PART_BITS
        for batch in self.source.read(part, schema, self.options):
            keys = [_cast(batch.column(name), name, kind) for name, (_, kind) in self.keys.items()]
            values = [
                _cast(_cast(batch.column(name), name, kind), name, carried)
                for (name, (_, kind)), carried in zip(self.values.items(), self.carried, strict=True)
            ] if with_values else []  # fmt: skip
            numbers = pa.array(range(at, at + batch.num_rows), pa.int64())
            at += batch.num_rows
            yield pa.RecordBatch.from_arrays([*keys, *values, numbers], schema=self.schema(with_values))

    def schema(self, with_values: bool = True) -> pa.Schema:
        keys = [(f"k{at}", kind) for at, (_, kind) in enumerate(self.keys.values())]
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
        return pa.float32() if pt.is_float16(one) else one

    return map_leaves(storage_type(kind), leaf)


def _cast(values: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    if values.type == kind:
        return values
    try:
        return values.cast(kind)
    except pa.ArrowException as error:
        raise InvalidInput(
            f"Values of column {name!r} of the source, which are {values.type}, cannot be loaded as {kind}: {error}. "
            "Convert them before."
        ) from error


@contextmanager
def _connection() -> Iterator[Any]:
    try:
        import duckdb
    except ImportError:
        raise InvalidInput(
            "Loading values in this process needs DuckDB: pip install 'airflow-geneva[load]'. On Spark it does not."
        ) from None
    with tempfile.TemporaryDirectory(prefix="geneva-join-") as folder:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": _MEMORY, "temp_directory": folder, "preserve_insertion_order": False, "threads": 2
        }  # fmt: skip
        connection = duckdb.connect(":memory:", config=config)
        try:
            yield connection
        except duckdb.Error as error:
            raise InvalidInput(
                f"The keys and the source cannot be joined in this process: {error}. Use Spark."
            ) from error
        finally:
            connection.close()


def check_duplicates(delivery: Delivery, keys: Sequence[str]) -> int:
    """Return the number of keys that several rows of the source have.

    Raises:
        InvalidInput: there are any, and ``on_duplicate`` is ``error``; the message lists some.
    """
    columns = ", ".join(f"k{at}" for at in range(len(keys)))
    given = " AND ".join(f"k{at} IS NOT NULL" for at in range(len(keys)))
    with _connection() as connection:
        connection.register("source", delivery.reader(with_values=False))
        connection.execute(
            f"CREATE TEMP TABLE twice AS SELECT {columns}, count(*) AS n FROM source WHERE {given} "  # noqa: S608
            f"GROUP BY {columns} HAVING count(*) > 1"
        )
        (count,) = connection.execute("SELECT count(*) FROM twice").fetchone()
        shown = connection.execute(f"SELECT * FROM twice ORDER BY ALL LIMIT {_SHOWN}").fetchall()  # noqa: S608
    if count and delivery.on_duplicate == "error":
        listed = "; ".join(
            f"{', '.join(f'{k}={v!r}' for k, v in zip(keys, row, strict=False))} ({row[-1]} rows)" for row in shown
        )
        more = f"; and {count - len(shown):,} more" if count > len(shown) else ""
        raise InvalidInput(
            f"Several rows of {delivery.source.name} have the same key: {listed}{more}. Remove them, or say which one "
            'counts: on_duplicate="first" or "last".'
        )
    return int(count)


def check_missing(delivery: Delivery, keys: Sequence[str], table: Callable[[], pa.RecordBatchReader]) -> None:
    """Raise `InvalidInput`, with some keys, if rows of the table have keys that the source lacks."""
    same = " AND ".join(f"t.k{at} = s.k{at}" for at in range(len(keys)))
    with _connection() as connection:
        connection.register("s", delivery.reader(with_values=False))
        connection.register("t", table())
        connection.execute(
            f"CREATE TEMP TABLE missing AS SELECT * FROM t WHERE NOT EXISTS (SELECT 1 FROM s WHERE {same})"  # noqa: S608
        )
        (count,) = connection.execute("SELECT count(*) FROM missing").fetchone()
        columns = ", ".join(f"k{at}" for at in range(len(keys)))
        shown = connection.execute(f"SELECT {columns} FROM missing ORDER BY ALL LIMIT {_SHOWN}").fetchall()  # noqa: S608
    if count:
        listed = "; ".join(", ".join(f"{k}={v!r}" for k, v in zip(keys, row, strict=True)) for row in shown)
        raise InvalidInput(
            f"{count:,} rows of the table have keys that {delivery.source.name} lacks, such as {listed}. Complete it, "
            'or let these rows keep their values: on_missing="keep", or lose them: on_missing="null".'
        )


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
            keys = [batch.column(name) for name in on]
            yield pa.RecordBatch.from_arrays([pa.array(address), pa.array(ids), *keys], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def key_schema(types: Sequence[pa.DataType]) -> pa.Schema:
    return pa.schema(
        [(ADDRESS, pa.int64()), (ROW_ID, pa.int64()), *((f"k{at}", kind) for at, kind in enumerate(types))]
    )


def join_inline(delivery: Delivery, table: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the table in the order of their addresses, with the source's values ``v0``... of their keys.

    Args:
        table: for each row its address, its row id and its keys ``k0``...
    """
    same = " AND ".join(f"t.k{at} = s.k{at}" for at in range(len(delivery.keys)))
    values = "".join(f", s.v{at}" for at in range(len(delivery.values)))
    keys = ", ".join(f"k{at}" for at in range(len(delivery.keys)))
    order = {"first": "ASC", "last": "DESC"}.get(delivery.on_duplicate)
    with _connection() as connection:
        connection.register("source", delivery.reader())
        connection.register("t", table)
        only = f" QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY number {order}) = 1" if order else ""
        found = connection.sql(
            f"SELECT t.{ADDRESS}, t.{ROW_ID}, s.number IS NOT NULL AS {FOUND}{values} FROM t LEFT JOIN "  # noqa: S608
            f"(SELECT * FROM source{only}) s ON {same} ORDER BY t.{ADDRESS}"
        )
        yield from (
            found.to_arrow_reader(_BATCH_ROWS)
            if hasattr(found, "to_arrow_reader")
            else found.fetch_record_batch(_BATCH_ROWS)
        )
