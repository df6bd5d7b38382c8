"""Cut rows into batches for a model: rows of similar weight, up to the limit of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import BatchMapper, BegunBatch
from airflow_geneva.engine.apply.fitting import most_fitting
from airflow_geneva.engine.apply.udf_call import MappedBatch, Mapper
from airflow_geneva.engine.apply.weights import Weights, weigh
from airflow_geneva.engine.failures import RowFailure
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.limits.rate_limit import is_used_up, may_go_on
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.error_policy import Skip, deciding_rule, rules_of
from airflow_geneva.errors import UdfError

Rows: TypeAlias = npt.NDArray[np.int64]
"""Positions of rows in a window."""


@dataclass(frozen=True, eq=False)
class Cutter:
    """Cuts the rows of a window into batches, by descending weight if there are weights.

    The weight of a batch is that of its heaviest row times its number of rows, because a model pads all rows to the
    longest one. It is at most the limit, unless the batch is a single row.
    """

    udf: UDF
    weights: Weights | None
    most_rows: int | None
    known_to_fit: float

    def in_order(self, rows: Rows) -> Rows:
        return rows if self.weights is None else rows[np.argsort(-self.weights[rows], kind="stable")]

    def first_batch(self, rows: Rows) -> int:
        """Return the number of rows in the first batch of these sorted rows, under the current limit."""
        most = len(rows) if self.most_rows is None else min(self.most_rows, len(rows))
        if self.weights is None:
            return most
        heaviest = float(self.weights[rows[0]])
        limit = min(self.udf.batch_limit or inf, most_fitting(self.udf, self.known_to_fit))
        return most if heaviest <= 0 or limit == inf else min(max(int(limit / heaviest), 1), most)


class CuttingMapper(BatchMapper):
    """Calls a UDF on batches that it cuts from windows of rows; results are in the order of the rows.

    A row that cannot be weighed fails as if the UDF had raised. If several rows of a window would fail the job, the
    first one does, as without cutting: the rows before it are computed first.

    Args:
        most_rows: the maximum number of rows of a batch; None: any number.
    """

    def __init__(self, inner: BatchMapper, mapper: Mapper, most_rows: int | None) -> None:
        self.inner = inner
        self.mapper = mapper
        self.most_rows = most_rows
        self.calls_at_a_time, self.needs_row_ids = inner.calls_at_a_time, inner.needs_row_ids

    def close(self) -> None:
        self.inner.close()

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        udf, rows = self.mapper.udf, np.arange(batch.num_rows)
        begun = _BegunWindow(self.inner, batch, udf.data_type)
        weights: Weights | None = None
        if udf.batch_by is not None:
            inputs, rules = self.mapper.inputs(batch), rules_of(udf.on_error)
            weights, troubles = weigh(udf, inputs, rules)
            for row, trouble in sorted(troubles.items()):
                rule = deciding_rule(rules, trouble.fits, None)
                if rule is None or not isinstance(rules[rule], Skip):
                    begun.fail(row, self.mapper.failure(trouble, inputs, row, batch.num_rows))
                    break
                failure = RowFailure(row, rule, trouble.exception, trouble.message, trouble.traceback, 0)
                begun.keep(rows[row : row + 1], pa.nulls(1, udf.data_type), [failure])
            rows = np.setdiff1d(rows, list(troubles))
        begun.cut(Cutter(udf, weights, self.most_rows, self.mapper.known_to_fit), rows)
        return begun


class _BegunWindow(BegunBatch):
    """A window: its batches whose calls may be in flight, and rows that are not cut yet."""

    def __init__(self, inner: BatchMapper, window: pa.RecordBatch, kind: pa.DataType) -> None:
        self.inner = inner
        self.window = window
        self.kind = kind
        self.todo = deque[tuple[Rows, BegunBatch | None]]()
        self.stop = window.num_rows
        self.error: UdfError | None = None
        self.called = 0
        self._rows = list[Rows]()
        self._values = list[pa.Array]()
        self._failures = list[RowFailure]()

    def cut(self, cutter: Cutter, rows: Rows) -> None:
        """Set the rows to compute; start their batches now if calls run in the background."""
        self.cutter, rows = cutter, cutter.in_order(rows)
        while self.inner.calls_at_a_time and len(rows):
            count = cutter.first_batch(rows)
            self.todo.append((rows[:count], self._begin(rows[:count])))
            rows = rows[count:]
        self.todo.append((rows, None))

    @property
    def unfinished(self) -> int:
        return sum(begun.unfinished for _, begun in self.todo if begun is not None)

    def result(self) -> MappedBatch:
        while self.todo:
            rows, begun = self.todo.popleft()
            if begun is None:
                rows = rows[rows < self.stop]
                if not len(rows):
                    continue
                if is_used_up():
                    may_go_on()
                count = self.cutter.first_batch(rows)
                self.todo.appendleft((rows[count:], None))
                rows = rows[:count]
                begun = self._begin(rows)
            self.todo.appendleft((rows, begun))
            self._take(rows, begun)
        values, failures = self._joined(self.stop)
        if self.error is not None:
            self.error.row_index, self.error.computed, self.error.failures = self.stop, values, failures
            raise self.error
        return MappedBatch(values, failures, self.called)

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        for rows, begun in self.todo:
            found, values = ([], None) if begun is None else begun.cancel()
            if values is not None:
                self.keep(rows[found], values)
        self.todo.clear()
        failed = {failure.index for failure in self._failures}
        rows = np.sort(np.concatenate([np.empty(0, np.int64), *self._rows]))
        done = np.flatnonzero(~np.isin(rows, list(failed)))
        if not len(done):
            return [], None
        values, _ = self._joined(self.window.num_rows)
        return rows[done].tolist(), rows_at(values, pa.array(done))

    def keep(self, rows: Rows, values: pa.Array, failures: Iterable[RowFailure] = ()) -> None:
        self._rows.append(rows)
        self._values.append(values)
        self._failures += failures

    def fail(self, row: int, error: UdfError) -> None:
        """Record that a row fails the job, so that only the rows before it are computed."""
        if row < self.stop:
            self.stop, self.error = row, error

    def _begin(self, rows: Rows) -> BegunBatch:
        in_order = len(rows) == self.window.num_rows and bool((np.diff(rows) == 1).all())
        return self.inner.begin(self.window if in_order else rows_at(self.window, pa.array(rows)))

    def _take(self, rows: Rows, begun: BegunBatch) -> None:
        """Wait for a batch and keep its results; rows after one that fails the job return to `todo`."""
        try:
            mapped = begun.result()
        except UdfError as error:
            if (at := error.row_index) is None or error.computed is None:
                raise
            self.todo.popleft()
            self.keep(rows[:at], error.computed, _moved(error.failures, rows))
            self.fail(int(rows[at]), error)
            self.todo.appendleft((rows[at + 1 :], None))
            return
        self.todo.popleft()
        self.called += mapped.rows_called
        self.keep(rows, mapped.values, _moved(mapped.failures, rows))

    def _joined(self, stop: int) -> tuple[pa.Array, tuple[RowFailure, ...]]:
        """Return the values and failures of the computed rows before `stop`, in row order."""
        rows = np.concatenate([np.empty(0, np.int64), *self._rows])
        order = np.argsort(rows)
        values = pa.concat_arrays(self._values) if self._values else pa.nulls(0, self.kind)
        wanted = order[: int(np.searchsorted(rows[order], stop))]
        if len(wanted) != len(values) or (np.diff(wanted) != 1).any():
            values = rows_at(values, pa.array(wanted))
        failures = (failure for failure in self._failures if failure.index < stop)
        return values, tuple(sorted(failures, key=lambda failure: failure.index))


def _moved(failures: Sequence[RowFailure], rows: Rows) -> list[RowFailure]:
    return [replace(failure, index=int(rows[failure.index])) for failure in failures]
