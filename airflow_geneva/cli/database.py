"""Shared by the commands: opening the database, reporting errors, and printing."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from airflow_geneva.cli.words import OPTIONS, in_own_words
from airflow_geneva.database import Database, connect, connect_namespace, similar_folder
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.catalogs import SCHEME
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.engine_errors import panics_as_errors
from airflow_geneva.engine.storage.location import read_storage_options
from airflow_geneva.engine.storage.places import allow_places, with_places
from airflow_geneva.engine.storage.uri import is_local, normalize_uri
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.spark.submit import CREDENTIALS

PROPERTIES = "AIRFLOW_GENEVA_NAMESPACE_PROPERTIES"
"""Environment variable with the properties of a catalog, a JSON object."""
_WIDTH_OF_A_FILE = 200

ConnectionId = Annotated[
    str | None,
    typer.Option(
        "--conn-id",
        metavar="CONNECTION",
        help="Airflow connection of the database. Leave DB out then, or give another database to open with the "
        "connection's storage options.",
    ),
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="DB",
        help="Another database in which the source of the view may lie; may be given several times.",
    ),
]
AllowedPlaces = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-place",
        metavar="URI",
        help="A folder outside of the database in which its tables may name files; may be given several times.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Command(TyperCommand):
    """A command that prints errors of this package and of the system as one message, and then exits with code 1.

    Its usage names its arguments as they are given, as in `airflow-geneva status DB JOB [OPTIONS]`.
    """

    def invoke(self, ctx: Any) -> Any:
        named = OPTIONS.set(frozenset(str(parameter.name) for parameter in self.params))
        try:
            with panics_as_errors():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (GenevaError, OSError) as error:
            typer.echo(f"Error: {without_controls(mask_secrets(in_own_words(error)))}", err=True)
            raise typer.Exit(code=1) from None
        finally:
            OPTIONS.reset(named)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        named = [str(parameter.metavar) for parameter in self.params if parameter.param_type_name == "argument"]
        return [*named, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            found = [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == kind]
            # typer adds Python's type to the name of an argument.
            records = [(parameter.metavar, parameter.get_help_record(ctx) or ("", "")) for parameter in found]
            rows = [(str(metavar) if kind == "argument" else name, text) for metavar, (name, text) in records]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def open_database_argument(
    arguments: Sequence[str] | None, conn_id: str | None, allowed_places: Sequence[str] | None, *names: str
) -> tuple[Database, list[str]]:
    """Open the database that a command names, and return the arguments after it.

    Credentials are never on the command line: for a path or URI they are a JSON object in the environment variable
    ``AIRFLOW_GENEVA_STORAGE_OPTIONS``, for a catalog, ``namespace://IMPL/ADDRESS``, its properties in
    ``AIRFLOW_GENEVA_NAMESPACE_PROPERTIES``; an Airflow connection contains its own.

    Args:
        arguments: the command's arguments, DB first; DB may be left out if there is a connection.
        allowed_places: folders in which tables may name files, beside those that the connection allows.
        names: names of the arguments after DB.
    """
    given = list(arguments or ())
    least = len(names) if conn_id else len(names) + 1
    if not least <= len(given) <= len(names) + 1:
        raise InvalidInput(
            f"Expected {' '.join(['DB', *names])}, got {counted(len(given), 'argument')}. DB is a path or a URI such "
            "as s3://bucket/db; leave it out and give --conn-id for an Airflow connection."
        )
    uri = given.pop(0) if len(given) > len(names) else None
    database = open_database(uri, conn_id)
    database = replace(database, options=with_places(database.options, allow_places(allowed_places)))
    if is_local(database.uri) and not Path(database.uri).is_dir():
        similar = similar_folder(database.uri)
        advice = f"Did you mean {similar}?" if similar else "Check the path."
        raise InvalidInput(f"There is no database {database.uri}: no such folder. {advice}")
    return database, given


def open_database(uri: str | None, conn_id: str | None) -> Database:
    """Open a database with the credentials of a connection, or of the environment."""
    if conn_id is None:
        options = read_storage_options(os.environ.get(CREDENTIALS))
        if uri is not None and uri.startswith(SCHEME):
            return _open_catalog(uri, options)
        return _connect(uri or "", options)
    try:
        from airflow_geneva.hooks.lance import LanceHook
        from airflow_geneva.operators._airflow_internals import as_command
    except ImportError as error:
        raise InvalidInput(
            f"--conn-id needs Airflow, which cannot be imported here: {error}. Give the database's path or URI, "
            f"and its credentials in {CREDENTIALS}."
        ) from error
    with as_command():
        return LanceHook(conn_id).get_database(uri and normalize_uri(uri))


def dags_folder() -> str | None:
    """Return the folder from which Airflow imports DAGs and their modules; None without Airflow."""
    try:
        from airflow_geneva.operators._airflow_internals import dags_folder
    except ImportError:
        return None
    return dags_folder()


def _connect(uri: str, options: Mapping[str, str]) -> Database:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is no folder")  # a command makes it, or fails
        return connect(uri, options)


def _open_catalog(uri: str, options: Mapping[str, str]) -> Database:
    """Open a catalog by `namespace://IMPL/ADDRESS`; its other properties are in the environment."""
    impl, _, address = uri.removeprefix(SCHEME).partition("/")
    given = os.environ.get(PROPERTIES) or "{}"
    try:
        properties = parse(given)
    except ValueError:
        properties = None
    if not isinstance(properties, dict):
        raise InvalidInput(f'{PROPERTIES} is not a JSON object. Give one such as {{"headers.Authorization": "..."}}.')
    place = {"root" if impl == "dir" else "uri": address} if address else {}
    return connect_namespace(impl, {**place, **properties}, options)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def without_controls(text: object) -> str:
    """Escape control characters, which a terminal would execute: messages may come from UDFs and from their data."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in str(text))


def plain(text: object) -> Text:
    """Return an untrusted text for a console, with markup and control characters escaped."""
    return Text(without_controls(text))


def open_console() -> Console:
    """Return a console that does not wrap lines at 80 characters when the output is a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_OF_A_FILE)


def make_grid(*headings: str) -> Table:
    """Return a table without lines; `>` before a heading aligns its column to the right."""
    grid = Table(box=None, pad_edge=False)
    for heading in headings:
        grid.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return grid
