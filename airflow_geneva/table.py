"""A table with computed columns, as its user holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_geneva.annotations import check_inputs
from airflow_geneva.errors import InvalidInput
from airflow_geneva.location import TableLocation
from airflow_geneva.udf import UDF, UdfDefinition, load_udf

if TYPE_CHECKING:
    import pyarrow as pa
    from lance import LanceDataset

    from airflow_geneva.job.result import BackfillResult
    from airflow_geneva.plan.values import Plan

UDF_KEY = "geneva::udf"

ColumnSpec: TypeAlias = UDF | tuple[UDF, Sequence[str]]


@dataclass(frozen=True)
class Table:
    """A Lance table and what is computed in it; made by :class:`airflow_geneva.Database`.

    Args:
        location: where it is.
    """

    location: TableLocation

    @property
    def name(self) -> str:
        return self.location.name

    @property
    def uri(self) -> str:
        return self.location.uri

    @property
    def lance(self) -> LanceDataset:
        """The plain pylance dataset at its newest version."""
        return self.location.open()

    @property
    def schema(self) -> pa.Schema:
        return self.lance.schema

    @property
    def version(self) -> int:
        return int(self.lance.version)

    def count_rows(self, where: str | None = None) -> int:
        return int(self.lance.count_rows(where))

    def to_arrow(self) -> pa.Table:
        return self.lance.to_table()

    def add(self, data: pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]) -> None:
        """Append rows; computed columns may be left out and are NULL until the next backfill.

        Args:
            data: an Arrow table or batch, or a list of dicts, with any of the table's columns.
        """
        import lance
        import pyarrow as pa

        schema = self.schema
        if isinstance(data, (pa.Table, pa.RecordBatch)):
            rows = pa.table(data) if isinstance(data, pa.RecordBatch) else data
        else:
            rows = pa.Table.from_pylist(list(data), schema=schema)
        unknown = [name for name in rows.schema.names if name not in schema.names]
        if unknown:
            raise InvalidInput(f"Table {self.name!r} has no columns {unknown}. It has: {', '.join(schema.names)}.")
        lance.write_dataset(rows, self.uri, mode="append", storage_options=self.location.storage_options)

    def add_columns(self, columns: Mapping[str, ColumnSpec]) -> None:
        """Define computed columns; no data is written, their values are NULL until a backfill.

        Args:
            columns: by name, a UDF, or a UDF with the columns to feed its parameters, in their order.

        Raises:
            InvalidInput: a column exists, an input is missing or of the wrong type, or the output cannot be stored.

        Example:
            ```python
            table.add_columns({"n": length, "m": (length, ["body"])})
            ```
        """
        import pyarrow as pa

        dataset = self.lance
        if not isinstance(columns, Mapping):
            raise InvalidInput(
                f'add_columns takes columns by name, such as {{"n": udf}}, not a {type(columns).__name__}.'
            )
        for name in columns:
            _check_column_name(name)
        taken = [name for name in columns if name in dataset.schema.names]
        if taken:
            raise InvalidInput(
                f"Table {self.name!r} already has columns {taken}. Change the UDF of a computed column with "
                "table.alter_columns(...), or choose other names."
            )
        fields = []
        for name, spec in columns.items():
            definition, udf = self._define(dataset, name, spec)
            field = pa.field(name, udf.data_type, metadata={UDF_KEY: definition.to_json()})
            _check_blob(self.name, dataset.schema, field)
            fields.append(field)
        dataset.add_columns(pa.schema(fields))

    def alter_columns(self, columns: Mapping[str, ColumnSpec]) -> None:
        """Give computed columns another UDF; values stay until a backfill.

        Raises:
            InvalidInput: the column does not exist, or the UDF's output type is not the column's.
        """
        dataset = self.lance
        changes: dict[str, dict[str, str | None]] = {}
        for name, spec in columns.items():
            self.definition(name, dataset)
            definition, udf = self._define(dataset, name, spec)
            self._check_type(dataset, name, udf)
            changes[name] = {UDF_KEY: definition.to_json()}
        dataset.update_field_metadata(changes)

    def definition(self, column: str, dataset: LanceDataset | None = None) -> UdfDefinition:
        """What is stored about a computed column.

        Raises:
            InvalidInput: the column does not exist, or has no UDF.
        """
        schema = (dataset or self.lance).schema
        if column not in schema.names:
            raise InvalidInput(
                f"Column {column!r} is not defined in table {self.name!r}, which has: {', '.join(schema.names)}. "
                f'Define it first: table.add_columns({{"{column}": udf}}).'
            )
        stored = (schema.field(column).metadata or {}).get(UDF_KEY.encode())
        if stored is None:
            raise InvalidInput(
                f"Column {column!r} of table {self.name!r} has no UDF: it was not made by table.add_columns(). "
                "Name a computed column, or add one."
            )
        return UdfDefinition.from_json(stored.decode())

    def plan_backfill(
        self,
        column: str,
        udf: UDF | None = None,
        where: str | None = None,
        read_version: int | None = None,
        on_code_change: str = "error",
        ignore_checkpoints: bool = False,
        run_after: datetime | None = None,
        **sizing: Any,
    ) -> Plan:
        """Say what a backfill would run, and why; writes nothing.

        Args:
            column: the computed column.
            udf: the UDF to use; by default the column's own, found by its import path. One of the same name takes the
                column's input columns, another brings its own.
            where: SQL filter on the rows to compute; ``now()`` and its like are frozen at ``run_after``.
            read_version: compute only rows that existed at this version.
            on_code_change: ``error``, ``recompute`` or ``new_rows`` when rows hold another UDF version's value.
            ignore_checkpoints: do not use what earlier jobs computed and did not commit.
            run_after: moment that ``now()`` stands for; by default now.
            sizing: see :class:`airflow_geneva.plan.values.Sizing`.

        Raises:
            InvalidInput: something asked for does not exist or makes no sense.
            CodeChanged: rows hold another version's value, and ``on_code_change`` is ``error``.
        """
        return self._plan(
            column, udf, where, read_version, on_code_change, ignore_checkpoints, run_after, sizing
        )[0]  # fmt: skip

    def backfill(
        self,
        column: str,
        udf: UDF | None = None,
        where: str | None = None,
        read_version: int | None = None,
        on_code_change: str = "error",
        ignore_checkpoints: bool = False,
        runner: str = "spark",
        run_after: datetime | None = None,
        **sizing: Any,
    ) -> BackfillResult:
        """Compute what is missing in a column, and make it visible.

        Args:
            runner: ``spark`` uses the active SparkSession or makes a local one; ``inline`` stays in this process.

        The others are those of :meth:`plan_backfill`.

        Raises:
            InvalidInput, CodeChanged: see :meth:`plan_backfill`; nothing was started.
            JobFailed: the job failed half-way; ``.result`` says what was done.
        """
        from airflow_geneva.run.backfill import check_runner, run_backfill
        from airflow_geneva.run.job import Stopwatch

        check_runner(runner)
        watch = Stopwatch()
        plan, function = self._plan(
            column, udf, where, read_version, on_code_change, ignore_checkpoints, run_after, sizing
        )  # fmt: skip
        return run_backfill(plan, self.location, function, runner, watch)

    def _plan(
        self,
        column: str,
        udf: UDF | None,
        where: str | None,
        read_version: int | None,
        on_code_change: str,
        ignore_checkpoints: bool,
        run_after: datetime | None,
        sizing: Mapping[str, Any],
    ) -> tuple[Plan, UDF]:
        from airflow_geneva.plan.request import BackfillRequest, plan_request

        dataset = self.lance
        definition = self.definition(column, dataset)
        if udf is not None and not isinstance(udf, UDF):
            raise InvalidInput(f"udf={udf!r} is not a UDF. Give a function that is decorated with @udf(...).")
        function = udf or self.column_udf(column, definition)
        request = BackfillRequest(
            column=column,
            where=where,
            read_version=read_version,
            on_code_change=on_code_change,
            ignore_checkpoints=ignore_checkpoints,
            run_after=run_after,
            sizing=dict(sizing),
        )
        own_inputs = definition.input_columns if udf is None or udf.name == definition.name else None
        return plan_request(self.location, request, function, own_inputs, dataset), function

    def column_udf(self, column: str, definition: UdfDefinition | None = None) -> UDF:
        """The column's own UDF, imported.

        Raises:
            InvalidInput: it has no import path, or cannot be imported here.
        """
        definition = definition or self.definition(column)
        if definition.import_path is None:
            raise InvalidInput(
                f"The UDF {definition.name!r} of column {column!r} was made in a notebook or script, so it cannot be "
                f"found by name. Hand it over: table.backfill({column!r}, udf=...), or move it to a module."
            )
        return load_udf(definition.import_path)

    def _define(self, dataset: LanceDataset, column: str, spec: ColumnSpec) -> tuple[UdfDefinition, UDF]:
        udf, inputs = spec if isinstance(spec, tuple) else (spec, None)
        if isinstance(inputs, str):
            inputs = [inputs]
        if not isinstance(udf, UDF):
            raise InvalidInput(f"Column {column!r} needs a UDF, got {type(udf).__name__}. Decorate it with @udf(...).")
        definition = udf.definition(inputs)
        if definition.input_columns is None:
            others = tuple(name for name in dataset.schema.names if name != column)
            definition = replace(definition, input_columns=others)
        check_inputs(udf, dataset.schema, definition.input_columns, self.name)
        self._check_cycle(dataset, column, definition.input_columns or ())
        return definition, udf

    def _check_cycle(self, dataset: LanceDataset, column: str, inputs: Sequence[str]) -> None:
        """Refuse a column that would be computed from itself: every backfill would make all of it due again."""
        queue, seen = list(inputs), set[str]()
        while queue:
            name = queue.pop()
            if name == column:
                raise InvalidInput(
                    f"Column {column!r} of table {self.name!r} would be computed from itself, by way of "
                    f"{list(inputs)}. Compute it from other columns, or add another column for the result."
                )
            stored = (dataset.schema.field(name).metadata or {}).get(UDF_KEY.encode())
            if stored is not None and name not in seen:
                seen.add(name)
                queue.extend(UdfDefinition.from_json(stored.decode()).input_columns or ())

    def _check_type(self, dataset: LanceDataset, column: str, udf: UDF) -> None:
        found = dataset.schema.field(column).type
        if found != udf.data_type:
            raise InvalidInput(
                f"Type mismatch for column {column!r} of table {self.name!r}: it is {found}, and UDF "
                f"{udf.name!r} gives {udf.data_type}. Use a UDF of that type, or add another column."
            )


_RESERVED = {"_distance", "_score"}


def _check_column_name(name: object) -> None:
    """Refuse names that Lance gives to columns of its own, or reads as paths into structs."""
    if not isinstance(name, str) or not name.strip() or name.startswith("_row") or name in _RESERVED or "." in name:
        raise InvalidInput(
            f"{name!r} cannot be the name of a computed column: it is empty, one of Lance's own (_row..., _distance, "
            "_score), or has a dot in it, which Lance reads as a path into a struct. Choose another."
        )


def _check_blob(table: str, schema: pa.Schema, field: pa.Field) -> None:
    from airflow_geneva.blobs import is_blob

    if not is_blob(field):
        return
    required = [other.name for other in schema if not other.nullable]
    if required:
        raise InvalidInput(
            f"Column {field.name!r} of table {table!r} cannot be a blob: Lance cannot write blobs into a table with "
            f"NOT NULL columns, and {required} are. Use pa.large_binary() without blob storage, or make these nullable."
        )
