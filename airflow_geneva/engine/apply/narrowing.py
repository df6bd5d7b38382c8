"""Find the rows that make a UDF's calls fail, under its error policy."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import pyarrow as pa

from airflow_geneva.engine.apply.fitting import learn, most_fitting
from airflow_geneva.engine.apply.udf_call import BatchResults
from airflow_geneva.engine.apply.weights import weigh
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.failures import CallFailure
from airflow_geneva.engine.limits.rate_limit import may_go_on
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.udf.error_policy import Retry, Skip, deciding_rule, pause_before

# A call that kills its process costs a new process, and other calls cost little, so cut into many pieces at once.
_PIECES = 16

logger = logging.getLogger("airflow_geneva.apply")

Result = TypeVar("Result")


@dataclass(eq=False)
class RowFailed(Exception):
    """A row fails the job."""

    row: int
    trouble: CallFailure


async def sleep(seconds: float) -> None:
    """Block this thread until the next call is allowed; for calls that `run_now` runs."""
    time.sleep(seconds)
    may_go_on()


def run_now(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never waits for an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("it waited for an event loop")


async def retry(results: BatchResults, rule: int | None, calls: int, pause: Callable[[float], Awaitable[None]]) -> bool:
    """Return whether a `Retry` rule decides, after the pause that the rule asks for."""
    found = None if rule is None else results.rules[rule]
    if not isinstance(found, Retry):
        return False
    await pause(pause_before(found, calls))
    return True


def skip_or_fail(results: BatchResults, row: int, rule: int | None, trouble: CallFailure) -> None:
    """Record a row as skipped; `RowFailed` if no `Skip` rule decides."""
    if rule is None or not isinstance(results.rules[rule], Skip):
        raise RowFailed(row, trouble)
    # Record the failure before the NULL, so that no reader sees a NULL without its failure.
    results.add_failure(row, rule, trouble)
    results.put(row, pa.nulls(1, results.mapper.udf.data_type))


@dataclass(frozen=True)
class Span:
    """Rows of one call; for the last piece of a failed call, `troubles` is the number of failed calls at its cut."""

    start: int
    stop: int
    troubles: int | None = None

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def pieces(self, size: int) -> list[Span]:
        return [Span(start, min(start + size, self.stop)) for start in range(self.start, self.stop, size)]


class Narrowing:
    """Maps a span of a batch's rows in order, with as few failing calls as possible.

    If a call of several rows fails, it is cut into pieces, down to single rows. A `Retry` rule repeats the call of the
    whole span before it is cut, and calls of single rows, but not of pieces in between. So the UDF is called on the
    span and on a single row at most as often as the rule allows, and once on each piece. If only the larger call fails
    and all smaller ones succeed, no row fails: the values of the smaller calls are kept, and a warning is logged.

    A call of several rows that runs out of a device's memory is halved regardless of the rules, and later calls of the
    process are no larger than the largest part that fitted.

    Args:
        call: calls the UDF on a span of rows; repeats the call of a single row once if its worker process dies.
        pause: waits between calls; may raise StopComputing.
    """

    def __init__(
        self,
        results: BatchResults,
        call: Callable[[int, int], Awaitable[pa.Array | CallFailure]],
        pause: Callable[[float], Awaitable[None]] = sleep,
        whole: Span | None = None,
    ) -> None:
        self.results = results
        self.call = call
        self.pause = pause
        self.whole = whole or Span(0, results.rows)
        self.udf = results.mapper.udf
        fits = inf if self.udf.batch_by else most_fitting(self.udf, results.mapper.known_to_fit)
        self.wholes = self.whole.pieces(int(min(max(self.whole.rows, 1), fits))) or [self.whole]
        self.todo = self.wholes[::-1]
        self.too_large: list[tuple[Span, CallFailure]] = []
        self.fitting: Span | None = None
        self.troubles = 0
        self.tries: Counter[Span] = Counter()

    async def run(self) -> None:
        """Map all rows; `RowFailed` at the first row that fails the job."""
        cut: CallFailure | None = None
        while self.todo:
            span = self.todo.pop()
            if span.rows > 1 and span.troubles == self.troubles:
                # All pieces before this one succeeded, so this one must fail: cut it without a call.
                self._cut(span)
                continue
            outcome = await self.call(span.start, span.stop)
            if not isinstance(outcome, CallFailure):
                self.results.put(span.start, outcome)
                if self.fitting is None or span.rows > self.fitting.rows:
                    self.fitting = span
                continue
            if outcome.out_of_memory:
                self.too_large.append((span, outcome))
                if span.rows > 1:
                    self.wholes += (halves := span.pieces(-(-span.rows // 2)))
                    self.todo += reversed(halves)
                    self.fitting = None
                    continue
            self.troubles += 1
            self.tries[span] += 1
            calls = self.tries[span] if span.rows == 1 or span in self.wholes else None
            rule = deciding_rule(self.results.rules, outcome.fits, calls)
            if await retry(self.results, rule, self.tries[span], self.pause):
                self.todo.append(span)
            elif span.rows > 1:
                cut = cut or outcome
                self._cut(span)
            else:
                skip_or_fail(self.results, span.start, rule, outcome)
        if self.too_large:
            self._learn()
        if cut and not self.results.failures:
            logger.warning(
                "UDF %r failed on a call of %s (%s: %s), but on none of them in smaller calls, whose values are "
                "kept. Set a smaller batch_size.",
                self.results.mapper.udf.name, counted(self.whole.rows, "row"), cut.name, cut.message,
            )  # fmt: skip

    def _learn(self) -> None:
        """Remember the size that fits; a single row that does not fit says nothing about others."""
        smallest, trouble = min(self.too_large, key=lambda found: found[0].rows)
        if smallest.rows > 1 and self.fitting is not None and (most := self._size(self.fitting)):
            learn(self.udf, most)
            logger.warning(
                "UDF %r ran out of its device's memory on a call of %s (%s: %s). From now on this process calls it "
                "with at most %s.",
                self.udf.name, counted(smallest.rows, "row"), trouble.name, trouble.message,
                f"a weight of {most:,g}" if self.udf.batch_by else counted(int(most), "row"),
            )  # fmt: skip

    def _size(self, span: Span) -> float:
        """Return the size of a call in the unit of the UDF's batches."""
        if self.udf.batch_by is None:
            return span.rows
        weights, _ = weigh(self.udf, self.results.inputs.slice(span.start, span.rows), ())
        return span.rows * float(weights.max())

    def _cut(self, span: Span) -> None:
        pieces = span.pieces(-(-span.rows // _PIECES))
        pieces[-1] = replace(pieces[-1], troubles=self.troubles)
        self.todo += reversed(pieces)
