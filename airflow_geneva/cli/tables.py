"""The command `tables`: what is fresh, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.text import Text

from airflow_geneva.cli.database import (
    AllowedPlaces,
    AsJson,
    ConnectionId,
    Sources,
    make_grid,
    open_console,
    open_database_argument,
    plain,
    print_json,
    without_controls,
)
from airflow_geneva.engine.storage.uri import normalize_uri

_COLORS = {"up to date": "green", "running": "cyan", "waiting": "cyan", "unknown": "red", "table": "bright_black"}
_PATIENCE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class _Row:
    """A computed column, a view, or a table without computed columns."""

    name: str
    state: str
    rows: int | None = None
    due: int | None = None
    failed: int | None = None
    about: str = ""


def tables(
    database: Annotated[
        list[str] | None, typer.Argument(metavar="DB", help="Path or URI of the database.", show_default=False)
    ] = None,
    table: Annotated[
        str, typer.Option("--table", metavar="NAME", help="Only tables and views whose name contains this.")
    ] = "",
    source: Sources = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """List what is fresh and what is not, worst first.

    It counts the rows of computed columns and views that are due, and loads no code.
    """
    from airflow_geneva.pages.databases import Filters, read_database
    from airflow_geneva.pages.tables import CountCache
    from airflow_geneva.pages.visible import Owner, VisibleDatabase

    db, _ = open_database_argument(database, conn_id, allowed_place)
    everything = VisibleDatabase("", Owner({normalize_uri(uri) for uri in source or ()}), db)
    shown = read_database(everything, Filters(table=table), _PATIENCE_SECONDS, CountCache())
    rows = [row for card in shown.cards for row in _rows_of(card)]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    grid = make_grid("name", "state", ">rows", ">due", ">failed")
    grid.columns[0].overflow = "fold"
    for row in rows:
        counts = ("" if count is None else f"{count:,}" for count in (row.rows, row.due, row.failed))
        grid.add_row(plain(row.name), Text(row.state, _COLORS.get(row.state, "yellow"), no_wrap=True), *counts)
    open_console().print(grid if rows else "No tables.")
    for row in rows:
        if row.about:
            typer.echo(without_controls(f"{row.name}: {row.about}"))


def _rows_of(card: Any) -> Iterator[_Row]:
    from airflow_geneva.pages.databases import STALE_ABOVE

    if not card.computed:
        about = "cannot be read: airflow-geneva plan DB --all says why" if card.broken else ""
        yield _Row(card.name, card.state, None if card.broken else card.rows, about=about)
    for item in card.computed:
        found, job, above = item.standing, (card.jobs or {}).get(item.name), card.stale_above.get(item.name)
        state = card.state_of(item)
        said = [] if item.error is None else [item.error]
        said += [f"up to date with {above}, which is stale"] if state == STALE_ABOVE else []
        said += [f"job {job.id} failed: {job.error.splitlines()[0]}"] if job and job.error else []
        yield _Row(
            card.name if card.is_view else f"{card.name}.{item.name}",
            state,
            found and found.rows,
            found and found.pending + found.gone,
            found and found.failed,
            "; ".join(said),
        )
