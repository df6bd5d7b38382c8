"""Make the columns of a batch of groups from the rows of their source: aggregates, and the inputs of functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.group_calls import (
    GROUP_ROWS,
    LARGE_GROUP,
    aggregate_alias,
    call_arguments,
    fold_alias,
    input_aliases,
)
from airflow_geneva.engine.counts import NEW_STATE
from airflow_geneva.engine.lance_io.arrays import column_at
from airflow_geneva.engine.views.aggregates import Aggregate, Lengths, aggregate_groups, parse_aggregate
from airflow_geneva.engine.views.definition import OutputColumn, fold_columns
from airflow_geneva.engine.views.rows import RowIdArray


@dataclass(frozen=True)
class GroupColumns:
    """The columns that `QueryComputer` needs in a batch of groups besides those that are read of the groups.

    Args:
        columns: those of the view's query.
        running: the columns whose functions run on some group of the batch.
    """

    columns: tuple[OutputColumn, ...]
    running: frozenset[str]

    @staticmethod
    def of(columns: Sequence[OutputColumn], running: Collection[str]) -> GroupColumns:
        return GroupColumns(tuple(columns), frozenset(running))

    @property
    def reads_rows(self) -> bool:
        """Whether values of all rows of a group are read at once, and not only their number or ids."""
        return bool(self.projection)

    def needs_order(self, sizes: Lengths) -> bool:
        """Whether rows of groups of these sizes must be in order: an iterator sorts those of a large group itself."""
        ordered = bool(self._inputs) or any(aggregate.is_ordered for _, _, aggregate in self._aggregates)
        return ordered or (self._has_iterators and bool((sizes < LARGE_GROUP).any()))

    @cached_property
    def projection(self) -> dict[str, str]:
        """What is read of each row of the source: SQL by alias."""
        arguments = {alias: f"({one.argument})" for alias, _, one in self._aggregates if one.argument is not None}
        roots = dict.fromkeys(name.partition(".")[0] for name in self._inputs)
        return arguments | {self._root(name): f"`{name}`" for name in roots}

    def unfolded(self, row_ids: RowIdArray, lengths: Lengths) -> dict[str, pa.Array]:
        """Return what the calls of functions get that can be folded, if all rows are added to the state of none."""
        folds, count = fold_columns([column for column in self._functions if column.udf]), len(lengths)
        parts = np.split(row_ids, np.cumsum(lengths)[:-1]) if count else []
        none = [row_ids[:0]] * count
        made = call_arguments(pa.nulls(count), parts, none, lengths, [NEW_STATE] * count) if folds else None
        return {fold_alias(column.name): made for column in folds if made is not None}

    @property
    def needs_rows(self) -> bool:
        """Whether it matters which rows a group has, and not only their number."""
        return self.reads_rows or self._has_iterators

    def compute(self, rows: pa.RecordBatch | None, row_ids: RowIdArray, lengths: Lengths) -> dict[str, pa.Array]:
        """Return the columns of a batch of groups, by the aliases under which `QueryComputer` finds them.

        Args:
            rows: the columns of `projection`, of rows sorted by group and then by the order of the view; None if there
                are none.
            row_ids: the ids of these rows in the source; those of a large group ascend.
            lengths: the number of rows of each group.
        """
        made: dict[str, pa.Array] = {}
        for alias, column, aggregate in self._aggregates:
            values = None if aggregate.argument is None or rows is None else rows.column(alias)
            made[alias] = aggregate_groups(aggregate, values, lengths, column)
        bounds = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int64())
        aliases = input_aliases(self.columns)
        for name in self._inputs:
            assert rows is not None
            root, _, path = name.partition(".")
            values = rows.column(self._root(root))
            if path:
                values = column_at(pa.record_batch([values], names=[root]), name)
            made[aliases[name]] = pa.LargeListArray.from_arrays(bounds, values)
        if self._has_iterators:
            made[GROUP_ROWS] = pa.LargeListArray.from_arrays(bounds, pa.array(row_ids, pa.int64()))
        return made

    @cached_property
    def _aggregates(self) -> list[tuple[str, str, Aggregate]]:
        return [
            (aggregate_alias(at), column.name, parse_aggregate(column.expression or "", column.name))
            for at, column in enumerate(self.columns)
            if column.kind == "aggregate"
        ]

    @property
    def _has_iterators(self) -> bool:
        """Whether a function takes an iterator over all rows."""
        batches = (one.udf for one in self._functions if one.udf is not None and one.udf.groups == "batches")
        return any(udf.removes is None for udf in batches)

    @property
    def _functions(self) -> list[OutputColumn]:
        return [column for column in self.columns if column.udf is not None and column.name in self.running]

    @cached_property
    def _inputs(self) -> list[str]:
        """The inputs whose values are read, those of functions that take no iterator."""
        read = (column for column in self._functions if column.udf is not None and column.udf.groups != "batches")
        return list(dict.fromkeys(name for column in read for name in column.inputs))

    def _root(self, name: str) -> str:
        return f"input_{list(dict.fromkeys(one.partition('.')[0] for one in self._inputs)).index(name)}"
