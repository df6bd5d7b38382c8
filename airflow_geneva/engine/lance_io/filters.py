"""Filters: check them, replace functions of the current time, find the columns they read, and evaluate them."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.lance_io.engine_errors import DIVIDES_BY_ZERO, EngineError, engine_errors
from airflow_geneva.engine.lance_io.fragments import open_fragment
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

# Tokens as Lance parses SQL, in one pass, because each kind may contain the quotes of the others. Double quotes make
# string literals.
_TEXT = r"""'(?:[^']|'')*'|"(?:[^"]|"")*\""""
_COMMENT = r"--[^\n]*|/\*.*?\*/"
_GAP = rf"(?:\s|{_COMMENT})*"
_NAME = r"`(?:[^`]|``)*`|(?![0-9$])(?:[A-Za-z0-9_@#$]|[^\x00-\x7f\s])+"
_TOKEN = re.compile(
    rf"(?P<text>{_TEXT})|{_COMMENT}|(?P<field>\.{_GAP})?(?P<name>{_NAME})(?P<call>{_GAP}\((?P<empty>{_GAP}\))?)?", re.S
)
_TIME_FUNCTIONS = {
    "now": "timestamp '{:%Y-%m-%d %H:%M:%S.%f}'",
    "current_timestamp": "timestamp '{:%Y-%m-%d %H:%M:%S.%f}'",
    "current_date": "date '{:%Y-%m-%d}'",
    "today": "date '{:%Y-%m-%d}'",
    "current_time": "time '{:%H:%M:%S.%f}'",
}
_WITHOUT_BRACKETS = {"current_timestamp", "current_date", "current_time"}
_MANY_ROWS = re.compile(r"logical expression (?:Aggregate|Window)Function\(.*?inner: (\w+)", re.S)
_NOT_OF_ITS_TYPE = re.compile(r"Received literal Float\d+\(.*could not convert to literal of type 'U?Int\d+'")
_STATEMENT = re.compile(r"Error parsing statement: .* \(sql parser error: (.*)\)", re.S)
_UNKNOWN_NAME = re.compile(r"(No field named .*?)\. Valid fields are .*", re.S)
_DEBUG = re.compile(r":? ?\b\w+\((?=\w*\(?\[?\w+[({])|:? \w+ \{ ")
_RANDOM_FUNCTIONS = {"random", "rand", "uuid"}


def freeze_where(where: str | None, at: datetime | None = None) -> str | None:
    """Replace functions of the current time by `at` (UTC; None: now), so that all tasks evaluate the same filter."""
    if where is None or not where.strip():
        return None
    moment = (at or datetime.now(timezone.utc)).astimezone(timezone.utc)

    def frozen(token: re.Match[str]) -> str:
        volatile = _volatile(token)
        if volatile in _RANDOM_FUNCTIONS:
            raise InvalidInput(
                f"The filter {where!r} draws random values, so no two tasks would select the same rows. "
                "Filter on a stored column instead."
            )
        return token[0] if volatile is None else _TIME_FUNCTIONS[volatile].format(moment)

    return _TOKEN.sub(frozen, where).strip()


def volatile_functions(sql: str) -> list[str]:
    """Return the functions of time and randomness in a filter or expression."""
    return sorted({name for name in map(_volatile, _TOKEN.finditer(sql)) if name})


def _volatile(token: re.Match[str]) -> str | None:
    """Return the function of time or randomness that a token calls, or None."""
    if token["name"] is None or token["field"]:
        return None
    name = _unquoted(token["name"]).lower()
    bare = name in _WITHOUT_BRACKETS and token["name"][0] != "`" and not token["call"]
    called = token["empty"] if name in _TIME_FUNCTIONS else token["call"] if name in _RANDOM_FUNCTIONS else None
    return name if called or bare else None


def names_in(sql: str) -> set[str]:
    """Return every name in a filter or expression, in lower case; text in double quotes counts as a name."""
    found = (token["name"] or token["text"] for token in _TOKEN.finditer(sql))
    return {_unquoted(name).lower() for name in found if name and name[0] != "'"}


def brackets_in(sql: str) -> str:
    """Remove literals, names and comments, which may contain brackets, from a filter or expression."""
    return _TOKEN.sub(lambda token: "(" * bool(token["call"]) + ")" * bool(token["empty"]), sql)


def _unquoted(name: str) -> str:
    quote = name[0]
    return name[1:-1].replace(quote * 2, quote) if quote in '`"' else name


def where_columns(where: str | None, columns: list[str]) -> list[str]:
    """Return all columns that a filter mentions, in upper or lower case; it may not read all of them."""
    if where is None:
        return []
    mentioned = names_in(where)
    return [name for name in columns if name.lower() in mentioned]


def check_where(dataset: lance.LanceDataset, where: str | None) -> None:
    if where is None:
        return
    try:
        with engine_errors():
            dataset.scanner(filter=where, columns=[], with_row_id=True).explain_plan()
            dataset.scanner(columns={"selected": f"({where})"}, with_row_id=True, limit=1).to_table()
    except EngineError as error:
        raise InvalidInput(
            f"The filter {where!r} is not valid for columns {', '.join(dataset.schema.names)}: "
            f"{explain_sql_error(dataset, where, error)} Write a condition as after WHERE in SQL."
        ) from None


def explain_sql_error(dataset: lance.LanceDataset, sql: str, error: BaseException) -> str:
    """Return in sentences why pylance rejects a filter or expression, and the casts that make it valid, if any."""
    message = str(error).split(", /")[0]
    if called := _MANY_ROWS.search(message):
        return f"it calls {_snake_case(called[1])}(), and a row's value is computed from that row alone."
    if _NOT_OF_ITS_TYPE.search(message):
        if valid := _with_casts(dataset, sql):
            return f"an integer column needs a cast beside a number with a fraction. Write {valid!r}."
        message = f"{message}; cast the column to the type of the value"
    if "Divide by zero" in message:
        return DIVIDES_BY_ZERO
    message = _STATEMENT.sub(r"\1", message.replace("Schema error: ", ""))
    message = _UNKNOWN_NAME.sub(r"\1; a text stands in single quotes", message)
    # The planner's debug output contains Rust structs.
    text = f"{_DEBUG.split(message)[0].rstrip('.'):.300}"
    return text if text.endswith("?") else f"{text}."


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _with_casts(dataset: lance.LanceDataset, sql: str) -> str:
    """Return the SQL with integer columns cast to DOUBLE, if that makes it valid; else ""."""
    integers = [field.name for field in dataset.schema if pa.types.is_integer(field.type)]
    mentioned = where_columns(sql, integers)
    for cast in (*([name] for name in mentioned), mentioned):

        def changed(token: re.Match[str], cast: list[str] = cast) -> str:
            is_column = token["name"] and not token["field"] and not token["call"]
            return f"CAST({token[0]} AS DOUBLE)" if is_column and _unquoted(token["name"]) in cast else token[0]

        found = _TOKEN.sub(changed, sql)
        with suppress(EngineError), engine_errors():
            dataset.scanner(columns={"value": f"({found})"}, with_row_id=True, limit=0).to_table()
            return found
    return ""


def selected_offsets(dataset: lance.LanceDataset, fragment_ids: list[int], where: str) -> dict[int, Ranges]:
    """Return the physical offsets of the live rows that a filter selects, by fragment, from one scan of its columns."""
    if not fragment_ids:
        return {}
    fragments = [open_fragment(dataset, fragment_id) for fragment_id in fragment_ids]
    scanner = dataset.scanner(columns=[], filter=where, with_row_address=True, fragments=fragments)
    parts = [
        Ranges.from_offsets(batch.column("_rowaddr").to_numpy().astype(np.int64)) for batch in scanner.to_batches()
    ]
    addresses = Ranges.union(parts)
    wanted = np.array(sorted(fragment_ids), np.int64)
    cuts = np.searchsorted(addresses.starts, np.append(wanted, wanted[-1] + 1) << 32)
    found: dict[int, Ranges] = {}
    for at, fragment_id in enumerate(wanted.tolist()):
        starts, ends = (bounds[cuts[at] : cuts[at + 1]] for bounds in (addresses.starts, addresses.ends))
        if len(starts):
            found[fragment_id] = Ranges(starts - (fragment_id << 32), ends - (fragment_id << 32))
    return found
