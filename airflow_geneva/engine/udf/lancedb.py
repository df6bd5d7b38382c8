"""Columns and views that LanceDB defines and refreshes itself: they are described, and refused by name."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.errors import InvalidInput

_COLUMN = b"computed_column"
_VIEW = b"mv.definition"
_SHOWN = 200


def lancedb_column(field: pa.Field) -> str | None:
    """Describe how LanceDB computes a column; None if LanceDB does not compute it."""
    metadata = field.metadata or {}
    if metadata.get(_COLUMN) != b"true":
        return None
    if expression := metadata.get(_COLUMN + b".expression"):
        return _shown(expression)
    stored = sorted((key, value) for key, value in metadata.items() if key.startswith(_COLUMN + b"."))
    return _shown(b", ".join(key.removeprefix(_COLUMN + b".") + b"=" + value[:_SHOWN] for key, value in stored))


def lancedb_view(metadata: Mapping[bytes, bytes] | None) -> str | None:
    """Return the query of a view that LanceDB maintains, or its definition in an unknown form; None for other tables.

    Args:
        metadata: of the table's schema.
    """
    stored = (metadata or {}).get(_VIEW)
    if stored is None:
        return None
    try:
        return _shown(str(parse(stored)["query"]).encode())
    except (LookupError, TypeError, ValueError):
        return _shown(stored)


def refuse_column(table: str, field: pa.Field) -> None:
    """Raise `InvalidInput` for a column that LanceDB computes."""
    if (how := lancedb_column(field)) is not None:
        name = field.name
        raise InvalidInput(
            f"Column {name!r} of table {table!r} is computed by LanceDB ({how}), and only LanceDB refreshes it: "
            f"refresh_column({name!r}) of its table. To compute it here, add a column with a UDF: "
            f'table.add_columns({{"{name}_2": udf}}).'
        )


def refuse_view(table: str, metadata: Mapping[bytes, bytes] | None) -> None:
    """Raise `InvalidInput` for a materialized view that LanceDB maintains."""
    if (query := lancedb_view(metadata)) is not None:
        raise InvalidInput(
            f"Table {table!r} is a materialized view of LanceDB ({query}), and only LanceDB refreshes it: "
            f"open_materialized_view({table!r}).refresh() of its database. To refresh it here, create a view with this "
            "query: table.query()...create_materialized_view()."
        )


def _shown(stored: bytes) -> str:
    text = stored[: 4 * _SHOWN].decode(errors="replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
