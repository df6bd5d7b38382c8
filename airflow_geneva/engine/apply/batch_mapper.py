"""The interface of UDFs that are ready to map batches of rows, one at a time or several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from airflow_geneva.engine.apply.event_loop import LOOP
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.errors import DeviceFailed


class StopComputing(BaseException):
    """Ends a task's computation without a failure; rows computed before are checkpointed.

    If it interrupts the calls of a batch, `kept` has the rows that have a value, and their values.
    """

    kept: tuple[list[int], pa.Array | None] = ([], None)


class BegunBatch(ABC):
    """A batch whose calls may be in flight."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of its calls that have not ended."""

    def go_on(self) -> bool:
        """Start the calls whose inputs have become available; return whether `result` has no calls to wait for."""
        return not self.unfinished

    @abstractmethod
    def result(self) -> MappedBatch:
        """Wait for all of its calls; see `BatchMapper.__call__`."""

    @abstractmethod
    def cancel(self) -> tuple[list[int], pa.Array | None]:
        """Cancel the calls in flight; return the rows that succeeded, and their values."""


def first_has_ended(begun: Iterable[BegunBatch]) -> bool:
    """Advance all batches with `go_on`; return whether the first one has no calls to wait for."""
    first, *_ = [batch.go_on() for batch in begun]
    return first


def wait_for_first(begun: Sequence[BegunBatch]) -> None:
    """Advance all batches until the first one has no calls to wait for."""
    ended = LOOP.ended
    while not first_has_ended(begun):
        LOOP.wait_for_call(ended)
        ended = LOOP.ended


class BatchMapper:
    """A UDF that is ready to be called on batches, by one thread at a time; a context manager.

    A subclass defines `__call__`, or `begin` if several of its batches may be in flight.
    """

    calls_at_a_time: int = 0
    """The number of calls that may be in flight; 0: `result` makes the calls of a batch."""

    calls_rows: bool = False
    """Whether a call in flight takes a single row, not a batch."""

    needs_row_ids: bool = False
    """Whether its batches must also have the row ids, as column `_rowid`."""

    prepares_at_a_time: int = 0
    """The number of threads in which `prepare` may run; 0: there is nothing to prepare."""

    prepares_rows: int | None = None
    """The most rows that `prepare` should get at a time, whatever their size was so far."""

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        """Map a batch with the input columns, named as in the table.

        Raises:
            InvalidInput: an input column is missing in the batch, or occurs twice.
            UdfError: a row fails the job, or the UDF cannot be set up. If ``row_index`` is set, ``computed`` and
                ``failures`` hold the values and failures of the rows before it.
        """
        begun = self.begin(batch)
        try:
            return begun.result()
        except (StopComputing, DeviceFailed) as stop:
            stop.kept = begun.cancel()
            raise
        except BaseException:
            begun.cancel()
            raise

    def prepare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Preprocess a batch before its call: return it with additional columns, which `begin` uses."""
        return batch

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        """Start mapping a batch; several may be started, and their results must be requested in the same order."""
        return _NotBegun(self, batch)

    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> BatchMapper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(eq=False)
class _NotBegun(BegunBatch):
    """A batch whose calls are made when its result is requested."""

    mapper: Callable[[pa.RecordBatch], MappedBatch]
    batch: pa.RecordBatch
    kept: tuple[list[int], pa.Array | None] = ([], None)

    @property
    def unfinished(self) -> int:
        return 0

    def result(self) -> MappedBatch:
        try:
            return self.mapper(self.batch)
        except (StopComputing, DeviceFailed) as stop:
            self.kept, stop.kept = stop.kept, ([], None)
            raise

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        return self.kept
