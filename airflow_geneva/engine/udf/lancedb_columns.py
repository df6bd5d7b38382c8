"""Columns that LanceDB declares by an SQL expression, `add_columns(computed=...)`, as columns that a UDF computes.

The import path of such a UDF holds the expression, so every process can make it, and none loads code from the table.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.code_hash.hasher import deps_version
from airflow_geneva.engine.lance_io.engine_errors import engine_errors
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.udf.decorator import UDF, udf
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.errors import InvalidInput

_COLUMN = "computed_column"
_PREFIX = "sql_"
_ROW = "__row"


class _Expression:
    """Evaluates an SQL expression as Lance does, on the columns that it was declared on."""

    def __init__(self, sql: str, inputs: tuple[str, ...], data_type: pa.DataType) -> None:
        self.sql, self.inputs, self.data_type = sql, inputs, data_type

    def __call__(self, rows: pa.RecordBatch) -> pa.Array:
        import lance

        # Lance selects no expression without a column.
        numbers = pa.array(range(rows.num_rows), pa.int64())
        given = pa.RecordBatch.from_arrays([*rows.columns[: len(self.inputs)], numbers], [*self.inputs, _ROW])
        with engine_errors():
            stored = lance.write_dataset(given, "memory://", data_storage_version="2.2")
            found = stored.scanner(columns={"value": self.sql, _ROW: _ROW}, scan_in_order=True).to_table()["value"]
        return found.combine_chunks().cast(self.data_type)


def is_declared(field: pa.Field) -> bool:
    """Whether LanceDB declares how the column is computed."""
    return (field.metadata or {}).get(_COLUMN.encode()) == b"true"


def declared_definition(field: pa.Field) -> UdfDefinition | None:
    """Return the definition of a column that LanceDB declares by SQL; None if it declares nothing or another kind."""
    metadata = field.metadata or {}
    if not is_declared(field) or metadata.get(f"{_COLUMN}.kind".encode()) != b"sql":
        return None
    try:
        sql = metadata[f"{_COLUMN}.expression".encode()].decode()
        named = parse(metadata[f"{_COLUMN}.inputs".encode()])
        # A field of a struct is given with its struct, as the expression names it.
        inputs = tuple(dict.fromkeys(name.partition(".")[0] for name in named))
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    return _find(_name_of(sql, inputs, field.type)).definition(inputs or None)


def without_declaration(field: pa.Field) -> dict[str, str | None]:
    """Return the change of a column's metadata that removes what LanceDB declares and records."""
    return {
        key.decode(): None for key in field.metadata or {} if key.startswith((b"computed_column", b"computed_refresh"))
    }


def explain_declaration(table: str, field: pa.Field) -> InvalidInput:
    """Return the error for a column that LanceDB declares in a form that is not known here."""
    about = {
        key.decode().removeprefix(f"{_COLUMN}."): value.decode(errors="replace")
        for key, value in (field.metadata or {}).items()
        if key.startswith(f"{_COLUMN}.".encode())
    }
    return InvalidInput(
        f"Column {field.name!r} of table {table!r} is declared by LanceDB as {json.dumps(about)}, and only SQL "
        "expressions of LanceDB are computed here. Refresh it with LanceDB, or add a column with a UDF: "
        f"table.add_columns({{'{field.name}_2': udf}})."
    )


def _name_of(sql: str, inputs: tuple[str, ...], data_type: pa.DataType) -> str:
    """Return a name that holds an expression, its inputs and its type."""
    schema = pa.schema([pa.field("value", data_type)]).serialize().to_pybytes()
    told = json.dumps([sql, list(inputs), base64.b64encode(schema).decode()])
    return _PREFIX + base64.b32encode(zlib.compress(told.encode(), 9)).decode().rstrip("=").lower()


def _find(name: str) -> UDF:
    """Return the UDF of such a name; AttributeError if it is none."""
    if (known := globals().get(name)) is not None:
        return known  # type: ignore[no-any-return]
    try:
        packed = name.removeprefix(_PREFIX).upper()
        sql, inputs, schema = json.loads(zlib.decompress(base64.b32decode(packed + "=" * (-len(packed) % 8))))
        data_type = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema))).field(0).type
    except (ValueError, TypeError, LookupError, zlib.error, pa.ArrowException) as error:
        raise AttributeError(name) from error
    version = deps_version([sql, inputs, str(data_type)], name)
    function = _Expression(sql, tuple(inputs), data_type)
    made = udf(data_type=data_type, name="sql", version=version, input_columns=inputs or None)(function)
    globals()[name] = made
    return made


def __getattr__(name: str) -> Any:
    if not name.startswith(_PREFIX):
        raise AttributeError(name)
    return _find(name)


def expression_at(import_path: str | None) -> str | None:
    """Return the SQL that an import path holds; None for a path to a function in a module."""
    module, _, name = (import_path or "").partition(":")
    return _find(name).func.sql if module == __name__ and name.startswith(_PREFIX) else None
