"""Compute a query's columns from rows of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.batch_api import BatchApiMapper, StillWaiting
from airflow_geneva.apply.batch_mapper import BatchMapper, BegunBatch
from airflow_geneva.apply.dedup import KnownValues
from airflow_geneva.apply.isolation.runner import open_batch_mapper
from airflow_geneva.apply.stages import prepared_columns, with_prepared
from airflow_geneva.apply.udf_call import MappedBatch
from airflow_geneva.checkpoint.records import ROW_ID
from airflow_geneva.checkpoint.submissions import Submissions
from airflow_geneva.display import counted
from airflow_geneva.errors import UdfError
from airflow_geneva.lance_io.arrays import rows_at, single_batch
from airflow_geneva.lance_io.blobs import is_blob
from airflow_geneva.udf import UDF
from airflow_geneva.udf.shipping import UdfReference
from airflow_geneva.views.definition import OutputColumn, source_inputs
from airflow_geneva.views.rows import RowIdArray

if TYPE_CHECKING:
    import lance

_BLOB_ROWS = 1_024


@dataclass(frozen=True)
class QueryRows:
    """Computed rows of a query, and by UDF column the result of its UDF, failures included.

    Source blobs are bytes, blobs of a UDF as it returned them. With a ``failure``, which fails the job, these are the
    rows before it.
    """

    rows: pa.RecordBatch
    mapped: Mapping[str, MappedBatch]
    failure: UdfError | None = None


class QueryComputer:
    """Computes a query's columns from batches of source rows; a context manager."""

    def __init__(
        self,
        columns: Sequence[OutputColumn],
        udfs: Mapping[str, UDF | UdfReference],
        known: Mapping[str, KnownValues] | None = None,
        submissions: Mapping[str, Submissions] | None = None,
        batch_sizes: Mapping[str, int | None] | None = None,
    ) -> None:
        self.columns = tuple(columns)
        self.projection, self._aliases, self._input_aliases = _projection(self.columns)
        self._stack = ExitStack()
        self._mappers: dict[str, BatchMapper] = {
            column.name: self._stack.enter_context(
                open_batch_mapper(
                    udfs[column.name],
                    column.inputs,
                    (known or {}).get(column.name),
                    (submissions or {}).get(column.name),
                    (batch_sizes or {}).get(column.name),
                )
            )
            for column in self.columns
            if column.udf is not None
        }

    def __enter__(self) -> QueryComputer:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def calls_at_a_time(self) -> int:
        """How many calls `begin` may have in flight."""
        return max((mapper.calls_at_a_time for mapper in self._mappers.values()), default=0)

    @property
    def calls_rows(self) -> bool:
        """Whether calls that `begin` has in flight are of single rows."""
        return any(mapper.calls_rows for mapper in self._mappers.values())

    @property
    def needs_row_ids(self) -> bool:
        """Whether a batch also has the row ids: one of its UDFs is a batch API."""
        return any(mapper.needs_row_ids for mapper in self._mappers.values())

    @property
    def prepares_at_a_time(self) -> int:
        """In how many threads `prepare` may run."""
        return max((mapper.prepares_at_a_time for mapper in self._mappers.values()), default=0)

    def prepare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Preprocess for the UDFs whose inputs are columns of the source; see `BatchMapper`."""
        for column in self.columns:
            mapper = self._mappers.get(column.name)
            if mapper and mapper.prepares_at_a_time and self._is_of_source(column):
                made = mapper.prepare(self._inputs(column, batch, {}))
                batch = with_prepared(batch, prepared_columns(made), column.name)
        return batch

    def begin(self, batch: pa.RecordBatch) -> dict[str, BegunBatch]:
        """Begin the calls of async UDFs whose inputs are columns of the source; of none before batch APIs answered."""
        begun = dict[str, BegunBatch]()
        for column in self.columns if not self.needs_row_ids else ():
            mapper = self._mappers.get(column.name)
            if mapper and mapper.calls_at_a_time and self._is_of_source(column):
                begun[column.name] = mapper.begin(self._inputs(column, batch, {}))
        return begun

    def __call__(
        self, batch: pa.RecordBatch, keep_before: bool = False, begun: Mapping[str, BegunBatch] | None = None
    ) -> QueryRows:
        """Compute a batch, the result of a scan with this projection and row ids: Lance cannot scan constants alone.

        If a row fails the job, raise its `UdfError`, see `BatchMapper`. With ``keep_before``, compute all columns of
        the rows before it instead, unless there are none or their results are not known. What was ``begun`` on the
        batch is not called again.
        """
        whole, begun = batch, begun or {}
        if self.needs_row_ids:
            self._ask_batch_apis(batch)
        done: dict[str, pa.Array] = {}
        mapped: dict[str, MappedBatch] = {}
        failure: UdfError | None = None
        for column in self.columns:
            if column.udf is None:
                done[column.name] = batch.column(self._aliases[column.name])
                continue
            try:
                if column.name in begun:
                    found = _first_rows(begun[column.name], batch.num_rows, whole.num_rows)
                else:
                    found = self._mappers[column.name](self._inputs(column, batch, done))
            except UdfError as error:
                error.column = column.name
                if not keep_before or not error.row_index or error.computed is None:
                    raise
                failure, rows = error, error.row_index
                batch = batch.slice(0, rows)
                done = {name: values.slice(0, rows) for name, values in done.items()}
                mapped = {name: outcome.first(rows) for name, outcome in mapped.items()}
                found = MappedBatch(error.computed, error.failures, rows)
            mapped[column.name], done[column.name] = found, found.values
        return QueryRows(pa.record_batch(list(done.values()), names=list(done)), mapped, failure)

    def _ask_batch_apis(self, batch: pa.RecordBatch) -> None:
        """Raise StillWaiting if the service of a batch API has not answered all rows: no other UDF is called yet."""
        waiting: dict[str, int] = {}
        plain = {column.name: batch.column(self._aliases[column.name]) for column in self.columns if not column.udf}
        for column in self.columns:
            mapper = self._mappers.get(column.name)
            if isinstance(mapper, BatchApiMapper):
                try:
                    mapper.collect(self._inputs(column, batch, plain))
                except StillWaiting as still:
                    waiting |= still.batches
        if waiting:
            raise StillWaiting(waiting)

    def _inputs(self, column: OutputColumn, batch: pa.RecordBatch, done: Mapping[str, pa.Array]) -> pa.RecordBatch:
        from_source, names = self._input_aliases[column.name], list(column.columns)
        given = [batch.column(from_source[name]) if name in from_source else done[name] for name in names]
        if self._mappers[column.name].needs_row_ids:
            names, given = [*names, ROW_ID], [*given, batch.column(ROW_ID)]
        return with_prepared(pa.record_batch(given, names=names), prepared_columns(batch, column.name))

    def _is_of_source(self, column: OutputColumn) -> bool:
        """Whether all inputs of a UDF are columns of the source, and none of another UDF."""
        return set(column.columns) <= set(self._input_aliases[column.name])


def _first_rows(begun: BegunBatch, rows: int, of: int) -> MappedBatch:
    """Return the result of the first rows of a batch that was begun; the rows after them do not matter."""
    try:
        return begun.result().first(rows)
    except UdfError as error:
        if rows == of or error.row_index is None or error.row_index < rows or error.computed is None:
            raise
        return MappedBatch(error.computed, error.failures, of).first(rows)


def _projection(
    columns: Sequence[OutputColumn],
) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]]]:
    """Return the scan's columns by alias, the alias of each output column, and the aliases of each UDF's inputs."""
    sources: dict[str, str] = {}
    expressions: dict[str, str] = {}
    outputs: dict[str, str] = {}
    inputs: dict[str, dict[str, str]] = {}

    def source(name: str) -> str:
        return sources.setdefault(name, f"source_{len(sources)}")

    from_source = source_inputs(columns)
    for position, column in enumerate(columns):
        if column.kind == "column":
            outputs[column.name] = source(str(column.expression))
        elif column.kind == "sql":
            outputs[column.name] = f"value_{position}"
            expressions[f"value_{position}"] = f"({column.expression})"
        else:
            inputs[column.name] = {name: source(name) for name in from_source[column.name]}
    return {**{alias: f"`{name}`" for name, alias in sources.items()}, **expressions}, outputs, inputs


def take_rows(dataset: lance.LanceDataset, row_ids: RowIdArray, projection: Mapping[str, str]) -> pa.RecordBatch:
    """Read existing rows, no id twice, in the order of their ids; a projection has SQL or quoted columns."""
    with_id = {**projection, "_rowid": "_rowid"}
    blobs = {f"`{field.name}`" for field in dataset.schema if is_blob(field)}
    if not blobs & set(projection.values()):
        return _one_batch(dataset._take_rows(pa.array(row_ids.view(np.uint64)), columns=with_id), row_ids)
    parts = []
    for start in range(0, len(row_ids), _BLOB_ROWS):
        # Taking rows returns only the descriptors of blobs, so scan for their bytes.
        listed = ",".join(map(str, row_ids[start : start + _BLOB_ROWS].tolist()))
        scanner = dataset.scanner(
            columns=dict(projection), filter=f"_rowid IN ({listed})", with_row_id=True, blob_handling="all_binary"
        )
        parts.append(scanner.to_table())
    return _one_batch(pa.concat_tables(parts), row_ids)


def _one_batch(table: pa.Table, row_ids: RowIdArray) -> pa.RecordBatch:
    found = table.column("_rowid").to_numpy().view(np.int64)
    if len(found) != len(row_ids):
        missing = f"{len(row_ids) - len(found):,} of {counted(len(row_ids), 'row')}"
        raise KeyError(f"{missing} not found in this version of the table")
    if not np.array_equal(found, row_ids):
        order = np.argsort(found, kind="stable")
        table = rows_at(table, pa.array(order[np.searchsorted(found, row_ids, sorter=order)]))
    return single_batch(table)
