"""The databases that may hold the source of a view."""

from __future__ import annotations

from collections.abc import Iterable

from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.storage.catalogs import SCHEME, options_in
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.storage.files import in_threads
from airflow_geneva.engine.storage.location import TableLocation, locate, table_names
from airflow_geneva.engine.storage.places import with_places
from airflow_geneva.engine.storage.uri import check_name, without_credentials
from airflow_geneva.engine.views.definition import ViewDefinition, is_view
from airflow_geneva.errors import InvalidInput

_created: ProcessMemo[tuple[str, str], bool] = ProcessMemo()
"""URIs of the views that this process created, each with the database of its source. It is the process's: what a table
stores, others may have changed."""


def keep_source(view: TableLocation, definition: ViewDefinition) -> None:
    """Allow the source of a view that this process created, until the process ends."""
    _created[view.uri, definition.source_database] = True


def locate_source(view: TableLocation, definition: ViewDefinition, allowed: Iterable[str] = ()) -> TableLocation:
    """Return the location of a view's source, with the credentials of the view.

    Anyone with write access to the view's folder can change its definition, and could make a reader copy rows there
    from any database that the reader may read. So the source must be in the view's database, in an `allowed` one, or in
    the one from which this process created the view.

    Raises:
        InvalidInput: the definition names another database, or no valid table.
    """
    table, database = check_name(definition.source_table, "table"), definition.source_database
    options = view.options
    if database == without_credentials(view.database_uri):
        database = view.database_uri
    elif database not in allowed and (view.uri, database) not in _created:
        raise InvalidInput(
            f"The definition of view {view.name!r} names a source in another database, {database!r:.300}, and only "
            "databases that you name are opened for it, since all who may write the view may change its definition. "
            f"If it is right, allow it: db.open_view({view.name!r}, sources=[...]), in Airflow "
            "RefreshTaskGroup(sources=[...]), of the command --source."
        )
    else:
        named = (one for one in allowed if not one.startswith(SCHEME))
        options = with_places(options, [*view.places.roots, *named])
    return locate(database, table, options_in(options, database if database.startswith(SCHEME) else ""))


def find_views(source: TableLocation) -> dict[str, tuple[TableLocation, ViewDefinition]]:
    """Return the views of a table in its own database, with their definitions; unreadable views are left out.

    Opens every table of the database.
    """

    def look(name: str) -> tuple[TableLocation, ViewDefinition] | None:
        try:
            location = locate(source.database_uri, name, source.options)
            metadata = location.open().schema.metadata
            definition = ViewDefinition.read(metadata, name) if is_view(metadata) else None
        except BaseException as error:  # one damaged view must not hide the others
            if not is_failure(error):
                raise
            return None
        if definition is None or not definition.is_of(source.database_uri, source.name):
            return None
        return location, definition

    names = table_names(source.database_uri, source.options)
    return {name: found for name, found in zip(names, in_threads(look, names), strict=True) if found is not None}
