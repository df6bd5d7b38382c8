"""Read the values that rows of a view keep while only some of their functions run again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.query_columns import CARRIED, RUNS
from airflow_geneva.engine.apply.reader import RowBatch
from airflow_geneva.engine.apply.source_rows import take_rows
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.plan.shard import CarriedRows
from airflow_geneva.engine.views.definition import OutputColumn, filled_by
from airflow_geneva.engine.views.rows import HeldRows, RowIdArray
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True)
class CarriedValues:
    """Adds the values that a view holds to rows of its source, for `QueryComputer`.

    Each batch gets a column of booleans for each UDF column, which says on which rows the UDF runs, and a column of
    values for each column that some of the rows carry.

    Args:
        view: the planned version of the view.
        columns, explode: those of its query.
        limit: maximum bytes of the values that are added to a batch.
    """

    view: lance.LanceDataset
    columns: Sequence[OutputColumn]
    explode: str | None
    limit: int
    _fitting: RowsPerBudget = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fitting", RowsPerBudget(self.limit))

    def add(self, batches: Iterable[RowBatch], carried: CarriedRows) -> Iterator[RowBatch]:
        """Yield the batches with the values of their rows, and smaller ones if values are large.

        Raises:
            StorageError: the view lacks a row that the plan found in it.
        """
        held = HeldRows.of(self.view, carried.view_fragments)
        read = self._read_columns(carried)
        for rows in batches:
            at, count = 0, len(rows.offsets)
            while at < count:
                until = min(at + self._fitting.careful_rows, count)
                yield self._with_values(rows.part(at, until), carried, held, read)
                at = until

    def _read_columns(self, carried: CarriedRows) -> dict[str, pa.DataType]:
        """Return the columns that some of the rows carry, with the types of their values."""
        always = set.intersection(*(set(columns) for columns, _ in carried.runs))
        names = [name for name, filled in filled_by(self.columns).items() if filled not in always]
        types = {column.name: column.type for column in self.columns}
        return {name: _type(self.view.schema.field(name), name == self.explode, types[name]) for name in names}

    def _with_values(
        self, rows: RowBatch, carried: CarriedRows, held: HeldRows, read: dict[str, pa.DataType]
    ) -> RowBatch:
        count = len(rows.offsets)
        masks = [(columns, found.mask(rows.offsets)) for columns, found in carried.runs]
        wanted = np.logical_or.reduce([mask for _, mask in masks])
        names, arrays = list(rows.columns.schema.names), list(rows.columns.columns)
        for column in self.columns:
            if column.udf is not None:
                runs = ~wanted
                for among, mask in masks:
                    runs |= mask if column.name in among else False
                names.append(RUNS + column.name)
                arrays.append(pa.array(runs))
        ids = carried.renumbered.back.follow(rows.row_ids[wanted].view(np.int64))
        values = self._values(ids, held, list(read))
        at = pa.array(np.cumsum(wanted) - 1, mask=~wanted)
        for name, kind in read.items():
            names.append(CARRIED + name)
            arrays.append(rows_at(convert_array(values[name], kind), at) if name in values else pa.nulls(count, kind))
        found = pa.record_batch(arrays, names=names)
        self._fitting.record(count, found.nbytes - rows.columns.nbytes)
        return RowBatch(rows.start, rows.end, rows.offsets, rows.row_ids, found, rows.selected)

    def _values(self, ids: RowIdArray, held: HeldRows, names: Collection[str]) -> dict[str, pa.Array]:
        """Return the values that the view has of source rows, given by their ids; an exploded column as lists."""
        if not len(ids) or not names:
            return {}
        first, last = (np.searchsorted(held.source_ids, ids, side) for side in ("left", "right"))
        if missing := int((first == last).sum()):
            raise StorageError(
                f"{counted(missing, 'row')} of version {self.view.version} of view {self.view.uri} vanished after the "
                "plan. Run it again: a new plan looks at what the view has."
            )
        plain = {name: f"`{name}`" for name in names if name != self.explode}
        found: dict[str, pa.Array] = {}
        if plain:
            read = take_rows(self.view, held.row_ids[first], plain)
            found = {name: read.column(name) for name in plain}
        if self.explode is not None and self.explode in names:
            lengths = last - first
            each = np.repeat(first - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths) + np.arange(lengths.sum())
            items = take_rows(self.view, held.row_ids[each], {self.explode: f"`{self.explode}`"}).column(self.explode)
            bounds = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int64())
            found[self.explode] = pa.LargeListArray.from_arrays(bounds, items)
        return found


def _type(column: pa.Field, exploded: bool, written: str) -> pa.DataType:
    """Return the type of a column's values before they are exploded; `written` is its type as text."""
    kind = pa.large_binary() if is_blob(column) else column.type
    if not exploded:
        return kind
    return pa.large_list(kind) if written.startswith("large_list") else pa.list_(kind)
