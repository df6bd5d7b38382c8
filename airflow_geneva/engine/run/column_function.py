"""Find the function that computed a column, to call it on other values, such as the text of a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.checkpoint.provenance import version_label
from airflow_geneva.engine.display import Described, counted
from airflow_geneva.engine.lance_io.arrays import find_field
from airflow_geneva.engine.lance_io.siblings import sibling_in
from airflow_geneva.engine.lance_io.to_python import python_value
from airflow_geneva.engine.limits.calls import calling
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.plan.freshness import column_freshness
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.definition import read_definition
from airflow_geneva.engine.udf.of_process import find_udf
from airflow_geneva.engine.views.definition import IS_SET, ViewDefinition, is_view
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.errors import CodeChanged, InvalidInput

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.udf.settings import UdfDefinition


@dataclass(frozen=True, repr=False)
class ColumnFunction(Described):
    """The function of a column at a version of its table; call it with one value for each input.

    Args:
        udf: the UDF.
        column: the column's name at that version.
        table_version: the version.
        inputs: its inputs with their types: columns, or fields of structs such as `chunk.text`.
        columns: the columns that contain the inputs.
        versions: number of rows with a value in that version, by the UDF version that computed it.
        rows_left: number of rows without a value of their current inputs in that version.
        of: the field of the UDF's struct that fills the column, if it fills several columns; else "".
        older: of a view, earlier UDF versions whose values some of these rows may still have; a view does not store
            which rows, and `versions` counts all of them for the newest version.
    """

    udf: UDF
    column: str
    table_version: int
    inputs: pa.Schema
    columns: pa.Schema
    versions: Mapping[str, int]
    rows_left: int
    location: TableLocation = field(compare=False)
    of: str = ""
    older: tuple[str, ...] = ()

    @staticmethod
    def find(
        location: TableLocation, column: str, dataset: lance.LanceDataset, source: lance.LanceDataset | None = None
    ) -> ColumnFunction:
        """Find the function that computed the values of a version of a table or view.

        Args:
            source: a view's source, whose columns are inputs.

        Raises:
            InvalidInput: no UDF computes the column, or its UDF cannot be imported here.
            CodeChanged: other code than that of this process computed the values.
        """
        if source is not None:
            return _function_of_view(location, column, dataset, source)
        definition = read_definition(location.name, dataset.schema, column)
        found = column_freshness(dataset, location.checkpoints, definition.input_columns or (), column)
        left, database = found.pending + found.given_up, location.database_uri
        return _function(location, column, dataset, definition, list(dataset.schema), found.versions, left, database)

    def __call__(self, *values: Any) -> Any:
        """Compute the value of a row with these inputs, in this process.

        Raises:
            InvalidInput: the numbers of values and inputs differ, or a value does not have its input's type.
            UdfError: the function fails on these values.
        """
        names = self.inputs.names
        if len(values) != len(names):
            raise InvalidInput(
                f"The function of column {self.column!r} takes {counted(len(names), 'value')}, for {names}, and got "
                f"{len(values)}."
            )
        try:
            row = self._row(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise InvalidInput(f"{values!r:.200} are no values for {self.inputs.to_string()}: {error}.") from error
        # An error fails the query at once. With these settings the function runs in this process, and keeps its model.
        udf = replace(
            self.udf,
            on_error="fail",
            timeout=self.udf.timeout if self.udf.is_async else None,
            setup_timeout=None,
            preprocess_workers=None,
            dedup=False,
        )
        with calling(self.location, Meter()), open_batch_mapper(udf, names) as mapper:
            value = python_value(mapper(row).values[0])
        return value[self.of] if self.of and value is not None else value

    def _row(self, values: Sequence[Any]) -> pa.RecordBatch:
        """Return a row with these inputs; fields of structs are nested in their columns."""
        row: dict[str, Any] = {}
        for path, value in zip(self.inputs.names, values, strict=True):
            *structs, name = path.split(".")
            at = row
            for struct in structs:
                at = at.setdefault(struct, {})
            at[name] = value
        return pa.record_batch([pa.array([row[field.name]], field.type) for field in self.columns], self.columns)

    def __str__(self) -> str:
        made = ", ".join(f"{counted(n, 'row')} of version {v}" for v, n in sorted(self.versions.items()))
        if self.older:
            made += f", some of them possibly of version {', '.join(self.older)}"
        left = f", {counted(self.rows_left, 'row')} without a value" if self.rows_left else ""
        function = self.udf.definition(self.inputs.names).function_name
        return (
            f"Function {function}({', '.join(self.inputs.names)}) of column "
            f"{self.column!r} at version {self.table_version}: {made or 'no values'}{left}"
        )


def _function_of_view(
    location: TableLocation, column: str, dataset: lance.LanceDataset, source: lance.LanceDataset
) -> ColumnFunction:
    query = ViewDefinition.read(dataset.schema.metadata, location.name)
    one = query.computed_column(column, location.name)
    assert one.udf is not None
    state = CommittedViewState(location, dataset)
    code = {name: version.partition("/")[0] for name, version in state.snapshot.code} if state.snapshot else {}
    rows, made = (int(dataset.count_rows(where)) for where in (IS_SET, f"{IS_SET} AND `{column}` IS NOT NULL"))
    versions = {code[column]: made} if column in code else {}
    older = state.snapshot.older if state.snapshot else ()
    earlier = query.columns[: query.columns.index(one)]
    fields = [*source.schema, *(dataset.schema.field(before.name) for before in earlier)]
    database, then = query.source_database, _of(column, older)
    return _function(location, column, dataset, one.udf, fields, versions, rows - made, database, then)


def _of(column: str, code: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the code versions of a column."""
    return tuple(version for name, version in code if name == column)


def _function(
    location: TableLocation,
    column: str,
    dataset: lance.LanceDataset,
    definition: UdfDefinition,
    fields: Sequence[pa.Field],
    versions: Mapping[str, int],
    left: int,
    database: str,
    older: tuple[str, ...] = (),
) -> ColumnFunction:
    inputs = definition.input_columns or ()
    advice = "Move it to a module that this process can import."
    udf = find_udf(definition, database, f"column {column!r}", advice)
    if udf.is_batch_api:
        raise InvalidInput(
            f"Column {column!r} of table {location.name!r} is computed by {udf.name!r}, a batch API, which answers "
            "after minutes. Call the service's direct API for a query."
        )
    _check_code(location.name, column, definition, udf, {*versions, *older}, is_view(dataset.schema.metadata))
    named = {field.name: field.remove_metadata() for field in fields}
    types = pa.schema([(path, field.type) for path in inputs if (field := find_field(named, path)) is not None])
    return ColumnFunction(
        udf,
        column,
        int(dataset.version),
        types,
        pa.schema([named[name] for name in definition.columns]),
        dict(versions),
        left,
        location,
        "" if (sibling := sibling_in(dataset.schema.field(column))) is None else sibling.field,
        older,
    )


def _check_code(
    table: str, column: str, definition: UdfDefinition, udf: UDF, versions: Set[str], of_view: bool
) -> None:
    """Refuse code that computed none of the values, because its results for queries cannot be compared with them."""
    # Without facts, as in a copied table, the values count as those of the column's definition.
    made = versions or {definition.version}
    if udf.code_version not in made:
        again = "view.refresh(" if of_view else f"table.backfill({column!r}, "
        raise CodeChanged(
            f"The values of column {column!r} of table {table!r} come from version "
            f"{', '.join(map(version_label, sorted(made)))} of UDF {definition.name!r}, and the code here is version "
            f"{udf.code_version}. Install the code that computed them, or compute the column again: "
            f'{again}on_code_change="recompute").'
        )
