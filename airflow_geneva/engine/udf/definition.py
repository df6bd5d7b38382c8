"""Definition of a computed column: a UDF and its inputs, checked against the table."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import check_storable
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.siblings import SIBLINGS_KEY, Output, Sibling, match_fields, new_group
from airflow_geneva.engine.storage.documents import parse, well_typed
from airflow_geneva.engine.udf.annotations import check_input_fields
from airflow_geneva.engine.udf.decorator import UDF
from airflow_geneva.engine.udf.lancedb import lancedb_column, refuse_column
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.udf.shipping import load_udf
from airflow_geneva.errors import InvalidInput

UDF_KEY = "geneva::udf"
"""Key of the column's metadata under which its definition is stored."""

FORMER_NAMES_KEY = "geneva::former_names"
"""Key of the column's metadata that lists its former names, as JSON."""

PROMOTED_KEY = "geneva::promoted"
"""Key of the column's metadata that says which columns had its name before it was promoted; see `Promoted`."""

MIXED_VERSIONS_KEY = "geneva::udf_version"
"""Key of the column's metadata that lists the UDF versions that computed it, if there are several."""

ColumnSpec: TypeAlias = UDF | str | tuple[UDF | str, Sequence[str]]
"""A UDF or its import path, or one of them with its inputs."""

ColumnSpecs: TypeAlias = Mapping[Any, ColumnSpec]
"""UDFs by the name of their column, or by the names of the columns that one UDF fills."""

logger = logging.getLogger("airflow_geneva.udf")
_RESERVED = {"_distance", "_score"}


def define_column(table: str, schema: pa.Schema, column: str, spec: ColumnSpec) -> tuple[UdfDefinition, UDF]:
    """Return the definition of a column that a UDF computes, checked against the table, and the UDF."""
    fields = {field.name: field for field in schema}
    definition, udf = _define(table, fields, column, spec)
    _check_cycles(table, fields, {column: definition})
    return definition, udf


def redefine(
    table: str, schema: pa.Schema, columns: tuple[str, ...], spec: ColumnSpec
) -> Iterator[tuple[str, UdfDefinition, UDF]]:
    """Yield each column that gets a UDF, with its new definition: the given ones and their siblings.

    A single column may hold plain data; its values are of unknown origin then, and a plan asks about them.
    """
    if len(columns) == 1 and is_plain(schema, columns[0]):
        definition, udf = define_column(table, schema, columns[0], spec)
        check_type(table, Output(columns), schema, udf)
        if not schema.field(columns[0]).nullable:
            raise InvalidInput(
                f"Column {columns[0]!r} of table {table!r} is NOT NULL, so a function cannot compute it: a row that "
                "was just added, or that fails, has no value. Add a column of another name."
            )
        yield columns[0], definition, udf
        return
    for name in columns:
        read_definition(table, schema, name)
    output = Output.in_schema(schema, columns[0])
    if not set(columns) <= set(output.columns):
        raise InvalidInput(
            f"Columns {list(columns)} of table {table!r} are not filled by one function. Name each with its own."
        )
    definition, udf = define_column(table, schema, output.column, spec)
    check_type(table, output, schema, udf)
    for name in output.columns:
        yield name, definition, udf


def is_plain(schema: pa.Schema, column: str) -> bool:
    """Whether a schema has a column that no system computes."""
    if column not in schema.names:
        return False
    field = schema.field(column)
    return definition_in(field) is None and lancedb_column(field) is None


def check_droppable(table: str, schema: pa.Schema, columns: Sequence[str]) -> None:
    """Refuse to drop columns that others are computed from, and all columns of a table."""
    if readers := readers_of(schema, columns):
        listed = ", ".join(f"{name!r} (from {inputs})" for name, inputs in readers.items())
        raise InvalidInput(
            f"Columns {columns} of table {table!r} cannot be dropped: other columns are computed from them: "
            f"{listed}. Drop these too: table.drop_columns({[*columns, *readers]}), or give them other inputs with "
            "table.alter_columns(...)."
        )
    if not set(schema.names) - set(columns):
        raise InvalidInput(
            f"Columns {columns} are all that table {table!r} has, and a table needs one. Drop the table: "
            f"db.drop_table({table!r})."
        )


def _define(table: str, fields: Mapping[str, pa.Field], column: str, spec: ColumnSpec) -> tuple[UdfDefinition, UDF]:
    udf, *given = spec if isinstance(spec, tuple) else (spec,)
    inputs = given[0] if given else None
    inputs = [inputs] if isinstance(inputs, str) else inputs
    named = inputs is None or (isinstance(inputs, Sequence) and all(isinstance(name, str) for name in inputs))
    if not named or (isinstance(spec, tuple) and len(spec) != 2):
        raise InvalidInput(f'Column {column!r} got a tuple that is no UDF with its input columns, (my_udf, ["body"]).')
    udf = load_udf(udf) if isinstance(udf, str) else udf
    if not isinstance(udf, UDF):
        raise InvalidInput(
            f"Column {column!r} needs a UDF, got {type(udf).__name__}. Decorate the function with @udf(...), and give "
            "the function, not its result."
        )
    definition = udf.definition(inputs)
    if definition.input_columns is None:
        definition = replace(definition, input_columns=columns_to_take(fields.values(), column))
        left_out = [name for name in fields if name not in (column, *(definition.input_columns or ()))]
        logger.log(
            logging.WARNING if left_out else logging.INFO,
            "UDF %r of column %r of table %r gets the columns %s%s. Name others: (udf, [...]).",
            udf.name, column, table, list(definition.input_columns or ()),
            f", and not the computed {left_out}" if left_out else "",
        )  # fmt: skip
    check_input_fields(udf, fields, definition.input_columns, table)
    if quoted := [name for name in definition.input_columns or () if "`" in name]:
        renamed = quoted[0].replace("`", "_")
        raise InvalidInput(
            f"Column {column!r} of table {table!r} cannot be computed from {quoted}: Lance cannot select a column "
            f"with a backtick in its name. Rename it: table.rename_column({quoted[0]!r}, {renamed!r})."
        )
    return definition, udf


def columns_to_take(fields: Iterable[pa.Field], column: str) -> tuple[str, ...]:
    """Return the columns that a record-batch UDF gets if none are named: those that are not computed.

    A computed column that is filled later would make every row due again.
    """
    computed = (field.name for field in fields if definition_in(field) is not None or lancedb_column(field) is not None)
    given, left_out = [field.name for field in fields], {column, *computed}
    return tuple(name for name in given if name not in left_out)


def by_name(columns: ColumnSpecs) -> ColumnSpecs:
    """Return columns if they are a mapping, as add_columns and alter_columns expect; else raise InvalidInput."""
    if not isinstance(columns, Mapping):
        raise InvalidInput(f'Columns are given by name, such as {{"n": udf}}, not as a {type(columns).__name__}.')
    return columns


def key_names(key: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in a key of such a mapping: of one column, or of several that one function fills."""
    return key if isinstance(key, tuple) else (key,)


def split_key(text: str, present: Collection[str]) -> tuple[str, ...]:
    """Return the names in text: of one column, or of several that one function fills, separated by commas.

    Args:
        present: the columns that are there; the name of one may have a comma.
    """
    return (text,) if text in present else tuple(name.strip() for name in text.split(","))


def define_columns(
    table: str, schema: pa.Schema, columns: ColumnSpecs, storage_version: str
) -> tuple[pa.Schema, dict[str, UDF]]:
    """Return new computed columns as Arrow fields that hold their definitions, and their UDFs.

    A column may be an input of later ones.
    """
    named = [name for key in by_name(columns) for name in key_names(key)]
    for name in named:
        check_column_name(name)
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise InvalidInput(f"Columns {twice} are named twice. Give each column one function.")
    known = {field.name: field for field in schema}
    taken = [name for name in named if name in known]
    if taken:
        raise InvalidInput(
            f"Table {table!r} already has columns {taken}. Change the UDF of a computed column with "
            "table.alter_columns(...), or choose other names."
        )
    new, definitions, udfs = list[pa.Field](), dict[str, UdfDefinition](), dict[str, UDF]()
    required = [other.name for other in schema if not other.nullable]
    for key, spec in columns.items():
        definition, udf = _define(table, known, key_names(key)[0], spec)
        for field in _fields(key, definition, udf):
            name = field.name
            if is_blob(field) and required:
                raise InvalidInput(
                    f"Column {name!r} of table {table!r} cannot be a blob: Lance cannot write blobs into a table with "
                    f"NOT NULL columns, and {required} are. Use pa.large_binary() without blob storage, or make these "
                    "nullable."
                )
            new.append(field)
            definitions[name], udfs[name], known[name] = definition, udf, field
    _check_cycles(table, known, definitions)
    check_storable(new, storage_version, f"table {table!r}")
    return pa.schema(new), udfs


def _fields(key: str | tuple[str, ...], definition: UdfDefinition, udf: UDF) -> list[pa.Field]:
    """Return the new columns of a UDF: one, or a sibling for each field of the struct that it returns."""
    metadata = {UDF_KEY: definition.to_json()}
    if not isinstance(key, tuple):
        return [pa.field(key, udf.data_type, metadata=metadata)]
    fields, group = match_fields(key, udf.data_type, udf.name), new_group()
    made = [
        pa.field(name, udf.data_type.field(of).type, metadata=metadata | {SIBLINGS_KEY: Sibling(group, of).to_json()})
        for name, of in zip(key, fields, strict=True)
    ]
    if blobs := [field.name for field in made if is_blob(field)]:
        raise InvalidInput(f"Columns {blobs} cannot be blobs beside other columns of one function. Compute them apart.")
    return made


def stored_definition(schema: pa.Schema, column: str) -> UdfDefinition | None:
    """Return the stored definition of a column; None if no UDF computes it."""
    return definition_in(schema.field(column))


def definition_in(field: pa.Field) -> UdfDefinition | None:
    """Return the definition that a column's field holds; None if no UDF computes it."""
    stored = (field.metadata or {}).get(UDF_KEY.encode())
    return None if stored is None else UdfDefinition.from_json(stored)


def origin_of(field: pa.Field) -> str:
    """Describe what computes a column; an empty text for other columns."""
    if (definition := definition_in(field)) is not None:
        return f"computed by {definition.call}"
    how = lancedb_column(field)
    return "" if how is None else f"computed by LanceDB: {how}"


def readers_of(schema: pa.Schema, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the other columns that are computed from the given ones, each with its inputs among these."""
    found: dict[str, list[str]] = {}
    for name in schema.names:
        definition = stored_definition(schema, name)
        if name not in columns and definition is not None:
            inputs = [one for one in definition.columns if one in columns]
            found |= {name: inputs} if inputs else {}
    return found


def renamed_metadata(schema: pa.Schema, column: str, renamed: str) -> dict[str, dict[str, str | None]]:
    """Return the metadata that renaming a column changes: the inputs of its readers, and its former names."""
    changed: dict[str, dict[str, str | None]] = {}
    if stored_definition(schema, column) is not None:
        changed[column] = {FORMER_NAMES_KEY: names_before(schema, column, renamed)}
    for name in readers_of(schema, [column]):
        definition = read_definition("", schema, name)
        inputs = renamed_inputs(definition.input_columns or (), {column: renamed})
        changed[name] = {UDF_KEY: replace(definition, input_columns=inputs).to_json()}
    return changed


def renamed_inputs(inputs: Iterable[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """Return inputs, which may be fields of structs, with other names of their columns."""
    paths = (one.split(".") for one in inputs)
    return tuple(".".join([names.get(root, root), *rest]) for root, *rest in paths)


@dataclass(frozen=True)
class Promoted:
    """The promotion of a column to its name, from its metadata.

    Args:
        column: its former name.
        kept_as: the new name of the column that it replaced.
        before: field ids of all columns that had the name before, so that readers of the name can continue.
    """

    column: str
    kept_as: str
    before: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(field: pa.Field) -> Promoted | None:
        """Read the promotion of a column's field; None if it was not promoted, or the metadata is damaged."""
        stored = (field.metadata or {}).get(PROMOTED_KEY.encode())
        try:
            return None if stored is None else well_typed(_promoted(parse(stored)))
        except (AttributeError, LookupError, TypeError, ValueError):
            return None


def _promoted(document: Mapping[str, Any]) -> Promoted:
    return Promoted(document["column"], document["kept_as"], tuple(document["before"]))


def columns_before(field: pa.Field) -> tuple[int, ...]:
    """Return the field ids of the columns that a promoted column has replaced."""
    promoted = Promoted.of(field)
    return () if promoted is None else promoted.before


def promoted_metadata(
    schema: pa.Schema, ids: Mapping[str, int], column: str, to: str, keep_as: str
) -> dict[int, dict[str, str | None]]:
    """Return the metadata that a promotion changes, by field id.

    Columns that are computed from `to` still read that name. Columns that are computed from the promoted column read
    it by its new name. If the promoted column reads the column that it replaces, it reads that by its new name.
    """
    before = {ids[to], *columns_before(schema.field(to))} - {ids[column]}
    changed: dict[int, dict[str, str | None]] = {
        ids[column]: {PROMOTED_KEY: Promoted(column, keep_as, tuple(sorted(before))).to_json()},
        ids[to]: {},
    }
    for name, renamed in ((column, to), (to, keep_as)):
        if stored_definition(schema, name) is not None:
            changed[ids[name]][FORMER_NAMES_KEY] = names_before(schema, name, renamed)
    for name in schema.names:
        definition = stored_definition(schema, name)
        new = {to: keep_as} if name == column else {column: to}
        if definition is not None and not new.keys().isdisjoint(definition.columns):
            inputs = renamed_inputs(definition.input_columns or (), new)
            changed.setdefault(ids[name], {})[UDF_KEY] = replace(definition, input_columns=inputs).to_json()
    return changed


def names_before(schema: pa.Schema, column: str, renamed: str) -> str:
    """Return the names that a column had before it was renamed, as its metadata stores them."""
    names = [name for name in (*former_names(schema, column), column) if name != renamed]
    return json.dumps(list(dict.fromkeys(names)))


def read_definition(table: str, schema: pa.Schema, column: str) -> UdfDefinition:
    if column not in schema.names:
        raise InvalidInput(
            f"Column {column!r} is not defined in table {table!r}, which has: {', '.join(schema.names)}. "
            f'Define it first: table.add_columns({{"{column}": udf}}).'
        )
    definition = stored_definition(schema, column)
    if definition is None:
        refuse_column(table, schema.field(column))
        raise InvalidInput(
            f"Column {column!r} of table {table!r} has no UDF: it was not defined by table.add_columns(). "
            "Name a computed column, or add one."
        )
    return definition


def _check_cycles(table: str, fields: Mapping[str, pa.Field], changed: Mapping[str, UdfDefinition]) -> None:
    """Reject a column that is computed from itself: every backfill would make all of its rows due again."""

    def inputs_of(name: str) -> Iterator[str]:
        definition = changed.get(name) or (definition_in(fields[name]) if name in fields else None)
        return iter(definition.columns if definition else ())

    done = set[str]()
    for first in changed:
        # Depth first, along a path of columns with their inputs; columns in `done` lead to no cycle.
        path = {} if first in done else {first: inputs_of(first)}
        while path:
            name = next(reversed(path))
            for given in path[name]:
                if given in path:
                    if cycle := set(list(path)[list(path).index(given) :]) & changed.keys():
                        column = next(one for one in changed if one in cycle)
                        inputs = list(changed[column].input_columns or ())
                        raise InvalidInput(
                            f"Column {column!r} of table {table!r} would be computed from itself, by way of {inputs}. "
                            "Compute it from other columns, or add another column for the result."
                        )
                elif given not in done:
                    path[given] = inputs_of(given)
                    break
            else:
                done.add(name)
                del path[name]


def has_type(output: Output, schema: pa.Schema, udf: UDF) -> bool:
    """Whether a UDF gives what its columns hold; of siblings, each field whose column still exists."""
    given = udf.data_type
    if output.fields and pt.is_struct(given):
        there = {field.name: field.type for field in given}
        given = pa.struct([pa.field(name, there[name]) for name in output.fields if name in there])
    return bool(output.type(schema) == given)


def check_type(table: str, output: Output, schema: pa.Schema, udf: UDF) -> None:
    """Reject a UDF that does not give what its columns hold."""
    column = output.column
    if not has_type(output, schema, udf):
        raise InvalidInput(
            f"Type mismatch for column {column!r} of table {table!r}: it is {output.type(schema)}, and UDF "
            f"{udf.name!r} gives {udf.data_type}. Use a UDF of that type. Or have both side by side, until readers "
            f"take the other: table.add_columns({{'{column}_2': udf}}), then table.backfill('{column}_2')."
        )


def check_view_type(view: str, column: str, found: str, udf: UdfDefinition, before: UdfDefinition | None) -> None:
    """Reject a UDF with another type than its column of a view, because no refresh changes the type.

    Args:
        before: the column's definition in the view, if the column is one field of what the UDF gives.
    """
    if before is not None and udf.data_type == found != before.data_type:
        raise InvalidInput(
            f"Type mismatch for column {column!r} of view {view!r}: it is a field of the {before.data_type} that UDF "
            f"{before.name!r} gives, and UDF {udf.name!r} gives {udf.data_type} alone, so no row can be computed "
            f"again. Drop the column and add it again: view.drop_columns([{column!r}]), then "
            f"view.add_columns({{{column!r}: ...}})."
        )
    if udf.data_type != (found if before is None else before.data_type):
        raise InvalidInput(
            f"Type mismatch for column {column!r} of view {view!r}: it is {found}, and UDF {udf.name!r} gives "
            f"{udf.data_type} now, so no row can be computed again. Have both side by side, until readers take the "
            f"other: leave {udf.name!r} as it was, make the new function under another name, and create a view with it "
            f"by the same query, such as {view + '_2'!r}."
        )


def former_names(schema: pa.Schema, column: str) -> list[str]:
    """Return the former names of a computed column, under which jobs recorded it; other columns may have them now."""
    stored = (schema.field(column).metadata or {}).get(FORMER_NAMES_KEY.encode(), b"[]")
    try:
        names = parse(stored)
    except (ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def check_column_name(name: object) -> None:
    """Reject names that Lance uses for its own columns, or reads as paths into structs."""
    if (
        not isinstance(name, str)
        or not name.strip()
        or name.startswith("_row")
        or name in _RESERVED
        or set(name) & set(".`")
    ):
        raise InvalidInput(
            f"{name!r} cannot be the name of a column: it is empty, one of Lance's own (_row..., _distance, "
            "_score), or has a dot in it, which Lance reads as a path into a struct, or a backtick. Choose another."
        )
