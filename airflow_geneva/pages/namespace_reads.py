"""What requests of the namespace read of tables, in a reader process."""

from __future__ import annotations

from lance_namespace import CreateMaterializedViewRequest, errors

from airflow_geneva.engine import api
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.namespace import check_view, find_job
from airflow_geneva.pages.visible import VisibleDatabase


def names_below(opened: VisibleDatabase, within: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the namespaces and tables that lie directly in a namespace."""
    if not opened.in_catalog:
        opened.reach()
        if within:
            raise errors.NamespaceNotFoundError(f"A folder of tables has no namespace {'.'.join(within)!r}.")
        return [], opened.tables()
    beginning = "".join(f"{part}." for part in within)
    found = [name.removeprefix(beginning) for name in opened.tables() if name.startswith(beginning)]
    if within and not found:
        raise errors.NamespaceNotFoundError(f"There is no namespace {'.'.join(within)!r} with tables.")
    deeper = sorted({name.partition(".")[0] for name in found if "." in name})
    return deeper, [name for name in found if "." not in name]


def locate_existing(opened: VisibleDatabase, name: str) -> TableLocation:
    return opened.reach().open_table(name).location


def locate_new(opened: VisibleDatabase, name: str) -> TableLocation:
    """Return where a program may write a new table."""
    database = opened.reach()
    if database.has_table(name):
        raise errors.TableAlreadyExistsError(f"There is a table or view {name!r} already.")
    return database.location(name)


def check_backfill(opened: VisibleDatabase, name: str, column: str) -> None:
    """Raise the error of a backfill of a column that has no UDF."""
    opened.reach().open_table(name).definition(column)


def name_of_view(opened: VisibleDatabase, name: str) -> str:
    """Return the name of a view that a job can refresh."""
    return opened.reach().open_view(name).name


def check_new_view(opened: VisibleDatabase, name: str, asked: CreateMaterializedViewRequest) -> None:
    check_view(opened.reach(), name, asked)


def find_visible_job(opened: VisibleDatabase, parts: list[str]) -> api.Job | None:
    job = find_job(opened.reach(), parts)
    return job if job is not None and opened.viewer.may_see_job(opened.conn_id, job) else None
