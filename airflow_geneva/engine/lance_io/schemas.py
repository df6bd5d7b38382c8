"""Change names and metadata of a table's columns in its Lance schema, for one commit of all changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.lance_io.messages import read_parts
from airflow_geneva.engine.storage.documents import LARGEST_PLAN, MOST_PLAN_VALUES, parse

if TYPE_CHECKING:
    import lance
    from lance.schema import LanceSchema

# Numbers in Lance's protobuf message `Field`, and in an entry of its map of metadata.
_NAME, _ID, _METADATA = 2, 3, 10
_KEY, _VALUE = 1, 2

Metadata = Mapping[str, str | None]


def changed_schema(
    dataset: lance.LanceDataset,
    names: Mapping[int, str],
    metadata: Mapping[int, Metadata],
    of_table: Mapping[str, str] | None = None,
) -> LanceSchema:
    """Return the schema of a version with other names and metadata of columns; all fields keep their ids.

    Args:
        names: new names, by field id.
        metadata: values to set, by field id and key; None removes a key.
        of_table: values to set in the metadata of the schema itself.
    """
    # A schema that pylance makes from Arrow fields has new ids. The pickled form of a schema keeps its ids.
    made: Any = dataset.lance_schema
    build, (about, *fields) = made.__reduce__()
    if of_table:
        about = json.dumps(
            parse(about, LARGEST_PLAN, MOST_PLAN_VALUES) | {key: list(text.encode()) for key, text in of_table.items()}
        )
    changed: LanceSchema = build(about, *(_changed(field, names, metadata) for field in fields))
    return changed


def _changed(message: bytes, names: Mapping[int, str], metadata: Mapping[int, Metadata]) -> bytes:
    parts = list(read_parts(message))
    field_id = next((value for number, value, _ in parts if number == _ID), 0)
    name, changes = names.get(int(field_id), None), metadata.get(int(field_id), {})
    kept = [raw for number, value, raw in parts if not _is_replaced(number, value, name, changes)]
    new = [] if name is None else [_part(_NAME, name.encode())]
    for key, text in changes.items():
        if text is not None:
            new.append(_part(_METADATA, _part(_KEY, key.encode()) + _part(_VALUE, text.encode())))
    return b"".join([*kept, *new])


def _is_replaced(number: int, value: int | bytes, name: str | None, changes: Metadata) -> bool:
    if number == _NAME:
        return name is not None
    return number == _METADATA and isinstance(value, bytes) and _key_of(value) in changes


def _key_of(entry: bytes) -> str:
    keys: Iterator[bytes] = (value for number, value, _ in read_parts(entry) if number == _KEY)  # type: ignore[misc]
    return next(keys, b"").decode()


def _part(number: int, value: bytes) -> bytes:
    length, size = bytearray(), len(value)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + value
