"""The definition of a materialized view and its columns, stored in its schema metadata for every later refresh."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.filters import where_columns
from airflow_geneva.engine.lance_io.sql_text import read_sql
from airflow_geneva.engine.lance_io.table_key import check_key, key_columns
from airflow_geneva.engine.storage.documents import parse, well_typed
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.engine.udf.definition import columns_before, renamed_inputs
from airflow_geneva.engine.udf.expect import Expectation, check_expectations
from airflow_geneva.engine.udf.lancedb import refuse_view
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.views.aggregates import parse_aggregate
from airflow_geneva.engine.views.deduplication import Deduplication
from airflow_geneva.engine.views.grouping import Grouping
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

SOURCE_ROW_ID = "__source_row_id"
IS_SET = "__is_set"
SYSTEM_COLUMNS = (SOURCE_ROW_ID, IS_SET)
"""A view's first columns: the row id in the source (int64), and whether the row is computed (bool)."""

QUERY_KEY = "geneva::view::query"
BASE_TABLE_KEY = "geneva::view::base_table"
BASE_DATABASE_KEY = "geneva::view::base_table_db_uri"
BASE_VERSION_KEY = "geneva::view::base_table_version"
VERSION_KEY = "geneva::view::version"

STATE_OF = "__state_of_"
"""Prefix of the hidden columns with the states of functions that can be folded, before the name of their column."""

NEVER_REFRESHED = "0"
"""Value of `BASE_VERSION_KEY` before the first refresh: the view's placeholder rows have no values yet."""

_MADE_BY = "airflow_geneva"
_FORMAT = 1

_NAMED = {
    "source_table": "source table",
    "source_database": "source database",
    "where": "filter",
    "shuffle_seed": "shuffle seed",
    "limit": "limit",
    "offset": "offset",
    "explode": "exploded column",
    "deduplicate": "deduplication",
}

_OPTIONAL: dict[str, type[Grouping] | type[Deduplication]] = {"grouping": Grouping, "deduplicate": Deduplication}

Kind = Literal["column", "sql", "aggregate", "udf", "sibling"]
_ORIGINS = {"column": "source column", "sql": "SQL", "aggregate": "aggregate"}


@dataclass(frozen=True)
class OutputColumn:
    """One column of a query, with its Arrow type as text: a column or SQL of the source, an aggregate, or a UDF.

    A UDF may fill several columns with the fields of its struct: the first one has the UDF, and `field` names the field
    of each. The others are siblings, and `of` is the first one's first name.

    `expression` is the source column's name, the SQL, or the SQL aggregate. An input of the UDF is an earlier column of
    the query with that name, or else a column of the source; an input of a UDF of groups is always the latter. `expect`
    are the view's own expectations, in addition to the UDF's.
    Promotions change `name`; `first_name` is then the name at the view's creation. `since` is the version of the view
    that added the column, if that was not its first, and `revision` the version that gave it another UDF or inputs.
    """

    name: str
    kind: Kind
    type: str
    expression: str | None = None
    udf: UdfDefinition | None = None
    expect: list[dict[str, Any]] | None = None
    first_name: str | None = None
    field: str | None = None
    of: str | None = None
    since: int | None = None
    revision: int | None = None

    @property
    def key(self) -> str:
        """Identifies the column also after promotions, and apart from a dropped column of the same name."""
        first = self.first_name or self.name
        return first if self.since is None else f"{first}@{self.since}"

    def code(self, version: str) -> str:
        """Identify the code of the column's values, from the version of its UDF."""
        return version if self.revision is None else f"{version}/{self.revision}"

    def is_in(self, code: Mapping[str, str]) -> bool:
        """Whether values of some code, by column, are the column's, computed from the inputs that it has now."""
        if self.kind != "udf" and self.since is None:
            return True
        return self.name in code and (self.revision is None or code[self.name].endswith(f"/{self.revision}"))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of the UDF: columns, or fields of structs such as `chunk.text`."""
        return (self.udf.input_columns or ()) if self.udf else ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level columns of the inputs."""
        return self.udf.columns if self.udf else ()

    def mentioned(self, names: Sequence[str]) -> list[str]:
        """Return which of these columns an SQL column names."""
        return where_columns(self.expression, list(names))

    def describe(self) -> str:
        if self.udf is not None:
            field = f", field {self.field!r}" if self.field else ""
            return f"UDF {self.udf.function_name} of ({', '.join(self.inputs)}){field} -> {self.type}"
        return f"{self.origin} -> {self.type}"

    @property
    def origin(self) -> str:
        if self.udf is not None:
            return f"computed by {self.udf.call}"
        if self.kind == "sibling":
            return f"field {self.field!r} of what computes {self.of!r}"
        return f"{_ORIGINS[self.kind]} {self.expression}"

    def to_document(self) -> dict[str, Any]:
        values = {**vars(self), "udf": self.udf and parse(self.udf.to_json())}
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> OutputColumn:
        udf = UdfDefinition.from_json(json.dumps(document["udf"])) if "udf" in document else None
        about = (document["name"], document["kind"], document["type"], document.get("expression"))
        more = (document.get(name) for name in ("expect", "first_name", "field", "of", "since", "revision"))
        return OutputColumn(*about, udf, *more)

    def called(self, name: str) -> OutputColumn:
        """Return the column under another name."""
        first = self.first_name or self.name
        return replace(self, name=name, first_name=None if name == first else first)


@dataclass(frozen=True)
class SourceColumn:
    """A column of the source that a query reads, with its name, nested field ids and type at the view's creation.

    `before` are the field ids of earlier columns that a promotion replaced with it; a definition does not store them.
    """

    name: str
    fields: tuple[int, ...]
    type: str
    before: tuple[int, ...] = field(default=(), compare=False)

    def to_document(self) -> dict[str, Any]:
        return {"name": self.name, "fields": self.fields, "type": self.type}

    def is_now(self, found: SourceColumn) -> bool:
        """Whether the column that now has the name is this column, or replaced it in a promotion."""
        return found.fields[0] == self.fields[0] or self.fields[0] in found.before


@dataclass(frozen=True)
class ViewDefinition:
    """The query of a materialized view: all that a refresh needs, without code and credentials.

    Args:
        source_version: version of the source when the view was created.
        stable_row_ids: whether the source has them; without them the view can be refreshed to `source_version` only.
        where: the whole SQL filter, which includes ``__is_set`` if the source is a view; or None.
        columns: the columns, in order, without the two system columns.
        all_columns: whether the query selected all columns of the source.
        shuffle_seed: see `airflow_geneva.engine.views.rows`; None: by row id.
        explode: the list column whose elements become rows, or None.
        reads: every source column that the filter or a column reads, or that their SQL mentions, or on which it depends
            which duplicates are kept.
        grouping: of a view of groups, what it reads of its source; then `where`, `columns` and `reads` are about its
            table `groups`, which has one row a group. None: its rows are those of the source.
        deduplicate: which rows are duplicates, of which one is kept; or None.
    """

    source_table: str
    source_database: str
    source_version: int
    stable_row_ids: bool
    where: str | None
    columns: tuple[OutputColumn, ...]
    all_columns: bool
    shuffle_seed: int | None
    limit: int | None
    offset: int
    explode: str | None
    reads: tuple[SourceColumn, ...]
    grouping: Grouping | None = None
    deduplicate: Deduplication | None = None

    @property
    def source_reads(self) -> tuple[SourceColumn, ...]:
        """Every column of the source itself that the query reads."""
        return self.reads if self.grouping is None else tuple(SourceColumn(*one) for one in self.grouping.reads)

    @property
    def source_where(self) -> str | None:
        """The filter on the source's rows."""
        return self.where if self.grouping is None else self.grouping.where

    @property
    def version(self) -> str:
        """The view format version: "2" if the source has stable row ids, "1" if not."""
        return "2" if self.stable_row_ids else "1"

    @property
    def has_limit(self) -> bool:
        return self.limit is not None or self.offset > 0

    @property
    def keeps_row_ids(self) -> bool:
        """Whether a row of the view that is computed again keeps its row id, because it is the row of one group."""
        return self.grouping is not None and self.explode is None

    @property
    def compares_rows(self) -> bool:
        """Whether other rows decide, too, if a row that passes the filter is in the view."""
        return self.has_limit or self.deduplicate is not None

    def is_of(self, database_uri: str, table: str) -> bool:
        """Whether a table is the source."""
        return (self.source_table, self.source_database) == (table, without_credentials(database_uri))

    def column(self, name: str) -> OutputColumn:
        return next(column for column in self.columns if column.name == name)

    def computed_column(self, name: str, view: str) -> OutputColumn:
        """Return a column that a UDF computes; `InvalidInput` if there is none of that name."""
        found = {one.name: one for one in self.columns if one.udf}
        if name not in found:
            names = ", ".join(map(repr, found)) or "none"
            raise InvalidInput(f"No UDF computes a column {name!r} of view {view!r}. Its computed columns: {names}.")
        return found[name]

    @property
    def expectations(self) -> list[tuple[str, Expectation]]:
        """The view's own expectations on its columns, without those of their UDFs."""
        return [(column.name, Expectation.from_json(one)) for column in self.columns for one in column.expect or ()]

    @property
    def expectations_by_first_name(self) -> list[tuple[str, Expectation]]:
        """The view's own expectations by the first names of its columns, which promotions do not change."""
        return replace(self, columns=tuple(c.called(c.first_name or c.name) for c in self.columns)).expectations

    def expecting(self, columns: Mapping[str, Any], schema: pa.Schema, view: str) -> ViewDefinition:
        """Return the definition with its expectations replaced by others, given by column."""
        names = [column.name for column in self.columns]
        if unknown := sorted(set(columns) - set(names)):
            raise InvalidInput(f"View {view!r} has no column {unknown[0]!r}, only {', '.join(names)}.")
        found = {name: check_expectations(given, schema.field(name).type) for name, given in columns.items()}
        for name, expected in found.items():
            if any(one.needs_function for one in expected):
                raise InvalidInput(
                    f"Column {name!r} of view {view!r} cannot have an expectation with a function: a view stores no "
                    "code. Give it to the UDF of a column, as in @udf(expect=[satisfies(...)])."
                )
        stored = {name: [one.to_json() for one in expected] for name, expected in found.items()}
        return replace(self, columns=tuple(replace(c, expect=stored.get(c.name) or None) for c in self.columns))

    @property
    def filled_by(self) -> dict[str, str]:
        """The column with the UDF for each column that a UDF fills."""
        return filled_by(self.columns)

    def filter_columns(self, names: Sequence[str]) -> list[str]:
        """Return which of these columns the filter names."""
        return where_columns(self.source_where, list(names))

    @property
    def keys(self) -> dict[str, str]:
        """The keys of the columns by their names."""
        return {column.name: column.key for column in self.columns}

    def code(self, versions: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Identify the code of the columns' values, from the versions of their UDFs.

        A column that was added to the query without a UDF has the code "".
        """
        plain = {column.name: "" for column in self.columns if column.since is not None and column.kind != "sibling"}
        return tuple(sorted((plain | {name: self.column(name).code(one) for name, one in versions.items()}).items()))

    @property
    def _taken(self) -> dict[str, str]:
        """The columns that the query takes from the source as they are, with their names there."""
        return {column.name: column.expression or "" for column in self.columns if column.kind == "column"}

    def check_key(self, key: str | Sequence[str] | None, schema: pa.Schema, view: str) -> tuple[str, ...]:
        """Return the columns of a key of the view; InvalidInput if they do not name rows of its source."""
        columns, taken = check_key(view, schema, key), self._taken
        if other := [name for name in columns if name not in taken]:
            raise InvalidInput(
                f"Column {other[0]!r} cannot be a key of view {view!r}: errors name rows of the source, which has no "
                f"such column. Choose one that the query takes as it is: {', '.join(taken) or 'it takes none'}."
            )
        return columns

    def columns_of_key(self, key: Sequence[str]) -> tuple[str, ...]:
        """Return the view's columns that hold the key of its source; none if one of them is not in the view."""
        names = {source: name for name, source in reversed(self._taken.items())}
        return tuple(names[column] for column in key) if set(key) <= names.keys() else ()

    def key_in_source(self, view: pa.Schema, source: pa.Schema) -> tuple[str, ...]:
        """Return the source columns that name the view's rows: those of its own key, or the source's if it has them."""
        taken = self._taken
        own = key_columns(view) or self.columns_of_key(key_columns(source))
        return tuple(taken[name] for name in own) if set(own) <= taken.keys() else ()

    def promoted(self, column: str, to: str, keep_as: str) -> ViewDefinition:
        """Return the definition after a promotion; computed columns go on to read the same columns of the view."""
        names, earlier, found = {column: to, to: keep_as}, set[str](), list[OutputColumn]()
        for one in self.columns:
            now = {name: names[name] for name in names if name in earlier}
            earlier.add(one.name)
            if one.udf is not None and not one.udf.groups and not now.keys().isdisjoint(one.columns):
                one = replace(one, udf=replace(one.udf, input_columns=renamed_inputs(one.inputs, now)))
            found.append(one.called(names[one.name]) if one.name in names else one)
        return replace(self, columns=tuple(found))

    def refuses(self, column: str, to: str, keep_as: str) -> Iterator[str]:
        """Say what of the query stops a promotion."""
        if self.explode in (column, to):
            yield f"{self.explode!r} is the exploded column, whose elements are the rows of the view"
        for now, then in zip(
            self.inputs_by_first_name(), self.promoted(column, to, keep_as).inputs_by_first_name(), strict=True
        ):
            if now != then:
                names = ", ".join(repr(name) for of_view, name in now if not of_view)
                yield (
                    f"a column of the query is computed from {names} of the source, and would read a column of the "
                    "view with that name. Create the view again"
                )

    def inputs_by_first_name(self) -> Iterator[list[tuple[bool, str]]]:
        """Yield the columns that each column is computed from: whether they are the view's, and their first names."""
        earlier = dict[str, str]()
        for one in self.columns:
            of_view = {} if one.udf is not None and one.udf.groups else earlier
            yield [(name in of_view, of_view.get(name, name)) for name in one.columns]
            earlier[one.name] = one.first_name or one.name

    def to_json(self) -> str:
        lists = {
            "columns": [c.to_document() for c in self.columns],
            "reads": [column.to_document() for column in self.reads],
        }
        marked: dict[str, Any] = {"made_by": _MADE_BY, "format": _FORMAT, **vars(self), **lists}
        for name in _OPTIONAL:
            if (found := marked.pop(name)) is not None:
                marked[name] = found.to_document()
        return json.dumps(marked, sort_keys=True, separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=16)  # a refresh reads the same definition ten times
    def from_json(text: str | bytes, view: str = "?") -> ViewDefinition:
        """Parse the output of `to_json`; `InvalidInput` if another system or a later version of this one wrote it."""
        try:
            document = parse(text)
            foreign = document.get("made_by") != _MADE_BY
        except (AttributeError, ValueError):
            foreign = True
        if foreign:
            raise InvalidInput(
                f"View {view!r} was made by another system, whose definition airflow-geneva does not read: "
                f"{text!r:.200}. Create the view again with its query: table.query()...create_materialized_view(...)."
            )
        if document.get("format") != _FORMAT:
            raise InvalidInput(
                f"The definition of view {view!r} has format {document.get('format')!r}; this version of "
                f"airflow-geneva reads format {_FORMAT}. Upgrade airflow-geneva."
            )
        try:
            values = {
                field.name: document[field.name] for field in fields(ViewDefinition) if field.name not in _OPTIONAL
            }
            values |= {name: kind.of_document(document[name]) for name, kind in _OPTIONAL.items() if name in document}
            values["columns"] = tuple(map(OutputColumn.of_document, values["columns"]))
            filled_by(values["columns"])
            values["reads"] = tuple(SourceColumn(c["name"], tuple(c["fields"]), c["type"]) for c in values["reads"])
            found = well_typed(ViewDefinition(**values))
            _ = found.expectations
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"The definition of view {view!r} is damaged ({error!r}): {text!r:.200}.") from error
        found.check_sql()
        return found

    def check_sql(self) -> None:
        """Raise `InvalidInput` if the filter or an expression is too large to be evaluated."""
        expressions = (column.expression for column in self.columns if column.kind in ("sql", "aggregate"))
        for sql in (self.where, self.source_where, *expressions):
            read_sql(sql or "")

    @staticmethod
    def read(metadata: Mapping[bytes, bytes] | None, view: str = "?") -> ViewDefinition:
        """Read the definition from a view's schema metadata; `InvalidInput` if it is not a view of this package."""
        refuse_view(view, metadata)
        if not is_view(metadata):
            raise InvalidInput(f"Table {view!r} is not a materialized view: create one from a query.")
        return ViewDefinition.from_json((metadata or {})[QUERY_KEY.encode()], view)

    def metadata(self) -> dict[str, str]:
        return {
            QUERY_KEY: self.to_json(),
            BASE_TABLE_KEY: self.source_table,
            BASE_DATABASE_KEY: self.source_database,
            BASE_VERSION_KEY: NEVER_REFRESHED,
            VERSION_KEY: self.version,
        }

    def differences(self, wanted: ViewDefinition) -> list[str]:
        """Describe how another definition differs from this one, as far as the view's rows depend on it.

        These are not differences: another code version or other settings of the same UDF (`on_code_change` handles
        them), and new source columns of a view that selects all columns (see `gained_columns`).
        """
        return list(self._differences(wanted))

    def _differences(self, wanted: ViewDefinition) -> Iterator[str]:
        for name, what in _NAMED.items():
            ours, theirs = (_shown(getattr(one, name)) for one in (self, wanted))
            if ours != theirs:
                yield f"the {what} is {ours} and would be {theirs}"
        ours, theirs = (str(one.grouping or "none") for one in (self, wanted))
        if ours != theirs:
            yield f"the grouping is {ours} and would be {theirs}"
        if self.stable_row_ids != wanted.stable_row_ids:
            yield "the source " + ("has lost its" if self.stable_row_ids else "now has") + " stable row ids"
        reads_now = {column.name: column for column in wanted.source_reads}
        for read in self.source_reads:
            found = reads_now.get(read.name, read)
            if found.fields != read.fields and read.fields[0] not in found.before:
                yield f"column {read.name!r} of the source was dropped and added again"
        gained = self.gained_columns(wanted)
        then = {column.name: column for column in self.columns}
        now = {column.name: column for column in wanted.columns if column.name not in gained}
        yield from (f"column {name!r} would be removed" for name in then if name not in now)
        yield from (f"column {name!r} would be new: {now[name].describe()}" for name in now if name not in then)
        for name in then.keys() & now.keys():
            if then[name].describe() != now[name].describe():
                yield f"column {name!r} is {then[name].describe()} and would be {now[name].describe()}"
        if then.keys() == now.keys() and list(then) != list(now):
            yield f"the columns are in the order {', '.join(then)} and would be in the order {', '.join(now)}"

    def gained_columns(self, wanted: ViewDefinition) -> list[str]:
        """Return the columns that the source gained since a view of all its columns was created."""
        if not (self.all_columns and wanted.all_columns):
            return []
        mine = {column.name for column in self.columns}
        return [column.name for column in wanted.columns if column.kind == "column" and column.name not in mine]

    def check_source(self, dataset: lance.LanceDataset) -> None:
        """Check that the source still has every column that the view reads, with the same field id, name and type.

        A renamed column is rejected too, because the stored filter and expressions use its name. A column that replaced
        the original one in a promotion is accepted.
        """
        now = {column.name: column for column in source_columns(dataset, dataset.schema.names)}
        by_id = {column.fields[0]: column.name for column in now.values()}
        changes = []
        for then in self.reads:
            found = now.get(then.name)
            if found is None or not then.is_now(found):
                renamed = by_id.get(then.fields[0])
                if renamed is not None:
                    changes.append(f"column {then.name!r} is now called {renamed!r}: rename it back")
                elif found is not None:
                    changes.append(f"column {then.name!r} was dropped and added again")
                else:
                    changes.append(f"column {then.name!r} was dropped")
            elif found.type != then.type:
                changes.append(f"column {then.name!r} was {then.type} and is {found.type}")
            elif found.fields != then.fields and found.fields[0] == then.fields[0]:
                changes.append(f"nested fields of column {then.name!r} were dropped and added again")
        if bool(dataset.has_stable_row_ids) != self.stable_row_ids:
            had, has = ("had", "has none") if self.stable_row_ids else ("had no", "has them")
            changes.append(f"it {had} stable row ids and now {has}, so it is another table")
        if changes:
            raise InvalidInput(
                f"Table {self.source_table!r} no longer fits the view that reads it: {'; '.join(changes)}. "
                "Undo the change, or create the view again from the current table."
            )


def _shown(value: object) -> str:
    """Return a part of a query as differences name it."""
    return "none" if value is None else str(value) if isinstance(value, Deduplication) else repr(value)


def is_view(metadata: Mapping[bytes, bytes] | None) -> bool:
    """Whether a table is a materialized view, by its schema metadata; another system may have created it."""
    return QUERY_KEY.encode() in (metadata or {})


def visible_columns(schema: pa.Schema) -> list[str]:
    """Return the names of a table's columns; for a view, without the system columns and states of functions."""
    hidden = SYSTEM_COLUMNS if is_view(schema.metadata) else ()
    return [name for name in schema.names if name not in hidden and not (hidden and name.startswith(STATE_OF))]


def view_columns(schema: pa.Schema) -> tuple[OutputColumn, ...]:
    """Return the columns of a view's query; none for a table."""
    return ViewDefinition.read(schema.metadata).columns if is_view(schema.metadata) else ()


def own_columns(schema: pa.Schema) -> list[str]:
    """Return the names of a view's columns: the two system columns, then the query's."""
    return [*SYSTEM_COLUMNS, *(column.name for column in view_columns(schema))]


@dataclass(frozen=True)
class FoldColumn:
    """A column of a function that can be folded, and the hidden column with the states.

    `code` identifies the function's code and inputs, and `removes` says whether rows can be removed from a state.
    """

    name: str
    state: str
    code: str
    removes: bool


def fold_columns(columns: Sequence[OutputColumn]) -> list[FoldColumn]:
    """Return the columns of functions that can be folded."""
    states = {column.of: column.name for column in columns if column.kind == "sibling"}
    return [
        FoldColumn(one.name, states.get(one.key, ""), f"{one.code(one.udf.version)} {one.inputs}", one.udf.removes)
        for one in columns
        if one.udf is not None and one.udf.removes is not None
    ]


def filled_by(columns: Sequence[OutputColumn]) -> dict[str, str]:
    """Return the column with the UDF for each column that a UDF fills."""
    first = {column.key: column.name for column in columns}
    return {c.name: c.name if c.of is None else first[c.of] for c in columns if c.udf or c.kind == "sibling"}


def source_inputs(columns: Sequence[OutputColumn]) -> dict[str, tuple[str, ...]]:
    """Return the inputs of each UDF column that are columns of the source, not earlier columns of the query.

    All inputs of a UDF of groups are columns of the source.
    """
    found: dict[str, tuple[str, ...]] = {}
    earlier: set[str] = set()
    for column in columns:
        if column.udf is not None:
            found[column.name] = tuple(name for name in column.columns if column.udf.groups or name not in earlier)
        earlier.add(column.name)
    return found


def grouping_of(grouping: Grouping, columns: Sequence[OutputColumn]) -> Grouping:
    """Return what a view of groups reads of its source if it has these columns."""
    names = [one[0] for one in grouping.reads]
    needed = {*grouping.keys, *(name for name, _ in grouping.order), *where_columns(grouping.where, names)}
    for column in columns:
        if column.kind == "aggregate":
            argument = parse_aggregate(column.expression or "", column.name).argument
            needed.update(where_columns(argument, names) if argument is not None else ())
        needed.update(column.columns)
    return replace(grouping, reads=tuple(one for one in grouping.reads if one[0] in needed))


def source_columns(dataset: lance.LanceDataset, names: Sequence[str]) -> tuple[SourceColumn, ...]:
    """Return columns of one version of a table, with their field ids and types."""
    by_name = {field.name(): field for field in dataset.lance_schema.fields()}
    columns = {column.name: column for column in dataset.schema}
    return tuple(
        SourceColumn(name, tuple(_field_ids(by_name[name])), str(columns[name].type), columns_before(columns[name]))
        for name in names
    )


def _field_ids(field: Any) -> Iterator[int]:
    yield field.id()
    for child in field.children():
        yield from _field_ids(child)


def exploded_schema(schema: pa.Schema, column: str) -> pa.Schema:
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
        pc.list_flatten(lists) if position == at else rows_at(values, parents)
        for position, values in enumerate(batch.columns)
    ]
    return pa.record_batch(columns, schema=exploded_schema(batch.schema, column))
