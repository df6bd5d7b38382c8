"""Call a UDF on several batches at a time, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import copy_context

import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import BatchMapper, BegunBatch, StopComputing
from airflow_geneva.engine.apply.event_loop import LOOP
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.limits.rate_limit import is_used_up, may_go_on
from airflow_geneva.engine.runtime import CancelledError, Future, SimpleQueue, ThreadPoolExecutor
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.errors import DeviceFailed


class ThreadedMapper(BatchMapper):
    """Maps batches in threads, each with one of the mappers, which all have the same UDF."""

    def __init__(self, mappers: Sequence[BatchMapper]) -> None:
        self.calls_at_a_time = len(mappers)
        self.needs_row_ids = mappers[0].needs_row_ids
        self.prepares_at_a_time, self.prepare = mappers[0].prepares_at_a_time, mappers[0].prepare  # type: ignore[method-assign]
        self.prepares_rows = mappers[0].prepares_rows
        self._free = SimpleQueue[BatchMapper]()
        for mapper in mappers:
            self._free.put(mapper)
        self._pool = ThreadPoolExecutor(len(mappers), thread_name_prefix="geneva-call")

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        future = self._pool.submit(copy_context().run, self._map, batch)
        future.add_done_callback(lambda _: LOOP.count_ended())
        return _InThread(future)

    def close(self) -> None:
        self._pool.shutdown()

    def _map(self, batch: pa.RecordBatch) -> MappedBatch:
        if is_used_up():
            may_go_on()
        mapper = self._free.get()
        try:
            return mapper(batch)
        finally:
            self._free.put(mapper)


class _InThread(BegunBatch):
    def __init__(self, future: Future[MappedBatch]) -> None:
        self.future = future

    @property
    def unfinished(self) -> int:
        return 0 if self.future.done() else 1

    def result(self) -> MappedBatch:
        return self.future.result()

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        """Withdraw the batch if no thread has started it; else wait for it, because its rows may have been paid for."""
        self.future.cancel()
        try:
            mapped = self.future.result()
        except CancelledError:
            return [], None
        except (StopComputing, DeviceFailed) as stop:
            return stop.kept
        except BaseException as error:
            if is_failure(error):
                return [], None
            raise
        failed = {failure.index for failure in mapped.failures}
        rows = [row for row in range(len(mapped.values)) if row not in failed]
        return rows, mapped.values.take(pa.array(rows, pa.int64()))
