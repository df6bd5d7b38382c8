"""Explode a list column: one row per element."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.errors import InvalidInput


def exploded_schema(schema: pa.Schema, column: str) -> pa.Schema:
    """Return a schema after a list column is exploded.

    Raises:
        InvalidInput: there is no such column, or it is not a list column.
    """
    if column not in schema.names:
        raise InvalidInput(f"explode({column!r}): the query has no such column, only {', '.join(schema.names)}.")
    found = schema.field(column).type
    if not (pa.types.is_list(found) or pa.types.is_large_list(found)):
        raise InvalidInput(
            f"explode({column!r}): the column is {found}. Give a list column, such as a generator UDF returns."
        )
    at = schema.get_field_index(column)
    return schema.set(at, pa.field(column, found.value_type))


def explode_rows(batch: pa.RecordBatch, column: str) -> pa.RecordBatch:
    """Return one row per element of a list column, in order, with the other columns repeated."""
    at = batch.schema.get_field_index(column)
    lists = batch.column(at)
    parents = pc.list_parent_indices(lists)
    columns = [
        pc.list_flatten(lists) if position == at else values.take(parents)
        for position, values in enumerate(batch.columns)
    ]
    return pa.record_batch(columns, schema=exploded_schema(batch.schema, column))
