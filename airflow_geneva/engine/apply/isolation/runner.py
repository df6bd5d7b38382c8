"""Run a UDF under its error policy and its timeout; find the rows that make its calls fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from math import inf
from typing import Any, TypeAlias

import pyarrow as pa

from airflow_geneva.engine.apply.async_calls import AsyncMapper
from airflow_geneva.engine.apply.batch_api import BatchApiMapper
from airflow_geneva.engine.apply.batch_mapper import BatchMapper, StopComputing
from airflow_geneva.engine.apply.batches import CuttingMapper
from airflow_geneva.engine.apply.dedup import DedupMapper, KnownValues
from airflow_geneva.engine.apply.device import device_failed, is_device_failure
from airflow_geneva.engine.apply.isolation.process import POOL, Chunk, UdfSetupFailed, WorkerLost, WorkerProcess
from airflow_geneva.engine.apply.narrowing import Narrowing, RowFailed, retry, run_now, skip_or_fail, sleep
from airflow_geneva.engine.apply.source_rows import SourceRows
from airflow_geneva.engine.apply.stages import PreprocessedMapper
from airflow_geneva.engine.apply.udf_call import BatchResults, MappedBatch, Mapper, call_failure_of, is_of_a_row
from airflow_geneva.engine.checkpoint.submissions import Submissions
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.failures import CallFailure
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.error_policy import Skip, deciding_rule, matching_rules_of, rules_of
from airflow_geneva.engine.udf.shipping import UdfReference
from airflow_geneva.errors import DeviceFailed, UdfCrashed, UdfError

OpenMapper: TypeAlias = Callable[[str, Sequence[str] | None], BatchMapper]
"""Opens the UDF of a column, which takes the values of these columns."""


def open_batch_mapper(
    udf: UDF | UdfReference,
    input_columns: Sequence[str] | None = None,
    known: KnownValues | None = None,
    submissions: Submissions | None = None,
    batch_size: int | None = None,
    known_to_fit: float = inf,
    source: SourceRows | None = None,
) -> BatchMapper:
    """Prepare a UDF to be called on batches; a `UdfReference` saves pickling it again.

    With `on_error="fail"` and no timeout, or if it is async, the UDF runs in this process. Otherwise it runs in a
    worker process. The first batch with rows starts the worker, which is killed and replaced as needed, and kept for a
    minute for the next caller that opens the same UDF. The timeout covers every call, including the first one in a new
    worker, but not the import of the UDF's module or the instantiation of its class, which `setup_timeout` bounds.
    With ``known``, the UDF is called only on inputs without a known value. ``submissions`` are those of a batch API's
    column. Unless the UDF is scalar, batches are cut into smaller ones of ``batch_size`` rows, and by `batch_by`. No
    call is larger than ``known_to_fit`` into the device's memory. ``source`` has the rows of groups for a UDF that
    takes iterators of batches.
    """
    opened = udf.open() if isinstance(udf, UdfReference) else udf
    mapper = Mapper(opened, input_columns, known_to_fit, source)
    made: BatchMapper
    if opened.is_batch_api:
        return BatchApiMapper(mapper, submissions)
    calls = mapper if opened.preprocess is None else Mapper(opened.without_stage, None, known_to_fit)
    if opened.is_async:
        made = AsyncMapper(calls)
    else:
        made = _WorkerMapper(calls, udf) if opened.needs_process else _InProcessMapper(calls)
    if opened.form != "scalar" and (opened.batch_by is not None or batch_size is not None):
        made = CuttingMapper(made, calls, batch_size)
    if opened.stage is not None:
        made = PreprocessedMapper(made, calls, _open_stage(opened, Mapper(opened.stage, mapper.input_columns)))
    return made if known is None else DedupMapper(made, known, mapper)


def _open_stage(udf: UDF, stage: Mapper) -> list[BatchMapper]:
    """Prepare a UDF's stage once for each of its `preprocess_workers`, or for each of its CPUs.

    The calls of an async one run side by side; while the last of one batch are in flight, those of a second one begin.
    """
    if stage.udf.is_async:
        return [AsyncMapper(stage) for _ in range(2)]
    if udf.preprocess_workers or stage.udf.needs_process:
        reference = UdfReference.of(udf, stage=True)
        return [_WorkerMapper(stage, reference) for _ in range(udf.preprocess_workers or _threads_of(udf))]
    return [_InProcessMapper(stage) for _ in range(_threads_of(udf))]


def _threads_of(udf: UDF) -> int:
    return max(int(udf.num_cpus or 1), 1)


class _InProcessMapper(BatchMapper):
    """Runs a UDF in this process, without an error policy."""

    def __init__(self, mapper: Mapper) -> None:
        self.mapper = mapper

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        if self.mapper.udf.form == "scalar":
            try:
                return MappedBatch(self.mapper(batch), (), batch.num_rows)
            except UdfError as error:
                if error.call is not None and error.call.device_failed:
                    failed = device_failed(error.call)
                    if error.computed is not None:
                        failed.kept = list(range(len(error.computed))), error.computed
                    raise failed from error
                raise
        results = BatchResults(self.mapper, self.mapper.inputs(batch), ())
        if batch.num_rows == 0:
            return results.mapped()
        function = self.mapper.set_up()

        async def call(start: int, stop: int) -> pa.Array | CallFailure:
            results.called(start, stop)
            try:
                return self.mapper.map_batch(results.inputs.slice(start, stop - start), function)
            except UdfError as error:
                failure = call_failure_of(error, (), self.mapper.udf)
                if failure.device_failed:
                    raise device_failed(failure) from error
                if failure.complete and not is_of_a_row(error):
                    raise
                results.causes[start] = error.__cause__
                return failure

        return _narrow(results, call)


def _narrow(
    results: BatchResults, call: Callable[[int, int], Coroutine[Any, Any, pa.Array | CallFailure]]
) -> MappedBatch:
    try:
        run_now(Narrowing(results, call).run())
    except RowFailed as failed:
        raise results.failed(failed.row, failed.trouble) from results.causes.get(failed.row)
    except (StopComputing, DeviceFailed) as stop:
        stop.kept = results.succeeded()
        raise
    return results.mapped()


class _WorkerMapper(BatchMapper):
    """Runs a UDF in a worker process, under an error policy or with a timeout."""

    def __init__(self, mapper: Mapper, source: UDF | UdfReference) -> None:
        self.mapper = mapper
        self.reference = source if isinstance(source, UdfReference) else UdfReference.of(source)
        self.timeout = mapper.udf.timeout
        self.rules = rules_of(mapper.udf.on_error)
        self.child: WorkerProcess | None = None
        self.loaded: pa.RecordBatch | None = None
        self.keeps_spare = False

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        results = BatchResults(self.mapper, self.mapper.inputs(batch), self.rules)
        if batch.num_rows == 0:
            return results.mapped()

        def order(start: int, stop: int) -> Iterator[Chunk]:
            return self._order(results.inputs, start, stop)

        if self.mapper.udf.form == "scalar":

            def explain(lost: WorkerLost, row: int) -> CallFailure:
                return self._explain(lost, results.inputs, row, row + 1)

            return RowByRow(results, order, explain).run()

        died: set[tuple[int, int]] = set()

        async def call(start: int, stop: int) -> pa.Array | CallFailure:
            results.called(start, stop)
            try:
                (chunk,) = order(start, stop)
            except WorkerLost as lost:
                if lost.timed_out or lost.by_itself or stop - start > 1 or (start, stop) in died:
                    return self._explain(lost, results.inputs, start, stop)
                # Try once more, alone in a new worker: other rows may have used up the memory.
                died.add((start, stop))
                return await call(start, stop)
            return chunk.troubles[0][1] if chunk.troubles else chunk.values

        return _narrow(results, call)

    def close(self) -> None:
        if self.child is not None:
            POOL.release_worker(self.child)
        self.child = self.loaded = None

    def _order(self, inputs: pa.RecordBatch, start: int, stop: int) -> Iterator[Chunk]:
        child = self._child_with(inputs)
        try:
            yield from child.map(start, stop, self.mapper.udf.data_type, self.timeout)
        except WorkerLost as lost:
            self.child = None
            # A spare takes as much memory again, of a device too.
            large = self.mapper.udf.num_gpus or self.mapper.udf.memory
            self.keeps_spare |= (lost.by_itself or lost.timed_out) and not large
            raise

    def _child_with(self, inputs: pa.RecordBatch) -> WorkerProcess:
        """Return a live worker process that has the batch."""
        for _ in range(2):
            if self.child is None:
                self.child, self.loaded = self._acquire(), None
            if self.loaded is inputs:
                return self.child
            try:
                self.child.load(inputs, self.mapper)
            except WorkerLost as lost:
                self.child, reason = None, lost.reason
            else:
                self.loaded = inputs
                return self.child
        raise UdfError(
            f"UDF {self.mapper.udf.name!r} cannot take a batch of {counted(inputs.num_rows, 'row')}, "
            f"{inputs.nbytes:,} bytes: the process that runs it {reason}, twice, while it read "
            "the batch. Set a smaller batch_size."
        )

    def _acquire(self) -> WorkerProcess:
        within = self.mapper.udf.setup_timeout
        try:
            child = POOL.acquire(self.reference, within)
            if self.keeps_spare:
                POOL.start_spare(self.reference, within)
            return child
        except UdfSetupFailed as unfit:
            if is_device_failure(str(unfit)):
                raise device_failed(str(unfit)) from unfit
            raise UdfError(f"UDF {self.mapper.udf.name!r} could not be set up: {unfit}") from unfit
        except OSError as error:
            raise UdfError(
                f"UDF {self.mapper.udf.name!r} could not be set up: no process can be started for it ({error})."
            ) from error

    def _explain(self, lost: WorkerLost, inputs: pa.RecordBatch, start: int, stop: int) -> CallFailure:
        """Describe why a call ended its process; raise DeviceFailed if calls on other rows fail alike."""
        kind: type[Exception] = UdfCrashed
        message = f"The process that ran the call {lost.reason}."
        if stop - start == 1 and self._is_of_device(lost) and self._fails_on_others(inputs, start):
            raise device_failed(f"Calls on several rows ended their processes. {message}")
        if lost.timed_out:
            kind, message = TimeoutError, f"The call took longer than {self.timeout:g} seconds and was killed."
        return CallFailure(f"{kind.__module__}.{kind.__qualname__}", message, "", matching_rules_of(self.rules, kind))

    def _is_of_device(self, lost: WorkerLost) -> bool:
        """Whether a device may be the cause: the worker reported it, or a call of a UDF with GPUs timed out."""
        return lost.by_device or (lost.timed_out and bool(self.mapper.udf.num_gpus))

    def _fails_on_others(self, inputs: pa.RecordBatch, row: int) -> bool:
        """Whether calls on other rows of a batch, each in another process, also fail because of a device."""
        others = [at for at in sorted({0, inputs.num_rows // 2, inputs.num_rows - 1}) if at != row]
        for other in others:
            self.mapper.count_call(1)
            try:
                list(self._order(inputs, other, other + 1))
            except WorkerLost as lost:
                if self._is_of_device(lost):
                    continue
            return False
        return bool(others)


class RowByRow:
    """Maps the rows of a batch in order with a scalar UDF, in a worker process that may die at any row.

    A row has failed if its call exceeds the timeout, or if the worker exits or crashes by itself during the call. If
    the worker dies in another way, the row runs once more, alone in a new worker, because other rows may have used up
    the memory; if that worker dies too, the row has failed.
    `Retry` rules apply in addition. Rows whose values were lost with a worker run again. If a worker dies between two
    calls, no row is to blame: the remaining rows are halved until one row is left, which then counts as called.
    """

    def __init__(
        self,
        results: BatchResults,
        order: Callable[[int, int], Iterator[Chunk]],
        explain: Callable[[WorkerLost, int], CallFailure],
    ) -> None:
        self.results = results
        self.order = order
        self.explain = explain
        # Rows to map, as start and end, or a row on which to decide, with its failure.
        self.todo: list[tuple[int, int | CallFailure]] = [(0, results.rows)]
        self.deaths: Counter[int] = Counter()
        self.tries: Counter[int] = Counter()

    def run(self) -> MappedBatch:
        try:
            while self.todo:
                start, rest = self.todo.pop()
                if isinstance(rest, CallFailure):
                    self._decide(start, rest)
                elif start < rest:
                    self._map(start, rest)
        except RowFailed as failed:
            raise self.results.failed(failed.row, failed.trouble) from None
        except (StopComputing, DeviceFailed) as stop:
            stop.kept = self.results.succeeded()
            raise
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
        if run_now(retry(self.results, rule, self.tries[row], sleep)):
            self.todo.append((row, row + 1))
        else:
            skip_or_fail(self.results, row, rule, trouble)

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
        if lost.timed_out or lost.by_itself or (alone and self.deaths[row] > 1):
            self.todo.append((row, self.explain(lost, row)))
        else:
            self.tries[row] += 1
            self.todo.append((row, row + 1))
        self.todo.append((at, row))
