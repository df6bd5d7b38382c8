"""Run an async UDF: many calls at a time in one event loop, under its error policy and its timeout."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from airflow_geneva.apply.arrow_output import OutputMismatch, array_from_values
from airflow_geneva.apply.batch_mapper import BatchMapper, BegunBatch
from airflow_geneva.apply.narrowing import Narrowing, RowFailed, Span
from airflow_geneva.apply.udf_call import BatchResults, CallFailure, MappedBatch, Mapper, call_failure_of, users_frames
from airflow_geneva.errors import UdfError
from airflow_geneva.limits.rate_limit import is_used_up, may_go_on
from airflow_geneva.udf.error_policy import Rules, matching_rules_of, rules_of

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF

Result = TypeVar("Result")


class EventLoop:
    """Runs the async calls of all UDFs of this process: a client such as `httpx.AsyncClient` belongs to one loop."""

    def __init__(self) -> None:
        self.ended = 0
        self._call_ended = threading.Condition()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gates: dict[tuple[str, str, int | None], asyncio.Semaphore] = {}

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the loop; to cancel the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def gate(self, udf: UDF) -> asyncio.Semaphore:
        """Return what lets `max_in_flight` calls of a UDF pass at a time, in the order in which they came."""
        key = (udf.name, udf.code_version, udf.max_in_flight)
        with self._lock:
            return self._gates.setdefault(key, asyncio.Semaphore(udf.max_in_flight or 1))

    def count_ended(self) -> None:
        """Say that a call has ended, or a batch."""
        with self._call_ended:
            self.ended += 1
            self._call_ended.notify_all()

    def wait_for_call(self, ended: int) -> None:
        """Wait until more calls than these have ended."""
        with self._call_ended:
            self._call_ended.wait_for(lambda: self.ended > ended)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(loop,), name="geneva-event-loop", daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # Of a task that a UDF starts, these end the loop besides being raised where the task is waited for.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


LOOP = EventLoop()


def _after_fork() -> None:
    """Begin anew: a forked process has no copy of the thread that runs the loop."""
    LOOP.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork)


_CANCEL_SECONDS = 5.0


class AsyncMapper(BatchMapper):
    """Runs an async UDF in this process. A row of a failing scalar UDF, and a batch, is retried while others go on."""

    def __init__(self, mapper: Mapper) -> None:
        self.mapper = mapper
        self.rules = rules_of(mapper.udf.on_error)
        self.calls_at_a_time = mapper.udf.max_in_flight or 1
        self.function: Callable[..., Any] | None = None

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        if not batch.num_rows:
            return BatchResults(self.mapper, self.mapper.inputs(batch), self.rules).mapped()
        return super().__call__(batch)

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        results = BatchResults(self.mapper, self.mapper.inputs(batch), self.rules)
        return _BegunCalls(results, self._set_up)

    def _set_up(self) -> Callable[..., Any]:
        self.function = self.function or self.mapper.set_up()
        return self.function


class _BegunCalls(BegunBatch):
    """The calls of one batch, in flight."""

    def __init__(self, results: BatchResults, set_up: Callable[[], Callable[..., Any]]) -> None:
        self.results = results
        self.mapper = results.mapper
        self.set_up = set_up
        self.gate = LOOP.gate(self.mapper.udf)
        self.columns: Sequence[Sequence[Any]] | None = None
        rows = results.rows
        spans = [Span(0, rows)] if rows else []
        if self.mapper.udf.form == "scalar":
            self.columns = self.mapper.arguments(results.inputs)
            spans = [Span(row, row + 1) for row in range(rows)]
        self.left = len(spans)
        self.stopping = False
        self.task: asyncio.Task[Any] | None = None
        self.future = LOOP.start(self._run(spans))
        self.future.add_done_callback(lambda _: LOOP.count_ended())

    @property
    def unfinished(self) -> int:
        return 0 if self.future.done() else self.left

    def result(self) -> MappedBatch:
        return self.future.result()

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        return LOOP.start(self._stop()).result()

    async def _stop(self) -> tuple[list[int], pa.Array | None]:
        task = self.task
        if task is not None:
            task.cancel()
            await asyncio.wait([task], timeout=_CANCEL_SECONDS)
        return self.results.succeeded()

    async def _run(self, spans: Sequence[Span]) -> MappedBatch:
        self.task = asyncio.current_task()
        if spans:
            # A client of its class belongs to the loop, so it is made here.
            self.function = self.set_up()
        tasks = [asyncio.create_task(self._narrow(span)) for span in spans]
        try:
            # In the order of the rows: the first row that fails the job is the same in every run.
            for task in tasks:
                await task
        except RowFailed as failed:
            raise self.results.failed(failed.row, failed.trouble) from self.results.causes.get(failed.row)
        finally:
            self.stopping = True
            for task in tasks:
                task.cancel()
                task.add_done_callback(_see_exception)
            if tasks:
                await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
        return self.results.mapped()

    async def _narrow(self, span: Span) -> None:
        await Narrowing(self.results, self._call, asyncio.sleep, span).run()
        self.left -= 1
        LOOP.count_ended()

    async def _call(self, start: int, stop: int) -> pa.Array | CallFailure:
        inputs = self.results.inputs.slice(start, stop - start)
        if self.columns is None:
            arguments = self.mapper.batch_arguments(inputs)
        else:
            arguments = [column[start] for column in self.columns]
        async with self.gate:
            if is_used_up():
                await asyncio.to_thread(may_go_on)
            self.results.answered(start, stop)
            try:
                result = await self.function(*arguments)
            except asyncio.CancelledError as error:
                if self.stopping:
                    raise
                return self._failure(start, RuntimeError(f"The call was cancelled by the function itself: {error!r}"))
            except Exception as error:
                return self._failure(start, error)
            finally:  # it may have reported what it cost
                self.mapper.count_call(stop - start)
        try:
            if self.columns is None:
                return self.mapper.batch_output(result, inputs)
            return array_from_values([result], self.mapper.udf.data_type)
        except UdfError as unfit:
            if not self.rules:
                raise
            return call_failure_of(unfit, self.rules)
        except OutputMismatch as mismatch:
            self.results.causes[start] = mismatch
            type_error = self.mapper.type_error(mismatch, result, self.results.inputs, start)
            return CallFailure.of(type_error, matching_rules_of(self.rules, UdfError), complete=True)

    @property
    def rules(self) -> Rules:
        return self.results.rules

    def _failure(self, start: int, error: Exception) -> CallFailure:
        self.results.causes[start] = error
        return CallFailure.of(error, matching_rules_of(self.rules, type(error)), users_frames(error))


def _see_exception(task: asyncio.Task[None]) -> None:
    """Ask for the exception of a task that is not waited for, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()
