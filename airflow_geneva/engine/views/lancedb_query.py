"""The query of a materialized view of LanceDB, as its schema metadata store it: `SELECT ... FROM table [WHERE ...]`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.lance_io.filters import explain_sql_error
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID, lancedb_query
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_WORD = re.compile(r"""'(?:[^']|'')*'|`(?:[^`]|``)*`|"(?:[^"]|"")*"|\w+|\s+|.""", re.S)
_CLAUSES = ("SELECT", "FROM", "WHERE")
_OTHERS = {"GROUP", "HAVING", "ORDER", "LIMIT", "OFFSET", "JOIN", "UNION"}
_FORMAT = 1


@dataclass(frozen=True)
class LancedbQuery:
    """A query of one row for each row of its source that a filter keeps.

    Args:
        columns: SQL expressions by the names of the view's columns, in their order.
    """

    source: str
    columns: Mapping[str, str]
    where: str | None

    @staticmethod
    def read(schema: pa.Schema, view: str) -> LancedbQuery:
        """Read the query of a view.

        Raises:
            InvalidInput: LanceDB stores another kind of query, which only LanceDB refreshes.
        """
        text = lancedb_query(schema.metadata) or ""
        found = _parse(text) if _is_select(schema.metadata) else None
        names = [field.name for field in schema if field.name != SOURCE_ROW_ID]
        fits = SOURCE_ROW_ID in schema.names and schema.field(SOURCE_ROW_ID).type == pa.uint64()
        if found is None or list(found.columns) != names or not fits or any(map(is_blob, schema)):
            raise InvalidInput(
                f"Table {view!r} is a materialized view of LanceDB that only LanceDB refreshes: {text:.500}. Queries "
                "that are refreshed here have columns and SQL expressions, none of them a blob, one table of the same "
                "database, and a filter. Refresh it there, or create a view here: "
                "table.query()...create_materialized_view()."
            )
        return found

    def check(self, source: lance.LanceDataset, view: str) -> None:
        """Raise `InvalidInput` if a version of the source lacks a column, or pylance an expression, of the query."""
        for sql in (*self.columns.values(), *(() if self.where is None else (self.where,))):
            try:
                with engine_errors():
                    # pylance scans no constant alone.
                    source.scanner(columns={"value": sql, "row": "_rowid"}, with_row_id=True, limit=0).to_table()
            except EngineError as error:
                raise InvalidInput(
                    f"View {view!r} of LanceDB cannot be refreshed here: {sql} cannot be computed from table "
                    f"{self.source!r}: {explain_sql_error(source, sql, error)} Correct the table, or refresh the view "
                    "by LanceDB."
                ) from None

    @property
    def sql(self) -> str:
        """All expressions, for the names in them."""
        return " , ".join([*self.columns.values(), self.where or ""])


def _is_select(metadata: Mapping[bytes, bytes] | None) -> bool:
    try:
        document = parse((metadata or {})[b"mv.definition"])
        return bool(document["format"] == _FORMAT and document.get("kind", "query") == "query")
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _parse(text: str) -> LancedbQuery | None:
    """Split a query as LanceDB spells it; None if it has another clause or another form."""
    parts: dict[str, list[list[str]]] = {}
    clause, depth, before = "", 0, ""
    for word in _WORD.findall(text):
        depth += (word in ("(", "[")) - (word in (")", "]"))
        if depth == 0 and (word in _OTHERS or (word == "DISTINCT" and before == "SELECT")):
            return None
        if depth == 0 and word in _CLAUSES and not (word == "FROM" and before == "DISTINCT"):
            if len(parts) >= len(_CLAUSES) or word != _CLAUSES[len(parts)]:
                return None
            clause = word
            parts[clause] = [[]]
        elif not clause:
            return None
        elif depth == 0 and word == "," and clause != "WHERE":
            parts[clause].append([])
        else:
            parts[clause][-1].append(word)
        before = before if word.isspace() else word
    columns = [_column(item) for item in parts.get("SELECT", [])]
    source = _name([word for word in parts.get("FROM", [[]])[0] if not word.isspace()])
    if source is None or len(parts["FROM"]) > 1 or not columns or not all(name for name, _ in columns):
        return None
    where = "".join(parts["WHERE"][0]).strip() if "WHERE" in parts else None
    return LancedbQuery(source, {str(name): sql for name, sql in columns}, where)


def _column(item: Sequence[str]) -> tuple[str | None, str]:
    """Return the name and the expression of `expression AS name`, or of a column's name alone."""
    words, depth, at = list(item), 0, None
    for position, word in enumerate(words):
        depth += (word in ("(", "[")) - (word in (")", "]"))
        at = position if depth == 0 and word == "AS" else at
    named = words if at is None else words[at + 1 :]
    return _name([word for word in named if not word.isspace()]), "".join(words[:at]).strip()


def _name(words: Sequence[str]) -> str | None:
    """Return the name that is all there is, without its quotes."""
    if len(words) != 1 or not re.fullmatch(r"\w+|`.+`", words[0], re.S):
        return None
    return words[0][1:-1].replace("``", "`") if words[0][0] == "`" else words[0]
