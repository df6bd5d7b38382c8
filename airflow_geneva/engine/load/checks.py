"""Check the keys of a source before anything is written; this process or Spark looks for those that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from airflow_geneva.engine.choices import OnDuplicate, OnMissing
from airflow_geneva.engine.load.delivery import SourceMapping, TableKeys
from airflow_geneva.errors import InvalidInput

SHOWN = 5


@dataclass(frozen=True)
class Examples:
    """Keys that do not fit: their number, and the first `SHOWN` in ascending order, NULLs last."""

    count: int
    columns: Sequence[pa.Array]

    @staticmethod
    def of(count: int, shown: pa.Table, delivery: SourceMapping) -> Examples:
        """Give keys ``k0``... the types that all searches give them; columns after the keys stay as they are."""
        kinds = list(delivery.schema(with_values=False).types)[: len(delivery.keys)]
        columns = [one.combine_chunks() for one in shown.columns]
        keys = [column.cast(kind) for column, kind in zip(columns, kinds, strict=False)]
        return Examples(count, [*keys, *columns[len(kinds) :]])

    def rows(self) -> list[tuple[Any, ...]]:
        return list(zip(*(column.to_pylist() for column in self.columns), strict=True))


class KeySearch(Protocol):
    """Finds keys that do not fit; by DuckDB in this process, or on Spark."""

    def find_duplicates(self, delivery: SourceMapping) -> Examples:
        """Find keys that several rows of the source have; after the keys, a column has the number of these rows."""

    def find_missing(self, delivery: SourceMapping, table: TableKeys) -> Examples:
        """Find rows of the table whose keys the source lacks."""


def check_keys(search: KeySearch, delivery: SourceMapping, table: TableKeys, on_missing: str) -> int:
    """Return the number of keys that several rows of the source have.

    Raises:
        InvalidInput: there are any, and ``on_duplicate`` is ``error``; or rows of the table have keys that the source
            lacks, and ``on_missing`` is ``error``. The message lists some.
    """
    twice, name = search.find_duplicates(delivery), delivery.source.name
    if twice.count and delivery.on_duplicate == OnDuplicate.ERROR:
        listed = "; ".join(f"{_named(delivery, row)} ({row[-1]} rows)" for row in twice.rows())
        more = f"; and {twice.count - SHOWN:,} more" if twice.count > SHOWN else ""
        raise InvalidInput(
            f"Several rows of {name} have the same key: {listed}{more}. Remove them"
            + ("." if delivery.source.on_spark else ', or say which one counts: on_duplicate="first" or "last".')
        )
    if on_missing == OnMissing.ERROR and (missing := search.find_missing(delivery, table)).count:
        listed = "; ".join(_named(delivery, row) for row in missing.rows())
        raise InvalidInput(
            f"{missing.count:,} rows of the table have keys that {name} lacks, such as {listed}. Complete it, or let "
            'these rows keep their values: on_missing="keep", or lose them: on_missing="null".'
        )
    return twice.count


def _named(delivery: SourceMapping, row: tuple[Any, ...]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(delivery.keys, row, strict=False))
