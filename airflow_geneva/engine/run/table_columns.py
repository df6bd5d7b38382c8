"""Define, alter, drop and rename columns of a table; no values are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa

from airflow_geneva.engine.checkpoint.facts import fields_with_state, mark_defined
from airflow_geneva.engine.lance_io.arrays import nested_types
from airflow_geneva.engine.lance_io.conflicts import commit_tries, is_conflict
from airflow_geneva.engine.lance_io.fragments import field_ids
from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.lance_io.siblings import Output, is_group
from airflow_geneva.engine.lance_io.table_key import check_key, check_key_stays, key_metadata
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import base_folders
from airflow_geneva.engine.udf import UDF, UdfDefinition
from airflow_geneva.engine.udf.definition import (
    UDF_KEY,
    ColumnSpecs,
    by_name,
    check_column_name,
    check_droppable,
    define_columns,
    has_type,
    is_plain,
    key_names,
    read_definition,
    redefine,
    renamed_metadata,
)
from airflow_geneva.engine.udf.of_process import give_udf
from airflow_geneva.engine.views.definition import visible_columns
from airflow_geneva.errors import InvalidInput

DefinedSpec: TypeAlias = UDF | tuple[UDF, Sequence[str]]


class DefinedColumns(ABC):
    """The columns of a table or a view, as its newest version has them."""

    table: TableLocation

    @abstractmethod
    def add(self, columns: Any) -> None: ...

    @abstractmethod
    def alter(self, columns: Any) -> None: ...

    @abstractmethod
    def definition(self, schema: pa.Schema, column: str) -> UdfDefinition: ...

    def define(self, columns: Mapping[tuple[str, ...], DefinedSpec]) -> tuple[list[str], list[str]]:
        """Add the columns that are missing, and alter those with another definition; return the names of both.

        Args:
            columns: by the names of the columns that one UDF fills.

        Raises:
            InvalidInput: see `Table.add_columns` and `Table.alter_columns`.
            CommitConflict: other writers committed first at every attempt.
        """
        added, altered = list[str](), list[str]()
        named = [name for names in columns for name in names]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise InvalidInput(f"Columns {twice} are named twice. Give each column one function.")
        for _ in commit_tries(f"table {self.table.name!r}", "define its columns"):
            schema = self.table.open().schema
            present = visible_columns(schema)
            lacking = {names: spec for names, spec in columns.items() if not set(names) & set(present)}
            there = {names: spec for names, spec in columns.items() if names not in lacking}
            for names in there:
                self._check_names(schema, names, [name for name in names if name not in present])
            differing = {
                names: spec for names, spec in there.items() if any(self._differs(schema, n, spec) for n in names)
            }
            try:
                if differing:
                    self.alter(differing)
                    altered += [name for names in differing for name in names]
                if lacking:
                    self.add({names if len(names) > 1 else names[0]: spec for names, spec in lacking.items()})
                    added += [name for names in lacking for name in names]
                break
            except (OSError, InvalidInput) as error:
                # Another writer committed meanwhile, or another run defined the same columns.
                now = present if isinstance(error, OSError) else visible_columns(self.table.open().schema)
                if now == present and not is_conflict(error):
                    raise
        return added, altered

    def _check_names(self, schema: pa.Schema, names: Sequence[str], missing: Sequence[str]) -> None:
        """Refuse names of columns that one function fills if some are missing, or were given in another order."""
        if missing:
            others = [name for name in names if name not in missing]
            raise InvalidInput(
                f"{self.table.name!r} has columns {others}, but not {list(missing)}, and one function fills them "
                "together. Name those that are there, or drop them and define all again."
            )

    def _differs(self, schema: pa.Schema, column: str, spec: DefinedSpec) -> bool:
        udf, inputs = spec if isinstance(spec, tuple) else (spec, None)
        stored, wanted = self.definition(schema, column), udf.definition(inputs)
        if wanted.input_columns is None:
            # A record-batch UDF gets the columns that existed when its column was defined.
            wanted = replace(wanted, input_columns=stored.input_columns)
        return wanted.to_json() != stored.to_json()


@dataclass(frozen=True)
class TableColumns(DefinedColumns):
    """The columns of a table."""

    table: TableLocation

    def add(self, columns: ColumnSpecs) -> None:
        """Define computed columns; see `Table.add_columns`."""
        dataset, checkpoints = self.table.open(), self.table.checkpoints
        fields, udfs = define_columns(self.table.name, dataset.schema, columns, dataset.data_storage_version)
        for name, udf in udfs.items():
            give_udf(udf, self.table.database_uri, self.described(name))
        dropped = {one for one in fields_with_state(checkpoints) if one > dataset.max_field_id and not is_group(one)}
        if base_folders(dataset):  # a clone's facts about a dropped column may lie beside the table of its files
            most = sum(1 for field in fields for _ in nested_types(field.type))
            dropped.update(range(dataset.max_field_id + 1, dataset.max_field_id + 1 + most))
        mark_defined(checkpoints, dropped, int(dataset.version))
        dataset.add_columns(fields)

    def alter(self, columns: ColumnSpecs) -> None:
        """Give columns another UDF; see `Table.alter_columns`."""
        dataset, name = self.table.open(), self.table.name
        changes: dict[str, dict[str, str | None]] = {}
        for key, spec in by_name(columns).items():
            for column, definition, udf in redefine(name, dataset.schema, key_names(key), spec):
                give_udf(udf, self.table.database_uri, self.described(column))
                changes[column] = {UDF_KEY: definition.to_json()}
        first = [field_ids(dataset, column)[0] for column in changes if is_plain(dataset.schema, column)]
        mark_defined(self.table.checkpoints, first, int(dataset.version))
        dataset.update_field_metadata(changes)

    def drop(self, columns: Sequence[str]) -> None:
        """Remove columns; see `Table.drop_columns`."""
        dataset, name = self.table.open(), self.table.name
        names = [columns] if isinstance(columns, str) else list(columns)
        check_columns(name, dataset.schema.names, names)
        check_droppable(name, dataset.schema, names)
        check_key_stays(name, dataset.schema, names)
        if names:
            dataset.drop_columns(list(dict.fromkeys(names)))

    def rename(self, column: str, to: str) -> None:
        """Rename a column; see `Table.rename_column`."""
        dataset, name = self.table.open(), self.table.name
        schema = dataset.schema
        check_columns(name, schema.names, [column])
        check_column_name(to)
        if to in schema.names:
            raise InvalidInput(
                f"Column {column!r} of table {name!r} cannot be renamed to {to!r}: there is such a column. Choose "
                f"another name, or drop that column first: table.drop_columns([{to!r}])."
            )
        # Metadata first: after a kill in between, to rename the column again completes both.
        if changes := renamed_metadata(schema, column, to):
            dataset.update_field_metadata(changes)
        escaped = column.replace("`", "``")
        self.table.open().alter_columns({"path": f"`{escaped}`", "name": to})  # type: ignore[dict-item]

    def set_key(self, key: str | Sequence[str] | None) -> None:
        """Choose the columns whose values name a row in errors; see `Table.set_key`."""
        dataset = self.table.open()
        columns = check_key(self.table.name, dataset.schema, key)
        if changes := key_metadata(dataset.schema, columns):
            dataset.update_field_metadata(changes)

    def definition(self, schema: pa.Schema, column: str) -> UdfDefinition:
        """Return the stored definition of a computed column; see `Table.definition`."""
        return read_definition(self.table.name, schema, column)

    def _check_names(self, schema: pa.Schema, names: Sequence[str], missing: Sequence[str]) -> None:
        super()._check_names(schema, names, missing)
        output = Output.in_schema(schema, names[0])
        field_of = dict(zip(output.columns, output.fields, strict=False))
        fields = [field_of.get(name, "") for name in names]
        if all(fields) and set(fields) != set(names) and fields != sorted(fields, key=output.fields.index):
            raise InvalidInput(
                f"Columns {list(names)} of table {self.table.name!r} are filled by the fields {fields} of a struct, in "
                f"the order in which they were named first. Name them in that order: {list(output.columns)}."
            )

    def _differs(self, schema: pa.Schema, column: str, spec: DefinedSpec) -> bool:
        udf = spec[0] if isinstance(spec, tuple) else spec
        fits = has_type(Output.in_schema(schema, column), schema, udf)
        return super()._differs(schema, column, spec) or not fits

    def described(self, column: str) -> str:
        """Name a column in messages, and as the owner of a UDF of this process."""
        return f"column {column!r} of {self.table.uri}"
