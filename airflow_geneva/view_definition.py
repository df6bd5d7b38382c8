"""What a materialized view is defined by, as it is stored with the view for whoever refreshes it, years later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from airflow_geneva.errors import InvalidInput
from airflow_geneva.view_columns import SYSTEM_COLUMNS, OutputColumn, SourceColumn, source_columns

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

QUERY_KEY = "geneva::view::query"
BASE_TABLE_KEY = "geneva::view::base_table"
BASE_DATABASE_KEY = "geneva::view::base_table_db_uri"
BASE_VERSION_KEY = "geneva::view::base_table_version"
VERSION_KEY = "geneva::view::version"

NEVER_REFRESHED = "0"
"""Under `BASE_VERSION_KEY` until the first refresh: a view's placeholders hold nothing of any source version."""

_MADE_BY = "airflow_geneva"
_FORMAT = 1


@dataclass(frozen=True)
class ViewDefinition:
    """The query of a materialized view: all that a refresh needs to know, without code and without credentials.

    Args:
        source_table: name of the source table or view.
        source_database: normalized URI of its database.
        source_version: version of the source when the view was made.
        stable_row_ids: whether the source has them; without, the view can be refreshed to `source_version` only.
        where: SQL filter with everything that counts, for a source that is a view its ``__is_set`` too; or None.
        columns: the columns, in order, without the two system columns.
        all_columns: whether the query took all columns of the source, whichever there were.
        shuffle_seed: seed of the shuffled order, see `airflow_geneva.row_order`; None: by row id.
        limit: most rows, or None.
        offset: rows left out before.
        explode: the column of lists whose elements become rows of their own, or None.
        reads: every column of the source that the filter or a column reads; the filter's and the expressions' are
            those they mention, so perhaps too many and never too few.
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

    @property
    def version(self) -> str:
        """The seed's view version: "2" with stable row ids in the source, "1" without."""
        return "2" if self.stable_row_ids else "1"

    @property
    def cuts(self) -> bool:
        """Whether a row's place among the others decides whether it is in the view."""
        return self.limit is not None or self.offset > 0

    def column(self, name: str) -> OutputColumn:
        """One of the columns."""
        return next(column for column in self.columns if column.name == name)

    def to_json(self) -> str:
        """The definition as JSON with sorted keys."""
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        document["columns"] = [column.to_document() for column in self.columns]
        document["reads"] = [{"name": c.name, "fields": list(c.fields), "type": c.type} for c in self.reads]
        marked = {"made_by": _MADE_BY, "format": _FORMAT, **document}
        return json.dumps(marked, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes, view: str = "?") -> ViewDefinition:
        """Read what `to_json` wrote.

        Args:
            view: the view's name, for messages.

        Raises:
            InvalidInput: another system wrote it, or a later version of this one.
        """
        try:
            document = json.loads(text)
            foreign = document.get("made_by") != _MADE_BY
        except (AttributeError, ValueError):
            foreign = True
        if foreign:
            raise InvalidInput(
                f"View {view!r} was made by another system, whose definition airflow-geneva does not read: "
                f"{text!r:.200}. Make the view again with its query: table.query()...create_materialized_view(...)."
            )
        if document.get("format") != _FORMAT:
            raise InvalidInput(
                f"The definition of view {view!r} has format {document.get('format')!r}; this version of "
                f"airflow-geneva reads format {_FORMAT}. Upgrade airflow-geneva."
            )
        try:
            values = {field.name: document[field.name] for field in fields(ViewDefinition)}
            values["columns"] = tuple(OutputColumn.of_document(column) for column in values["columns"])
            values["reads"] = tuple(SourceColumn(c["name"], tuple(c["fields"]), c["type"]) for c in values["reads"])
            return ViewDefinition(**values)
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"The definition of view {view!r} is damaged ({error!r}): {text!r:.200}.") from error

    @staticmethod
    def read(metadata: Mapping[bytes, bytes] | None, view: str = "?") -> ViewDefinition:
        """The definition in a view's schema metadata.

        Raises:
            InvalidInput: see `from_json`; or the table is no view.
        """
        if not is_view(metadata):
            raise InvalidInput(f"Table {view!r} is not a materialized view: make one of a query's result.")
        return ViewDefinition.from_json((metadata or {})[QUERY_KEY.encode()], view)

    def metadata(self) -> dict[str, str]:
        """The schema metadata of a view that was just made: the seed's keys."""
        return {
            QUERY_KEY: self.to_json(),
            BASE_TABLE_KEY: self.source_table,
            BASE_DATABASE_KEY: self.source_database,
            BASE_VERSION_KEY: NEVER_REFRESHED,
            VERSION_KEY: self.version,
        }

    def differences(self, wanted: ViewDefinition) -> list[str]:
        """In words, how another definition differs from this one, as far as the view's contents depend on it.

        What is not a difference: another code version or other settings of the same UDF (a refresh asks about those),
        and columns that a source gained whose every column was asked for (`gained_columns` names those).
        """
        return list(self._differences(wanted))

    def _differences(self, wanted: ViewDefinition) -> Iterator[str]:
        pairs = {
            "source table": (self.source_table, wanted.source_table),
            "source database": (self.source_database, wanted.source_database),
            "filter": (self.where, wanted.where),
            "shuffle seed": (self.shuffle_seed, wanted.shuffle_seed),
            "limit": (self.limit, wanted.limit),
            "offset": (self.offset, wanted.offset),
            "exploded column": (self.explode, wanted.explode),
        }
        for what, (ours, theirs) in pairs.items():
            if ours != theirs:
                yield f"the {what} is {_quoted(ours)} and would be {_quoted(theirs)}"
        if self.stable_row_ids != wanted.stable_row_ids:
            yield "the source " + ("has lost its" if self.stable_row_ids else "now has") + " stable row ids"
        fields_now = {column.name: column.fields for column in wanted.reads}
        for read in self.reads:
            if fields_now.get(read.name, read.fields) != read.fields:
                yield f"column {read.name!r} of the source was dropped and is another one now"
        gained = self.gained_columns(wanted)
        then = {column.name: column for column in self.columns}
        now = {column.name: column for column in wanted.columns if column.name not in gained}
        yield from (f"column {name!r} would be gone" for name in then if name not in now)
        yield from (f"column {name!r} would be new: {now[name].describe()}" for name in now if name not in then)
        for name in then.keys() & now.keys():
            if then[name].describe() != now[name].describe():
                yield f"column {name!r} is {then[name].describe()} and would be {now[name].describe()}"
        if then.keys() == now.keys() and list(then) != list(now):
            yield f"the columns are in the order {', '.join(then)} and would be in the order {', '.join(now)}"

    def gained_columns(self, wanted: ViewDefinition) -> list[str]:
        """Columns that the source gained since a view of all its columns was made, and which the view is without."""
        if not (self.all_columns and wanted.all_columns):
            return []
        mine = {column.name for column in self.columns}
        return [column.name for column in wanted.columns if column.kind == "column" and column.name not in mine]

    def check_source(self, dataset: lance.LanceDataset) -> None:
        """Check that the source still has every column that is read: the same one, by field id, name and type.

        A renamed column is refused too: the stored filter and expressions name it.

        Raises:
            InvalidInput: it does not; says what changed.
        """
        now = {column.name: column for column in source_columns(dataset, dataset.schema.names)}
        by_id = {column.fields[0]: column.name for column in now.values()}
        changes = []
        for then in self.reads:
            found = now.get(then.name)
            if found is None or found.fields[0] != then.fields[0]:
                renamed = by_id.get(then.fields[0])
                if renamed is not None:
                    changes.append(f"column {then.name!r} is now called {renamed!r}: rename it back")
                elif found is not None:
                    changes.append(f"column {then.name!r} was dropped and is another one now")
                else:
                    changes.append(f"column {then.name!r} is gone")
            elif found.type != then.type:
                changes.append(f"column {then.name!r} was {then.type} and is {found.type}")
            elif found.fields != then.fields:
                changes.append(f"fields inside of column {then.name!r} were dropped and are others now")
        if bool(dataset.has_stable_row_ids) != self.stable_row_ids:
            had, has = ("had", "has none") if self.stable_row_ids else ("had no", "has them")
            changes.append(f"it {had} stable row ids and now {has}, so it is another table")
        if changes:
            raise InvalidInput(
                f"Table {self.source_table!r} no longer fits the view that reads it: {'; '.join(changes)}. "
                "Undo the change, or make the view again from the table as it is now."
            )


def is_view(metadata: Mapping[bytes, bytes] | None) -> bool:
    """Tell by its schema metadata whether a table is a materialized view, whoever made it."""
    return QUERY_KEY.encode() in (metadata or {})


def visible_columns(schema: pa.Schema) -> list[str]:
    """Names of a table's columns, for a view without the two system columns."""
    hidden = SYSTEM_COLUMNS if is_view(schema.metadata) else ()
    return [name for name in schema.names if name not in hidden]


def own_columns(schema: pa.Schema) -> list[str]:
    """Names of a view's columns that are its query's, the two system columns first."""
    return [*SYSTEM_COLUMNS, *(column.name for column in ViewDefinition.read(schema.metadata).columns)]


def _quoted(value: Any) -> str:
    return "none" if value is None else repr(value)
