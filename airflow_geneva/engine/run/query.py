"""A query of a table: evaluated in this process, or stored as a materialized view."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import BatchMapper
from airflow_geneva.engine.apply.group_columns import GroupColumns
from airflow_geneva.engine.apply.group_rows import rows_in_order
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.query_columns import QueryComputer
from airflow_geneva.engine.apply.source_rows import SourceRows, take_rows
from airflow_geneva.engine.duplicates.clusters import Clusters
from airflow_geneva.engine.duplicates.kept import find_clusters, hash_rows, kept_rows
from airflow_geneva.engine.lance_io.arrays import DATA_STORAGE_VERSION, check_storable, rows_at, single_batch
from airflow_geneva.engine.lance_io.blobs import scan_bytes
from airflow_geneva.engine.lance_io.filters import check_where, freeze_where, where_columns
from airflow_geneva.engine.lance_io.reading import to_polars
from airflow_geneva.engine.lance_io.table_key import key_columns, with_key
from airflow_geneva.engine.lance_io.table_versions import check_no_mem_wal
from airflow_geneva.engine.limits.calls import calling
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.storage.catalogs import with_sources
from airflow_geneva.engine.storage.location import TableLocation, locate_new
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.definition import key_names
from airflow_geneva.engine.udf.of_process import give_udf
from airflow_geneva.engine.views.deduplication import Deduplication
from airflow_geneva.engine.views.definition import (
    IS_SET,
    STATE_OF,
    OutputColumn,
    SourceColumn,
    ViewDefinition,
    explode_rows,
    exploded_schema,
    is_view,
    source_columns,
    visible_columns,
)
from airflow_geneva.engine.views.group_keys import CountedKeys, Keys
from airflow_geneva.engine.views.grouping import (
    TOUCHED,
    Grouped,
    Grouping,
    check_grouping,
    groups_schema,
    key_schema,
    read_order,
)
from airflow_geneva.engine.views.hidden import check_may_hide
from airflow_geneva.engine.views.resolve import (
    QuerySpec,
    ResolvedColumns,
    check_expression,
    check_output_name,
    check_repeatable,
    resolve_columns,
)
from airflow_geneva.engine.views.rows import RowIdArray, create_view, order_row_ids, select_row_ids
from airflow_geneva.engine.views.sources import keep_source
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance
    import polars as pl

_READ_ROWS = 4_096

_log = logging.getLogger("airflow_geneva.query")


@dataclass(frozen=True)
class TableQuery:
    """A query of a table or view at its newest version; its fields are those of `airflow_geneva.Query`."""

    table: TableLocation
    conditions: tuple[str, ...]
    selected: tuple[tuple[Any, QuerySpec], ...] | None
    added: tuple[tuple[Any, QuerySpec], ...]
    shuffle_seed: int | None
    max_rows: int | None
    skipped_rows: int
    exploded: str | None
    grouped: Grouped | None = None
    deduplication: Deduplication | None = None

    def output_schema(self) -> pa.Schema:
        """Return the schema of the result; see `Query.output_schema`."""
        dataset = self.table.open()
        self._filter(dataset)
        found = self._outputs(dataset).schema
        return pa.schema([field for field in found if not field.name.startswith(STATE_OF)], metadata=found.metadata)

    def evaluate(self) -> pa.Table:
        """Evaluate the query in this process; see `Query.to_arrow`."""
        dataset = self.table.open()
        where = freeze_where(self._filter(dataset))
        outputs = self._outputs(dataset)
        if self.grouped is not None:
            return self._evaluate_groups(dataset, where, outputs)
        size = min([udf.batch_size or _READ_ROWS for udf in outputs.udfs.values()], default=_READ_ROWS)
        batches: list[pa.RecordBatch] = []
        with (
            calling(self.table, Meter()),
            QueryComputer(outputs.columns, outputs.udfs, keeps_before=False) as compute,
        ):
            for part in self._row_ids(dataset, where):
                for start in range(0, len(part), size):
                    rows = compute(take_rows(dataset, part[start : start + size], compute.projection))
                    batches.append(pa.RecordBatch.from_struct_array(rows.values))
            if not batches:
                empty = scan_bytes(dataset, compute.projection, limit=0, with_row_id=True)
                batches = [pa.RecordBatch.from_struct_array(compute(single_batch(empty.to_table())).values)]
        return self._exploded(batches)

    def _exploded(self, batches: list[pa.RecordBatch]) -> pa.Table:
        shown = [name for name in batches[0].schema.names if not name.startswith(STATE_OF)]
        batches = [batch.select(shown) for batch in batches]
        if self.exploded is not None:
            batches = [explode_rows(batch, self.exploded) for batch in batches]
        return pa.Table.from_batches(batches, schema=batches[0].schema)

    def _evaluate_groups(self, dataset: lance.LanceDataset, where: str | None, outputs: ResolvedColumns) -> pa.Table:
        """Compute all groups; all that is read of the rows is held in memory."""
        grouped, rows_of = self.grouped, SourceRows(self.table, int(dataset.version))
        assert grouped is not None
        columns = GroupColumns.of(outputs.columns, set(outputs.udfs))
        order = [read_order(text) for text in grouped.order_by]
        names = [*grouped.keys, *(name for name, _ in order)]
        reads = {**columns.projection, **{f"column_{at}": f"`{name}`" for at, name in enumerate(names)}}
        ids = np.sort(np.concatenate([np.empty(0, np.int64), *select_row_ids(dataset, where)]))
        if len(ids):
            rows = take_rows(dataset, ids, reads)
        else:
            rows = single_batch(scan_bytes(dataset, reads, limit=0, with_row_id=True).to_table())
        values = [rows.column(f"column_{at}") for at in range(len(names))]
        keys, by = Keys.of(values[: len(grouped.keys)]), values[len(grouped.keys) :]
        groups = CountedKeys.of_rows(keys, ids)
        of_row, shown = groups.positions(keys), groups.in_order()
        of_row = np.argsort(np.argsort(groups.first, kind="stable"))[of_row] if len(groups) else of_row
        sorted_by = rows_in_order(of_row, by, [way for _, way in order], ids)
        rows = rows_at(rows, pa.array(sorted_by))
        whole = pa.record_batch(list(shown.keys.columns), names=[f"source_{at}" for at in range(len(grouped.keys))])
        open_mapper = partial(_open_of_groups, outputs.udfs, rows_of)
        batches, at, size = list[pa.RecordBatch](), 0, _READ_ROWS
        with (
            calling(self.table, Meter()),
            QueryComputer(outputs.columns, outputs.udfs, open_mapper, keeps_before=False) as compute,
        ):
            for start in range(0, max(whole.num_rows, 1), size):
                part, lengths = whole.slice(start, size), shown.counts[start : start + size]
                count = int(lengths.sum())
                read = rows.slice(at, count).select(list(columns.projection)) if columns.reads_rows else None
                these = ids[sorted_by[at : at + count]]
                made = columns.compute(read, these, lengths) | columns.unfolded(these, lengths)
                found = pa.record_batch([*part.columns, *made.values()], names=[*part.schema.names, *made])
                batches.append(pa.RecordBatch.from_struct_array(compute(found).values))
                at += count
        return self._exploded(batches)

    def to_polars(self) -> pl.DataFrame:
        """Evaluate the query into a polars data frame; see `Query.to_polars`."""
        return to_polars(self.evaluate)

    def definition(self) -> ViewDefinition:
        """Return the query as a view stores it; see `Query.definition`."""
        dataset = self.table.open()
        return self._definition(dataset, self._outputs(dataset))

    def create_view(
        self,
        place: tuple[str, str, tuple[tuple[str, str], ...]],
        max_rows_per_fragment: int,
        key: str | Sequence[str] | None,
    ) -> TableLocation:
        """Create a view of the query, and return its location; see `Query.create_materialized_view`.

        Args:
            place: the URI of the view's database, the view's name, and the options of the database.
        """
        name = place[1]
        dataset = self.table.open()
        check_no_mem_wal(self.table.name, dataset)
        outputs = self._outputs(dataset)
        definition = self._definition(dataset, outputs)
        if self.grouped is not None or self.deduplication is not None:
            check_may_hide(name, place[2])
        if not definition.stable_row_ids:
            message = (
                f"Table {self.table.name!r} has no stable row ids, so view {name!r} can only ever be refreshed to "
                f"version {dataset.version} of it, and not once it is compacted. For a view that follows its table, "
                "copy the table with db.copy_table(..., rewrite=True), which gives it stable row ids."
            )
            _log.warning(message)
            warnings.warn(message, stacklevel=3)
        # The first refresh finds the groups, or the duplicates.
        row_ids: Iterable[RowIdArray] = ()
        if self.grouped is None and self.deduplication is None:
            row_ids = self._row_ids(dataset, definition.where)
        own = definition.check_key(key, outputs.schema, name)
        named = own or self._named(definition, outputs.schema, name, key_columns(dataset.schema))
        schema = with_key(name, outputs.schema, named).with_metadata(definition.metadata())
        with locate_new(*place) as location:
            create_view(location, schema, row_ids, max_rows_per_fragment, dataset.version)
        keep_source(location, definition)
        return replace(location, options=with_sources(location.options, [self.table.options]))

    def _named(
        self, definition: ViewDefinition, schema: pa.Schema, name: str, of_source: Sequence[str]
    ) -> tuple[str, ...]:  # fmt: skip
        """Return the columns that name a row in errors if no key is given: the key of the source, or of the groups."""
        if self.grouped is None:
            return definition.columns_of_key(of_source)
        try:
            return definition.check_key(self.grouped.keys, schema, name)
        except InvalidInput:  # columns of this type cannot name a row
            return ()

    def _filter(self, dataset: lance.LanceDataset) -> str | None:
        """Return the whole filter; of a view, only computed rows pass it."""
        conditions = [check_expression(condition, "The filter") for condition in self.conditions]
        for condition in conditions:
            check_where(dataset, condition)
        whole = [*([IS_SET] if is_view(dataset.schema.metadata) else []), *conditions]
        return whole[0] if len(whole) == 1 else " AND ".join(f"({part})" for part in whole) or None

    def _row_ids(self, dataset: lance.LanceDataset, where: str | None) -> Iterator[RowIdArray]:
        order = (self.shuffle_seed, self.max_rows, self.skipped_rows)
        if self.deduplication is None:
            yield from select_row_ids(dataset, where, *order)
            return
        read = hash_rows(dataset, where, self.deduplication)
        clusters = find_clusters(read, dataset, self.deduplication, Clusters.none())
        yield order_row_ids(kept_rows(clusters, read, self.deduplication), *order)

    def _outputs(self, dataset: lance.LanceDataset) -> ResolvedColumns:
        if self.grouped is not None:
            return self._groups(dataset, self.grouped)
        every = ((name, f"`{name}`") for name in visible_columns(dataset.schema))
        first = tuple(every) if self.selected is None else self.selected
        outputs = resolve_columns(dataset, self.table.name, (*first, *self.added))
        if self.deduplication is not None:
            self.deduplication.check(dataset.schema, visible_columns(dataset.schema), self.table.name)
        if self.exploded is None:
            return outputs
        if self.max_rows is not None or self.skipped_rows:
            raise InvalidInput(
                f"The query of table {self.table.name!r} explodes column {self.exploded!r} and has a limit or "
                "offset, which count rows of the table. Leave them out, or give them to a view of this view."
            )
        return replace(outputs, schema=exploded_schema(outputs.schema, self.exploded))

    def _groups(self, dataset: lance.LanceDataset, grouped: Grouped) -> ResolvedColumns:
        """Return the columns of groups: the key, and what is computed of the rows."""
        visible = {field.name: field for field in dataset.schema if field.name in visible_columns(dataset.schema)}
        name = self.table.name
        check_grouping(name, visible, grouped.keys, grouped.order_by, grouped.max_group_rows)
        for key in grouped.keys:
            check_output_name(key)
        keys = key_schema(grouped.keys, {column: field.type for column, field in visible.items()})
        specs = grouped.columns
        if twice := sorted({one for key, _ in specs for one in key_names(key)} & set(grouped.keys)):
            raise InvalidInput(f"agg: {twice[0]!r} is a column of the key, which the result has already. Rename it.")
        found = ResolvedColumns((), pa.schema([]), {}, frozenset())
        if specs:
            found = resolve_columns(dataset, name, specs, {field.name: field for field in keys}, groups=True)
        of_key = tuple(OutputColumn(field.name, "column", str(field.type), expression=field.name) for field in keys)
        reads = {*grouped.keys, *(read_order(text)[0] for text in grouped.order_by)}
        schema = pa.schema([*keys, *found.schema])
        return ResolvedColumns(
            (*of_key, *found.columns),
            schema if self.exploded is None else exploded_schema(schema, self.exploded),
            found.udfs,
            found.reads | reads,
        )

    def _definition(self, dataset: lance.LanceDataset, outputs: ResolvedColumns) -> ViewDefinition:
        where = self._filter(dataset)
        check_storable(outputs.schema, DATA_STORAGE_VERSION, f"a view of table {self.table.name!r}")
        expressions = [column.expression or "" for column in outputs.columns if column.kind == "sql"]
        for sql in [*self.conditions, *expressions]:
            check_repeatable(sql)
        for name, udf in outputs.udfs.items():
            give_udf(udf, self.table.database_uri, f"column {name!r} of a view of {self.table.uri}")
        names = dataset.schema.names
        reads = outputs.reads | set(where_columns(where, names))
        reads |= set(self.deduplication.reads if self.deduplication else ())
        read = source_columns(dataset, [name for name in names if name in reads])
        if self.grouped is not None:
            return self._definition_of_groups(dataset, outputs, where, read, self.grouped)
        return ViewDefinition(
            source_table=self.table.name,
            source_database=without_credentials(self.table.database_uri),
            source_version=dataset.version,
            stable_row_ids=bool(dataset.has_stable_row_ids),
            where=where,
            columns=outputs.columns,
            all_columns=self.selected is None,
            shuffle_seed=self.shuffle_seed,
            limit=self.max_rows,
            offset=self.skipped_rows,
            explode=self.exploded,
            reads=read,
            deduplicate=self.deduplication,
        )

    def _definition_of_groups(
        self,
        dataset: lance.LanceDataset,
        outputs: ResolvedColumns,
        where: str | None,
        read: tuple[SourceColumn, ...],
        grouped: Grouped,
    ) -> ViewDefinition:
        if not dataset.has_stable_row_ids:
            raise InvalidInput(
                f"Table {self.table.name!r} has no stable row ids, so no view can follow the groups of its rows. Copy "
                "it with db.copy_table(..., rewrite=True), which gives it stable row ids."
            )
        of_groups = groups_schema(key_schema(grouped.keys, {field.name: field.type for field in dataset.schema}))
        return ViewDefinition(
            source_table=self.table.name,
            source_database=without_credentials(self.table.database_uri),
            source_version=dataset.version,
            stable_row_ids=True,
            where=None,
            columns=outputs.columns,
            all_columns=False,
            shuffle_seed=None,
            limit=None,
            offset=0,
            explode=self.exploded,
            # A row of the table `groups` whose key stays is another one if its group was touched.
            reads=tuple(
                SourceColumn(field.name, (at,), str(field.type))
                for at, field in enumerate(of_groups)
                if field.name in (*grouped.keys, TOUCHED)
            ),
            grouping=Grouping(
                grouped.keys,
                grouped.order_by,
                grouped.max_group_rows,
                where,
                tuple((one.name, one.fields, one.type) for one in read),
            ),
        )


def _open_of_groups(
    udfs: Mapping[str, UDF], rows_of: SourceRows, name: str, inputs: Sequence[str] | None
) -> BatchMapper:  # fmt: skip
    return open_batch_mapper(udfs[name], inputs, source=rows_of)
