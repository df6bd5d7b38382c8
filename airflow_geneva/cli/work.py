"""The commands that define, plan and compute, and `copy`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from airflow_geneva.cli.database import (
    AllowedPlaces,
    AsJson,
    ConnectionId,
    Sources,
    dags_folder,
    open_database,
    open_database_argument,
    print_json,
    without_controls,
)
from airflow_geneva.cli.stopping import exit_if_canceled
from airflow_geneva.cli.words import in_own_words
from airflow_geneva.database import Database
from airflow_geneva.engine import api
from airflow_geneva.engine.choices import OnCodeChange, OnUnknownValues, RunnerName
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.udf import load_udf
from airflow_geneva.engine.udf.definition import split_key
from airflow_geneva.engine.udf.lancedb import refuse_view
from airflow_geneva.errors import InvalidInput
from airflow_geneva.view import View

_Udf = Annotated[
    str | None, typer.Option("--udf", metavar="MODULE:NAME", help="Import path; default: the column's own UDF.")
]
_Where = Annotated[str | None, typer.Option("--where", metavar="SQL", help="SQL filter on the rows.")]
_ReadVersion = Annotated[
    int | None,
    typer.Option(
        "--read-version", metavar="N", help="Only rows that existed at this version; for a view, of its source."
    ),
]
_OnCodeChange = Annotated[
    str,
    typer.Option(metavar="CHOICE", help=f"Of values of other code: {OnCodeChange.explained()}."),
]
_OnUnknownValues = Annotated[
    str,
    typer.Option(metavar="CHOICE", help=f"Of values that no job computed: {OnUnknownValues.explained()}."),
]
_ContinueFrom = Annotated[
    list[str] | None,
    typer.Option(metavar="VERSION", help="UDF version whose values are kept; may be given several times."),
]
_ErrorsOnly = Annotated[bool, typer.Option("--errors-only", help="Only rows that the UDF failed on.")]
_RecomputeMixed = Annotated[
    bool, typer.Option("--recompute-mixed", help="Only rows whose value comes from another UDF version.")
]
_IgnoreCheckpoints = Annotated[bool, typer.Option("--ignore-checkpoints", help="Compute again what checkpoints hold.")]
_Runner = Annotated[
    str,
    typer.Option(metavar="inline|spark|auto", help=f"Where it is computed: {RunnerName.explained()}."),
]
_MaxFailed = Annotated[
    str | None,
    typer.Option(metavar="N", help="Fail if more rows fail: a number, as 100, or a part of those due, as 0.01."),
]
_Indexes = Annotated[str | None, typer.Option(metavar="update", help="Bring the indexes over what changed up to date.")]


def define(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DB TABLE COLUMN UDF",
            help="The database, the table, the column or those that one call fills (width,height), and its UDF, "
            "module:name.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="COLUMN",
            help="Input column of the UDF; once for each parameter, in order. Default: by name.",
        ),
    ] = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
) -> None:
    """Add a computed column, or give a column another UDF.

    It computes nothing.
    """
    _find_modules(conn_id)
    db, (name, column, path) = open_database_argument(arguments, conn_id, allowed_place, "TABLE", "COLUMN", "UDF")
    table, udf = db.open_table(name), load_udf(path)
    spec = (udf, inputs) if inputs else udf
    columns = split_key(column, table.schema.names)
    known = set(columns) <= set(table.schema.names)
    (table.alter_columns if known else table.add_columns)({columns if len(columns) > 1 else column: spec})
    typer.echo(without_controls(f"{name}.{column} is computed by {table.definition(columns[0]).call}."))


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="DB [TABLE COLUMN]", help="The database, and what to plan.", show_default=False),
    ] = None,
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Print the plan of this job.")] = None,
    view: Annotated[str | None, typer.Option("--view", metavar="VIEW", help="Plan the refresh of this view.")] = None,
    udf: _Udf = None,
    where: _Where = None,
    read_version: _ReadVersion = None,
    on_code_change: _OnCodeChange = "error",
    on_unknown_values: _OnUnknownValues = "error",
    continue_from: _ContinueFrom = None,
    errors_only: _ErrorsOnly = False,
    recompute_mixed: _RecomputeMixed = False,
    ignore_checkpoints: _IgnoreCheckpoints = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Plan all columns and views of the database, in order of dependency.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=MODULE:NAME", help="With --all: as if TABLE.COLUMN had this UDF; may be repeated."
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="With --all: then compute them, one after another.")] = False,
    runner: _Runner = "auto",
    source: Sources = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """Print what a backfill or refresh would compute, and why.

    With --job it prints the plan of that job, with --all that of the database. It writes nothing, except with --run.
    """
    whole = {"--what-if": what_if, "--run": run, "--json": as_json}
    if given := [name for name, value in whole.items() if value and not everything]:
        raise InvalidInput(f"{given[0]} is for the plan of a database: airflow-geneva plan DB --all {given[0]}.")
    if everything:
        if job is not None or view is not None:
            raise InvalidInput("--all plans the whole database. Leave --job and --view out.")
        _find_modules(conn_id)
        db, _ = open_database_argument(arguments, conn_id, allowed_place)
        _plan_all(db, what_if or [], run, runner, as_json)
        return
    if job is not None:
        db, _ = open_database_argument(arguments, conn_id, allowed_place)
        typer.echo(without_controls(_stored_plan(db, job)))
        return
    _find_modules(conn_id)
    options: dict[str, Any] = {"udf": udf, "where": where, "continue_from": continue_from}
    options |= {"recompute_mixed": recompute_mixed}
    if view is not None:
        if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value]:
            raise InvalidInput(f"{' and '.join(given)} apply to columns, and --view {view} is planned as a whole.")
        db, _ = open_database_argument(arguments, conn_id, allowed_place)
        found = _open_view(db, view, source)
        planned = found.plan_refresh(
            read_version, None, on_code_change, ignore_checkpoints, errors_only, on_unknown_values
        )
        typer.echo(without_controls(in_own_words(planned)))
        return
    db, (table, column) = open_database_argument(arguments, conn_id, allowed_place, "TABLE", "COLUMN")
    options |= {"read_version": read_version, "on_code_change": on_code_change, "errors_only": errors_only}
    options |= {"on_unknown_values": on_unknown_values}
    options |= {"udf": load_udf(udf) if udf else None, "ignore_checkpoints": ignore_checkpoints}
    typer.echo(without_controls(in_own_words(db.open_table(table).plan_backfill(column, **options))))


def backfill(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DB TABLE COLUMN", help="The database, the table and its computed column.", show_default=False
        ),
    ] = None,
    udf: _Udf = None,
    where: _Where = None,
    read_version: _ReadVersion = None,
    on_code_change: _OnCodeChange = "error",
    on_unknown_values: _OnUnknownValues = "error",
    continue_from: _ContinueFrom = None,
    errors_only: _ErrorsOnly = False,
    recompute_mixed: _RecomputeMixed = False,
    ignore_checkpoints: _IgnoreCheckpoints = False,
    runner: _Runner = "auto",
    max_failed: _MaxFailed = None,
    indexes: _Indexes = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """Compute the missing values of a column, without Airflow."""
    _find_modules(conn_id)
    db, (table, column) = open_database_argument(arguments, conn_id, allowed_place, "TABLE", "COLUMN")
    result = db.open_table(table).backfill(
        column, udf, where=where, read_version=read_version, on_code_change=on_code_change,
        continue_from=continue_from, errors_only=errors_only, recompute_mixed=recompute_mixed,
        ignore_checkpoints=ignore_checkpoints, runner=runner, max_failed=_number(max_failed), indexes=indexes,
        on_unknown_values=on_unknown_values,
    )  # fmt: skip
    _print_result(result, as_json)


def load(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DB TABLE SOURCE",
            help="The database, the table, and the files or the table with the values.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        list[str] | None, typer.Option("--on", metavar="COLUMN", help="Key column; may be given several times.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="COLUMN", help="Column to load; once for each. Default: all but the keys."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="parquet, csv, json, lance, iceberg, spark; default: by extension."),
    ] = None,
    on_missing: Annotated[
        str, typer.Option(metavar="keep|null|error", help="Of rows whose key the source lacks.")
    ] = "keep",
    on_duplicate: Annotated[
        str, typer.Option(metavar="error|first|last", help="Of several rows of the source with one key.")
    ] = "error",
    where: _Where = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Count values of a computed column as computed by its function.")
    ] = False,
    runner: _Runner = "auto",
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """Load values that others computed, by key, without Airflow."""
    db, (table, source) = open_database_argument(arguments, conn_id, allowed_place, "TABLE", "SOURCE")
    result = db.open_table(table).load_columns(
        source, on or (), column or None, format, on_missing, on_duplicate, where, adopt, runner
    )
    _print_result(result, as_json)


def refresh(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="DB VIEW", help="The database and the view.", show_default=False)
    ] = None,
    read_version: _ReadVersion = None,
    on_code_change: _OnCodeChange = "error",
    on_unknown_values: _OnUnknownValues = "error",
    errors_only: _ErrorsOnly = False,
    ignore_checkpoints: _IgnoreCheckpoints = False,
    runner: _Runner = "auto",
    max_failed: _MaxFailed = None,
    indexes: _Indexes = None,
    source: Sources = None,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
    as_json: AsJson = False,
) -> None:
    """Bring a view up to its source, without Airflow."""
    _find_modules(conn_id)
    db, (name,) = open_database_argument(arguments, conn_id, allowed_place, "VIEW")
    view = _open_view(db, name, source)
    failed = _number(max_failed)
    result = view.refresh(
        read_version, None, on_code_change, ignore_checkpoints, runner, failed, indexes, errors_only, on_unknown_values
    )
    _print_result(result, as_json)


def copy(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DB TABLE COPY",
            help="The database, the table or view, and the name of its copy.",
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="DB", help="Another database for the copy, opened with the same credentials."),
    ] = None,
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Write the rows anew, with stable row ids and the newest storage version.")
    ] = False,
    conn_id: ConnectionId = None,
    allowed_place: AllowedPlaces = None,
) -> None:
    """Copy a table or view with what its jobs recorded."""
    db, (name, copied) = open_database_argument(arguments, conn_id, allowed_place, "TABLE", "COPY")
    target = db if into is None else open_database(into, conn_id)
    made = target.copy_table(db.open_table(name), copied, rewrite)
    typer.echo(without_controls(f"{name} is copied to {made.uri}: {made.state()}."))


def _plan_all(db: Database, what_if: Sequence[str], run: bool, runner: str, as_json: bool) -> None:
    if wrong := [text for text in what_if if not all(text.partition("="))]:
        raise InvalidInput(f"--what-if {wrong[0]} is not understood: give TABLE.COLUMN=MODULE:NAME.")
    planned = db.plan({name: path for name, _, path in (text.partition("=") for text in what_if)})
    if as_json and not run:
        print_json(planned.to_json())
        return
    if not as_json:
        typer.echo(without_controls(in_own_words(planned)))
    if run:
        results = planned.run(runner, partial(_show_of_plan, as_json))
        if as_json:
            print_json({name: result.to_json() for name, result in results.items()})


def _show_of_plan(as_json: bool, name: str, result: BackfillResult) -> None:
    if not as_json:
        typer.echo(without_controls(in_own_words(f"{name}: {result}")))
    exit_if_canceled()


def _find_modules(conn_id: str | None) -> None:
    """Search the current folder, as Python does for a script, and the DAGs folder, as Airflow does.

    UDFs are modules of the project in them. Without a connection, Airflow's own configuration is not read.
    """
    sys.path.insert(0, os.getcwd())
    folder = os.environ.get("AIRFLOW__CORE__DAGS_FOLDER") if conn_id is None else dags_folder()
    if folder and folder not in sys.path:
        sys.path.append(folder)


def _open_view(db: Database, name: str, sources: Sequence[str] | None) -> View:
    found = db.open_table(name)
    if not isinstance(found, View):
        refuse_view(name, found.schema.metadata)
        raise InvalidInput(
            f"{name!r} is a table and not a view. Its columns are computed each by itself: airflow-geneva plan or "
            f"backfill, with DB {name} COLUMN."
        )
    return db.open_view(name, sources or ())


def _number(text: str | None) -> int | float | None:
    try:
        return None if text is None else float(text) if set(text) & set(".e") else int(text)
    except ValueError:
        raise InvalidInput(f"--max-failed {text} is no number: give rows, as 100, or a part, as 0.01.") from None


def _print_result(result: BackfillResult, as_json: bool) -> None:
    if as_json:
        print_json(result.to_json())
    else:
        typer.echo(without_controls(in_own_words(result)))


def _stored_plan(db: Database, job_id: str) -> str:
    job = db.job(job_id)
    about = "\n".join(job.lines()[:1])
    saved = api.SavedPlan.read(api.JobFolder.of(db.location(job.table).checkpoints, job_id))
    if saved is None:
        if job.shard_count:
            raise InvalidInput(f"The plan of job {job_id} was removed or never finished. Run the {job.kind} again.")
        if job.commits:
            return f"{about}\n  No row had to be computed: rows were only removed from the view."
        return f"{about}\n  Nothing to do: {counted(job.rows_total, 'row')} up to date."
    version = f"{f'{job.source} at' if job.source else 'table'} version {saved.spec.rows_of.version}"
    lines = [
        about,
        f"  {version}: {counted(saved.rows_total, 'row')}, {job.rows_pending:,} pending, "
        f"{saved.rows_skipped:,} with nothing to do",
        f"  fingerprint {saved.fingerprint}, checkpoints under {saved.spec.prefix}",
    ]
    lines += [
        f"  shard {index}: {counted(entry['rows'], 'row')} in {counted(entry['fragments'], 'fragment')}"
        for index, entry in enumerate(saved.shards)
    ]
    return "\n".join([*lines, *(f"  Note: {note}" for note in saved.notes)])
