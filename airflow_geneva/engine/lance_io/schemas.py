"""Change names and metadata of a table's columns in its Lance schema, for one commit of all changes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.lance_io.messages import read_parts
from airflow_geneva.engine.storage.documents import LARGEST_PLAN, MOST_PLAN_VALUES, parse

if TYPE_CHECKING:
    import lance
    from lance.schema import LanceSchema

# Numbers in Lance's protobuf message `Field`, and in an entry of its map of metadata.
_NAME, _ID, _PARENT, _METADATA = 2, 3, 4, 10
_KEY, _VALUE = 1, 2

Metadata = Mapping[str, str | None]


def changed_schema(
    dataset: lance.LanceDataset,
    names: Mapping[int, str],
    metadata: Mapping[int, Metadata],
    of_table: Mapping[str, str] | None = None,
    added: Sequence[pa.Field] = (),
    dropped: Collection[int] = (),
) -> LanceSchema:
    """Return the schema of a version with other columns, names and metadata; all fields keep their ids.

    Args:
        names: new names, by field id.
        metadata: values to set, by field id and key; None removes a key.
        of_table: values to set in the metadata of the schema itself.
        added: new columns, without values, which get new field ids.
        dropped: the field ids of the columns to remove, with those of their nested fields.
    """
    from lance.schema import LanceSchema

    # A schema that pylance makes from Arrow fields has new ids. The pickled form of a schema keeps its ids.
    made: Any = dataset.lance_schema
    build, (about, *fields) = made.__reduce__()
    if of_table:
        about = json.dumps(
            parse(about, LARGEST_PLAN, MOST_PLAN_VALUES) | {key: list(text.encode()) for key, text in of_table.items()}
        )
    kept = (_changed(field, names, metadata) for field in fields if _id_of(field) not in dropped)
    new: tuple[Any, ...] = LanceSchema.from_pyarrow(pa.schema(added)).__reduce__()[1][1:] if added else ()  # type: ignore[assignment]
    first = int(dataset.max_field_id) + 1
    changed: LanceSchema = build(about, *kept, *(_renumbered(field, first) for field in new))
    return changed


def _id_of(message: bytes) -> int:
    return next((int(value) for number, value, _ in read_parts(message) if number == _ID), 0)


def _renumbered(message: bytes, first: int) -> bytes:
    """Return a field of a new schema, whose ids begin at 0, with ids from `first` on."""
    parts = list(read_parts(message))
    numbers = {number: int(value) for number, value, _ in parts if number in (_ID, _PARENT)}
    parent = numbers.get(_PARENT, 0)
    kept = b"".join(raw for number, _, raw in parts if number not in (_ID, _PARENT))
    top = parent >> 63  # -1: the field is a column
    return kept + _number(_ID, numbers.get(_ID, 0) + first) + _number(_PARENT, parent if top else parent + first)


def _changed(message: bytes, names: Mapping[int, str], metadata: Mapping[int, Metadata]) -> bytes:
    parts = list(read_parts(message))
    field_id = _id_of(message)
    name, changes = names.get(field_id), metadata.get(field_id, {})
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
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
