"""Advice in the words of the command: errors and plans advise calls and arguments of Python."""

from __future__ import annotations

import re
from contextvars import ContextVar

OPTIONS: ContextVar[frozenset[str]] = ContextVar("geneva_options", default=frozenset())
"""The options of the running command, by the names of their parameters."""

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


def in_own_words(text: object) -> str:
    """Name the commands and options that do what a text advises to call and pass in Python."""
    said = str(text)
    for python, command in _CALLS:
        said = python.sub(command, said)
    return _BEFORE_MARKS.sub("", _ARGUMENT.sub(_option, said))


def _option(found: re.Match[str]) -> str:
    name, value = found.groups()
    if name not in OPTIONS.get():
        return found.group()
    value = value.strip("\"'")
    return f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value}")
