"""Define computed columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow.sdk import Context

from airflow_geneva.engine import api
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._lance_task import Configuration, LanceOperator, load_named_udf, parse_json, required_text

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF
    from airflow_geneva.table import Table

    _Spec: TypeAlias = UDF | tuple[UDF, Sequence[str]]


class AddColumnsOperator(LanceOperator):
    """Define computed columns of a table or a view; columns that already have this definition are unchanged.

    A new column is added, and a column with another UDF or UDF version is altered. No values are computed; a backfill
    of the table, or a refresh of the view, does that.

    Args:
        table: the name of the table or the view.
        columns: by name, the import path `"module:name"` of its UDF, or the path and the input columns for its
            parameters. JSON text is accepted, for templates.

    Example:
        ```python
        AddColumnsOperator(task_id="define", table="docs", columns={"n": "my_project.udfs:length"})
        AddColumnsOperator(task_id="define", table="docs", columns={"n": ("my_project.udfs:length", ["body"])})
        ```
    """

    template_fields: Sequence[str] = (*LanceOperator.template_fields, "table", "columns")

    def __init__(self, *, table: str, columns: Mapping[str, Any] | str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table = table
        if not isinstance(columns, str) and not hasattr(columns, "resolve"):  # text, or the output of another task
            _check_columns(columns)
        self.columns = columns

    def execute(self, context: Context) -> dict[str, Any]:
        table = self.open_database().open_table(required_text("table", self.table))
        columns = _check_columns(parse_json("columns", self.columns))
        specs = {name: _spec(name, given) for name, given in columns.items()}
        added: list[str] = []
        altered: list[str] = []
        with Configuration.read().retrying_commits():
            for _ in api.commit_tries(f"table {table.name!r}", "define its columns"):
                present = table.schema.names
                try:
                    _define(table, specs, present, added, altered)
                    break
                except (OSError, InvalidInput) as error:
                    # Another writer committed meanwhile, or another run defined the same columns.
                    conflict = api.is_conflict(error) if isinstance(error, OSError) else table.schema.names != present
                    if not conflict:
                        raise
        unchanged = [name for name in specs if name not in added and name not in altered]
        self.log.info("Table %s: added %s, altered %s, unchanged %s.", table.name, added, altered, unchanged)
        return {"added": added, "altered": altered, "unchanged": unchanged, "version": table.version}


def _check_columns(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidInput(f'columns is {given!r:.200}. Give UDFs by column, such as {{"n": "module:name"}}.')
    return given


def _define(
    table: Table, specs: Mapping[str, _Spec], present: Sequence[str], added: list[str], altered: list[str]
) -> None:  # fmt: skip
    """Alter and add the columns that differ or are missing, and record them in the two lists."""
    differing = {name: spec for name, spec in specs.items() if name in present and _differs(table, name, spec)}
    if differing:
        table.alter_columns(differing)
        altered += differing
    lacking = {name: spec for name, spec in specs.items() if name not in present}
    if lacking:
        table.add_columns(lacking)
        added += lacking


def _spec(column: str, given: Any) -> _Spec:
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != 2 or isinstance(given[1], str) or not isinstance(given[1], Sequence):
            raise InvalidInput(
                f'Column {column!r} is given {given!r:.200}. Give "module:name", or ("module:name", ["input", ...]).'
            )
        return load_named_udf(given[0]), [str(name) for name in given[1]]
    return load_named_udf(given)


def _differs(table: Table, column: str, spec: _Spec) -> bool:
    """Whether a column's definition differs from the requested one; altering a column of another type raises later."""
    from airflow_geneva.view import View

    stored = table.definition(column)
    udf, inputs = spec if isinstance(spec, tuple) else (spec, None)
    wanted = udf.definition(inputs)
    if wanted.input_columns is None:
        # A record-batch UDF gets the columns that existed when its column was defined.
        wanted = replace(wanted, input_columns=stored.input_columns)
    if wanted.to_json() != stored.to_json():
        return True
    # The elements of a view's exploded column are of another type than what its UDF returns.
    return not isinstance(table, View) and table.schema.field(column).type != udf.data_type
