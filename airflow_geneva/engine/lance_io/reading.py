"""Read a table into memory, batch by batch, or only its first rows."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.display import Rows
from airflow_geneva.engine.lance_io.filters import check_where
from airflow_geneva.engine.storage.engine_errors import panics_as_errors
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from lance import LanceDataset
    from lance.dataset import LanceScanner

_SHOWN_ROWS, _SHOWN_COLUMNS = 5, 20


class Readable(ABC):
    """The read methods of tables and views."""

    @property
    @abstractmethod
    def lance(self) -> LanceDataset:
        """The dataset at its newest version."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in its database."""

    def _visible(self, schema: pa.Schema) -> tuple[list[str], str | None]:
        """Return the columns that a read returns, and the filter on its rows."""
        return schema.names, None

    def count_rows(self, where: str | None = None) -> int:
        """Count the rows, or the rows for which an SQL condition holds; a view has the rows of its last refresh.

        Raises:
            InvalidInput: the condition is not valid for the columns.
        """
        dataset = self.lance
        check_where(dataset, where)
        always = self._visible(dataset.schema)[1]
        both = f"{always} AND ({where})" if where is not None and always is not None else where or always
        with panics_as_errors():
            return int(dataset.count_rows(both))

    def __len__(self) -> int:
        return self.count_rows()

    def __bool__(self) -> bool:
        return True  # also without rows, and without counting them

    def to_arrow(self, columns: Sequence[str] | None = None, limit: int | None = None) -> pa.Table:
        """Read rows into memory.

        Args:
            columns: names of columns; by default all.
            limit: maximum number of rows to read; by default all.

        Raises:
            InvalidInput: a column does not exist, or `limit` is not a number of rows.
        """
        if limit is not None:
            check_whole("limit", limit, 0)
        with panics_as_errors():
            return self._scan(columns, limit=limit).to_table()

    def to_pandas(self, columns: Sequence[str] | None = None, limit: int | None = None) -> pd.DataFrame:
        """Read rows into a pandas data frame; pandas must be installed. The arguments are those of :meth:`to_arrow`."""
        return self.to_arrow(columns, limit).to_pandas()

    def to_polars(self, columns: Sequence[str] | None = None, limit: int | None = None) -> pl.DataFrame:
        """Read rows into a polars data frame. The arguments are those of :meth:`to_arrow`.

        Raises:
            InvalidInput: polars is not installed, or a column does not exist.
        """
        return to_polars(lambda: self.to_arrow(columns, limit))

    def to_batches(
        self, columns: Sequence[str] | None = None, batch_size: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read rows batch by batch, for a table that does not fit into memory.

        Args:
            columns: names of columns; by default all.
            batch_size: maximum number of rows in a batch.

        Raises:
            InvalidInput: a column does not exist.
        """
        if batch_size is not None:
            check_whole("batch_size", batch_size)
        more = {} if batch_size is None else {"batch_size": batch_size}
        with panics_as_errors():
            yield from self._scan(columns, **more).to_batches()

    def head(self, n: int = 5) -> Rows:
        """Read the first rows: a `pyarrow.Table` that prints as a grid and shortens long and nested values."""
        check_whole("n", n, 0)
        return Rows(self.to_arrow(limit=n))

    def preview(self) -> pa.Table:
        """Read the first rows and columns, for display in a notebook."""
        return self.to_arrow(self._visible(self.lance.schema)[0][:_SHOWN_COLUMNS], _SHOWN_ROWS)

    def _scan(self, columns: Sequence[str] | None, **options: Any) -> LanceScanner:
        dataset = self.lance
        visible, where = self._visible(dataset.schema)
        chosen = visible if columns is None else [columns] if isinstance(columns, str) else list(columns)
        check_columns(self.name, visible, chosen)
        return dataset.scanner(columns=chosen, filter=where, **options)


def check_columns(table: str, existing: Sequence[str], wanted: Sequence[str]) -> None:
    """Reject columns that a table does not have."""
    if unknown := [name for name in wanted if name not in existing]:
        raise InvalidInput(f"Table {table!r} has no columns {unknown}. It has: {', '.join(existing)}.")


def to_polars(read: Callable[[], pa.Table]) -> pl.DataFrame:
    """Read rows into a polars data frame; without polars, `InvalidInput` before anything is read."""
    try:
        polars = import_module("polars")
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        raise InvalidInput(
            f"to_polars needs the package 'polars', which {sys.executable} does not have: pip install polars. "
            "to_arrow works without it."
        ) from error
    frame: pl.DataFrame = polars.from_arrow(read())
    return frame
