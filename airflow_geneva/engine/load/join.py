"""Join the keys of a table with a source in this process, by DuckDB, which spills to disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.load.delivery import ADDRESS, FOUND, ROW_ID, Delivery
from airflow_geneva.errors import InvalidInput

_MEMORY = "400MB"
_SHOWN = 5
_BATCH_ROWS = 8_192


@contextmanager
def _connection() -> Iterator[Any]:
    try:
        import duckdb
    except ImportError:
        raise InvalidInput(
            "Planning a load and joining in this process need DuckDB: pip install 'airflow-geneva[load]'. Executors of "
            "Spark do not need it."
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
