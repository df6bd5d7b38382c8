"""Compute a query's columns from rows of its source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.apply.batch_api import BatchApiMapper, StillWaiting
from airflow_geneva.engine.apply.batch_mapper import BatchMapper, BegunBatch, wait_for_first
from airflow_geneva.engine.apply.group_calls import GROUP_ROWS, aggregate_alias, fold_alias, input_aliases
from airflow_geneva.engine.apply.isolation.runner import OpenMapper, open_batch_mapper
from airflow_geneva.engine.apply.stages import prepare_some, prepared_columns, with_prepared
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.checkpoint.records import ROW_ID
from airflow_geneva.engine.failures import RowFailure
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at
from airflow_geneva.engine.lance_io.blobs import as_bytes, is_blob_type
from airflow_geneva.engine.lance_io.row_ranges import Offsets
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.error_policy import rules_of
from airflow_geneva.engine.views.definition import OutputColumn, filled_by, source_inputs
from airflow_geneva.errors import UdfError

RUNS, CARRIED = "__geneva_runs ", "__geneva_carried "
"""Prefixes of columns of a batch: whether the UDF of a column runs on a row, and values of rows on which it does not.

A batch without them is computed whole. `CarriedValues` adds them.
"""


class QueryComputer(BatchMapper):
    """Computes all columns of a query as one struct array, which checkpoints store like a column; blobs are bytes.

    A batch comes from a scan with `projection` and row ids, because Lance cannot scan constants alone. A column's calls
    start as soon as their inputs are available, so that calls of several columns and batches are in flight.

    Args:
        udfs: the UDFs by column; without those that run on no row of any batch.
        open_mapper: opens the UDF of a column, with the columns of its inputs; None: as it is in `udfs`.
        keeps_before: if a row fails the job, compute all columns of the rows before it, and attach them to the error.
    """

    def __init__(
        self,
        columns: Sequence[OutputColumn],
        udfs: Mapping[str, UDF],
        open_mapper: OpenMapper | None = None,
        keeps_before: bool = True,
    ) -> None:
        self.columns = tuple(columns)
        self.keeps_before = keeps_before
        self.projection, self._aliases, self.input_aliases = _projection(self.columns)
        self._group_inputs = input_aliases(self.columns)
        self._groups = {name: udf.groups for name, udf in udfs.items() if udf.groups}
        self.filled_by = filled_by(self.columns)
        self._stack = ExitStack()
        opens = open_mapper or (lambda name, inputs: open_batch_mapper(udfs[name], inputs))
        self.mappers: dict[str, BatchMapper] = {
            column.name: self._stack.enter_context(opens(column.name, column.inputs))
            for column in self.columns
            if column.name in udfs
        }
        self._types = {
            column.name: _type_of(column, udfs[filled])
            for column in self.columns
            if (filled := self.filled_by.get(column.name, "")) in udfs
        }
        rules = accumulate((len(rules_of(udfs[name].on_error)) for name in self.mappers), initial=0)
        self.first_rule = dict(zip(self.mappers, rules, strict=False))
        self._read_chains({name for name in self.mappers if udfs[name].form == "scalar"})
        self.calls_rows = any(mapper.calls_rows for mapper in self.mappers.values())
        self.needs_row_ids = any(mapper.needs_row_ids for mapper in self.mappers.values())
        self.prepares_at_a_time = max((mapper.prepares_at_a_time for mapper in self.mappers.values()), default=0)
        most = (mapper.prepares_rows for mapper in self.mappers.values() if mapper.prepares_rows is not None)
        self.prepares_rows = min(most, default=None)

    def _read_chains(self, scalar: set[str]) -> None:
        """Find the columns that need other columns' values, and the number of calls in flight along such chains."""
        in_flight = {name for name, mapper in self.mappers.items() if mapper.calls_at_a_time}
        udf_columns = [column for column in self.columns if column.name in self.mappers]
        above, below = ({name: set[str]() for name in self.mappers} for _ in range(2))
        along = dict.fromkeys(self.mappers, 0)
        for column in udf_columns:
            needed = [name for name in self.needed(column) if name in self.mappers]
            above[column.name] = set(needed).union(*(above[name] for name in needed))
            along[column.name] = max((along[name] for name in needed), default=0)
            along[column.name] += self.mappers[column.name].calls_at_a_time
            for name in above[column.name]:
                below[name].add(column.name)
        self.calls_at_a_time = max(along.values(), default=0)
        self.ahead = {name for name in self.mappers if in_flight & {name, *below[name]}}
        """Columns computed before their batch's turn: their calls run in the background, or such calls need them."""
        rowwise = in_flight & scalar
        self.by_row = {
            name for name in scalar if (name in rowwise) + bool(rowwise & above[name]) + bool(rowwise & below[name]) > 1
        }
        """Scalar columns computed row by row: on a chain, from the first to the last of several with a call per row."""

    def needed(self, column: OutputColumn) -> list[str]:
        """Return the UDF columns whose values are inputs of a column."""
        if column.name in self._groups:
            return []
        from_source = self.input_aliases[column.name]
        found = (self.filled_by.get(name) for name in column.columns if name not in from_source)
        return [name for name in dict.fromkeys(found) if name is not None]

    def __enter__(self) -> QueryComputer:
        return self

    def close(self) -> None:
        self._stack.close()

    def prepare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Preprocess for the UDFs whose inputs are all columns of the source; see `BatchMapper`."""
        for column in self.columns:
            mapper, from_source = self.mappers.get(column.name), self.input_aliases.get(column.name, {})
            if mapper and mapper.prepares_at_a_time and set(column.columns) <= set(from_source):
                rows = np.flatnonzero(_runs(batch, column.name))
                if not len(rows):
                    continue
                made = prepare_some(mapper, self.inputs(column, batch, {}), rows)
                batch = with_prepared(batch, prepared_columns(made), column.name)
        return batch

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        begun = self._begun(batch)
        try:
            if not self.needs_row_ids:
                begun.go_on()
        except BaseException:
            begun.cancel()
            raise
        return begun

    def _begun(self, batch: pa.RecordBatch) -> _BegunQuery | _BegunGroups:
        """Group rows on which the same UDFs run."""
        marked = [name for name in self.mappers if RUNS + name in batch.schema.names]
        if not marked or not batch.num_rows:
            return _BegunQuery(self, batch, self.mappers)
        masks = np.stack([_runs(batch, name) for name in marked])
        sets, of_row = np.unique(masks, axis=1, return_inverse=True)
        groups = []
        for number, chosen in enumerate(sets.T):
            names = [name for name, runs in zip(marked, chosen.tolist(), strict=True) if runs]
            rows = np.flatnonzero(of_row.ravel() == number)
            part = batch if len(rows) == batch.num_rows else rows_at(batch, pa.array(rows))
            groups.append((rows, _BegunQuery(self, part, names)))
        return groups[0][1] if len(groups) == 1 else _BegunGroups(groups, batch.num_rows)

    def plain(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Return the columns that no UDF computes."""
        return {name: batch.column(alias) for name, alias in self._aliases.items()}

    def carried(self, batch: pa.RecordBatch, running: Collection[str]) -> dict[str, pa.Array]:
        """Return the values of the columns that no `running` UDF fills."""
        found: dict[str, pa.Array] = {}
        for name, filled in self.filled_by.items():
            if filled not in running:
                values = batch.column(CARRIED + name)
                found[name] = convert_array(values, self._types[name]) if name in self._types else values
        return found

    def spread(self, values: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
        """Return the values of all columns that UDFs fill, from what the UDFs return, by the column with the UDF."""
        found: dict[str, pa.Array] = {}
        for column in self.columns:
            made = values.get(self.filled_by.get(column.name, ""))
            if made is not None:
                found[column.name] = made if column.field is None else pc.struct_field(made, column.field)
        return found

    def ask_batch_apis(self, batch: pa.RecordBatch, running: Collection[str]) -> None:
        """Raise StillWaiting if a batch API has not answered all rows, before any other UDF is called."""
        waiting: dict[str, int] = {}
        plain = self.plain(batch)
        for column in self.columns:
            mapper = self.mappers[column.name] if column.name in running else None
            if isinstance(mapper, BatchApiMapper):
                try:
                    mapper.collect(self.inputs(column, batch, plain))
                except StillWaiting as still:
                    waiting |= still.batches
        if waiting:
            raise StillWaiting(waiting)

    def inputs(self, column: OutputColumn, batch: pa.RecordBatch, others: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """Return the inputs of a column's UDF, from a batch of the source and other columns of the query."""
        if (form := self._groups.get(column.name)) is not None:
            if column.udf is not None and column.udf.removes is not None:
                return pa.record_batch([batch.column(fold_alias(column.name))], names=[fold_alias(column.name)])
            aliases = {GROUP_ROWS: GROUP_ROWS} if form == "batches" else self._group_inputs
            taken = [GROUP_ROWS] if form == "batches" else list(dict.fromkeys(column.inputs))
            return pa.record_batch([batch.column(aliases[name]) for name in taken], names=taken)
        from_source, names = self.input_aliases[column.name], list(column.columns)
        given = [batch.column(from_source[name]) if name in from_source else others[name] for name in names]
        if self.mappers[column.name].needs_row_ids:
            names, given = [*names, ROW_ID], [*given, batch.column(ROW_ID)]
        return with_prepared(pa.record_batch(given, names=names), prepared_columns(batch, column.name))


@dataclass(eq=False)
class _Part:
    """Rows of a batch on which a UDF is called together, with the started calls and their result."""

    start: int
    stop: int
    begun: BegunBatch | None = None
    found: MappedBatch | None = None


class _BegunColumn:
    """A UDF column of a batch, as one part, or with `by_row` as one part per row."""

    def __init__(self, column: OutputColumn, mapper: BatchMapper, rows: int, by_row: bool) -> None:
        self.column = column
        self.mapper = mapper
        parts = [(row, row + 1) for row in range(rows)] if by_row and rows else [(0, rows)]
        self.parts = [_Part(*part) for part in parts]

    def unfinished(self, stop: int) -> int:
        """Return the number of calls on the rows before ``stop`` that have not ended or not started."""
        left = (part for part in self.parts if part.start < stop and part.found is None)
        alone = self.mapper.calls_rows
        return sum(part.begun.unfinished if part.begun else part.stop - part.start if alone else 1 for part in left)

    def has(self, stop: int) -> bool:
        return all(part.found is not None for part in self.parts if part.start < stop)

    def values(self, start: int, stop: int) -> pa.Array | None:
        """Return the values of some rows; None if they are not available yet."""
        if len(self.parts) == 1:
            found = self.parts[0].found
            return None if found is None else found.values.slice(start, stop - start)
        parts = self.parts[start:stop]
        values = [part.found.values for part in parts if part.found is not None]
        return pa.concat_arrays(values) if len(values) == len(parts) else None

    def mapped(self, rows: int) -> MappedBatch:
        """Return the result of the first rows, whose values must be available."""
        values = self.values(0, rows)
        assert values is not None
        done = [(part.start, part.found) for part in self.parts if part.found is not None]
        failures = (replace(one, index=start + one.index) for start, found in done for one in found.failures)
        return MappedBatch(values, tuple(one for one in failures if one.index < rows), rows)

    def succeeded(self) -> dict[int, pa.Array]:
        """Cancel the calls in flight; return the available values by row, each as an array of length one."""
        good: dict[int, pa.Array] = {}
        for part in self.parts:
            if part.found is not None:
                failed = {failure.index for failure in part.found.failures}
                values = part.found.values
                rows = [row if row not in failed else -1 for row in range(len(values))]
            elif part.begun is not None:
                rows, values = part.begun.cancel()
            else:
                continue
            good |= {part.start + row: values.slice(at, 1) for at, row in enumerate(rows) if row >= 0}
        return good


class _BegunQuery(BegunBatch):
    """A batch of a query, on whose rows the same UDFs run.

    After a row fails the job, only the rows before it are computed.
    """

    def __init__(self, computer: QueryComputer, batch: pa.RecordBatch, running: Collection[str]) -> None:
        self.computer = computer
        self.batch = batch
        self.held = computer.needs_row_ids  # until batch APIs have answered
        self.plain = computer.plain(batch) | computer.carried(batch, running)
        self.stop = batch.num_rows
        self.failure: UdfError | None = None
        self.columns = {
            name: _BegunColumn(column, computer.mappers[name], self.stop, name in computer.by_row)
            for column in computer.columns
            if (name := column.name) in running
        }
        self.ahead = computer.ahead & self.columns.keys()

    @property
    def unfinished(self) -> int:
        if self.held:
            return 0
        return max((self.columns[name].unfinished(self.stop) for name in self.ahead), default=0)

    def go_on(self) -> bool:
        if not self.held:
            self._advance(self.ahead)
        return self.held or all(self.columns[name].has(self.stop) for name in self.ahead)

    def ask(self) -> None:
        """Raise StillWaiting if a batch API has not answered all rows."""
        if self.held:
            self.computer.ask_batch_apis(self.batch, self.columns)
            self.held = False

    def result(self) -> MappedBatch:
        self.ask()
        wait_for_first([self])
        self._advance(self.columns, whatever_waits=True)
        rows, failure = self.stop, self.failure
        if failure is not None and not rows:
            raise failure
        mapped = {name: column.mapped(rows) for name, column in self.columns.items()}
        computed = {name: outcome.values for name, outcome in mapped.items()}
        plain = {name: values.slice(0, rows) for name, values in self.plain.items()}
        values = self._rows(plain | self.computer.spread(computed))
        failures = tuple(sorted(self._failures(mapped), key=lambda failure: failure.index))
        if failure is not None:
            error = UdfError(str(failure), rows, values, failures, failure.column, failure.call)
            raise error from failure.__cause__
        return MappedBatch(values, failures, rows)

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        """Cancel; return the rows that have the values of all columns."""
        found = {name: column.succeeded() for name, column in self.columns.items()}
        rows = sorted(set.intersection(*map(set, found.values()))) if found else []
        if not rows:
            return [], None
        computed = {name: pa.concat_arrays([good[row] for row in rows]) for name, good in found.items()}
        plain = {name: rows_at(values, pa.array(rows)) for name, values in self.plain.items()}
        return rows, self._rows(plain | self.computer.spread(computed))

    def _advance(self, names: Collection[str], whatever_waits: bool = False) -> None:
        """Start the calls of columns whose inputs are available, and take the results of those that have ended."""
        for name, column in self.columns.items():
            for part in column.parts if name in names else ():
                if part.start >= self.stop and self.failure is not None:
                    break
                if part.begun is None and (given := self._inputs(column, part)) is not None:
                    part.begun = column.mapper.begin(given)
                if part.found is None and part.begun is not None and (whatever_waits or part.begun.go_on()):
                    part.found = self._take(column.column.name, part, part.begun)

    def _inputs(self, column: _BegunColumn, part: _Part) -> pa.RecordBatch | None:
        """Return the inputs of a part, up to a row that fails the job; None if some are not available yet."""
        part.stop = min(part.stop, self.stop)
        computed = dict[str, pa.Array]()
        for name in self.computer.needed(column.column):
            if name not in self.columns:
                continue  # carried
            if (values := self.columns[name].values(part.start, part.stop)) is None:
                return None
            computed[name] = values
        rows = slice(part.start, part.stop)
        plain = {name: values[rows] for name, values in self.plain.items()}
        return self.computer.inputs(column.column, self.batch[rows], plain | self.computer.spread(computed))

    def _take(self, name: str, part: _Part, begun: BegunBatch) -> MappedBatch | None:
        """Return the result of a part; if a row of it fails the job, the result of the rows before it."""
        try:
            return begun.result()
        except UdfError as error:
            error.column = name
            rows = error.row_index
            if rows is None or not self.computer.keeps_before or (rows and error.computed is None):
                # The results of the rows before it are not known, or not wanted.
                self.stop, self.failure = 0, error
                return None
            error.row_index = part.start + rows
            if self.failure is None or error.row_index < self.stop:
                self.stop, self.failure = error.row_index, error
            return MappedBatch(error.computed, error.failures, rows) if rows else None

    def _rows(self, values: Mapping[str, pa.Array]) -> pa.StructArray:
        names = [column.name for column in self.computer.columns]
        return pa.StructArray.from_arrays([as_bytes(values[name]) for name in names], names)

    def _failures(self, mapped: Mapping[str, MappedBatch]) -> list[RowFailure]:
        found: dict[int, list[RowFailure]] = {}
        for name, outcome in mapped.items():
            first_rule = self.computer.first_rule[name]
            for failure in outcome.failures:
                named = replace(failure, rule=failure.rule + first_rule, column=name)
                found.setdefault(failure.index, []).append(named)
        return [replace(first, also=tuple(also)) for first, *also in found.values()]


class _BegunGroups(BegunBatch):
    """A batch with rows on which different UDFs run: groups of rows, each with its positions in the batch."""

    def __init__(self, groups: Sequence[tuple[Offsets, _BegunQuery]], rows: int) -> None:
        self.groups = groups
        self.rows = rows

    @property
    def unfinished(self) -> int:
        return sum(begun.unfinished for _, begun in self.groups)

    def go_on(self) -> bool:
        ended = [begun.go_on() for _, begun in self.groups]
        return all(ended)

    def result(self) -> MappedBatch:
        self._ask()
        stop, error, found = self.rows, None, list[tuple[Offsets, MappedBatch]]()
        for rows, begun in self.groups:
            try:
                mapped = begun.result()
            except UdfError as failed:
                if failed.row_index is None:
                    raise
                failed.row_index = int(rows[failed.row_index])
                if failed.computed is None and failed.row_index != rows[0]:
                    raise  # the values of the rows before it are not known
                if error is None or failed.row_index < stop:
                    stop, error = failed.row_index, failed
                if failed.computed is None:
                    continue
                mapped = MappedBatch(failed.computed, failed.failures, 0)
            found.append((rows, mapped))
        parts = [(rows[: int(np.searchsorted(rows, stop))], mapped) for rows, mapped in found]
        values = _in_order((rows, mapped.values[: len(rows)]) for rows, mapped in parts if len(rows))
        failures = [
            replace(failure, index=int(rows[failure.index]))
            for rows, mapped in parts
            for failure in mapped.failures
            if failure.index < len(rows)
        ]
        ordered = tuple(sorted(failures, key=lambda failure: failure.index))
        if error is not None:
            error.computed, error.failures = values, ordered
            raise error
        assert values is not None
        return MappedBatch(values, ordered, sum(mapped.rows_called for _, mapped in found))

    def _ask(self) -> None:
        waiting: dict[str, int] = {}
        for _, begun in self.groups:
            try:
                begun.ask()
            except StillWaiting as still:
                waiting |= still.batches
        if waiting:
            raise StillWaiting(waiting)

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        found = [(rows[kept], values) for rows, begun in self.groups for kept, values in [begun.cancel()]]
        parts = [(rows, values) for rows, values in found if values is not None]
        return sorted(int(row) for rows, _ in parts for row in rows), _in_order(parts)


def _in_order(parts: Iterable[tuple[Offsets, pa.Array]]) -> pa.Array | None:
    """Join values in the order of their rows; None if there are none."""
    found = list(parts)
    if not found:
        return None
    order = np.argsort(np.concatenate([rows for rows, _ in found]), kind="stable")
    return rows_at(pa.concat_arrays([values for _, values in found]), pa.array(order))


def _runs(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.bool_]:
    """Return for each row of a batch whether a column's UDF runs on it."""
    if RUNS + name not in batch.schema.names:
        return np.ones(batch.num_rows, np.bool_)
    found: npt.NDArray[np.bool_] = batch.column(RUNS + name).to_numpy(zero_copy_only=False)
    return found


def _type_of(column: OutputColumn, udf: UDF) -> pa.DataType:
    """Return the type of a column's values as its UDF computes them."""
    kind = udf.data_type if column.field is None else udf.data_type.field(column.field).type
    return pa.large_binary() if is_blob_type(kind) else kind


def read_for(columns: Sequence[OutputColumn], running: Collection[str]) -> dict[str, str]:
    """Return the part of a projection that is read if only some UDFs run."""
    projection, outputs, inputs = _projection(columns)
    needed = {*outputs.values(), *(alias for name in running for alias in inputs[name].values())}
    return {alias: text for alias, text in projection.items() if alias in needed}


def _projection(
    columns: Sequence[OutputColumn],
) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]]]:
    """Return the scan's columns by alias, the alias of each output column, and the aliases of each UDF's inputs.

    `GroupColumns` adds aggregates, and the inputs of UDFs of groups.
    """
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
        elif column.kind == "aggregate":
            outputs[column.name] = aggregate_alias(position)
        elif column.udf is not None and column.udf.groups:
            inputs[column.name] = {}
        elif column.udf is not None:
            inputs[column.name] = {name: source(name) for name in from_source[column.name]}
    return {**{alias: f"`{name}`" for name, alias in sources.items()}, **expressions}, outputs, inputs
