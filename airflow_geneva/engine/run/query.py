"""A query of a table: evaluated in this process, or stored as a materialized view."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.apply.query_columns import QueryComputer
from airflow_geneva.engine.apply.source_rows import take_rows
from airflow_geneva.engine.lance_io.arrays import DATA_STORAGE_VERSION, check_storable, single_batch
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
from airflow_geneva.engine.udf.of_process import give_udf
from airflow_geneva.engine.views.definition import (
    IS_SET,
    ViewDefinition,
    explode_rows,
    exploded_schema,
    is_view,
    source_columns,
    visible_columns,
)
from airflow_geneva.engine.views.resolve import (
    QuerySpec,
    ResolvedColumns,
    check_expression,
    check_repeatable,
    resolve_columns,
)
from airflow_geneva.engine.views.rows import create_view, select_row_ids
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

    def output_schema(self) -> pa.Schema:
        """Return the schema of the result; see `Query.output_schema`."""
        dataset = self.table.open()
        self._filter(dataset)
        return self._outputs(dataset).schema

    def evaluate(self) -> pa.Table:
        """Evaluate the query in this process; see `Query.to_arrow`."""
        dataset = self.table.open()
        where = freeze_where(self._filter(dataset))
        outputs = self._outputs(dataset)
        size = min([udf.batch_size or _READ_ROWS for udf in outputs.udfs.values()], default=_READ_ROWS)
        batches: list[pa.RecordBatch] = []
        with (
            calling(self.table.limits, Meter()),
            QueryComputer(outputs.columns, outputs.udfs, keeps_before=False) as compute,
        ):
            for part in select_row_ids(dataset, where, self.shuffle_seed, self.max_rows, self.skipped_rows):
                for start in range(0, len(part), size):
                    rows = compute(take_rows(dataset, part[start : start + size], compute.projection))
                    batches.append(pa.RecordBatch.from_struct_array(rows.values))
            if not batches:
                empty = scan_bytes(dataset, compute.projection, limit=0, with_row_id=True)
                batches = [pa.RecordBatch.from_struct_array(compute(single_batch(empty.to_table())).values)]
        if self.exploded is not None:
            batches = [explode_rows(batch, self.exploded) for batch in batches]
        return pa.Table.from_batches(batches, schema=batches[0].schema)

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
        if not definition.stable_row_ids:
            message = (
                f"Table {self.table.name!r} has no stable row ids, so view {name!r} can only ever be refreshed to "
                f"version {dataset.version} of it, and not once it is compacted. For a view that follows its table, "
                "copy the table with db.copy_table(..., rewrite=True), which gives it stable row ids."
            )
            _log.warning(message)
            warnings.warn(message, stacklevel=3)
        row_ids = select_row_ids(dataset, definition.where, self.shuffle_seed, self.max_rows, self.skipped_rows)
        own = definition.check_key(key, outputs.schema, name)
        named = own or definition.columns_of_key(key_columns(dataset.schema))
        schema = with_key(name, outputs.schema, named).with_metadata(definition.metadata())
        with locate_new(*place) as location:
            create_view(location, schema, row_ids, max_rows_per_fragment, dataset.version)
        keep_source(location, definition)
        return replace(location, options=with_sources(location.options, [self.table.options]))

    def _filter(self, dataset: lance.LanceDataset) -> str | None:
        """Return the whole filter; of a view, only computed rows pass it."""
        conditions = [check_expression(condition, "The filter") for condition in self.conditions]
        for condition in conditions:
            check_where(dataset, condition)
        whole = [*([IS_SET] if is_view(dataset.schema.metadata) else []), *conditions]
        return whole[0] if len(whole) == 1 else " AND ".join(f"({part})" for part in whole) or None

    def _outputs(self, dataset: lance.LanceDataset) -> ResolvedColumns:
        every = ((name, f"`{name}`") for name in visible_columns(dataset.schema))
        first = tuple(every) if self.selected is None else self.selected
        outputs = resolve_columns(dataset, self.table.name, (*first, *self.added))
        if self.exploded is None:
            return outputs
        if self.max_rows is not None or self.skipped_rows:
            raise InvalidInput(
                f"The query of table {self.table.name!r} explodes column {self.exploded!r} and has a limit or "
                "offset, which count rows of the table. Leave them out, or give them to a view of this view."
            )
        return replace(outputs, schema=exploded_schema(outputs.schema, self.exploded))

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
            reads=source_columns(dataset, [name for name in names if name in reads]),
        )
