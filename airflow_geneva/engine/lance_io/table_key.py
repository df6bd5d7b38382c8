"""The key of a table: the columns whose values name its rows to people, where row addresses alone would stand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.lance_io.rows_by_id import rows_in_batches
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.lance_io")

KEY = b"geneva::key"
"""Key of a column's metadata that says its position in the table's key; it follows the column when it is renamed."""
_PRIMARY = b"lance-schema:unenforced-primary-key"
MOST_BYTES = 200
"""The most bytes of a row's key in a message or a record; a longer key is cut."""
_MOST_READ = 4_096

_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    *(pt.is_integer, pt.is_decimal, pt.is_temporal, pt.is_string, pt.is_large_string),
    *(pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary),
)


def key_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns of a table's key, in order; by default those of Lance's unenforced primary key, or none."""
    for position in (lambda found: found.get(KEY), _position_in_primary_key):
        found = {field.name: at for field in schema if (at := position(field.metadata or {})) is not None}
        if found:
            return tuple(sorted(found, key=lambda name: (len(found[name]), found[name])))
    return ()


def _position_in_primary_key(metadata: Mapping[bytes, bytes]) -> bytes | None:
    at = metadata.get(_PRIMARY + b":position")
    return at if at is not None else b"" if metadata.get(_PRIMARY) == b"true" else None


def check_key(table: str, schema: pa.Schema, key: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns of a key; InvalidInput if the table lacks one, or it holds values that name no row."""
    columns = [key] if isinstance(key, str) else list(key or ())
    check_columns(table, schema.names, columns)
    if len(set(columns)) < len(columns):
        raise InvalidInput(f"key={columns} names a column twice. Name each once.")
    for field in map(schema.field, columns):
        kind = field.type.value_type if pt.is_dictionary(field.type) else field.type
        kind = kind.storage_type if getattr(kind, "extension_name", "") == "arrow.uuid" else kind
        if is_blob(field) or not any(holds(kind) for holds in _KINDS):
            raise InvalidInput(
                f"Column {field.name!r} of table {table!r} is {field.type} and cannot be a key, which names rows in "
                "messages. Choose a column of text, bytes, whole numbers or dates."
            )
    return tuple(columns)


def key_metadata(schema: pa.Schema, columns: Sequence[str]) -> dict[str, dict[str, str | None]]:
    """Return the metadata that columns get and lose when these become the table's key; nothing if they are its key."""
    there = {field.name: (field.metadata or {}).get(KEY, b"").decode() for field in schema}
    wanted = {name: str(at) for at, name in enumerate(columns)}
    return {name: {KEY.decode(): wanted.get(name)} for name, at in there.items() if at != wanted.get(name, "")}


def check_key_is(table: str, schema: pa.Schema, key: str | Sequence[str] | None) -> None:
    """Raise InvalidInput if a table that exists does not have the key that was asked for."""
    found = key_columns(schema)
    if key is not None and check_key(table, schema, key) != found:
        raise InvalidInput(
            f"Table {table!r} exists and its key is {list(found)}, not {key!r}. Leave key out, or change it: "
            f"table.set_key({key!r})."
        )


def with_key(table: str, schema: pa.Schema, key: str | Sequence[str] | None) -> pa.Schema:
    """Return the schema of a new table with a key; None: with the key that it has."""
    changed = {} if key is None else key_metadata(schema, check_key(table, schema, key))
    for name, changes in changed.items():
        at = schema.get_field_index(name)
        kept = {key: value for key, value in (schema.field(at).metadata or {}).items() if key != KEY}
        kept |= {key.encode(): value.encode() for key, value in changes.items() if value is not None}
        schema = schema.set(at, schema.field(at).with_metadata(kept or None))
    return schema


def check_key_stays(table: str, schema: pa.Schema, dropped: Sequence[str]) -> None:
    """Refuse to drop a column of the key that was set; one that Lance calls primary may go."""
    if columns := [name for name in dropped if KEY in (schema.field(name).metadata or {})]:
        raise InvalidInput(
            f"Columns {columns} of {table!r} cannot be dropped: they are its key, which names rows in errors. Choose "
            "another key first, or none, with set_key(None)."
        )


@dataclass(frozen=True)
class RowNames:
    """Reads the key of rows of one version, to name them; nothing is read before it is asked for."""

    dataset: lance.LanceDataset
    columns: tuple[str, ...]

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the key of each row as text, given by row id; "" for every row if there is no key.

        A key that cannot be read leaves its row without a name: no job fails because of it.
        """
        if not self.columns or not ids:
            return [""] * len(ids)
        try:
            named = dict(self._read(ids))
        except BaseException as error:
            if not is_failure(error):
                raise
            logger.warning("The key %s of failed rows cannot be read: %s", ", ".join(self.columns), error)
            named = {}
        return [named.get(row, "") for row in ids]

    def _read(self, ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        for batch in rows_in_batches(self.dataset, np.unique(np.array(ids, np.uint64)), self.columns):
            parts = zip(*(_texts(batch.column(name)) for name in self.columns), strict=True)
            yield from zip(batch.column("_rowid").to_pylist(), map(_shown, parts), strict=True)


def _texts(values: pa.Array) -> Iterator[str]:
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pt.is_string(kind) or pt.is_large_string(kind):
        # Text that is not UTF-8 is in some tables, and Python cannot hold it.
        values = values.cast(pa.large_binary())
        return ("NULL" if v is None else v[:_MOST_READ].decode(errors="replace") for v in values.to_pylist())
    if pt.is_temporal(kind):
        values = values.cast(pa.string())  # Python has no times of nanoseconds
    return ("NULL" if v is None else v.hex() if isinstance(v, bytes) else str(v) for v in values.to_pylist())


def _shown(parts: Sequence[str]) -> str:
    """Join the parts of a key to one line of text, without secrets, of at most `MOST_BYTES` bytes."""
    text = mask_secrets(", ".join(part[:_MOST_READ] for part in parts))
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(whole := text.encode(errors="replace")) <= MOST_BYTES:
        return text
    return f"{whole[: MOST_BYTES - 3].decode(errors='ignore')}…"
