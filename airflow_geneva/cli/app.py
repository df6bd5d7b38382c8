"""The command `airflow-geneva`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import airflow_geneva
from airflow_geneva.cli import jobs as cli_jobs
from airflow_geneva.cli.checkpoints import checkpoints_app
from airflow_geneva.cli.doctor import CheckResult, airflow_home, run_checks

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (cli_jobs.jobs, cli_jobs.status, cli_jobs.errors, cli_jobs.plan):
    app.command()(command)
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


@app.command()
def doctor(
    path: Annotated[Path | None, typer.Option(help="The folder that must be writable; default: AIRFLOW_HOME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check that everything a backfill needs is installed; print the command that fixes what is not."""
    findings = run_checks(path or airflow_home())
    if as_json:
        typer.echo(json.dumps([{**dataclasses.asdict(finding), "ok": finding.ok} for finding in findings], indent=2))
    else:
        _print_findings(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(code=1)


def _print_findings(findings: list[CheckResult]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row("[green]ok[/]" if finding.ok else "[red]no[/]", finding.check, finding.found)
    console.print(table)
    for finding in findings:
        if finding.mend is not None:
            # Commands are not wrapped, so that they can be copied.
            console.print(f"\n{finding.check}: fix it with:\n  [bold]", end="", highlight=False)
            console.print(finding.mend, soft_wrap=True, markup=False, highlight=False)
