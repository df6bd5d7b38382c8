"""Run a UDF under its error policy and its timeout; find the rows that make its calls fail."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_geneva.apply.isolation.process import POOL, Chunk, UdfSetupFailed, WorkerLost, WorkerProcess
from airflow_geneva.apply.udf_call import BatchResults, CallFailure, MappedBatch, Mapper, call_failure_of
from airflow_geneva.errors import UdfCrashed, UdfError
from airflow_geneva.udf import UDF
from airflow_geneva.udf.error_policy import Retry, Skip, deciding_rule, matching_rules_of, pause_before, rules_of
from airflow_geneva.udf.shipping import UdfReference

# A call that kills its process costs a new process, other calls cost little: many pieces are better than many cuts.
_PIECES = 16

logger = logging.getLogger("airflow_geneva.apply")


class BatchMapper(ABC):
    """A UDF that is ready to be called on batches, by one thread at a time; a context manager."""

    @abstractmethod
    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        """Map a batch with the input columns, named as in the table.

        Raises:
            InvalidInput: an input column is missing in the batch, or is there twice.
            UdfError: a row fails the job, or the UDF cannot be set up. If ``row_index`` is set, ``computed`` and
                ``failures`` hold the values and failures of the rows before it.
        """

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> BatchMapper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_batch_mapper(udf: UDF | UdfReference, input_columns: Sequence[str] | None = None) -> BatchMapper:
    """Prepare a UDF, or a reference so that it is pickled only once, to be called on batches.

    With `on_error="fail"` and no timeout, the UDF runs in this process. Otherwise it runs in a worker process. The
    first batch with rows starts the worker, which is killed and replaced as needed, and kept for a minute for the next
    caller that opens the same UDF. The timeout covers every call, including the first one in a new worker, but not the
    import of the UDF's module or the instantiation of its class.
    """
    opened = udf.open() if isinstance(udf, UdfReference) else udf
    mapper = Mapper(opened, input_columns)
    if opened.on_error == "fail" and opened.timeout is None:
        return _InProcessMapper(mapper)
    return _WorkerMapper(mapper, udf)


class _InProcessMapper(BatchMapper):
    """Runs a UDF in this process, without an error policy."""

    def __init__(self, mapper: Mapper) -> None:
        self.mapper = mapper

    def close(self) -> None:
        """Do nothing: no worker process to release."""

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        if self.mapper.udf.form == "scalar":
            return MappedBatch(self.mapper(batch), (), batch.num_rows)
        results = BatchResults(self.mapper, self.mapper.inputs(batch), ())
        if batch.num_rows == 0:
            return results.mapped()
        function = self.mapper.set_up()
        cause: BaseException | None = None

        def call(start: int, stop: int) -> pa.Array | CallFailure:
            nonlocal cause
            results.called(start, stop)
            try:
                return self.mapper.map_batch(results.inputs.slice(start, stop - start), function)
            except UdfError as error:
                failure = call_failure_of(error, ())
                if failure.complete:
                    raise
                cause = error.__cause__
                return failure

        try:
            return Narrowing(results, call).run()
        except UdfError as failed:
            if failed.row_index is None:
                raise
            raise failed from cause


class _WorkerMapper(BatchMapper):
    """Runs a UDF in a worker process, under an error policy or with a timeout."""

    def __init__(self, mapper: Mapper, source: UDF | UdfReference) -> None:
        self.mapper = mapper
        self.reference = source if isinstance(source, UdfReference) else UdfReference.of(source)
        self.timeout = mapper.udf.timeout
        self.rules = rules_of(mapper.udf.on_error)
        self.child: WorkerProcess | None = None
        self.loaded: pa.RecordBatch | None = None

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        results = BatchResults(self.mapper, self.mapper.inputs(batch), self.rules)
        if batch.num_rows == 0:
            return results.mapped()

        def order(start: int, stop: int) -> Iterator[Chunk]:
            return self._order(results.inputs, start, stop)

        if self.mapper.udf.form == "scalar":
            return RowByRow(results, order, self._explain).run()

        died: set[tuple[int, int]] = set()

        def call(start: int, stop: int) -> pa.Array | CallFailure:
            results.called(start, stop)
            try:
                (chunk,) = order(start, stop)
            except WorkerLost as lost:
                if lost.timed_out or stop - start > 1 or (start, stop) in died:
                    return self._explain(lost)
                # Try once more, alone in a new worker: other rows may have used up the memory.
                died.add((start, stop))
                return call(start, stop)
            return chunk.troubles[0][1] if chunk.troubles else chunk.values

        return Narrowing(results, call).run()

    def close(self) -> None:
        if self.child is not None:
            POOL.release_worker(self.child)
        self.child = self.loaded = None

    def _order(self, inputs: pa.RecordBatch, start: int, stop: int) -> Iterator[Chunk]:
        child = self._child_with(inputs)
        try:
            yield from child.map(start, stop, self.mapper.udf.data_type, self.timeout)
        except WorkerLost:
            self.child = None
            raise

    def _child_with(self, inputs: pa.RecordBatch) -> WorkerProcess:
        """Return a live worker process that has the batch."""
        for _ in range(2):
            if self.child is None:
                self.child, self.loaded = self._acquire(), None
            if self.loaded is inputs:
                return self.child
            try:
                self.child.load(inputs)
            except WorkerLost as lost:
                self.child, reason = None, lost.reason
            else:
                self.loaded = inputs
                return self.child
        raise UdfError(
            f"UDF {self.mapper.udf.name!r} cannot take a batch of {inputs.num_rows} rows, {inputs.nbytes:,} bytes: "
            f"the process that runs it {reason}, twice, while it read the batch. Set a smaller batch_size."
        )

    def _acquire(self) -> WorkerProcess:
        try:
            return POOL.acquire(self.reference)
        except UdfSetupFailed as unfit:
            raise UdfError(f"UDF {self.mapper.udf.name!r} could not be set up: {unfit}") from unfit
        except OSError as error:
            raise UdfError(
                f"UDF {self.mapper.udf.name!r} could not be set up: no process can be started for it ({error})."
            ) from error

    def _explain(self, lost: WorkerLost) -> CallFailure:
        kind: type[Exception] = UdfCrashed
        message = f"The process that ran the call {lost.reason}."
        if lost.timed_out:
            kind, message = TimeoutError, f"The call took longer than {self.timeout:g} seconds and was killed."
        return CallFailure(f"{kind.__module__}.{kind.__qualname__}", message, "", matching_rules_of(self.rules, kind))


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

    def run(self) -> MappedBatch:
        """Map all rows; `UdfError` at the first row that fails the job."""
        whole, cut = self.todo[0], None
        while self.todo:
            span = self.todo.pop()
            if span.rows > 1 and span.troubles == self.troubles:
                # All pieces before this one succeeded, so this one must fail: cut it without a call.
                self._cut(span)
                continue
            outcome = self.call(span.start, span.stop)
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
