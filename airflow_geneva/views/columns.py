"""The columns of a view: two system columns, the query's, those of the source that it reads, and rows from lists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.errors import InvalidInput
from airflow_geneva.udf.settings import UdfDefinition

if TYPE_CHECKING:
    import lance

SOURCE_ROW_ID = "__source_row_id"
IS_SET = "__is_set"
SYSTEM_COLUMNS = (SOURCE_ROW_ID, IS_SET)
"""A view's first columns: the row id in the source (int64), and whether the row is computed (bool)."""

Kind = Literal["column", "sql", "udf"]


@dataclass(frozen=True)
class OutputColumn:
    """One column of a query.

    Args:
        name: the column's name.
        kind: a column of the source, an SQL expression over the source's columns, or a UDF.
        type: its Arrow type as text.
        expression: the source column's name, or the SQL; None for a UDF.
        udf: the UDF and its inputs; None otherwise. An input is an earlier column of the query with that name, or
            else a column of the source.
    """

    name: str
    kind: Kind
    type: str
    expression: str | None = None
    udf: UdfDefinition | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the UDF, in order."""
        return (self.udf.input_columns or ()) if self.udf else ()

    def describe(self) -> str:
        """Describe the column in words."""
        if self.udf is not None:
            return f"UDF {self.udf.import_path or self.udf.name} of ({', '.join(self.inputs)}) -> {self.type}"
        what = "source column" if self.kind == "column" else "SQL"
        return f"{what} {self.expression} -> {self.type}"

    def to_document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"name": self.name, "kind": self.kind, "type": self.type}
        if self.expression is not None:
            document["expression"] = self.expression
        if self.udf is not None:
            document["udf"] = json.loads(self.udf.to_json())
        return document

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> OutputColumn:
        udf = document.get("udf")
        return OutputColumn(
            document["name"],
            document["kind"],
            document["type"],
            document.get("expression"),
            None if udf is None else UdfDefinition.from_json(json.dumps(udf)),
        )


def source_inputs(columns: Sequence[OutputColumn]) -> dict[str, tuple[str, ...]]:
    """Return the inputs of each UDF column that are columns of the source, not earlier columns of the query."""
    found: dict[str, tuple[str, ...]] = {}
    earlier: set[str] = set()
    for column in columns:
        if column.udf is not None:
            found[column.name] = tuple(name for name in column.inputs if name not in earlier)
        earlier.add(column.name)
    return found


@dataclass(frozen=True)
class SourceColumn:
    """A column of the source that a query reads, as of the view's creation.

    Args:
        name: what it was called.
        fields: field ids of the column and its nested fields.
        type: its Arrow type as text.
    """

    name: str
    fields: tuple[int, ...]
    type: str


def source_columns(dataset: lance.LanceDataset, names: Sequence[str]) -> tuple[SourceColumn, ...]:
    """Return columns of one version of a table, with their field ids and types."""
    by_name = {field.name(): field for field in dataset.lance_schema.fields()}
    types = {field.name: str(field.type) for field in dataset.schema}
    return tuple(SourceColumn(name, tuple(_field_ids(by_name[name])), types[name]) for name in names)


def _field_ids(field: Any) -> Iterator[int]:
    yield field.id()
    for child in field.children():
        yield from _field_ids(child)


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
