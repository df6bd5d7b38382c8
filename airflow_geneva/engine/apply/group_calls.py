"""What a function gets that is called once per group: the values of the group's rows, in the form that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.reader import joint_width
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget, batch_bytes, task_memory_bytes
from airflow_geneva.engine.lance_io.to_python import python_values

if TYPE_CHECKING:
    from airflow_geneva.engine.apply.source_rows import SourceRows
    from airflow_geneva.engine.udf.fold import FoldedCall
    from airflow_geneva.engine.udf.signature import Form
    from airflow_geneva.engine.views.definition import OutputColumn
    from airflow_geneva.engine.views.rows import RowIdArray

GROUP_ROWS = "__geneva_group_rows"
"""The column of a batch of groups with the ids of each group's rows in the source: in order, or, of a large group,
ascending."""

LARGE_GROUP = 1 << 19
"""Rows of a group from which it is computed alone, and its rows are sorted where they are read."""


FOLDED = ("kept", "added", "removed", "rows", "as_of", "stamp", "why", "then")
"""Fields of what a call of a function gets that can be folded: the state that is kept, the ids of the rows to add to it
and to remove from it, the marks of the new state, and the version of the source that has the removed rows."""


def fold_alias(column: str) -> str:
    """Name the column of a batch of groups with what the calls of a column's function get, if it can be folded."""
    return f"fold {column}"


def aggregate_alias(position: int) -> str:
    """Name the column of a batch of groups that has the results of the aggregate at a position of the query."""
    return f"aggregate_{position}"


def input_aliases(columns: Sequence[OutputColumn]) -> dict[str, str]:
    """Name the columns of a batch of groups that have the inputs of functions, by the names of the inputs."""
    taken = (name for column in columns if column.udf is not None and column.udf.groups for name in column.inputs)
    return {name: f"rows_{at}" for at, name in enumerate(dict.fromkeys(taken))}


def group_arguments(
    inputs: pa.RecordBatch, form: Form, columns: Sequence[str], source: SourceRows | None, fold: FoldedCall | None
) -> list[Sequence[Any]]:
    """Return the arguments of calls on groups: for each parameter, one value per group.

    Args:
        inputs: a list column for each input, with one list per group; or `GROUP_ROWS` for iterators of batches.
        columns, source: what these iterators read, and where.
        fold: the function, if it can be folded; then the inputs are one column with the fields `FOLDED`.
    """
    if form == "batches":
        assert source is not None
        if fold is not None:
            return _folded_arguments(inputs.column(0), columns, source, fold)
        return [_Batches(inputs.column(GROUP_ROWS), columns, source)]
    parts = [_parts(lists) for lists in inputs.columns]
    if form == "array":
        return list(parts)
    names = inputs.schema.names
    return [[pa.record_batch(list(arrays), names=names) for arrays in zip(*parts, strict=True)]]


def call_arguments(
    states: pa.Array,
    added: Sequence[RowIdArray],
    removed: Sequence[RowIdArray],
    sizes: RowIdArray,
    why: Sequence[str],
    marks: tuple[int, int, int] = (0, 0, 0),
) -> pa.StructArray:
    """Return what a call on each group gets, as one column.

    Args:
        marks: the version of the table `rows`, the stamp, and the source version with the removed rows.
    """
    as_of, stamp, then = (np.full(len(sizes), mark) for mark in marks)
    arrays = [
        states, _lists(added), _lists(removed), *map(pa.array, (sizes, as_of, stamp)), pa.array(why, pa.string()),
        pa.array(then),
    ]  # fmt: skip
    return pa.StructArray.from_arrays(arrays, list(FOLDED))


def _lists(parts: Sequence[RowIdArray]) -> pa.LargeListArray:
    bounds = np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))
    return pa.LargeListArray.from_arrays(
        pa.array(bounds, pa.int64()), pa.array(np.concatenate([np.empty(0, np.int64), *map(np.sort, parts)]))
    )


def _folded_arguments(
    inputs: pa.StructArray, columns: Sequence[str], source: SourceRows, fold: FoldedCall
) -> list[Sequence[Any]]:
    kept, added, removed, *_ = map(inputs.field, FOLDED)
    then = int(inputs.field("then").to_numpy()[0]) if len(inputs) else 0
    marks, _ = python_values(pa.StructArray.from_arrays(list(map(inputs.field, FOLDED[3:])), list(FOLDED[3:])))
    read = _Batches(added, columns, source), _Batches(removed, columns, source.at(then))
    return [fold.python(kept), *read, marks]


def _parts(lists: pa.LargeListArray) -> list[pa.Array]:
    items = lists.values
    return [items.slice(start, end - start) for start, end in pairwise(lists.offsets.to_numpy().tolist())]


class _Batches(Sequence[Iterator[pa.RecordBatch]]):
    """An iterator of record batches for each group, made when it is asked for.

    A batch takes at most the bytes of a batch of a task. Rows of several small groups are read together, those of a
    large one in order.
    """

    def __init__(self, row_ids: pa.LargeListArray, columns: Sequence[str], source: SourceRows) -> None:
        offsets: RowIdArray = row_ids.offsets.to_numpy()
        self._bounds = (offsets - offsets[0]).tolist()
        self._row_ids: RowIdArray = row_ids.values.to_numpy()[offsets[0] : offsets[-1]]
        self._columns, self._source = columns, source
        self._fitting = RowsPerBudget(batch_bytes(task_memory_bytes()))
        self._held, self._first = pa.record_batch({}), 0

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, at: Any) -> Any:
        start, stop = self._bounds[at], self._bounds[at + 1]
        if stop - start >= LARGE_GROUP:
            return self._source.in_order(self._row_ids[start:stop], self._columns, self._fitting.limit)
        return self._batches(start, stop)

    def _batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            held, skipped = self._rows_from(start)
            part = held.slice(skipped, stop - start)
            start += part.num_rows
            yield part

    def _rows_from(self, start: int) -> tuple[pa.RecordBatch, int]:
        """Return a batch that has a row, and the row's position in it."""
        if not self._first <= start < self._first + self._held.num_rows:
            ids = self._row_ids[start : start + self._fitting.careful_rows]
            # Drop the previous batch before the next one is read.
            self._held = pa.record_batch({})
            self._held, self._first = self._source.take(ids, self._columns), start
            if (width := joint_width(self._held.schema.types)) is not None:
                self._fitting = RowsPerBudget(self._fitting.limit, width)
            self._fitting.record(len(ids), self._held.nbytes)
        return self._held, start - self._first
