"""A query of a table (filter, order, limit, columns), from which a materialized view can be created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.storage.location import DatabaseLocation
from airflow_geneva.engine.storage.uri import check_name
from airflow_geneva.engine.udf import UDF, load_udf
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from airflow_geneva.view import View

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from airflow_geneva.engine.api import Deduplication, Grouped, QuerySpec, TableQuery, ViewDefinition

ROWS_PER_FRAGMENT = 1_048_576
_SEEDS = 1 << 64


@dataclass(frozen=True)
class Query:
    """A query of a table; every method returns a new one. Created by :meth:`airflow_geneva.Table.query`.

    The order of the calls does not matter. A query filters, removes duplicates, orders by row id, shuffles, skips
    ``offset`` rows, takes ``limit`` rows, and then computes the columns. The query is checked against the table when it
    is used.

    Args:
        table: the table or view that is queried.
        conditions: SQL filters, all of which must hold for a row.
        selected: columns by name, or None: all columns of the table.
        added: more columns after these.
        shuffle_seed: see :meth:`shuffle`.
        max_rows: see :meth:`limit`.
        skipped_rows: see :meth:`offset`.
        exploded: see :meth:`explode`.
        grouped: see :meth:`group_by`.
        deduplication: see :meth:`deduplicate`.

    Example:
        ```python
        view = table.query().where("n > 10").select(["id"]).add_columns({"e": embed}).create_materialized_view(db, "v")
        ```
    """

    table: Table
    conditions: tuple[str, ...] = ()
    selected: tuple[tuple[Any, QuerySpec], ...] | None = None
    added: tuple[tuple[Any, QuerySpec], ...] = ()
    shuffle_seed: int | None = None
    max_rows: int | None = None
    skipped_rows: int = 0
    exploded: str | None = None
    grouped: Grouped | None = None
    deduplication: Deduplication | None = None

    def where(self, sql: str) -> Query:
        """Keep the rows for which an SQL condition over the table's columns holds; several conditions must all hold."""
        if not isinstance(sql, str) or not sql.strip():
            raise InvalidInput(f"where({sql!r:.200}) is not valid: give an SQL condition as text.")
        self._refuse_for_groups("where", "It keeps rows: call it before group_by. To keep groups, make a view of this")
        return replace(self, conditions=(*self.conditions, sql.strip()))

    def select(self, columns: Sequence[str] | Mapping[Any, QuerySpec]) -> Query:
        """Select these columns instead of all; a later call replaces an earlier one.

        Args:
            columns: names; or a mapping from a new name to a column's name, an SQL expression over the table's columns,
                a UDF, or a UDF, or its import path, with its inputs. An input is an earlier column of the query, or
                else one of the table. Several new names in a tuple are filled by the fields of a UDF's struct.
        """
        self._refuse_for_groups(
            "select", "The result has the key and the columns of agg. To select some, make a view of this"
        )
        if isinstance(columns, Mapping):
            return replace(self, selected=tuple(columns.items()))
        if isinstance(columns, str) or not isinstance(columns, Sequence):
            raise InvalidInput(f"select({columns!r:.200}) is not valid: give a list of names, or columns by name.")
        named = [name for name in columns if not isinstance(name, str)]
        if named:
            raise InvalidInput(f'select takes names in a list, not {named[0]!r:.200}. Give it a name: {{"n": ...}}.')
        return replace(self, selected=tuple((name, f"`{name}`") for name in columns))

    def add_columns(self, columns: Mapping[Any, QuerySpec]) -> Query:
        """Add columns after the others, as a mapping like that of :meth:`select`."""
        if not isinstance(columns, Mapping):
            raise InvalidInput(f'add_columns takes columns by name, such as {{"n": udf}}, not {columns!r:.200}.')
        self._refuse_for_groups(
            "add_columns", "Give columns of the groups to agg. To compute others from these, make a view of this"
        )
        return replace(self, added=(*self.added, *columns.items()))

    def add_column(self, udf: UDF | str, name: str | None = None) -> Query:
        """Add a column that a UDF, given itself or by its import path, computes; its default name is the UDF's."""
        udf = load_udf(udf) if isinstance(udf, str) else udf
        if not isinstance(udf, UDF):
            raise InvalidInput(f"add_column takes a UDF, not {udf!r:.200}. Decorate it with @udf(...).")
        return self.add_columns({udf.name if name is None else name: udf})

    def shuffle(self, seed: int = 0) -> Query:
        """Order the rows by a fixed hash of seed and row id: the same on every machine and in every version."""
        self._refuse_for_groups("shuffle", "Groups have no order. To order or limit them, make a view of this")
        check_whole("shuffle", seed, 0, _SEEDS - 1)
        return replace(self, shuffle_seed=seed)

    def limit(self, n: int) -> Query:
        """Return at most ``n`` rows."""
        self._refuse_for_groups("limit", "Groups have no order. To order or limit them, make a view of this")
        check_whole("limit", n, 0)
        return replace(self, max_rows=n)

    def offset(self, n: int) -> Query:
        """Skip the first ``n`` rows."""
        self._refuse_for_groups("offset", "Groups have no order. To order or limit them, make a view of this")
        check_whole("offset", n, 0)
        return replace(self, skipped_rows=n)

    def explode(self, column: str) -> Query:
        """Make one row per element of a list column, in order; rows with an empty or NULL list are dropped.

        The other columns are repeated. A generator UDF computes such a column: the chunks of a document, the frames of
        a video.

        Args:
            column: name of the column in the query.

        Example:
            ```python
            @udf(data_type=pa.list_(pa.string()))
            def chunks(text: str) -> Iterator[str]:
                yield from text.split("\n\n")

            query = table.query().select({"id": "id", "chunk": chunks}).explode("chunk")
            ```
        """
        if not isinstance(column, str) or not column:
            raise InvalidInput(f"explode({column!r:.200}) is not valid: give the name of a list column.")
        return replace(self, exploded=column)

    def deduplicate(
        self, on: str | Sequence[str], method: str = "equal", threshold: float | None = None, keep: str = "first"
    ) -> Query:
        """Keep one row of each cluster of duplicates among the rows that the filter selects.

        A cluster has the rows that are connected by pairs of duplicates: two rows of it may be less similar than the
        threshold, if rows between them connect them.

        Args:
            on: the column of the table that is compared, or several.
            method: `"equal"`: rows are duplicates if the values of all these columns are equal; NULL equals NULL.
                `"minhash"`: if their texts are similar, which is the Jaccard similarity of their sets of shingles, runs
                of seven characters, without regard to case and to the amount of white space. Rows whose text is NULL
                are kept. `"cosine"`: if the cosine of their vectors, lists of one size of floating-point numbers, is
                large enough. Rows whose vector is NULL or has no direction are kept. Of 100 pairs of texts or vectors
                with the similarity of the threshold, about one is not found.
            threshold: the least similarity: of `"minhash"` from 0.3 to 1, by default 0.8; of `"cosine"` from 0.8 to 1,
                by default 0.95.
            keep: the row of a cluster to keep: `"min(column)"` or `"max(column)"`, the one with the smallest or largest
                value, and of these the one with the smallest row id; `"first"`: the one with the smallest row id.

        Raises:
            InvalidInput: an argument is not valid; for columns, when the query is used.

        Example:
            ```python
            clean = docs.query().deduplicate(on="text", method="minhash", threshold=0.8, keep="min(id)")
            view = clean.create_materialized_view(db, "clean_docs")
            ```
        """
        self._refuse_for_groups("deduplicate", "It compares rows of the table. To compare groups, make a view of this")
        return replace(self, deduplication=api.Deduplication.of(on, method, threshold, keep))

    def group_by(self, *keys: str) -> GroupedQuery:
        """Make one row of all rows that have the same values in some columns; call ``agg`` on the result.

        NULL is a value like others, NaN equals NaN, and -0.0 equals 0.0. A view of groups is refreshed by group: a
        refresh computes the groups whose rows were added, changed, moved or deleted.

        Args:
            keys: names of columns of numbers, booleans, texts, bytes, dates, times or decimals.

        Raises:
            InvalidInput: no key is given, or the query selects, adds, explodes, shuffles or limits rows.

        Example:
            ```python
            query = events.query().where("kind <> 'test'").group_by("user").agg({"n": "count(*)", "last": "max(at)"})
            ```
        """
        if not keys or not all(isinstance(key, str) for key in keys):
            raise InvalidInput(f"group_by{keys!r:.200} is not valid: give the names of columns.")
        self._refuse_for_groups("group_by", "It groups rows already. To group the groups, make a view of this")
        plain = Query(self.table, self.conditions)
        if self != plain:
            raise InvalidInput(
                "group_by groups the rows of a table as they are, after where: a query that selects, adds or explodes "
                "columns, or shuffles or limits rows, cannot be grouped. Group a view of such a query."
            )
        return GroupedQuery(self, keys)

    def _refuse_for_groups(self, method: str, why: str) -> None:
        if self.grouped is not None:
            raise InvalidInput(f"{method} cannot follow group_by(...).agg(...). {why} view, and query that.")

    def output_schema(self) -> pa.Schema:
        """Return the schema of the result: nullable columns, with blob columns as blobs.

        Raises:
            InvalidInput: the query does not fit the table.
        """
        return self._asked.output_schema()

    def to_arrow(self) -> pa.Table:
        """Evaluate the query now, in this process; meant for small results. Blobs are returned as bytes.

        Raises:
            InvalidInput: the query does not fit the table.
            UdfError: a UDF failed on a row.
        """
        return self._asked.evaluate()

    def to_pandas(self) -> pd.DataFrame:
        """Evaluate the query into a pandas data frame; pandas must be installed. See :meth:`to_arrow`."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        """Evaluate the query into a polars data frame; see :meth:`to_arrow`.

        Raises:
            InvalidInput: polars is not installed, or the query does not fit the table.
            UdfError: a UDF failed on a row.
        """
        return self._asked.to_polars()

    def definition(self) -> ViewDefinition:
        """Return the query as a view stores it, checked against the newest version of the table.

        Raises:
            InvalidInput: the query does not fit the table, or could not be repeated.
        """
        return self._asked.definition()

    def create_materialized_view(
        self,
        db: DatabaseLocation | None = None,
        name: str | None = None,
        *,
        conn: DatabaseLocation | None = None,
        view_name: str | None = None,
        max_rows_per_fragment: int = ROWS_PER_FRAGMENT,
        key: str | Sequence[str] | None = None,
    ) -> View:
        """Create a view that holds the query's result after its first refresh; no UDF runs before.

        UDFs that are not in a module, as in a notebook, are found by this process only: no other one can refresh it.

        Args:
            db, conn: the view's database; by default the table's own.
            name, view_name: the view's name.
            max_rows_per_fragment: rows of each fragment of the view.
            key: the column, or several, whose values name rows in errors, as in :meth:`Table.set_key`: columns that the
                query takes from the table as they are. By default the table's key, if the query takes it.

        Raises:
            InvalidInput: a table with this name exists, the query does not fit its table, or it could not be repeated:
                it reads the clock, or draws random values; or the key is not a column of the table.

        Example:
            ```python
            view = table.query().where("n > 10").create_materialized_view(db, "long_docs")
            ```
        """
        chosen, called = _one_of("db", db, "conn", conn), _one_of("name", name, "view_name", view_name)
        if called is None:
            raise InvalidInput('The view has no name. Give one: create_materialized_view(db, "long_docs").')
        check_whole("max_rows_per_fragment", max_rows_per_fragment)
        check_name(called, "table")
        beside = self.table.location
        place = (
            (beside.database_uri, called, beside.options) if chosen is None else (chosen.uri, called, chosen.options)
        )
        return View(self._asked.create_view(place, max_rows_per_fragment, key))

    @property
    def _asked(self) -> TableQuery:
        own = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "table"}
        return api.TableQuery(self.table.location, **own)


@dataclass(frozen=True)
class GroupedQuery:
    """Rows of a query by the values of some columns; created by :meth:`Query.group_by`.

    Args:
        query: the query whose rows are grouped.
        keys: the columns.
    """

    query: Query
    keys: tuple[str, ...]

    def agg(
        self, columns: Mapping[Any, QuerySpec], order_by: Sequence[str] = (), max_group_rows: int | None = None
    ) -> Query:  # fmt: skip
        """Compute columns of the rows of each group; the result has the columns of the key first.

        Args:
            columns: by name, an SQL aggregate as text (``count(*)``, ``count``, ``sum``, ``min``, ``max``, ``avg``,
                ``first`` or ``last`` of a column or an SQL expression, and ``count(distinct ...)``); a UDF, or a UDF
                or its import path with its inputs. A UDF is called once per group, with the values of all of its rows:
                as one `pa.Array` per input, or as a list, see :func:`airflow_geneva.udf`. Several names in a tuple are
                filled by the fields of a UDF's struct. A UDF that returns a list can be exploded into rows.
            order_by: the columns by which the rows of a group are sorted, each perhaps followed by ``desc``; NULL comes
                last. Rows with equal values, and by default all rows, are in the order of their row ids.
            max_group_rows: the most rows that a group may have: a refresh that finds a larger one fails before it
                computes anything. It does not apply if all columns are ``count(*)`` or take iterators, which hold no
                group as a whole. None: any number.

        Raises:
            InvalidInput: an argument is not of such a form.

        Example:
            ```python
            profiles = events.query().group_by("user").agg(
                {"n": "count(*)", "profile": (profile_of, ["kind", "at"])}, order_by=["at"]
            ).create_materialized_view(db, "profiles")
            ```
        """
        if not isinstance(columns, Mapping):
            raise InvalidInput(f'agg takes columns by name, such as {{"n": "count(*)"}}, not {columns!r:.200}.')
        if isinstance(order_by, str) or not all(isinstance(name, str) for name in order_by):
            raise InvalidInput(f'order_by={order_by!r:.200} is not valid: give names in a list, such as ["at desc"].')
        grouped = api.Grouped(self.keys, tuple(columns.items()), tuple(order_by), max_group_rows)
        return replace(self.query, grouped=grouped)


def _one_of(name: str, value: Any, other: str, alias: Any) -> Any:
    if value is not None and alias is not None:
        raise InvalidInput(f"{name} and {other} are two names for one parameter. Give one of them.")
    return alias if value is None else value
