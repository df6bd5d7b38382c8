"""The commands about jobs: `jobs`, `status` and `errors`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
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
from airflow_geneva.database import Database
from airflow_geneva.engine import api
from airflow_geneva.engine.choices import parse_age
from airflow_geneva.engine.display import counted, duration
from airflow_geneva.engine.results import DONE, FAILED, PARTIAL
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.table import Table as LanceTable
from airflow_geneva.view import View

_COLORS: dict[str, str] = {DONE: "green", PARTIAL: "yellow", FAILED: "red"}
_WATCH_SECONDS = 1.0
_MOST_LINES = 40
_BAR_WIDTH = 16

_DB = typer.Argument(metavar="DB", help="Path or URI of the database.", show_default=False)
_TABLE = typer.Option("--table", metavar="TABLE", help="Only this table.")
_NEWEST = typer.Option("--newest", metavar="N", min=1, help="Show at most this many.")


def jobs(
    database: Annotated[list[str] | None, _DB] = None,
    table: Annotated[str | None, _TABLE] = None,
    newest: Annotated[int, _NEWEST] = 20,
    state: Annotated[str | None, typer.Option(metavar="STATE", help="Only RUNNING, FAILED, ... jobs.")] = None,
    dag: Annotated[str | None, typer.Option(metavar="DAG", help="Only jobs that this DAG planned.")] = None,
    since: Annotated[str | None, typer.Option(metavar="AGE", help="Only jobs started in the last 12h, 7d, ...")] = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """List the newest jobs of a database, running jobs included."""
    db, _ = open_database_argument(database, conn_id, allowed_place)
    began = None if since is None else datetime.now(timezone.utc) - parse_age("since", since)
    found = db.jobs(newest, table, None if state is None else state.upper(), dag, began)
    if as_json:
        print_json([job.to_json() for job in found])
        return
    priced = any(job.cost is not None for job in found)
    grid = make_grid("job", "state", "of", ">took", ">due", ">failed", ">left", *([">cost"] if priced else []))
    grid.columns[0].no_wrap = True
    grid.columns[2].overflow = "fold"
    for job in found:
        cells = [f"{n:,}" for n in (job.rows_pending, job.rows_failed, job.rows_left)]
        cells += [f"{job.cost or 0.0:,.4g}"] if priced else []
        grid.add_row(job.id, _state(job), plain(job.target), duration(job.took), *cells)
    open_console().print(grid if found else "No jobs.")


def status(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="DB JOB", help="The database and the job's id.", show_default=False)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update until the job has ended.")] = False,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """Show a job: rows, times, and the progress of each shard."""
    db, (job_id,) = open_database_argument(arguments, conn_id, allowed_place, "JOB")
    states = _follow(db, job_id, watch)
    if as_json:
        for job in states:
            # With --watch print one JSON document per line.
            typer.echo(json.dumps(job.to_json(), indent=None if watch else 2))
        return
    console = open_console()
    job = next(states)
    if watch and job.open:
        with Live(_render_job(job), console=console, auto_refresh=False) as live:
            for job in states:
                live.update(_render_job(job), refresh=True)
    else:
        console.print(_render_job(job))


def cancel(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="DB JOB", help="The database and the job's id.", show_default=False)
    ] = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
) -> None:
    """End a running job after its current calls.

    What is computed is kept, and the next run goes on from there.
    """
    db, (job_id,) = open_database_argument(arguments, conn_id, allowed_place, "JOB")
    db.cancel_job(job_id)
    typer.echo(
        without_controls(f"Job {job_id} ends after its current calls: airflow-geneva status DB {job_id} --watch.")
    )


def errors(
    database: Annotated[list[str] | None, _DB] = None,
    table: Annotated[str | None, _TABLE] = None,
    column: Annotated[str | None, typer.Option("--column", metavar="COLUMN", help="Only this column.")] = None,
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only this job.")] = None,
    history: Annotated[bool, typer.Option("--history", help="Also rows that have a value now, and each try.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="List each row, newest first.")] = False,
    newest: Annotated[int, _NEWEST] = 50,
    source: Sources = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """Group the rows that UDFs fail on now by their cause.

    Each group has a count and an example; --rows and --json list rows.
    """
    db, _ = open_database_argument(database, conn_id, allowed_place)
    if job is not None and table is None:
        table = db.job(job).table
    tables = [_open(db, name, source) for name in (db.table_names() if table is None else [table])]
    if table is None and column is not None:
        tables = [each for each in tables if column in each.schema.names]
        if not tables:
            raise InvalidInput(f"No table of {db.uri} has a column {column!r}.")
    listed, found = rows or as_json, list[tuple[str, Any]]()
    for each in tables:
        try:
            asked = (job, column, history)
            items: Sequence[Any] = each.get_errors(*asked) if listed else each.group_errors(*asked)
            found += [(each.name, item) for item in items]
        except GenevaError as error:
            if table is not None:
                raise
            typer.echo(f"{each.name} is left out: {without_controls(error)}", err=True)
    found.sort(key=lambda item: -(item[1].time if listed else item[1].rows))
    if as_json:
        print_json([{"table": name, **item.to_json()} for name, item in found[:newest]])
        return
    for name, item in found[:newest]:
        typer.echo(f"{name}: {without_controls(item)}\n")
    if not found:
        typer.echo("No errors.")
    elif len(found) > newest:
        typer.echo(f"{len(found) - newest:,} more are not shown; --newest shows more.")


def _open(db: Database, name: str, sources: Sequence[str] | None) -> LanceTable:
    found = db.open_table(name)
    return db.open_view(name, sources or ()) if isinstance(found, View) else found


def _follow(db: Database, job_id: str, watch: bool) -> Iterator[api.Job]:
    """Read a job; with ``watch``, read it repeatedly until it has ended."""
    yield (job := db.job(job_id))
    while watch and job.open:
        time.sleep(_WATCH_SECONDS)
        yield (job := db.job(job_id))


def _render_job(job: api.Job) -> RenderableType:
    head, *rest = map(without_controls, job.lines())
    parts: list[RenderableType] = [Text(head, f"bold {_COLORS.get(job.state, 'cyan')}"), *map(Text, rest)]
    # Failed and running shards first: a screen shows about forty of possibly a thousand shards.
    by_need = sorted(job.shown_shards, key=lambda shard: (shard.step != "failed", shard.step == "committed"))
    shown = by_need[:_MOST_LINES]
    if shown:
        grid = Table.grid(padding=(0, 1))
        for shard in sorted(shown, key=lambda shard: shard.index):
            grid.add_row(*_shard_row(shard))
        parts.append(grid)
    if len(job.shards) > len(shown):
        parts.append(Text(f"and {counted(len(job.shards) - len(shown), 'more shard')}"))
    return Group(*parts)


def _shard_row(shard: api.ShardStatus) -> list[RenderableType]:
    failed = f", {shard.rows_failed:,} failed" if shard.rows_failed else ""
    speed = f", {shard.rows_per_second:,.0f} rows/s" if shard.rows_per_second else ""
    left = f", {shard.seconds_left:,.0f} s left" if shard.seconds_left is not None else ""
    error = f"; error: {shard.reason}" if shard.error else ""
    return [
        Text(f"  shard {shard.index}"),
        _bar(shard.rows_checkpointed, shard.rows_failed, shard.rows),
        Text(shard.step),
        Text(
            f"{shard.rows_checkpointed:,} of {counted(shard.rows, 'row')}{failed}{speed}{left}{without_controls(error)}"
        ),
    ]


def _bar(done: int, failed: int, rows: int) -> Text:
    """Draw a bar of the done, failed and remaining rows; even one failed row gets a visible part."""
    of = max(rows, done + failed, 1)
    red = -(-_BAR_WIDTH * failed // of)
    green = min(_BAR_WIDTH * done // of, _BAR_WIDTH - red) if rows else _BAR_WIDTH
    rest = _BAR_WIDTH - red - green
    return Text.assemble(("━" * green, "green"), ("x" * red, "red"), ("─" * rest, "bright_black"))


def _state(job: api.Job) -> Text:
    waits = job.time_left is not None and job.time_left.waits
    about = " (dead)" if job.dead else " (waiting)" if waits else ""
    color = "yellow" if job.state == DONE and job.rows_failed else _COLORS.get(job.state, "cyan")
    return Text(f"{job.state}{about}", "red" if job.dead else color)
