"""Resolve the columns of a query against its source: check them and find their types."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from airflow_geneva.engine.lance_io.arrays import find_field
from airflow_geneva.engine.lance_io.blobs import blob_field, is_blob
from airflow_geneva.engine.lance_io.filters import volatile_functions, where_columns
from airflow_geneva.engine.lance_io.siblings import match_fields
from airflow_geneva.engine.lance_io.sql_errors import explain_sql_error
from airflow_geneva.engine.lance_io.sql_text import names_in, read_sql
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.udf import UDF, load_udf
from airflow_geneva.engine.udf.annotations import check_input_fields
from airflow_geneva.engine.udf.definition import check_column_name, key_names
from airflow_geneva.engine.udf.fold import STATE, VALUE
from airflow_geneva.engine.views.aggregates import parse_aggregate, result_type
from airflow_geneva.engine.views.definition import STATE_OF, SYSTEM_COLUMNS, OutputColumn, visible_columns
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

QuerySpec: TypeAlias = str | UDF | tuple[UDF | str, Sequence[str]]
"""A column of a query: a source column's name, an SQL expression, a UDF, or a UDF (or its import path) with inputs."""

# Metadata of a source column that its view must not inherit: the UDF that computes it, and its primary key.
_NOT_INHERITED = (b"geneva::", b"lance-schema:")
_INTERNAL = {"_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version"}


@dataclass(frozen=True)
class ResolvedColumns:
    """The columns of a query on one version of its source: their nullable fields, and the UDFs by column.

    `reads` are the source columns that they read.
    """

    columns: tuple[OutputColumn, ...]
    schema: pa.Schema
    udfs: Mapping[str, UDF] = field(repr=False)
    reads: frozenset[str]


def resolve_columns(
    dataset: lance.LanceDataset,
    table: str,
    specs: Sequence[tuple[Any, Any]],
    earlier: Mapping[str, pa.Field] | None = None,
    computed: Collection[str] = (),
    groups: bool = False,
) -> ResolvedColumns:
    """Check a query's columns, given by name and `QuerySpec`, and find their types.

    An input of a UDF is an earlier column of the query with that name, else the source's column. SQL expressions read
    the source's columns only.

    Args:
        earlier: the columns that the query has before these.
        computed: those of them that UDFs compute.
        groups: whether these are columns of groups: a text is an SQL aggregate, and a UDF is called once per group, on
            columns of the source.
    """
    visible = visible_columns(dataset.schema)
    names = [name for key, _ in specs for name in key_names(key)]
    for name in names:
        check_output_name(name)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise InvalidInput(f"The query of table {table!r} has columns {twice} twice. Give each column one name.")
    if not names:
        raise InvalidInput(f"The query of table {table!r} has no columns. Select some: {', '.join(visible)}.")
    source = _Source(dataset, table, visible)
    columns: list[OutputColumn] = []
    before = dict(earlier or {})
    fields = dict(before)
    udfs: dict[str, UDF] = {}
    reads: set[str] = set()
    for key, spec in specs:
        name = key_names(key)[0]
        if isinstance(spec, str) and isinstance(key, tuple):
            raise InvalidInput(f"Columns {list(key)} need a UDF that returns a struct, not {spec!r:.200}.")
        if isinstance(spec, str):
            column, made, read = source.resolve_aggregate(name, spec) if groups else source.resolve_text(name, spec)
        else:
            udf, inputs = _split(name, spec, "an SQL aggregate" if groups else "a column's name or an SQL expression")
            if groups:
                udf = udf.of_groups
            usable = {} if groups else fields
            column = source.resolve_udf(name, udf, inputs, usable, () if groups else names[len(fields) - len(before) :])
            if udf.is_batch_api and (fed := sorted({*udfs, *computed} & set(column.columns))):
                raise InvalidInput(
                    f"Column {name!r}: UDF {udf.name!r} is a batch API, and takes {fed}, which other UDFs compute; "
                    "these would compute it again while the service works. Make a view with these, and a view of it "
                    "with the batch API, or a computed column."
                )
            made = pa.field(name, udf.data_type)
            read = {given for given in column.columns if given not in usable}
            udfs[name] = udf
            if udf.fold is not None:
                key = _with_state(key, udf)
        for one, its in _filled(key, column, made):
            columns.append(one)
            fields[one.name] = its
        reads |= read
    schema = pa.schema([field for name, field in fields.items() if name not in before])
    return ResolvedColumns(tuple(columns), schema, udfs, frozenset(reads))


def _filled(
    key: str | tuple[str, ...], column: OutputColumn, made: pa.Field
) -> Iterator[tuple[OutputColumn, pa.Field]]:
    """Yield a column, or the columns that its UDF fills, with their fields."""
    if not isinstance(key, tuple):
        yield column, made
        return
    assert column.udf is not None
    folded = column.udf.removes is not None
    fields = (VALUE, STATE) if folded else match_fields(key, made.type, column.udf.name)
    for name, of in zip(key, fields, strict=True):
        kind = made.type.field(of).type
        found = OutputColumn(name, "sibling", str(kind), field=of, of=column.name)
        if name == column.name:
            found = replace(column, type=str(kind), field=of)
        yield found, pa.field(name, kind)


def _with_state(key: str | tuple[str, ...], udf: UDF) -> tuple[str, ...]:
    """Return the names of the columns of a function that can be folded: its value, and the hidden state."""
    if isinstance(key, tuple):
        raise InvalidInput(
            f"Columns {list(key)} are given UDF {udf.name!r}, which can be folded and fills one column. Give it a "
            "struct as its data_type, and read its fields in a view of this view."
        )
    return key, STATE_OF + key


def check_output_name(name: str) -> None:
    """Raise InvalidInput for a name that no column of a query can have."""
    check_column_name(name)
    if name.lower() in SYSTEM_COLUMNS or name.startswith(STATE_OF):
        raise InvalidInput(f"{name!r} cannot be the name of a column: views have columns of that name. Choose another.")


def check_expression(sql: object, what: str) -> str:
    """Return an expression unchanged; reject it if it is not text, is empty, or reads system columns."""
    if not isinstance(sql, str) or not sql.strip():
        raise InvalidInput(f"{what} is {sql!r:.200}. Give it as a text that is not empty.")
    internal = names_in(sql) & {*_INTERNAL, *SYSTEM_COLUMNS}
    if internal:
        raise InvalidInput(
            f"{what}, {sql!r}, reads {sorted(internal)}, which are Lance's and the views' own and change without the "
            "rows changing. Use the table's columns."
        )
    depth = 0
    for token in read_sql(sql):
        depth += (token.text == "(") - (token.text == ")")
        if depth < 0:
            # Lance would parse only the part before this bracket; in added brackets, the text has another meaning.
            raise InvalidInput(f"{what}, {sql!r}, closes a bracket that it did not open. Write one condition or value.")
    return sql.strip()


def check_repeatable(sql: str) -> None:
    """Refuse an expression that returns another value at every call."""
    if found := volatile_functions(sql):
        raise InvalidInput(
            f"{sql!r} calls {', '.join(found)}, which returns another value at every call, and a view must have one "
            "result, whenever it is computed. Write a fixed value, filter on a stored column, or store the value in "
            "the table first."
        )


@dataclass(frozen=True)
class _Source:
    """The table of a query, and the names of the columns that the query may use."""

    dataset: lance.LanceDataset
    table: str
    visible: list[str]

    @cached_property
    def fields(self) -> dict[str, pa.Field]:
        visible = set(self.visible)
        return {field.name: field for field in self.dataset.schema if field.name in visible}

    def resolve_text(self, name: str, text: str) -> tuple[OutputColumn, pa.Field, set[str]]:
        """Resolve a column's name or an SQL expression; return also the source columns that it reads."""
        source = text.strip()
        if source.startswith("`") and source.endswith("`"):
            source = source[1:-1]
        if source in self.fields:
            found = self.fields[source]
            kept = {k: v for k, v in (found.metadata or {}).items() if not k.startswith(_NOT_INHERITED)}
            made = found.with_name(name).with_nullable(True).with_metadata(kept or None)
            if is_blob(found):
                # Convert the older blob type too: views use the newest storage format, which has one blob type only.
                made = blob_field(name)
            return OutputColumn(name, "column", str(made.type), expression=source), made, {source}
        sql = check_expression(text, f"The expression of column {name!r}")
        made = pa.field(name, self._sql_type(name, sql))
        return OutputColumn(name, "sql", str(made.type), expression=sql), made, set(where_columns(sql, self.visible))

    def resolve_aggregate(self, name: str, text: str) -> tuple[OutputColumn, pa.Field, set[str]]:
        """Resolve an SQL aggregate of the rows of a group; return also the source columns that it reads."""
        found = parse_aggregate(text, name)
        argument, read = None, set[str]()
        if found.argument is not None:
            sql = check_expression(found.argument, f"The argument of {found.function} of column {name!r}")
            check_repeatable(sql)
            argument, read = self._sql_type(name, sql, of_group=True), set(where_columns(sql, self.visible))
        made = pa.field(name, result_type(found, argument, name))
        return OutputColumn(name, "aggregate", str(made.type), expression=text.strip()), made, read

    def _sql_type(self, name: str, sql: str, of_group: bool = False) -> pa.DataType:
        try:
            # Lance cannot scan an expression alone, so add row ids: a column's name might contain a backtick. An empty
            # scan also finds errors in the execution plan.
            with engine_errors():
                scanner = self.dataset.scanner(columns={"value": f"({sql})"}, with_row_id=True, limit=0)
                found = scanner.to_table().schema.field("value")
        except EngineError as error:
            listed = ", ".join(self.visible)
            if sql.strip("`") == name and not of_group:
                raise InvalidInput(
                    f"Column {name!r} is not in table {self.table!r}, which has: {listed}. Select one of these, or "
                    f'give an expression: select({{"{name}": "..."}}).'
                ) from None
            raise InvalidInput(
                f"The expression {sql!r} of column {name!r} is not valid for table {self.table!r} with the columns "
                f"{listed}: {explain_sql_error(self.dataset, sql, error)} Write it as after SELECT in SQL, over "
                "columns of the table, without aggregates."
            ) from None
        if is_blob(found):
            remedy = "Give the column to a function" if of_group else "Select the blob column by its name alone"
            raise InvalidInput(f"Column {name!r} is a blob made by {sql!r}. {remedy}.")
        if pa.types.is_null(found.type):
            raise InvalidInput(f"Column {name!r} has no type: {sql!r} is NULL. Give one, as in CAST(NULL AS BIGINT).")
        return found.type

    def resolve_udf(
        self, name: str, udf: UDF, inputs: Sequence[str] | None, earlier: dict[str, pa.Field], later: Sequence[str]
    ) -> OutputColumn:
        definition = udf.definition(inputs)
        if definition.input_columns is None:
            definition = replace(definition, input_columns=tuple(self.visible))
        given = definition.input_columns or ()
        columns = ChainMap(earlier, self.fields)
        missing = [column for column in given if find_field(columns, column) is None]
        if missing:
            advice = f"Map its inputs: ({udf.name}, [...])."
            if early := [column for column in missing if column in later]:
                advice = (
                    f"A UDF can take columns that come before it: put {early} before {name!r}, and no column feeds "
                    "itself."
                )
            raise InvalidInput(
                f"Column {name!r}: UDF {udf.name!r} takes {list(given)}, and there is no column {missing} in table "
                f"{self.table!r} or before it in the query, only {', '.join(columns)}. {advice}"
            )
        check_input_fields(udf, columns, given, self.table)
        return OutputColumn(name, "udf", str(udf.data_type), udf=definition)


def _split(name: str, spec: Any, text: str) -> tuple[UDF, Sequence[str] | None]:
    pair = isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) == 2
    udf, inputs = spec if pair else (spec, None)
    inputs = [inputs] if isinstance(inputs, str) else inputs
    udf = load_udf(udf) if pair and isinstance(udf, str) else udf
    if not isinstance(udf, UDF):
        raise InvalidInput(
            f'Column {name!r} is given {spec!r:.200}. Give {text} as text, a UDF, or (udf, ["input", ...]).'
        )
    return udf, inputs
