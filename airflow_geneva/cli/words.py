"""Advice in the words of the command: errors and plans advise calls and arguments of Python."""

from __future__ import annotations

import re
from collections.abc import Container

import click

_CALLS = [
    (re.compile(python), command)
    for python, command in (
        (r"db\.jobs\(table='([^']*)'\)", r"airflow-geneva jobs DB --table \1"),
        (r"db\.jobs\(\)", "airflow-geneva jobs DB"),
        (r"(?:table|view)\.get_errors\(column_name='([^']*)'\)", r"airflow-geneva errors DB --column \1"),
        (r"(?:table|view)\.get_errors\(\)", "airflow-geneva errors DB"),
        (r"table\.(?:add|alter)_columns\(\{'([^']*)': [^}]*\}\)", r"airflow-geneva define DB TABLE \1 MODULE:NAME"),
        (r"table\.(?:add|alter)_columns\((?:\.\.\.)?\)", "airflow-geneva define"),
        (r"table\.backfill\('([^']*)'(?:, )?([^()]*)\)", r"airflow-geneva backfill DB TABLE \1 \2"),
        (r"view\.refresh\(([^()]*)\)", r"airflow-geneva refresh DB VIEW \1"),
        (r"db\.open_view\([^()]*, sources=\[\.\.\.\]\)", "--source DB"),
        (r"\bsrc_version=", "read_version="),
    )
]
_ARGUMENT = re.compile(r"""\b([a-z_]+)=(True\b|"[^"]*"|'[^']*'|[\w.:]+)""")
_BEFORE_MARKS = re.compile(r" +(?=[.,;](?:\s|$))")


def in_own_words(text: object, context: click.Context | None = None) -> str:
    """Name the commands and options that do what a text advises to call and pass in Python."""
    context = context or click.get_current_context(silent=True)
    options = {str(one.name) for one in context.command.params} if context else set[str]()
    said = str(text)
    for python, command in _CALLS:
        said = python.sub(command, said)
    return _BEFORE_MARKS.sub("", _ARGUMENT.sub(lambda found: _option(found, options), said))


def _option(found: re.Match[str], options: Container[str]) -> str:
    name, value = found.groups()
    if name not in options:
        return found.group()
    value = value.strip("\"'")
    return f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value}")
