"""Rows that a user gives for a table: a new one, or one that exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.lance_io.rows import RowData, as_rows, create_with_rows, differences, fit_schema, write_rows
from airflow_geneva.engine.lance_io.table_key import check_key_is, with_key
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput

_OF_VIEW = b"geneva::view::"


@dataclass(frozen=True)
class GivenRows:
    """Rows for a table of this name, in a form that pylance can write; a stream stays a stream."""

    table: str
    rows: pa.Table | pa.RecordBatchReader

    @staticmethod
    def of(
        table: str,
        data: RowData,
        schema: pa.Schema | None = None,
        existing: pa.Schema | None = None,
        rows_per_file: int | None = None,
    ) -> GivenRows:
        """Convert data to rows.

        Args:
            schema: the columns that they shall have.
            existing: types of columns, by which they are converted without `schema`; they may lack columns.

        Raises:
            InvalidInput: the data are not rows, or do not fit the types.
        """
        rows = as_rows(data, schema or existing, rows_per_file)
        return GivenRows(table, rows if schema is None else fit_schema(rows, schema))

    def append(self, location: TableLocation, existing: pa.Schema) -> None:
        """Append them; InvalidInput if the table lacks one of their columns, or they do not fit it."""
        check_columns(self.table, existing.names, self.rows.schema.names)
        write_rows(self.rows, location, mode="append")

    def check_same(self, database_uri: str, existing: pa.Schema, key: str | Sequence[str] | None) -> None:
        """Raise InvalidInput if a table that exists lacks their columns, or has another key."""
        if differing := differences(self.rows.schema, existing):
            raise InvalidInput(
                f"Table {self.table!r} exists in {database_uri} with other columns. It has {'; '.join(differing)}. "
                'Give another name, or mode="overwrite" to replace its rows and columns.'
            )
        check_key_is(self.table, existing, key)

    def with_key(self, key: str | Sequence[str] | None) -> GivenRows:
        """Return them for a new table with a key; InvalidInput if they lack its columns, or have none."""
        metadata = self.rows.schema.metadata or {}
        # Rows that were read from a view come with its definition.
        kept = {name: value for name, value in metadata.items() if not name.startswith(_OF_VIEW)}
        rows = fit_schema(self.rows, with_key(self.table, self.rows.schema.with_metadata(kept), key))
        if not rows.schema.names:
            raise InvalidInput(
                f"Table {self.table!r} would have no columns: the data have none. Give rows, or a schema."
            )
        return replace(self, rows=rows)

    def create(self, location: TableLocation, new: bool, **options: Any) -> bool:
        """Create the table; see `create_with_rows`."""
        return create_with_rows(self.rows, location, new, **options)
