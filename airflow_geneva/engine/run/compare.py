"""Compare values of a column of a table or view with values of other code, on a sample of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.blobs import scan_bytes
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.lance_io.table_versions import open_version
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.refresh import plan_refresh
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.run.estimate import ComputedSample, check_rows, sample_plan
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.view import definitions_now, find_column_udf
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.views.definition import IS_SET, SOURCE_ROW_ID, OutputColumn, ViewDefinition, visible_columns
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_SHOWN = 8


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Old and new values of sampled rows of a column.

    Args:
        target: the column.
        version: the UDF version of the new values.
        table: the inputs, ``<column>.old``, ``<column>.new``, and ``error`` for rows on which the new code fails; it is
            ``error.raised`` if another column is called ``error``.
        differing: positions of the rows whose values differ, or on which the new code fails.
    """

    target: str
    version: str
    table: pa.Table
    differing: tuple[int, ...]

    @staticmethod
    def of_column(plan: Plan, udf: UDF, location: TableLocation, column: str, rows: int) -> Comparison:
        """Compute a sample of the rows that a plan would compute again; store nothing."""
        spec = plan.spec
        udfs = Udfs(dict.fromkeys(spec.udfs, udf))
        found = sample_plan(plan, location, udfs, check_rows("sample", rows), also=(column,))
        before = pa.Table.from_batches(found.inputs).column(column) if found.inputs else None
        output = Output.of(plan.opened[0], column)
        if output.fields:
            of = output.fields[output.columns.index(column)]
            found = replace(found, column=column, values=[_field(part, of) for part in found.values])
        return _comparison(f"{spec.table_name}.{column}", spec.udf_version, column, found, before)

    @staticmethod
    def of_view(
        view: TableLocation, definition: ViewDefinition, source: TableLocation, column: str, udf: UDF | None, rows: int
    ) -> Comparison:
        """Compute a column for a sample of a view's rows, from the source version that they reflect; store nothing.

        Only the column and the query's columns that it needs are computed.
        """
        check_rows("sample", rows)
        dataset = view.open()
        state = CommittedViewState(view, dataset)
        if not (udf is None or isinstance(udf, UDF)):
            advice = "Give a function decorated with @udf(...), or its import path."
            raise InvalidInput(f"udf={udf!r} is not a UDF. {advice}")
        udf = udf or find_column_udf(definition, definition.computed_column(column, view.name))
        columns = _columns_for(definition, column, udf, source, view.name)
        snapshot, target, version = state.snapshot, f"{view.name}.{column}", udf.code_version
        made_by = {made for name, made in (*snapshot.code, *snapshot.older) if name == column} if snapshot else set()
        if snapshot is None or made_by == {version}:
            return _comparison(target, version, column, ComputedSample(column), None)
        asked = replace(definition, columns=columns, explode=None)
        udfs = {one.name: udf if one.name == column else find_column_udf(definition, one) for one in columns if one.udf}
        request = RefreshRequest(
            snapshot.source_version, on_code_change="recompute", on_unknown_values="recompute", ignore_checkpoints=True
        )
        try:
            open_version(source.open(), snapshot.source_version)
        except InvalidInput as gone:
            raise InvalidInput(
                f"View {view.name!r} shows version {snapshot.source_version} of {source.name!r}, which was cleaned up, "
                'so its rows cannot be compared. Refresh it first, with on_code_change="new_rows".'
            ) from gone
        state.snapshot = None  # plan all rows, with all columns that are needed
        planned = plan_refresh(
            view, asked, source, definitions_now(asked, udfs), state, request, kept=lambda _: snapshot.matching
        )
        found = sample_plan(planned, view, Udfs(udfs), rows)
        shown, before = _shown(dataset, column, found.row_ids, definition.explode == column)
        return _comparison(target, version, column, found, before, shown)

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def filled(self) -> int:
        """Number of the rows without a value today for which the new code returns one."""
        before, after = (self.table.column(at) for at in (-3, -2))
        return int(pc.sum(pc.and_(before.is_null(), after.is_valid())).as_py() or 0)

    @property
    def failed(self) -> int:
        return self.rows - int(self.table.column(self.table.num_columns - 1).null_count)

    def to_arrow(self) -> pa.Table:
        """Return the sampled rows."""
        return self.table

    def without_values(self) -> str:
        """Describe the comparison without the values of rows."""
        head = f"Comparison of {self.target} with UDF version {self.version}"
        if not self.rows:
            return f"{head}: no row holds a value of other code"
        failed = f", {self.failed:,} of these fail" if self.failed else ""
        filled = f", {self.filled:,} of these have no value today" if self.filled else ""
        return f"{head}: {len(self.differing):,} of {counted(self.rows, 'row')} differ{failed}{filled}"

    def __repr__(self) -> str:
        lines = [self.without_values()]
        for at in self.differing[:_SHOWN]:
            (row,) = self.table.slice(at, 1).to_pylist()
            lines.append("  " + ", ".join(f"{name}={value!r:.60}" for name, value in row.items() if value is not None))
        if len(self.differing) > _SHOWN:
            lines.append(f"  and {len(self.differing) - _SHOWN:,} more")
        return "\n".join(lines)


def _field(values: pa.Array, name: str) -> pa.Array:
    """Return a field of struct values; NULLs if all calls failed, so that they have no type."""
    return pc.struct_field(values, name) if pt.is_struct(values.type) else values


def _columns_for(
    definition: ViewDefinition, column: str, udf: UDF, source: TableLocation, view: str
) -> tuple[OutputColumn, ...]:
    """Return a column of the query, computed by another UDF, and the columns before it that it needs."""
    then = definition.computed_column(column, view)
    assert then.udf is not None
    dataset = source.open()
    new = udf.definition(then.inputs if udf.name == then.udf.name else None)
    new = replace(new, input_columns=new.input_columns or tuple(visible_columns(dataset.schema)))
    if new.data_type != then.type:
        raise InvalidInput(
            f"Type mismatch for column {column!r} of view {view!r}: it is {then.type}, and UDF {udf.name!r} gives "
            f"{new.data_type}. Use a UDF of that type."
        )
    earlier = {one.name: one for one in definition.columns[: definition.columns.index(then)]}
    columns = replace(then, udf=new).columns
    missing = [name for name in columns if name not in {*earlier, *dataset.schema.names}]
    if missing:
        raise InvalidInput(
            f"UDF {udf.name!r} takes {missing}, which are not columns of {source.name!r}, or of view {view!r} before "
            f"{column!r}. Name its inputs: @udf(input_columns=[...])."
        )
    needed, queue = {column}, list(columns)
    while queue:
        name = queue.pop()
        if name in earlier and name not in needed:
            needed.add(name)
            queue += earlier[name].columns
    return (*(one for name, one in earlier.items() if name in needed), replace(then, udf=new))


def _shown(
    view: lance.LanceDataset, column: str, ids: Sequence[int], exploded: bool
) -> tuple[list[bool], pa.ChunkedArray]:
    """Return which source rows a view shows, and their values; for an exploded column, a list for each row."""
    listed = ",".join(map(str, ids)) or "NULL"
    wanted = f"{IS_SET} AND {SOURCE_ROW_ID} IN ({listed})"
    found = scan_bytes(view, [SOURCE_ROW_ID, column], filter=wanted).to_table()
    positions: dict[int, list[int]] = {}
    for at, row_id in enumerate(found.column(SOURCE_ROW_ID).to_pylist()):
        positions.setdefault(row_id, []).append(at)
    values = found.column(column)
    if exploded:
        flat = values.to_pylist()
        lists = [[flat[at] for at in positions.get(row_id, ())] for row_id in ids]
        return [True] * len(ids), pa.chunked_array([pa.array(lists, pa.list_(values.type))])
    shown = [row_id in positions for row_id in ids]
    first = pa.array((positions[row_id][0] for row_id in ids if row_id in positions), pa.int64())
    return shown, rows_at(found, first).column(column)


def _comparison(
    target: str,
    version: str,
    column: str,
    found: ComputedSample,
    before: pa.ChunkedArray | None,
    shown: Sequence[bool] | None = None,
) -> Comparison:
    """Put new values of a sample beside the old ones; `shown` marks the rows with an old value, None: all rows."""
    computed = found.table()
    if before is None or not found.inputs:
        return Comparison(target, version, computed, ())
    computed = computed if shown is None else computed.filter(pa.array(shown, pa.bool_()))
    *names, raised = computed.column_names
    parts = {name: computed.column(name) for name in names if name != column}
    parts |= {f"{column}.old": before, f"{column}.new": computed.column(column), raised: computed.column(raised)}
    after, errors = (computed.column(name).to_pylist() for name in (column, raised))
    pairs = zip(before.to_pylist(), after, errors, strict=True)
    # NaN does not equal NaN, but their texts are equal.
    differing = tuple(at for at, (old, new, error) in enumerate(pairs) if error or repr(old) != repr(new))
    return Comparison(target, version, pa.table(parts), differing)
