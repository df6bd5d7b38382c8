"""Narrow a failing call down to the rows that make it fail."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_geneva.apply.isolation.batch_state import BatchResults
from airflow_geneva.apply.outcome import CallFailure, MappedBatch
from airflow_geneva.apply.policy import deciding_rule, pause_before
from airflow_geneva.udf.error_policy import Retry, Skip

# A call that kills its process costs a new process, other calls cost little: many pieces are better than many cuts.
_PIECES = 16

logger = logging.getLogger("airflow_geneva.apply")


@dataclass(frozen=True)
class _Span:
    """Rows of one call.

    Args:
        start, stop: the rows, end exclusive.
        troubles: for the last piece of a failed call, the number of failed calls when it was cut.
    """

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

    def __init__(self, batch_results: BatchResults, call: Callable[[int, int], pa.Array | CallFailure]) -> None:
        self.batch_results = batch_results
        self.call = call
        self.todo = [_Span(0, batch_results.rows)]
        self.troubles = 0
        self.tries: Counter[_Span] = Counter()

    def run(self, first: CallFailure | None = None) -> MappedBatch:
        """Map all rows; `UdfError` at the first row that fails the job.

        Args:
            first: the failure of a call of the whole batch, if the caller made one.
        """
        whole, cut = self.todo[0], None
        while self.todo:
            span = self.todo.pop()
            if span.rows > 1 and span.troubles == self.troubles:
                # All pieces before this one succeeded, so this one must fail: cut it without a call.
                self._cut(span)
                continue
            outcome, first = first or self.call(span.start, span.stop), None
            if not isinstance(outcome, CallFailure):
                self.batch_results.put(span.start, outcome)
                continue
            self.troubles += 1
            self.tries[span] += 1
            again = self.tries[span] if span.rows == 1 or span == whole else None
            at = deciding_rule(self.batch_results.rules, outcome.fits, again)
            rule = None if at is None else self.batch_results.rules[at]
            if isinstance(rule, Retry):
                time.sleep(pause_before(rule, self.tries[span]))
                self.todo.append(span)
            elif span.rows > 1:
                cut = cut or outcome
                self._cut(span)
            elif at is not None and isinstance(rule, Skip):
                self.batch_results.leave(span.start)
                self.batch_results.add_failure(span.start, at, outcome)
            else:
                raise self.batch_results.failed(span.start, outcome)
        if cut and not self.batch_results.failures:
            logger.warning(
                "UDF %r failed on a call of %s rows (%s: %s), but on none of them in smaller calls, whose values are "
                "kept. Set a smaller batch_size.",
                self.batch_results.mapper.udf.name, self.batch_results.rows, cut.name, cut.message,
            )  # fmt: skip
        return self.batch_results.mapped()

    def _cut(self, span: _Span) -> None:
        size = -(-span.rows // _PIECES)
        pieces = [_Span(start, min(start + size, span.stop)) for start in range(span.start, span.stop, size)]
        pieces[-1] = replace(pieces[-1], troubles=self.troubles)
        self.todo += reversed(pieces)
