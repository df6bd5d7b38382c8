"""Define computed columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow.sdk import Context

from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._lance_task import Configuration, LanceOperator, load_named_udf, parse_json, required_text

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF

    _Spec: TypeAlias = UDF | tuple[UDF, Sequence[str]]


class AddColumnsOperator(LanceOperator):
    """Define computed columns of a table or a view; columns that already have this definition are unchanged.

    A new column is added, and a column with another UDF or UDF version is altered. No values are computed; a backfill
    of the table, or a refresh of the view, does that.

    Args:
        table: the name of the table or the view.
        columns: by name, the import path `"module:name"` of its UDF, or the path and the input columns for its
            parameters. The names of several columns that one call fills are a tuple, or text with commas. JSON text
            is accepted, for templates.

    Example:
        ```python
        AddColumnsOperator(task_id="define", table="docs", columns={"n": "my_project.udfs:length"})
        AddColumnsOperator(task_id="define", table="docs", columns={"n": ("my_project.udfs:length", ["body"])})
        AddColumnsOperator(task_id="define", table="docs", columns={"width, height": "my_project.udfs:size_of"})
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
        specs = {_names(key, table.schema.names): _spec(key, given) for key, given in columns.items()}
        with Configuration.read().retrying_commits():
            added, altered = table._edit.define(specs)
        names = [name for key in specs for name in key]
        unchanged = [name for name in names if name not in added and name not in altered]
        self.log.info("Table %s: added %s, altered %s, unchanged %s.", table.name, added, altered, unchanged)
        return {"added": added, "altered": altered, "unchanged": unchanged, "version": table.version}


def _check_columns(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidInput(f'columns is {given!r:.200}. Give UDFs by column, such as {{"n": "module:name"}}.')
    return given


def _names(key: Any, present: Collection[str]) -> tuple[str, ...]:
    from airflow_geneva.engine.udf.definition import key_names, split_key

    return split_key(key, present) if isinstance(key, str) else key_names(key)


def _spec(column: Any, given: Any) -> _Spec:
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != 2 or isinstance(given[1], str) or not isinstance(given[1], Sequence):
            raise InvalidInput(
                f'Column {column!r} is given {given!r:.200}. Give "module:name", or ("module:name", ["input", ...]).'
            )
        return load_named_udf(given[0]), [str(name) for name in given[1]]
    return load_named_udf(given)
