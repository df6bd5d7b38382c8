"""The groups of a view: what a definition says of them, and the two hidden tables that find the touched ones.

A view of groups is an ordinary view of the table `groups`, which has one row a group. The table `rows` is an ordinary
view of the true source that holds the hash of the key of each of its rows. Both lie in the view's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.lance_io.arrays import sortable
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.decorator import udf
from airflow_geneva.engine.views.group_keys import Keys, hash_keys, key_type
from airflow_geneva.engine.views.hidden import GROUPS, hidden_table
from airflow_geneva.errors import InvalidInput

GROUP, ROWS, TOUCHED, SHARED = "__group", "__rows", "__touched", "__shared"
"""Columns of the table `groups` after the key: the hash of the key, the number of its source rows, a random number for
each commit that touched the group, and whether another group has the same hash."""

TABLE_ID = "geneva::groups::table"
"""Schema metadata of the table `rows` that is another one if the table is made anew."""

HASH = "group"
"""Column of the table `rows`: the hash of the key."""

_DESC = " desc"


@dataclass(frozen=True)
class Grouped:
    """The groups of a query, as they are asked for: see `Query.group_by` and `GroupedQuery.agg`."""

    keys: tuple[str, ...]
    columns: tuple[tuple[Any, Any], ...]
    order_by: tuple[str, ...]
    max_group_rows: int | None


@dataclass(frozen=True)
class Grouping:
    """What a view of groups reads of its source.

    Args:
        keys: the columns whose values make a group.
        order_by: the columns by which the rows of a group are sorted, each perhaps followed by " desc".
        max_group_rows: the most rows that a group may have; None: any number.
        where: the SQL filter on the source's rows.
        reads: every source column that the filter, the keys, the order, an aggregate or a function reads, with its
            field ids and type at the view's creation.
    """

    keys: tuple[str, ...]
    order_by: tuple[str, ...]
    max_group_rows: int | None
    where: str | None
    reads: tuple[tuple[str, tuple[int, ...], str], ...]

    def to_document(self) -> dict[str, Any]:
        return dict(vars(self))

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> Grouping:
        reads = tuple((name, tuple(fields), kind) for name, fields, kind in document["reads"])
        keys, order = tuple(document["keys"]), tuple(document["order_by"])
        return Grouping(keys, order, document["max_group_rows"], document["where"], reads)

    @property
    def order(self) -> list[tuple[str, str]]:
        """The columns by which the rows of a group are sorted, each with ``ascending`` or ``descending``."""
        return [read_order(text) for text in self.order_by]

    def __str__(self) -> str:
        order = f" ordered by {', '.join(self.order_by)}" if self.order_by else ""
        most = f" of at most {self.max_group_rows:,} rows" if self.max_group_rows is not None else ""
        where = f" of the rows where {self.where}" if self.where else ""
        return f"groups by {', '.join(self.keys)}{where}{order}{most}"


def read_order(text: str) -> tuple[str, str]:
    """Return the column of an entry of `order_by`, and its direction."""
    name, direction = text.strip(), "ascending"
    for ending, found in ((_DESC, "descending"), (" asc", "ascending")):
        if name.lower().endswith(ending):
            name, direction = name[: -len(ending)].strip(), found
    return name.strip("`"), direction


def check_grouping(
    table: str, fields: Mapping[str, pa.Field], keys: Sequence[Any], order_by: Sequence[Any], max_group_rows: Any
) -> None:
    """Raise InvalidInput for keys or an order that a table's columns do not allow."""
    columns = ", ".join(fields)
    for what, names in (("group_by", keys), ("order_by", [read_order(str(text))[0] for text in order_by])):
        for name in names:
            if not isinstance(name, str) or name not in fields:
                raise InvalidInput(f"{what}: table {table!r} has no column {name!r}. It has {columns}.")
            if names.count(name) > 1:
                raise InvalidInput(f"{what} names column {name!r} twice. Name it once.")
    for name in keys:
        if is_blob(fields[name]) or name in (GROUP, ROWS, TOUCHED, SHARED):
            raise InvalidInput(f"group_by({name!r}): blobs, and columns of this name, cannot be a key. Choose another.")
        key_type(name, fields[name].type)
    for text in order_by:
        name, _ = read_order(text)
        try:
            pc.sort_indices(pa.table({"x": sortable(pa.nulls(0, fields[name].type))}), [("x", "ascending")])
        except pa.ArrowException:
            raise InvalidInput(
                f"order_by: rows cannot be ordered by column {name!r}, which is {fields[name].type}. Order by numbers, "
                "texts, or times."
            ) from None
    whole = isinstance(max_group_rows, int) and not isinstance(max_group_rows, bool)
    if max_group_rows is not None and not (whole and max_group_rows >= 1):
        raise InvalidInput(f"max_group_rows={max_group_rows!r} is not valid: give a whole number of at least 1.")


def key_schema(keys: Sequence[str], types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the columns of the key as the table `groups` stores them."""
    return pa.schema([pa.field(name, key_type(name, types[name])) for name in keys])


def groups_schema(keys: pa.Schema) -> pa.Schema:
    """Return the schema of the table `groups`."""
    own = [(GROUP, pa.int64()), (ROWS, pa.int64()), (TOUCHED, pa.int64()), (SHARED, pa.bool_())]
    return pa.schema([*keys, *(pa.field(name, kind) for name, kind in own)])


def rows_table(view: TableLocation) -> TableLocation:
    """Return the location of a view's table `rows`."""
    return hidden_table(view, GROUPS, "rows")


def groups_table(view: TableLocation) -> TableLocation:
    """Return the location of a view's table `groups`."""
    return hidden_table(view, GROUPS, "groups")


@udf(data_type=pa.int64(), version="1")
def hash_of_key(batch: pa.RecordBatch) -> pa.Array:
    """Return the hash of the key of each row, for the table `rows`."""
    return pa.array(hash_keys(Keys.of(batch.columns)))
