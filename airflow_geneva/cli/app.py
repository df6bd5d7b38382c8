"""The command `airflow-geneva`."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import airflow_geneva
from airflow_geneva.cli import jobs as cli_jobs, work
from airflow_geneva.cli.checkpoints import checkpoints_app
from airflow_geneva.cli.database import Command, print_json
from airflow_geneva.cli.doctor import airflow_home, print_findings, run_airflow_checks, run_checks
from airflow_geneva.cli.init import init
from airflow_geneva.cli.stopping import JobCommand
from airflow_geneva.cli.tables import duplicates, tables
from airflow_geneva.spark.server import HOST, run_server

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
runs_jobs = (work.plan, work.backfill, work.load, work.refresh)
shows = (work.copy, tables, duplicates, cli_jobs.jobs, cli_jobs.status, cli_jobs.cancel, cli_jobs.errors)
for command in (init, work.define, *runs_jobs, *shows):
    app.command(cls=JobCommand if command in runs_jobs else Command)(command)
app.add_typer(checkpoints_app, name="checkpoints")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"airflow-geneva {airflow_geneva.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Computed columns and materialized views of Lance tables, kept up to date by Airflow on Spark."""


@app.command(cls=Command)
def doctor(
    path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder that must be writable; default: AIRFLOW_HOME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check that everything a backfill needs is installed.

    For each problem it prints the command that fixes it. Without --path, also check Airflow's connections lance_default
    and spark_default, and the port of its API server.
    """
    findings = run_checks(path or airflow_home()) + ([] if path else run_airflow_checks())
    if as_json:
        print_json([{**asdict(finding), "ok": finding.ok} for finding in findings])
    else:
        print_findings(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(code=1)


@app.command(cls=Command)
def spark_server(
    port: Annotated[int, typer.Option(metavar="PORT", help="The port on 127.0.0.1.")] = 15002,
    master: Annotated[
        str, typer.Option(metavar="MASTER", help="Where the server computes: local[N] is N task slots.")
    ] = "local[*]",
) -> None:
    """Start a Spark Connect server for development.

    It serves this machine only; Ctrl-C ends it.
    """
    connection = json.dumps({"conn_type": "spark_connect", "host": f"sc://{HOST}", "port": port})
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with (
        tempfile.TemporaryDirectory(prefix="geneva-spark-") as folder,
        run_server(Path(folder), port, master) as server,
    ):
        typer.echo(f"A Spark Connect server listens at sc://{HOST}:{port}. For Airflow:")
        typer.echo(f"  export AIRFLOW_CONN_SPARK_DEFAULT={shlex.quote(connection)}")
        raise typer.Exit(server.wait())
