"""Write the files of a new project: a DAG, its functions, a test, settings, and a Makefile."""

from __future__ import annotations

import builtins
import json
import keyword
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from jinja2 import Environment, PackageLoader, StrictUndefined
from packaging.version import Version

from airflow_geneva.cli.database import open_database
from airflow_geneva.engine.storage.uri import is_local
from airflow_geneva.errors import InvalidInput

_TEMPLATES = Environment(
    loader=PackageLoader("airflow_geneva.cli", "project"),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    autoescape=False,  # noqa: S701  Python and shell; the names of tables have no quotes
)
_TEMPLATES.filters["shell"] = shlex.quote
_OWN_TABLE = "make_table.py"
_COLUMN, _DAG = "words", "keep_up_to_date"
_TYPES = ((pa.types.is_boolean, "bool"), (pa.types.is_integer, "int"), (pa.types.is_floating, "float"))


def init(
    project: Annotated[Path, typer.Argument(metavar="PROJECT", help="The folder to make; it may exist, but empty.")],
    from_table: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE", help="A table of yours, as path or URI, such as library/docs; default: a new one."
        ),
    ] = None,
) -> None:
    """Write a project that keeps a column up to date.

    It has a DAG, a module of functions, a test, settings and a Makefile. `make run` in its folder runs the DAG at once,
    without a scheduler.
    """
    if project.exists() and (not project.is_dir() or any(project.iterdir())):
        raise InvalidInput(f"{project} exists and is not an empty folder. Choose another name for the project.")
    about = _new_table() if from_table is None else _table_of(from_table)
    for template in _TEMPLATES.list_templates(["jinja"]):
        name = template.removesuffix(".jinja")
        if name == _OWN_TABLE and from_table is not None:
            continue
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_TEMPLATES.get_template(template).render(about))
    typer.echo(
        f"{project}: the DAG {about['dag']} keeps column {about['column']!r} of table {about['table']!r} up to date."
    )
    if about.get("moving_ids"):
        typer.echo(
            "  Note: the table has no stable row ids, so a fragment that is updated or compacted is computed again as "
            "a whole. Write it with lance.write_dataset(..., enable_stable_row_ids=True), or copy it with "
            "db.copy_table(..., rewrite=True)."
        )
    typer.echo(f"  cd {project} && make run      # runs it once; make help lists the other targets")


def _new_table() -> dict[str, Any]:
    return {"table": "docs", "database": None, "column": _COLUMN} | _function("text", "str")


def _table_of(given: str) -> dict[str, Any]:
    """Describe a table, and a column that it may get."""
    place, _, name = given.rstrip("/").removesuffix(".lance").rpartition("/")
    if not name or (not place and "://" in given):
        raise InvalidInput(f"--from-table {given!r} names no table. Give its database and its name: library/docs.")
    database = open_database(place or ".", None)
    table = database.open_table(name)
    schema, stable = table.schema, table.lance.has_stable_row_ids
    column = next(made for made in _names(_COLUMN) if made not in schema.names)
    uri = str(Path(database.uri).absolute()) if is_local(database.uri) else database.uri
    for wanted in (lambda kind: kind == "str", bool):
        for field in schema:
            if wanted(found := _annotation(field.type)) and _can_name(field.name):
                connection = json.dumps({"conn_type": "lance", "host": uri})
                about = {"table": name, "database": uri, "connection": connection, "column": column}
                return {**about, "moving_ids": not stable, **_function(field.name, found)}
    raise InvalidInput(
        f"Table {name!r} has no column of texts, numbers or booleans for a first function, only "
        f"{', '.join(schema.names)}. Make a project without --from-table, and change its function and DAG."
    )


def _function(of: str, annotation: str) -> dict[str, Any]:
    old = Version(version("apache-airflow-core")) < Version("3.2")
    dagbag = "airflow.models.dagbag" if old else "airflow.dag_processing.dagbag"
    return {
        "of": of,
        "annotation": annotation,
        "dag": _DAG,
        "dagbag": dagbag,
        "programs": str(Path(sys.executable).parent),
    }


def _names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1


def _can_name(name: str) -> bool:
    """Whether a parameter may have a name; that of a built-in function such as `len` would hide it."""
    return name.isidentifier() and not keyword.iskeyword(name) and not hasattr(builtins, name)


def _annotation(kind: pa.DataType) -> str:
    """Return the Python type of a column's values; "" for types that a first function does not take."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "str"
    return next((name for is_one, name in _TYPES if is_one(kind)), "")
