"""Run an async UDF: many calls at a time in one event loop, under its error policy and its timeout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import BatchMapper, BegunBatch
from airflow_geneva.engine.apply.device import device_failed, release
from airflow_geneva.engine.apply.event_loop import GRACE_SECONDS, LOOP, POLL_SECONDS, CallLoop, see_exception, timed_out
from airflow_geneva.engine.apply.narrowing import Narrowing, RowFailed, Span
from airflow_geneva.engine.apply.udf_call import (
    BatchResults,
    MappedBatch,
    Mapper,
    call_failure_of,
    describe_failure,
    is_of_a_row,
    unfit_row,
    users_frames,
)
from airflow_geneva.engine.failures import CallFailure
from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_values
from airflow_geneva.engine.limits.rate_limit import begin_call, is_used_up, may_go_on
from airflow_geneva.engine.runtime import wait
from airflow_geneva.engine.storage.engine_errors import as_failure
from airflow_geneva.engine.udf.error_policy import Rules, matching_rules_of, rules_of
from airflow_geneva.errors import UdfError

_BETWEEN_LOOKS = 0.02
# The rows of a call: start and stop in its batch.
Rows = tuple[int, int]


class AsyncMapper(BatchMapper):
    """Runs an async UDF in this process. Failed calls are retried while other calls continue."""

    def __init__(self, mapper: Mapper) -> None:
        self.mapper = mapper
        self.rules = rules_of(mapper.udf.on_error)
        self.calls_at_a_time = mapper.udf.max_in_flight or 1
        self.calls_rows = mapper.udf.form == "scalar"
        self.functions: dict[CallLoop, Callable[..., Any]] = {}

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        if not batch.num_rows:
            return BatchResults(self.mapper, self.mapper.inputs(batch), self.rules).mapped()
        return super().__call__(batch)

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        results = BatchResults(self.mapper, self.mapper.inputs(batch), self.rules)
        return _BegunCalls(results, self._set_up)

    def _set_up(self, loop: CallLoop) -> Callable[..., Any]:
        if loop not in self.functions:
            loop.set_ups += 1
            try:
                self.functions[loop] = self.mapper.set_up()
            finally:
                loop.set_ups -= 1
        return self.functions[loop]


SetUp = Callable[[CallLoop], Callable[..., Any]]


class _BegunCalls(BegunBatch):
    """The calls of one batch. If one blocks the event loop, the unfinished ones start again in a new loop."""

    def __init__(self, results: BatchResults, set_up: SetUp) -> None:
        self.set_up = set_up
        self.blocking = Counter[Rows]()
        self.calls = _CallsInLoop(results, set_up, self.blocking)

    @property
    def unfinished(self) -> int:
        calls = self._in_a_loop_that_runs()
        return 0 if calls.future.done() else calls.left

    def result(self) -> MappedBatch:
        while True:
            calls = self._in_a_loop_that_runs()
            if wait([calls.future], POLL_SECONDS).done:
                return calls.future.result()

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        calls = self.calls
        if not calls.future.done() and not calls.loop.is_blocked():
            wait([calls.loop.start(calls.stop())], 2 * GRACE_SECONDS)
        return calls.results.succeeded()

    def _in_a_loop_that_runs(self) -> _CallsInLoop:
        calls = self.calls
        if not calls.future.done() and calls.loop.is_blocked():
            self.blocking += Counter(rows for task, rows in calls.running.items() if task is calls.loop.blocked_by)
            results = calls.results.begin_again(keep=self.calls.columns is not None)
            self.calls = _CallsInLoop(results, self.set_up, self.blocking)
        return self.calls


class _CallsInLoop:
    """The calls of one batch in flight in one loop. Calls that blocked an earlier loop fail without being made."""

    def __init__(self, results: BatchResults, set_up: SetUp, blocking: Counter[Rows]) -> None:
        self.results = results
        self.mapper = results.mapper
        self.set_up = set_up
        self.blocking = blocking.copy()
        self.running: dict[asyncio.Task[Any] | None, Rows] = {}
        self.loop = LOOP.current()
        self.gate = self.loop.gate(self.mapper.udf)
        self.columns: Sequence[Sequence[Any]] | None = None
        self.missing: dict[int, UdfError] = {}
        rows = results.rows
        spans = [Span(*part) for part in self.mapper.rows_of_calls(results.inputs)] if rows else []
        if self.mapper.udf.form == "scalar":
            self.columns, self.missing = self.mapper.arguments(results.inputs)
            spans = [Span(row, row + 1) for row in range(rows) if not results.has(row)]
        self.left = len(spans)
        self.stopping = False
        self.task: asyncio.Task[Any] | None = None
        self.future = self.loop.start(self._run(spans))
        self.future.add_done_callback(lambda _: LOOP.count_ended())

    async def stop(self) -> None:
        """Cancel the calls in flight."""
        self.stopping = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task], timeout=GRACE_SECONDS)

    async def _run(self, spans: Sequence[Span]) -> MappedBatch:
        self.task = asyncio.current_task()
        if spans:
            # Set up the UDF here: a client that its class creates belongs to the loop.
            self.function = self.set_up(self.loop)
        tasks = [asyncio.create_task(self._narrow(span)) for span in spans]
        try:
            # Await in row order, so that every run reports the same first failing row.
            for task in tasks:
                await task
        except RowFailed as failed:
            raise self.results.failed(failed.row, failed.trouble) from self.results.causes.get(failed.row)
        finally:
            self.stopping = True
            for task in tasks:
                task.cancel()
                task.add_done_callback(see_exception)
            if tasks:
                await asyncio.wait(tasks, timeout=GRACE_SECONDS)
        return self.results.mapped()

    async def _narrow(self, span: Span) -> None:
        await Narrowing(self.results, self._call, asyncio.sleep, span).run()
        self.left -= 1
        LOOP.count_ended()

    async def _call(self, start: int, stop: int) -> pa.Array | CallFailure:
        inputs = self.results.inputs.slice(start, stop - start)
        if (unreadable := self.missing.get(start)) is not None:
            return unfit_row(unreadable, self.rules)
        if self.columns is None:
            arguments = self.mapper.batch_arguments(inputs)
        else:
            arguments = [column[start] for column in self.columns]
        if self.blocking[start, stop]:
            self.blocking[start, stop] -= 1
            return self._failure(start, timed_out(self.mapper.udf.timeout, "did not `await` anything when it ended"))
        async with self.gate:
            end = await self._begin(stop - start)
            self.results.answered(start, stop)
            task = asyncio.current_task()
            self.running[task] = (start, stop)
            try:
                result = await self.function(*arguments)
            except asyncio.CancelledError as error:
                if self.stopping or self.loop.blocked_by is not None:
                    raise
                return self._failure(start, RuntimeError(f"The call was cancelled by the function itself: {error!r}"))
            except BaseException as raised:
                return self._failure(start, as_failure(raised))
            finally:
                del self.running[task]
                self.mapper.count_call(stop - start)  # after the call, which may have reported its cost
                end()
        try:
            if self.columns is None:
                return self.mapper.batch_output(result, inputs)
            return array_from_values([result], self.mapper.udf.data_type)
        except UdfError as unfit:
            if not self.rules and not is_of_a_row(unfit):
                raise
            return call_failure_of(unfit, self.rules, self.mapper.udf)
        except OutputMismatch as mismatch:
            self.results.causes[start] = mismatch.raised or mismatch
            return self.mapper.unfit(mismatch, result, self.results.inputs, start, self.rules)

    async def _begin(self, rows: int) -> Callable[[], None]:
        """Wait until the job's cap covers a call beside those in flight; return a function that marks its end."""
        while True:
            if is_used_up():
                await asyncio.to_thread(may_go_on)
            if end := begin_call(rows, self.mapper.udf.cost):
                return end
            await asyncio.sleep(_BETWEEN_LOOKS)

    @property
    def rules(self) -> Rules:
        return self.results.rules

    def _failure(self, start: int, error: Exception) -> CallFailure:
        self.results.causes[start] = error
        udf = self.mapper.udf
        found = describe_failure(error, matching_rules_of(self.rules, type(error)), users_frames(error), udf=udf)
        if found.out_of_memory:
            release(error)
        if found.device_failed:
            raise device_failed(found) from error
        return found
