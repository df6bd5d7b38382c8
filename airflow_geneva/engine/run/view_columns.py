"""Change the columns of a view's query, each time in one commit; the next refresh computes what is new alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.checkpoint.view_snapshot import new_snapshot_key, save_snapshot
from airflow_geneva.engine.job.folder import new_job_id
from airflow_geneva.engine.lance_io.arrays import DATA_STORAGE_VERSION, check_storable
from airflow_geneva.engine.lance_io.filters import where_columns
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.lance_io.table_key import check_key_stays, key_metadata
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.refresh import read_columns
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.run.promotion import QueryChange, change_query
from airflow_geneva.engine.run.table_columns import DefinedColumns, DefinedSpec
from airflow_geneva.engine.run.view import plan
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf import UDF, UdfDefinition
from airflow_geneva.engine.udf.definition import by_name, check_view_type, key_names
from airflow_geneva.engine.udf.of_process import give_udf
from airflow_geneva.engine.views.definition import (
    STATE_OF,
    OutputColumn,
    ViewDefinition,
    filled_by,
    grouping_of,
    source_columns,
    visible_columns,
)
from airflow_geneva.engine.views.resolve import ResolvedColumns, check_repeatable, resolve_columns
from airflow_geneva.engine.views.state import AdvanceNote, CommittedViewState, write_advance_note
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True)
class ViewColumns(DefinedColumns):
    """The columns of a view's query, which are changed in one commit each.

    Args:
        table: the view.
        source: locates its source.
    """

    table: TableLocation
    source: Callable[[], TableLocation]

    def add(self, columns: Mapping[Any, Any]) -> None:
        """Add columns to the end of the query; see `View.add_columns`."""
        view, source, specs = self.table, self.source(), by_name(columns)
        names = [name for key in specs for name in key_names(key)]
        tried = set[int]()

        def change(now: ViewDefinition, dataset: lance.LanceDataset) -> QueryChange | None:
            there = {column.name: column.since for column in now.columns}
            if tried and all(there.get(name) in tried for name in names):
                return None  # an earlier attempt, whose outcome was not known
            if taken := [name for name in names if name in dataset.schema.names]:
                raise InvalidInput(
                    f"View {view.name!r} already has columns {taken}. Give a computed column another function with "
                    "view.alter_columns(...), or choose other names."
                )
            read = source.open()
            found = _resolved(view, now, now.columns, dataset, read, specs)
            check_storable(found.schema, DATA_STORAGE_VERSION, f"view {view.name!r}")
            since = int(dataset.version) + 1
            added = tuple(replace(column, since=since) for column in found.columns)
            keys = {column.name: column.key for column in added}
            added = tuple(replace(column, of=keys[column.of]) if column.of else column for column in added)
            tried.add(since)
            return QueryChange(_reading(now, (*now.columns, *added), found, read), tuple(found.schema))

        change_query(view, change)

    def alter(self, columns: Mapping[Any, Any]) -> None:
        """Give computed columns other UDFs; see `View.alter_columns`."""
        view, source, specs = self.table, self.source(), by_name(columns)
        change_query(view, lambda now, dataset: QueryChange(altered(view, now, dataset, source.open(), specs)))

    def drop(self, columns: Sequence[str]) -> None:
        """Remove columns from the query, and from its table; see `View.drop_columns`."""
        view, source, names = self.table, self.source(), [columns] if isinstance(columns, str) else list(columns)
        tried = list[int]()

        def change(now: ViewDefinition, dataset: lance.LanceDataset) -> QueryChange | None:
            if not names or (tried and not set(names) & set(dataset.schema.names)):
                return None
            visible = [name for name in dataset.schema.names if name not in dataset.schema.names[:2]]
            check_columns(view.name, visible, names)
            states = [STATE_OF + name for name in names if STATE_OF + name in visible]
            names.extend(state for state in states if state not in names)
            if why := list(_refusals(now, names, visible)):
                raise InvalidInput(f"Columns {list(names)} of view {view.name!r} cannot be dropped: {'; '.join(why)}.")
            check_key_stays(view.name, dataset.schema, names)
            left = tuple(column for column in now.columns if column.name not in names)
            tried.append(int(dataset.version))
            if now.grouping is not None:
                query = replace(now, columns=left, grouping=grouping_of(now.grouping, left))
                return QueryChange(query, (), tuple(dict.fromkeys(names)))
            needed = set(_source_names(now, left))
            reads = tuple(column for column in now.reads if column.name in needed)
            with suppress(InvalidInput):  # a view whose source was dropped can lose columns, too
                _keep_only(
                    view, now, dataset, source.open(), needed, [now.keys[name] for name in names if name in now.keys]
                )
            return QueryChange(replace(now, columns=left, reads=reads), (), tuple(dict.fromkeys(names)))

        change_query(view, change)

    def set_key(self, key: str | Sequence[str] | None) -> None:
        """Choose the columns whose values name a row in errors; see `Table.set_key`."""
        dataset, name = self.table.open(), self.table.name
        shown = pa.schema([dataset.schema.field(column) for column in visible_columns(dataset.schema)])
        columns = ViewDefinition.read(dataset.schema.metadata, name).check_key(key, shown, name)
        if changes := key_metadata(dataset.schema, columns):
            dataset.update_field_metadata(changes)

    def expect(self, columns: Mapping[str, Any]) -> None:
        """Set the conditions that values must meet; see `View.expect`."""
        name = self.table.name
        change_query(self.table, lambda now, dataset: QueryChange(now.expecting(columns, dataset.schema, name)))

    def definition(self, schema: pa.Schema, column: str) -> UdfDefinition:
        """Return the definition of a computed column, as the query has it."""
        query = ViewDefinition.read(schema.metadata, self.table.name)
        found = query.computed_column(filled_by(query.columns).get(column, column), self.table.name).udf
        assert found is not None
        return found

    def _differs(self, schema: pa.Schema, column: str, spec: DefinedSpec) -> bool:
        if ViewDefinition.read(schema.metadata, self.table.name).grouping is not None:
            spec = (spec[0].of_groups, spec[1]) if isinstance(spec, tuple) else spec.of_groups
        return super()._differs(schema, column, spec)

    def plan_altered(self, udfs: Mapping[str, UDF]) -> Plan:
        """Plan a refresh as if columns had other UDFs, with the inputs of a UDF of the same name; write nothing."""
        view, source = self.table, self.source()
        dataset = view.open()
        now = ViewDefinition.read(dataset.schema.metadata, view.name)
        before = {name: now.computed_column(name, view.name) for name in udfs}
        specs = {
            name: (udf, list(before[name].inputs)) if (was := before[name].udf) and was.name == udf.name else udf
            for name, udf in udfs.items()
        }
        query = altered(view, now, dataset, source.open(), specs)
        return plan(view, query, source, RefreshRequest(on_code_change="recompute"), dataset)


def altered(
    view: TableLocation,
    query: ViewDefinition,
    dataset: lance.LanceDataset,
    read: lance.LanceDataset,
    specs: Mapping[Any, Any],
) -> ViewDefinition:
    """Return a view's query with other UDFs for computed columns; write nothing.

    Args:
        dataset, read: a version of the view, and of its source.
        specs: see `View.alter_columns`.

    Raises:
        InvalidInput: see `View.alter_columns`.
    """
    for key, spec in specs.items():
        columns, filled = {column.name: column for column in query.columns}, filled_by(query.columns)
        check_columns(view.name, list(columns), key_names(key))
        first = filled.get(key_names(key)[0], key_names(key)[0])
        then = query.computed_column(first, view.name)
        if {filled.get(name) for name in key_names(key)} != {first}:
            raise InvalidInput(
                f"Columns {list(key_names(key))} of view {view.name!r} are not filled by one function. Name each "
                "with its own."
            )
        earlier = query.columns[: query.columns.index(then)]
        found = _resolved(view, query, earlier, dataset, read, {first: spec})
        udf = found.columns[0].udf
        assert udf is not None
        assert then.udf is not None
        check_view_type(view.name, first, then.type, udf, then.udf if then.field else None)
        other = (udf.name, udf.input_columns) != (then.udf.name, then.udf.input_columns)
        changed = replace(then, udf=udf, revision=int(dataset.version) + 1 if other else then.revision)
        after = tuple(changed if column is then else column for column in query.columns)
        query = _reading(query, after, found, read)
    return query


def _refusals(now: ViewDefinition, names: Sequence[str], visible: Sequence[str]) -> Iterator[str]:
    left = [column for column in now.columns if column.name not in names]
    earlier = set[str]()
    for column in now.columns:
        if column in left and (read := sorted(earlier & set(names) & set(column.columns))):
            yield f"column {column.name!r} is computed from {read}. Drop it, too, or give it other inputs first"
        earlier.add(column.name)
    filled = filled_by(now.columns)
    for name in {filled[name] for name in names if name in filled}:
        if others := [column.name for column in left if filled.get(column.name) == name]:
            yield f"one function fills them and {others}. Drop all of these"
    if now.grouping is not None and (keys := [name for name in names if name in now.grouping.keys]):
        yield f"{keys[0]!r} is a column of the key, which says what a row of the view is about"
    if now.explode in names:
        yield f"{now.explode!r} is the exploded column, whose elements are the rows of the view"
    if not left or not set(visible) - set(names):
        yield "no other column would be left. Drop the view instead"


def _resolved(
    view: TableLocation,
    query: ViewDefinition,
    earlier: Sequence[OutputColumn],
    dataset: lance.LanceDataset,
    source: lance.LanceDataset,
    specs: Mapping[Any, Any],
) -> ResolvedColumns:
    """Check columns for a view's query, which may read the `earlier` ones."""
    groups = query.grouping is not None
    if not groups:
        query.check_source(source)
    fields = {column.name: _unexploded(dataset.schema.field(column.name), column, query) for column in earlier}
    computed = list(filled_by(earlier))
    found = resolve_columns(source, query.source_table, tuple(specs.items()), fields, computed, groups)
    for column in found.columns:
        if column.kind == "sql":
            check_repeatable(column.expression or "")
    for name, udf in found.udfs.items():
        give_udf(udf, query.source_database, f"column {name!r} of view {view.uri}")
    return found


def _unexploded(field: pa.Field, column: OutputColumn, query: ViewDefinition) -> pa.Field:
    """Return a column as UDFs of the query read it, before it is exploded."""
    if column.name != query.explode:
        return field
    kind = pa.large_list(field.type) if column.type.startswith("large_list") else pa.list_(field.type)
    return pa.field(column.name, kind)


def _reading(
    now: ViewDefinition, columns: tuple[OutputColumn, ...], found: ResolvedColumns, source: lance.LanceDataset
) -> ViewDefinition:
    """Return the query with other columns; columns of the source that it did not read before come last."""
    if now.grouping is not None:
        read = {one[0] for one in now.grouping.reads}
        new = source_columns(source, [name for name in source.schema.names if name in found.reads - read])
        reads_of = (*now.grouping.reads, *((one.name, one.fields, one.type) for one in new))
        return replace(now, columns=columns, grouping=replace(now.grouping, reads=reads_of))
    known = {column.name: column for column in now.reads}
    more = source_columns(source, [name for name in source.schema.names if name in found.reads - known.keys()])
    known |= {column.name: column for column in more}
    needed = set(_source_names(replace(now, reads=tuple(known.values())), columns))
    reads = tuple(column for name, column in known.items() if name in needed)
    return replace(now, columns=columns, reads=reads)


def _source_names(now: ViewDefinition, columns: Sequence[OutputColumn]) -> Iterator[str]:
    """Yield the columns of the source that the filter, some columns and the deduplication of a query read."""
    names, earlier = [column.name for column in now.reads], set[str]()
    yield from where_columns(now.where, names)
    yield from now.deduplicate.reads if now.deduplicate else ()
    for column in columns:
        if column.kind == "column":
            yield str(column.expression)
        elif column.kind == "sql":
            yield from where_columns(column.expression, names)
        yield from (name for name in column.columns if name not in earlier)
        earlier.add(column.name)


def _keep_only(
    view: TableLocation,
    now: ViewDefinition,
    dataset: lance.LanceDataset,
    source: lance.LanceDataset,
    left: Collection[str],
    dropped: Sequence[str],
) -> None:
    """Describe the source that the view reflects by the columns that the query still reads.

    The source may lose the other ones before the next refresh, which compares it with this description.
    """
    state = CommittedViewState(view, dataset)
    snapshot = state.snapshot
    kept = tuple((name, text) for name, text in (snapshot.reads if snapshot else ()) if name in left)
    if snapshot is None or kept == snapshot.reads:
        return
    if (then := open_version_or_none(source, snapshot.source_version)) is None:
        return
    before, after = (read_manifest(then, read_columns(then, part)).values() for part in (snapshot.reads, kept))
    signatures = {one.signature: other.signature for one, other in zip(before, after, strict=True)}
    if not all(one.signature in signatures for one in snapshot.fragments):
        return  # the source was created again
    fragments = tuple(replace(one, signature=signatures[one.signature]) for one in snapshot.fragments)
    dropped = (*snapshot.dropped, *dropped)
    changed = replace(snapshot, fragments=fragments, reads=kept, dropped=dropped).renamed(now.keys)
    key = new_snapshot_key(new_job_id())
    save_snapshot(view.checkpoints, key, changed)
    write_advance_note(view, AdvanceNote(state.newest.snapshot, snapshot.source_version, key))
