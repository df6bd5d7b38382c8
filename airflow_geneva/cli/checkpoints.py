"""The commands about checkpoints: `checkpoints list` and `checkpoints gc`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from airflow_geneva.cli.database import (
    AllowedPlaces,
    AsJson,
    Command,
    ConnectionId,
    make_grid,
    open_console,
    open_database_argument,
    plain,
    print_json,
)
from airflow_geneva.engine import api
from airflow_geneva.engine.choices import parse_age
from airflow_geneva.engine.display import counted, format_time, readable_bytes

checkpoints_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List or remove what is stored beside tables."
)


@checkpoints_app.command("list", cls=Command)
def list_all(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="DB TABLE", help="The database and the table.", show_default=False)
    ] = None,
    column: Annotated[str | None, typer.Option("--column", metavar="COLUMN", help="Of one column only.")] = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a table by UDF version and column."""
    db, (name,) = open_database_argument(arguments, conn_id, allowed_place, "TABLE")
    found = api.list_checkpoints(db.open_table(name).location.checkpoints, column)
    if as_json:
        print_json([asdict(group) for group in found])
        return
    grid = make_grid("column", "udf", "version", "filter", ">fragments", ">ranges", ">size", ">newest")
    for group in found:
        named = (group.column, group.udf, group.version, (group.where or "none")[:8])
        size = readable_bytes(group.size_bytes)
        grid.add_row(*map(plain, named), f"{group.fragments:,}", f"{group.ranges:,}", size, format_time(group.newest))
    open_console().print(grid if found else "No checkpoints.")


@checkpoints_app.command("gc", cls=Command)
def collect_garbage(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DB [TABLE]", help="The database, and one table; all tables without it.", show_default=False
        ),
    ] = None,
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="TIME", help="Remove only what is older than this: 7d, 12h or 30m.")
    ] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only report.")] = False,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints, staged files and old job records.

    Files that an open job uses are kept, whatever their age. Choose a --ttl that is longer than the longest time
    between planning a backfill and its last retry: the shards of a run that is older than --ttl can no longer be
    cleared.
    """
    span = parse_age("ttl", ttl)
    # With --conn-id the database is not an argument, so one argument is the table.
    several = len(arguments or ()) > (0 if conn_id else 1)
    db, names = open_database_argument(arguments, conn_id, allowed_place, *(["TABLE"] if several else []))
    if names:
        db.open_table(names[0])
    found = [api.clean_up(db.location(name), span, dry_run) for name in names or db.table_names()]
    if as_json:
        print_json(
            {"dry_run": dry_run, **api.Garbage.add_up(found), "tables": [garbage.to_json() for garbage in found]}
        )
        return
    total = api.Garbage.add_up(found)
    grid = make_grid(">files", ">size", "kind")
    for kind in api.FileKind:
        grid.add_row(
            f"{total['kinds'][kind.value]['files']:,}", readable_bytes(total["kinds"][kind.value]["bytes"]), kind.what
        )
    verb = "Would remove" if dry_run else "Removed"
    console = open_console()
    console.print(grid)
    for note in total["notes"]:
        console.print(plain(f"Note: {note}"))
    tables = counted(len(found), "table")
    console.print(f"{verb} {counted(total['files'], 'file')}, {readable_bytes(total['bytes'])}, of {tables}.")
