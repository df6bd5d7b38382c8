"""Sibling columns: columns that one function fills, one for each field of the struct that it returns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.runtime import random
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

SIBLINGS_KEY = "geneva::siblings"
"""Key of a column's metadata that names its siblings' group, and the field of the function's struct that fills it."""

_FIRST_GROUP = 1 << 30
"""Groups have numbers above those of Lance's fields, so that one number identifies the output of any function."""


@dataclass(frozen=True)
class Sibling:
    """The place of a column among its siblings, from its metadata; it stays when columns are renamed or dropped.

    Args:
        group: the number of the group of siblings.
        field: the field of the function's struct that fills the column.
    """

    group: int
    field: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(metadata: object) -> Sibling | None:
        """Parse the value of `SIBLINGS_KEY`; None if it is missing or damaged."""
        try:
            document = parse(metadata) if isinstance(metadata, (str, bytes)) else None
            found = Sibling(**document) if isinstance(document, dict) else None
        except (TypeError, ValueError, RecursionError):
            return None
        if found is None or type(found.group) is not int or not isinstance(found.field, str):
            return None
        return found if is_group(found.group) else None


def is_group(number: int) -> bool:
    """Whether a number identifies a group of siblings, and not a field."""
    return number >= _FIRST_GROUP


def group_of(columns: Sequence[str]) -> int:
    """Return a number for columns that are written together, the same for the same names."""
    return _FIRST_GROUP + int(md5(repr(sorted(columns)))[:7], 16)


def new_group() -> int:
    """Return the number of a new group of siblings."""
    return random.SystemRandom().randrange(_FIRST_GROUP, 1 << 31)


@dataclass(frozen=True)
class Output:
    """The columns of one version of a table that a function fills: one column, or several siblings.

    Args:
        columns: their names, in the order of the table.
        fields: of siblings, the fields of the function's struct that fill them, in the same order.
        group: of siblings, the number of their group.
    """

    columns: tuple[str, ...]
    fields: tuple[str, ...] = ()
    group: int | None = None

    @staticmethod
    def of(dataset: lance.LanceDataset, column: str) -> Output:
        """Return a column with its siblings, if it has any."""
        return _output_of(((one.name(), sibling_of(one)) for one in dataset.lance_schema.fields()), column)

    @staticmethod
    def all_of(dataset: lance.LanceDataset, columns: Iterable[str]) -> list[Output]:
        """Return the outputs that columns belong to, each once."""
        there = {one.name(): sibling_of(one) for one in dataset.lance_schema.fields()}
        groups = dict[int, dict[str, str]]()
        for name, sibling in there.items():
            if sibling is not None:
                groups.setdefault(sibling.group, {})[name] = sibling.field
        found = dict[Output, None]()
        for column in columns:
            own = there[column]
            one = Output((column,)) if own is None else _siblings(own.group, groups[own.group])
            found[one] = None
        return list(found)

    @staticmethod
    def in_schema(schema: pa.Schema, column: str) -> Output:
        """Return a column of an Arrow schema with its siblings, if it has any."""
        return _output_of([(one.name, sibling_in(one)) for one in schema], column)

    @property
    def column(self) -> str:
        """The first column, which stands for all of them where there is room for one name."""
        return self.columns[0]

    def type(self, schema: pa.Schema) -> pa.DataType:
        """Return the type of the values: of siblings, a struct of the fields whose columns still exist."""
        types = [schema.field(name).type for name in self.columns]
        if not self.fields:
            return types[0]
        return pa.struct([pa.field(name, kind) for name, kind in zip(self.fields, types, strict=True)])

    def joined(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Join the values of the columns to one array: of siblings, structs, which are NULL where all columns are."""
        if not self.fields:
            return columns[0]
        mask = None
        if all(column.null_count for column in columns):
            mask = reduce(pc.and_, [column.is_null() for column in columns])
        return pa.StructArray.from_arrays(columns, list(self.fields), mask=mask)

    def split(self, values: pa.Array) -> list[pa.Array]:
        """Split values of the function into those of the columns; a NULL struct is NULL in each."""
        if not self.fields:
            return [values]
        parts = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
        return [parts[name] for name in self.fields]

    def narrowed(self, values: pa.Array) -> pa.Array:
        """Return struct values with only the fields whose columns still exist."""
        if not self.fields or not pt.is_struct(values.type) or [one.name for one in values.type] == list(self.fields):
            return values
        kinds = [values.type.field(name) for name in self.fields]
        mask = values.is_null() if values.null_count else None
        return pa.StructArray.from_arrays(self.split(values), fields=kinds, mask=mask)


def _output_of(there: Iterable[tuple[str, Sibling | None]], column: str) -> Output:
    found = dict(there)
    own = found.get(column)
    if own is None:
        return Output((column,))
    return _siblings(own.group, {name: one.field for name, one in found.items() if one and one.group == own.group})


def _siblings(group: int, fields: Mapping[str, str]) -> Output:
    """Return the output of a group; `fields` are the fields of the function's struct, by column."""
    return Output(tuple(fields), tuple(fields.values()), group)


def sibling_of(field: Any) -> Sibling | None:
    """Return the place of the column of a Lance field among its siblings; None if it has none."""
    return Sibling.of(field.metadata.get(SIBLINGS_KEY))


def sibling_in(field: pa.Field) -> Sibling | None:
    """Return the place of an Arrow field's column among its siblings; None if it has none."""
    return Sibling.of((field.metadata or {}).get(SIBLINGS_KEY.encode()))


def match_fields(columns: Sequence[str], kind: pa.DataType, function: str) -> tuple[str, ...]:
    """Return the field of a struct that fills each column: by name if the names are the same, else in order.

    Raises:
        InvalidInput: the type is not a struct, or has another number of fields.
    """
    asked = f"Columns {list(columns)} need a function that returns a struct with {len(columns)} fields"
    how = "Annotate its result as a NamedTuple or a dataclass, or give @udf(data_type=pa.struct(...))."
    if not pt.is_struct(kind):
        raise InvalidInput(f"{asked}, and UDF {function!r} returns {kind}. {how}")
    fields = [field.name for field in kind]
    if len(set(fields)) < len(fields) or len(fields) != len(columns):
        raise InvalidInput(f"{asked}, and UDF {function!r} returns {fields}. Name a column for each field.")
    return tuple(columns) if set(columns) == set(fields) else tuple(fields)
