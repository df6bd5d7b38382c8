"""The commands `tables`, what is fresh and what is not, and `duplicates`, which rows a view leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
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
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.storage.uri import normalize_uri

_COLORS = {"up to date": "green", "running": "cyan", "waiting": "cyan", "unknown": "red", "table": "bright_black"}
_PATIENCE_SECONDS = 24 * 3600.0
_SHOWN = 60
"""The most characters of a value of a row."""


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


def duplicates(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="DB VIEW", help="The database and the view.", show_default=False)
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="COLUMN", help="A column of the source to show; may be given several times."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Show at most this many rows.")] = 40,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write all rows to this Parquet file instead.")
    ] = None,
    source: Sources = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """List the duplicates that a view leaves out.

    They come by cluster, after the row that is kept instead. --json and --output give all rows.
    """
    db, (name,) = open_database_argument(arguments, conn_id, allowed_place, "VIEW")
    found = db.open_view(name, source or ()).duplicates(column or ())
    if output is not None:
        import pyarrow.parquet

        pyarrow.parquet.write_table(found, output)
        typer.echo(without_controls(f"{counted(len(found), 'row')} written to {output}."))
    elif as_json:
        print_json([{key: _as_json(value) for key, value in row.items()} for row in found.to_pylist()])
    elif len(found):
        grid = make_grid(">row id", ">cluster", ">duplicate of", *(without_controls(name) for name in column or ()))
        for row in found.slice(0, rows).to_pylist():
            grid.add_row(*("" if value is None else plain(str(value)[:_SHOWN]) for value in row.values()))
        open_console().print(grid)
        left_out = len(found) - found.column("duplicate_of").null_count
        told = f"{counted(left_out, 'row')} left out of {counted(len(found) - left_out, 'cluster')}"
        typer.echo(f"{told}; --rows shows more." if len(found) > rows else f"{told}.")
    else:
        typer.echo("No duplicates.")


def _as_json(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value
