"""Join the keys of a table with a source in this process, by DuckDB, which spills to disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.choices import OnDuplicate, undecided
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.rows import RowErrors, write_rows
from airflow_geneva.engine.load.checks import SHOWN, Examples
from airflow_geneva.engine.load.delivery import ADDRESS, FOUND, ROW_ID, SourceMapping, TableKeys
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import GenevaError, InvalidInput

if TYPE_CHECKING:
    import lance

_MEMORY = "400MB"
_BATCH_ROWS = 8_192
_TAKE_BYTES = 16 << 20


@dataclass(frozen=True)
class _Connection:
    duck: Any
    errors: RowErrors

    def register(self, name: str, rows: pa.RecordBatchReader) -> None:
        self.duck.register(name, self.errors.reader(rows.schema, rows))


@contextmanager
def _connection() -> Iterator[_Connection]:
    try:
        import duckdb
    except ImportError:
        raise InvalidInput(
            "Checking and joining keys in this process need DuckDB: pip install 'airflow-geneva[load]'. Outside of "
            'Airflow, runner="spark" does both on Spark, without it.'
        ) from None
    with tempfile.TemporaryDirectory(prefix="geneva-join-") as folder:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": _MEMORY, "temp_directory": folder, "preserve_insertion_order": False, "threads": 2
        }  # fmt: skip
        connection = duckdb.connect(":memory:", config=config)
        try:
            with RowErrors(GenevaError) as errors:
                yield _Connection(connection, errors)
        except duckdb.Error as error:
            raise InvalidInput(
                f"The keys and the source cannot be joined in this process: {error}. Use Spark."
            ) from error
        finally:
            connection.close()


class DuckSearch:
    """Finds keys that do not fit by DuckDB, in this process."""

    def find_duplicates(self, delivery: SourceMapping) -> Examples:
        columns = _keys(delivery)
        given = " AND ".join(f"{name} IS NOT NULL" for name in columns.split(", "))
        with _connection() as connection:
            connection.register("source", delivery.reader(with_values=False))
            return _examples(
                connection,
                f"SELECT {columns}, count(*) AS n FROM source WHERE {given} "  # noqa: S608
                f"GROUP BY {columns} HAVING count(*) > 1",
                delivery,
            )

    def find_missing(self, delivery: SourceMapping, table: TableKeys) -> Examples:
        with _connection() as connection:
            connection.register("s", delivery.reader(with_values=False))
            connection.register("t", table.read())
            query = f"SELECT {_keys(delivery)} FROM t WHERE NOT EXISTS (SELECT 1 FROM s WHERE {_same(delivery)})"  # noqa: S608
            return _examples(connection, query, delivery)


def _keys(delivery: SourceMapping) -> str:
    return ", ".join(f"k{at}" for at in range(len(delivery.keys)))


def _same(delivery: SourceMapping) -> str:
    return " AND ".join(f"t.k{at} = s.k{at}" for at in range(len(delivery.keys)))


def _examples(connection: _Connection, query: str, delivery: SourceMapping) -> Examples:
    connection.duck.execute(f"CREATE TEMP TABLE found AS {query}")
    [(count,)] = connection.duck.execute("SELECT count(*) FROM found").fetchall()
    shown = connection.duck.sql(f"SELECT * FROM found ORDER BY ALL LIMIT {SHOWN}")  # noqa: S608
    return Examples.of(int(count), _reader(shown, SHOWN).read_all(), delivery)


def _reader(found: Any, rows: int) -> pa.RecordBatchReader:
    """Return the rows of a relation of DuckDB 1 or 2, in batches of a number of rows."""
    return found.to_arrow_reader(rows) if hasattr(found, "to_arrow_reader") else found.fetch_record_batch(rows)


def join_inline(delivery: SourceMapping, table: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the table in the order of their addresses, with the source's values ``v0``... of their keys.

    DuckDB joins and sorts keys and positions only. The values lie in a Lance dataset on disk and are taken by position,
    because DuckDB cannot sort wide rows within its limit of memory.

    Args:
        table: for each row its address, its row id and its keys ``k0``...
    """
    keys = _keys(delivery)
    match OnDuplicate(delivery.on_duplicate):
        case OnDuplicate.FIRST | OnDuplicate.ERROR:  # no key has several rows, else the plan had stopped
            counts = "min"
        case OnDuplicate.LAST:
            counts = "max"
        case other:
            undecided(other)
    with tempfile.TemporaryDirectory(prefix="geneva-values-") as folder, _connection() as connection:
        stored = _store(delivery.reader(), folder)
        connection.register("source", _positions(stored, len(delivery.keys)))
        connection.register("t", table)
        found = connection.duck.sql(
            f"SELECT t.{ADDRESS}, t.{ROW_ID}, s.position FROM t LEFT JOIN "  # noqa: S608
            f"(SELECT {keys}, {counts}(position) AS position FROM source GROUP BY {keys}) s ON {_same(delivery)} "
            f"ORDER BY t.{ADDRESS}"
        )
        size = _rows_of_a_take(stored, folder)
        for batch in _reader(found, size):
            for start in range(0, batch.num_rows, size):
                yield _with_values(batch.slice(start, size), stored, delivery)


def _store(rows: pa.RecordBatchReader, folder: str) -> lance.LanceDataset:
    """Write the rows of a source to a dataset, in their order."""
    import lance

    uri = f"{folder}/values.lance"
    write_rows(rows, TableLocation(uri, "values"))
    return lance.dataset(uri)


def _positions(stored: lance.LanceDataset, keys: int) -> pa.RecordBatchReader:
    """Read the keys of stored rows, each with its position."""
    names = [f"k{at}" for at in range(keys)]
    schema = pa.schema([*(stored.schema.field(name) for name in names), ("position", pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        at = 0
        for batch in stored.scanner(columns=names, scan_in_order=True).to_batches():
            numbers = pa.array(np.arange(at, at + batch.num_rows))
            at += batch.num_rows
            yield pa.RecordBatch.from_arrays([*batch.select(names).columns, numbers], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _rows_of_a_take(stored: lance.LanceDataset, folder: str) -> int:
    """Return the number of rows whose values have about `_TAKE_BYTES` on disk."""
    size = sum(path.stat().st_size for path in Path(folder).rglob("*.lance") if path.is_file())
    rows = stored.count_rows()
    return max(1, min(_BATCH_ROWS, _TAKE_BYTES * rows // max(1, size))) if rows else _BATCH_ROWS


def _with_values(batch: pa.RecordBatch, stored: lance.LanceDataset, delivery: SourceMapping) -> pa.RecordBatch:
    """Replace the positions of joined rows by the values that lie there."""
    position = batch.column("position")
    names = [f"v{at}" for at in range(len(delivery.values))]
    at, of_row = np.unique(position.drop_null().to_numpy(), return_inverse=True)
    there = position.is_valid()
    taken = np.zeros(batch.num_rows, np.int64)
    taken[there.to_numpy(zero_copy_only=False)] = of_row
    indices = pa.array(taken, mask=~there.to_numpy(zero_copy_only=False))
    if len(at):
        found = stored.take(at.tolist(), columns=names).combine_chunks()
        values = [rows_at(pa.concat_arrays(found.column(name).chunks), indices) for name in names]
    else:
        values = [pa.nulls(batch.num_rows, kind) for kind in delivery.carried]
    columns = [batch.column(ADDRESS), batch.column(ROW_ID), there, *values]
    return pa.RecordBatch.from_arrays(columns, [ADDRESS, ROW_ID, FOUND, *names])
