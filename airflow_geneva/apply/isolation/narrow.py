"""Find the rows that make calls of a UDF fail, and apply the error policy to each of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_geneva.apply.isolation.process import Chunk, WorkerLost
from airflow_geneva.apply.udf_call import BatchResults, CallFailure, MappedBatch
from airflow_geneva.udf.error_policy import Retry, Skip, deciding_rule, pause_before

# A call that kills its process costs a new process, other calls cost little: many pieces are better than many cuts.
_PIECES = 16

logger = logging.getLogger("airflow_geneva.apply")


def _retry(results: BatchResults, rule: int | None, calls: int) -> bool:
    """Return whether a `Retry` rule decides, after waiting as long as it says."""
    retry = None if rule is None else results.rules[rule]
    if isinstance(retry, Retry):
        time.sleep(pause_before(retry, calls))
    return isinstance(retry, Retry)


def _skip_or_fail(results: BatchResults, row: int, rule: int | None, trouble: CallFailure) -> None:
    if rule is None or not isinstance(results.rules[rule], Skip):
        raise results.failed(row, trouble)
    results.put(row, pa.nulls(1, results.mapper.udf.data_type))
    results.add_failure(row, rule, trouble)


@dataclass(frozen=True)
class _Span:
    """Rows of one call; of the last piece of a failed call, also the number of failed calls when it was cut."""

    start: int
    stop: int
    troubles: int | None = None

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Narrowing:
    """Maps the rows of a batch in order, with as few failing calls as possible.

    If a call of several rows fails, it is cut into pieces, down to single rows. A `Retry` rule repeats the call of the
    whole batch before it is cut, and calls of single rows, but not of pieces in between. So the UDF is called on the
    batch and on a single row at most as often as the rule allows, and once on each piece. If only the larger call fails
    and all smaller ones succeed, no row fails: the values of the smaller calls are kept, and a warning is logged.

    Args:
        call: calls the UDF on a span of rows; repeats the call of a single row once if its worker process dies.
    """

    def __init__(self, results: BatchResults, call: Callable[[int, int], pa.Array | CallFailure]) -> None:
        self.results = results
        self.call = call
        self.todo = [_Span(0, results.rows)]
        self.troubles = 0
        self.tries: Counter[_Span] = Counter()

    def run(self, first: CallFailure | None = None) -> MappedBatch:
        """Map all rows; `UdfError` at the first row that fails the job. ``first`` is a failure of the whole call."""
        whole, cut = self.todo[0], None
        while self.todo:
            span = self.todo.pop()
            if span.rows > 1 and span.troubles == self.troubles:
                # All pieces before this one succeeded, so this one must fail: cut it without a call.
                self._cut(span)
                continue
            outcome, first = first or self.call(span.start, span.stop), None
            if not isinstance(outcome, CallFailure):
                self.results.put(span.start, outcome)
                continue
            self.troubles += 1
            self.tries[span] += 1
            calls = self.tries[span] if span.rows == 1 or span == whole else None
            rule = deciding_rule(self.results.rules, outcome.fits, calls)
            if _retry(self.results, rule, self.tries[span]):
                self.todo.append(span)
            elif span.rows > 1:
                cut = cut or outcome
                self._cut(span)
            else:
                _skip_or_fail(self.results, span.start, rule, outcome)
        if cut and not self.results.failures:
            logger.warning(
                "UDF %r failed on a call of %s rows (%s: %s), but on none of them in smaller calls, whose values are "
                "kept. Set a smaller batch_size.",
                self.results.mapper.udf.name, self.results.rows, cut.name, cut.message,
            )  # fmt: skip
        return self.results.mapped()

    def _cut(self, span: _Span) -> None:
        size = -(-span.rows // _PIECES)
        pieces = [_Span(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]
        pieces[-1] = replace(pieces[-1], troubles=self.troubles)
        self.todo += reversed(pieces)


class RowByRow:
    """Maps the rows of a batch in order with a scalar UDF, in a worker process that may die at any row.

    A row whose call exceeds the timeout has failed. If a worker dies during a row's call, the row runs once more, alone
    in a new worker, because other rows may have used up the memory; if that worker dies too, the row has failed.
    `Retry` rules apply in addition. Rows whose values were lost with a worker run again. If a worker dies between two
    calls, no row is to blame: the remaining rows are cut in half until one row is left, which counts as called.

    ``order`` maps rows in a worker, and ends early at a row that this class has to decide about.
    """

    def __init__(
        self,
        results: BatchResults,
        order: Callable[[int, int], Iterator[Chunk]],
        explain: Callable[[WorkerLost], CallFailure],
    ) -> None:
        self.results = results
        self.order = order
        self.explain = explain
        # Rows to map, as start and end, or a row to decide about, with its failure.
        self.todo: list[tuple[int, int | CallFailure]] = [(0, results.rows)]
        self.deaths: Counter[int] = Counter()
        self.tries: Counter[int] = Counter()

    def run(self) -> MappedBatch:
        while self.todo:
            start, rest = self.todo.pop()
            if isinstance(rest, CallFailure):
                self._decide(start, rest)
            elif start < rest:
                self._map(start, rest)
        return self.results.mapped()

    def _map(self, start: int, stop: int) -> None:
        at = start
        undecided: list[tuple[int, CallFailure]] = []
        try:
            for chunk in self.order(start, stop):
                undecided += self._take(chunk)
                at = chunk.start + len(chunk.values)
        except WorkerLost as lost:
            self._on_worker_death(lost, at, stop, alone=stop - start == 1)
        else:
            self.todo.append((at, stop))
        self.todo += reversed(undecided)

    def _take(self, chunk: Chunk) -> Iterator[tuple[int, CallFailure]]:
        """Keep the values and skipped rows of a chunk; yield the rows that still need a decision."""
        self.results.called(chunk.start, chunk.start + len(chunk.values))
        at = chunk.start
        for row, trouble in chunk.troubles:
            first = trouble.fits[0] if trouble.fits else None
            if first is not None and isinstance(self.results.rules[first], Skip):
                self.results.add_failure(row, first, trouble)
            else:
                yield row, trouble
                self.results.put(at, chunk.values.slice(at - chunk.start, row - at))
                at = row + 1
        self.results.put(at, chunk.values.slice(at - chunk.start))

    def _decide(self, row: int, trouble: CallFailure) -> None:
        self.tries[row] += 1
        rule = deciding_rule(self.results.rules, trouble.fits, self.tries[row])
        if _retry(self.results, rule, self.tries[row]):
            self.todo.append((row, row + 1))
        else:
            _skip_or_fail(self.results, row, rule, trouble)

    def _on_worker_death(self, lost: WorkerLost, at: int, stop: int, alone: bool) -> None:
        row = lost.row
        if row is None or not at <= row < stop:
            if stop - at > 1:
                middle = (at + stop) // 2
                self.todo += [(middle, stop), (at, middle)]
                return
            row = at
        self.results.called(at, row + 1)
        self.todo.append((row + 1, stop))
        self.deaths[row] += not lost.timed_out
        if lost.timed_out or (alone and self.deaths[row] > 1):
            self.todo.append((row, self.explain(lost)))
        else:
            self.tries[row] += 1
            self.todo.append((row, row + 1))
        self.todo.append((at, row))
