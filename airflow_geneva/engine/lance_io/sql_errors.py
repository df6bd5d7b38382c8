"""Explain in sentences why pylance rejects a filter or expression."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_geneva.engine.lance_io.sql_text import Token, names_in, replace_tokens
from airflow_geneva.engine.storage.engine_errors import DIVIDES_BY_ZERO, EngineError, engine_errors

if TYPE_CHECKING:
    import lance

_MANY_ROWS = re.compile(r"logical expression (?:Aggregate|Window)Function\(.*?inner: (\w+)", re.S)
_NOT_OF_ITS_TYPE = re.compile(r"Received literal Float\d+\(.*could not convert to literal of type 'U?Int\d+'")
_UNKNOWN_NAME = re.compile(r"(No field named .*?)\. Valid fields are .*", re.S)
_DEBUG = re.compile(r":? ?\b\w+\((?=\w*\(?\[?\w+[({])|:? \w+ \{ ")
_READ_OF_MESSAGE = 20_000
"""Messages repeat the SQL, which may have a million characters."""


def explain_sql_error(dataset: lance.LanceDataset, sql: str, error: BaseException) -> str:
    """Return in sentences why pylance rejects a filter or expression, and the casts that make it valid, if any."""
    message = str(error).split(", /")[0]
    statement, found, reason = message.rpartition(" (sql parser error: ")
    message = reason.removesuffix(")") if found and statement.startswith("Error parsing statement: ") else message
    message = message[:_READ_OF_MESSAGE]
    if called := _MANY_ROWS.search(message):
        return f"it calls {_snake_case(called[1])}(), and a row's value is computed from that row alone."
    if _NOT_OF_ITS_TYPE.search(message):
        if valid := _with_casts(dataset, sql):
            return f"an integer column needs a cast beside a number with a fraction. Write {valid!r}."
        message = f"{message}; cast the column to the type of the value"
    if "Divide by zero" in message:
        return DIVIDES_BY_ZERO
    message = message.replace("Schema error: ", "")
    message = _UNKNOWN_NAME.sub(r"\1; a text stands in single quotes", message)
    # The planner's debug output contains Rust structs.
    text = f"{_DEBUG.split(message)[0].rstrip('.'):.300}"
    return text if text.endswith("?") else f"{text}."


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _with_casts(dataset: lance.LanceDataset, sql: str) -> str:
    """Return the SQL with integer columns cast to DOUBLE, if that makes it valid; else ""."""
    integers = [field.name for field in dataset.schema if pa.types.is_integer(field.type)]
    mentioned = [name for name in integers if name.lower() in names_in(sql)]
    for cast in (*([name] for name in mentioned), mentioned):

        def changed(token: Token, cast: list[str] = cast) -> str | None:
            is_column = token.kind == "name" and not token.field and not token.call and token.name in cast
            return f"CAST({token.text} AS DOUBLE)" if is_column else None

        found = replace_tokens(sql, changed)
        with suppress(EngineError), engine_errors():
            dataset.scanner(columns={"value": f"({found})"}, with_row_id=True, limit=0).to_table()
            return found
    return ""
