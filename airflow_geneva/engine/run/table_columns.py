"""Define, alter, drop and rename columns of a table; no values are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_geneva.engine.checkpoint.facts import fields_with_state, mark_defined
from airflow_geneva.engine.lance_io.arrays import nested_types
from airflow_geneva.engine.lance_io.fragments import field_ids
from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.lance_io.siblings import is_group
from airflow_geneva.engine.lance_io.table_key import check_key, check_key_stays, key_metadata
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import base_folders
from airflow_geneva.engine.udf.definition import (
    UDF_KEY,
    ColumnSpecs,
    by_name,
    check_column_name,
    check_droppable,
    define_columns,
    is_plain,
    key_names,
    redefine,
    renamed_metadata,
)
from airflow_geneva.engine.udf.of_process import give_udf
from airflow_geneva.errors import InvalidInput


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table, as its newest version has them."""

    table: TableLocation

    def add(self, columns: ColumnSpecs) -> None:
        """Define computed columns; see `Table.add_columns`."""
        dataset, checkpoints = self.table.open(), self.table.checkpoints
        fields, udfs = define_columns(self.table.name, dataset.schema, columns, dataset.data_storage_version)
        for name, udf in udfs.items():
            give_udf(udf, self.described(name))
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
                give_udf(udf, self.described(column))
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

    def described(self, column: str) -> str:
        """Name a column in messages, and as the owner of a UDF of this process."""
        return f"column {column!r} of {self.table.uri}"
