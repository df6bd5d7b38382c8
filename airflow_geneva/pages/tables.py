"""Tables and views as their pages show them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_geneva.column_definition import stored_definition
from airflow_geneva.commit.contents import ViewContents
from airflow_geneva.database import Database
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError
from airflow_geneva.job.status import Job
from airflow_geneva.lance_io.engine_errors import is_failure
from airflow_geneva.location import TableLocation
from airflow_geneva.pages.access import Viewer
from airflow_geneva.pages.counting import Counts
from airflow_geneva.pages.databases import visible_tables
from airflow_geneva.pages.jobs import list_jobs
from airflow_geneva.plan.standing import Standing, column_standing, view_standing
from airflow_geneva.uri import without_credentials
from airflow_geneva.view_columns import SYSTEM_COLUMNS
from airflow_geneva.view_definition import ViewDefinition, is_view

if TYPE_CHECKING:
    import lance

_COUNTS = Counts()
_JOBS_OF_COLUMNS = 25


@dataclass(frozen=True)
class ColumnView:
    """A column, or a view, as a row of a table's page.

    Args:
        name: what it is called.
        type: the column's Arrow type; "" for a view.
        what: what it is computed by, in words; None for a column that is just data.
        standing: how it stands; None while that is being counted, and for plain data.
        error: why it cannot be told, or None.
        job: the newest job about it that the viewer may see.
    """

    name: str
    type: str
    what: str | None
    standing: Standing | None = None
    error: str | None = None
    job: Job | None = None

    @property
    def counting(self) -> bool:
        """Whether its standing is still to come."""
        return self.what is not None and self.standing is None and self.error is None


@dataclass(frozen=True)
class TableView:
    """A table or view as its page shows it.

    Args:
        name: what it is called.
        version: its newest version.
        rows, fragments: how large it is.
        definition: the query, of a view that this package made; else None.
        columns: its columns, without the system columns of a view.
        own: of a view, the view itself; else None.
        error: what is wrong with its definition, or None.
    """

    name: str
    version: int
    rows: int
    fragments: int
    definition: ViewDefinition | None
    columns: tuple[ColumnView, ...]
    own: ColumnView | None = None
    error: str | None = None

    def source_in(self, database: Database) -> str | None:
        """The table that it is made of, if it is a view of a table of this database."""
        made_of = self.definition
        if made_of is None or made_of.source_database != without_credentials(database.uri):
            return None
        return made_of.source_table


def describe_table(location: TableLocation) -> TableView:
    """What the table's manifest says of it.

    Raises:
        InvalidInput: there is no such table.
        StorageError: the store does not answer, or the table is damaged.
    """
    return _describe(location.name, _open(location))


def _open(location: TableLocation) -> lance.LanceDataset:
    """The table; a store that does not answer is told from one without that table, which pylance does not do."""
    if not location.exists():
        raise InvalidInput(f"There is no table {location.name!r} at {location.uri}.")
    try:
        return location.open()
    except InvalidInput as error:
        raise StorageError(str(error)) from error


def _describe(name: str, dataset: lance.LanceDataset) -> TableView:
    fragments = int(dataset.stats.dataset_stats()["num_fragments"])
    size = (name, int(dataset.version), int(dataset.count_rows()), fragments)
    if not is_view(dataset.schema.metadata):
        return TableView(*size, None, tuple(_column(dataset, field.name) for field in dataset.schema))
    kept = [field for field in dataset.schema if field.name not in SYSTEM_COLUMNS]
    try:
        definition = ViewDefinition.read(dataset.schema.metadata, name)
    except GenevaError as error:
        plain = tuple(ColumnView(field.name, str(field.type), None) for field in kept)
        return TableView(*size, None, plain, error=str(error))
    said = {column.name: column.describe() for column in definition.columns}
    columns = tuple(ColumnView(field.name, str(field.type), said.get(field.name)) for field in kept)
    return TableView(*size, definition, columns, ColumnView(name, "", _query(definition)))


def _column(dataset: lance.LanceDataset, name: str) -> ColumnView:
    kind = str(dataset.schema.field(name).type)
    try:
        definition = stored_definition(dataset.schema, name)
    except GenevaError as error:
        return ColumnView(name, kind, "a UDF", error=str(error))
    if definition is None:
        return ColumnView(name, kind, None)
    inputs = ", ".join(definition.input_columns or ())
    path = definition.import_path or definition.name
    return ColumnView(name, kind, f"{path} (version {definition.version}) of {inputs}")


def _query(definition: ViewDefinition) -> str:
    where = f" where {definition.where}" if definition.where else ""
    limit = f" limit {definition.limit}" if definition.limit is not None else ""
    names = ", ".join(column.name for column in definition.columns)
    return f"{names} of {definition.source_table}{where}{limit}"


@dataclass(frozen=True)
class StandingView:
    """How a table's columns, or a view, and the views made of it stand.

    Args:
        columns: its computed columns; of a view, the view itself.
        views: the views that are made of it.
        counting: whether some are still being counted.
    """

    columns: tuple[ColumnView, ...]
    views: tuple[ColumnView, ...]
    counting: bool


def count_standings(
    database: Database, conn_id: str, location: TableLocation, viewer: Viewer, seconds: float
) -> StandingView:
    """Count what is pending, for so long; ask again for the rest.

    Args:
        conn_id: the connection of the database.
        seconds: to wait for the counts.

    Raises:
        InvalidInput: there is no such table.
        StorageError: the store does not answer, or the table is damaged.
    """
    until = time.monotonic() + seconds
    dataset = _open(location)
    described = _describe(location.name, dataset)
    newest = _newest_jobs(database, conn_id, viewer, location.name, _JOBS_OF_COLUMNS)
    if described.own is not None:
        shown = [_with_view(location, int(dataset.version), described.own, until)]
    else:
        computed = [column for column in described.columns if column.what is not None]
        shown = [_with_column(location, dataset, column, until) for column in computed]
    shown = [replace(item, job=newest.get(item.name)) for item in shown]
    views = _views_of(database, conn_id, location, int(dataset.version), viewer, until)
    whole = views is not None and not any(item.counting for item in (*shown, *views))
    return StandingView(tuple(shown), tuple(views or ()), not whole)


def _with_column(
    location: TableLocation, dataset: lance.LanceDataset, column: ColumnView, until: float
) -> ColumnView:  # fmt: skip
    def count() -> Standing:
        definition = stored_definition(dataset.schema, column.name)
        assert definition is not None
        return column_standing(dataset, location.checkpoints, definition.input_columns or (), column.name)

    name = (location.name, dataset.version, column.name)
    return column if column.error else _counted(column, location, name, count, until)


def _with_view(location: TableLocation, version: int, view: ColumnView, until: float) -> ColumnView:
    def count() -> Standing:
        dataset = location.open()
        definition = ViewDefinition.read(dataset.schema.metadata, location.name)
        source = Database(definition.source_database, location.options).location(definition.source_table)
        return view_standing(source.open(), definition, ViewContents(location, dataset))

    return _counted(view, location, (location.name, "view", version), count, until)


def _counted(
    item: ColumnView, location: TableLocation, name: tuple[object, ...], count: Callable[[], Standing], until: float
) -> ColumnView:
    try:
        return replace(item, standing=_COUNTS.get(location.database_uri, name, count, until))
    except BaseException as error:
        if not is_failure(error):
            raise
        return replace(item, error=str(error) or type(error).__name__)


def _views_of(
    database: Database, conn_id: str, location: TableLocation, version: int, viewer: Viewer, until: float
) -> list[ColumnView] | None:
    """The views that are made of a table; None while the database is still being looked through."""
    search = (location.name, "views")
    found = _COUNTS.get(location.database_uri, search, lambda: _find_views(database, location.name), until)
    if found is None:
        return None
    views = []
    for name in visible_tables(database, conn_id, viewer):
        if name in found:
            place = database.location(name)
            newest = _newest_jobs(database, conn_id, viewer, name, 1)
            views.append(replace(_with_view(place, version, found[name], until), job=newest.get(name)))
    return views


def _find_views(database: Database, source: str) -> dict[str, ColumnView]:
    """Every view of a database that is made of one of its tables; tables that cannot be opened are passed over."""
    place = without_credentials(database.uri)
    found: dict[str, ColumnView] = {}
    for name in database.table_names():
        try:
            metadata = database.location(name).open().schema.metadata
            definition = ViewDefinition.read(metadata, name) if is_view(metadata) else None
        except GenevaError:
            continue
        if definition is not None and (definition.source_table, definition.source_database) == (source, place):
            found[name] = ColumnView(name, "", _query(definition))
    return found


def _newest_jobs(database: Database, conn_id: str, viewer: Viewer, table: str, most: int) -> Mapping[str, Job]:
    """Of the newest visible jobs, the newest of each column of a table, or of a view by its own name."""
    newest: dict[str, Job] = {}
    for job in list_jobs(database, conn_id, viewer, table=table, most=most).jobs:
        newest.setdefault(job.view or job.column or "", job)
    return newest
