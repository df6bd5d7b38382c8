"""Run the command airflow-geneva in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from airflow_geneva.cli.app import app


def run(*arguments: str, code: int = 0) -> str:
    """Return the output of a command, or its errors if it is expected to fail."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return " ".join(result.stderr.split()) if code else result.stdout
