"""Map a batch with a scalar UDF in a worker process that may die at any row."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from airflow_geneva.apply.isolation.batch_state import BatchResults
from airflow_geneva.apply.isolation.process import Chunk, WorkerLost
from airflow_geneva.apply.outcome import CallFailure, MappedBatch
from airflow_geneva.apply.policy import deciding_rule, pause_before
from airflow_geneva.udf.error_policy import Retry, Skip

_Range = tuple[int, int]
_Open = tuple[int, CallFailure]


class RowByRow:
    """Maps the rows of a batch in order.

    A row whose call exceeds the timeout has failed. If a worker dies during a row's call, the row runs once more, alone
    in a new worker, because other rows may have used up the memory; if that worker dies too, the row has failed.
    `Retry` rules apply in addition. Rows whose values were lost with a worker run again. If a worker dies between two
    calls, no row is to blame: the remaining rows are cut in half until one row is left, which counts as called.

    Args:
        order: maps rows in a worker; ends early at a row that this class has to decide about.
        explain: converts the loss of a worker to the failure of a row.
    """

    def __init__(
        self,
        batch_results: BatchResults,
        order: Callable[[int, int], Iterator[Chunk]],
        explain: Callable[[WorkerLost], CallFailure],
    ) -> None:
        self.batch_results = batch_results
        self.order = order
        self.explain = explain
        self.todo: list[_Range | _Open] = [(0, batch_results.rows)]
        self.deaths: Counter[int] = Counter()
        self.tries: Counter[int] = Counter()

    def run(self) -> MappedBatch:
        """Map all rows; `UdfError` at the first row that fails the job."""
        while self.todo:
            start, rest = self.todo.pop()
            if isinstance(rest, CallFailure):
                self._decide(start, rest)
            elif start < rest:
                self._map(start, rest)
        return self.batch_results.mapped()

    def _map(self, start: int, stop: int) -> None:
        at = start
        opened: list[_Open] = []
        try:
            for chunk in self.order(start, stop):
                opened += self._take(chunk)
                at = chunk.stop
        except WorkerLost as lost:
            self._on_worker_death(lost, at, stop, alone=stop - start == 1)
        else:
            self.todo.append((at, stop))
        self.todo += reversed(opened)

    def _take(self, chunk: Chunk) -> list[_Open]:
        """Keep the values and skipped rows of a chunk; return the rows that still need a decision."""
        batch_results = self.batch_results
        batch_results.called(chunk.start, chunk.stop)
        at = chunk.start
        opened = []
        for row, trouble in chunk.troubles:
            first = trouble.fits[0] if trouble.fits else None
            if first is not None and isinstance(batch_results.rules[first], Skip):
                batch_results.add_failure(row, first, trouble)
            else:
                opened.append((row, trouble))
                batch_results.put(at, chunk.values.slice(at - chunk.start, row - at))
                at = row + 1
        batch_results.put(at, chunk.values.slice(at - chunk.start))
        return opened

    def _decide(self, row: int, trouble: CallFailure) -> None:
        self.tries[row] += 1
        at = deciding_rule(self.batch_results.rules, trouble.fits, self.tries[row])
        rule = None if at is None else self.batch_results.rules[at]
        if isinstance(rule, Retry):
            time.sleep(pause_before(rule, self.tries[row]))
            self.todo.append((row, row + 1))
        elif at is not None and isinstance(rule, Skip):
            self.batch_results.leave(row)
            self.batch_results.add_failure(row, at, trouble)
        else:
            raise self.batch_results.failed(row, trouble)

    def _on_worker_death(self, lost: WorkerLost, at: int, stop: int, alone: bool) -> None:
        row = lost.row
        if row is None or not at <= row < stop:
            if stop - at > 1:
                middle = (at + stop) // 2
                self.todo += [(middle, stop), (at, middle)]
                return
            row = at
        self.batch_results.called(at, row + 1)
        self.todo.append((row + 1, stop))
        self.deaths[row] += not lost.timed_out
        if lost.timed_out or (alone and self.deaths[row] > 1):
            self.todo.append((row, self.explain(lost)))
        else:
            self.tries[row] += 1
            self.todo.append((row, row + 1))
        self.todo.append((at, row))
