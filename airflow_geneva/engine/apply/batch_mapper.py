"""What is ready to compute batches of rows, one at a time or several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from airflow_geneva.engine.apply.event_loop import LOOP
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.errors import DeviceFailed


class StopComputing(BaseException):
    """Ends a unit; rows computed before are checkpointed. It is not a failure.

    If it ends the calls of a batch, `kept` has the rows of the batch that have a value, and their values.
    """

    kept: tuple[list[int], pa.Array | None] = ([], None)


class BegunBatch(ABC):
    """A batch whose calls may be in flight."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of its calls that have not ended."""

    def go_on(self) -> bool:
        """Begin the calls whose inputs have become known; return whether `result` has no calls to wait for."""
        return not self.unfinished

    @abstractmethod
    def result(self) -> MappedBatch:
        """Wait for all of its calls; see `BatchMapper.__call__`."""

    @abstractmethod
    def cancel(self) -> tuple[list[int], pa.Array | None]:
        """Cancel what is in flight; return the rows that succeeded, without the failed ones, and their values."""


def first_has_ended(begun: Iterable[BegunBatch]) -> bool:
    """Let all batches go on; return whether the first one has no calls to wait for."""
    first, *_ = [batch.go_on() for batch in begun]
    return first


def wait_for_first(begun: Sequence[BegunBatch]) -> None:
    """Wait until the first batch has no calls to wait for, while those of all batches go on."""
    ended = LOOP.ended
    while not first_has_ended(begun):
        LOOP.wait_for_call(ended)
        ended = LOOP.ended


class BatchMapper:
    """A UDF that is ready to be called on batches, by one thread at a time; a context manager.

    A subclass defines `__call__`, or `begin` if several of its batches may be in flight.
    """

    calls_at_a_time: int = 0
    """How many calls may be in flight; 0: `result` makes the calls of a batch."""

    calls_rows: bool = False
    """Whether a call in flight is of a single row, not of a batch."""

    needs_row_ids: bool = False
    """Whether its batches also have the row ids, as column `_rowid`."""

    prepares_at_a_time: int = 0
    """In how many threads `prepare` may run; 0: there is nothing to prepare."""

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        """Map a batch with the input columns, named as in the table.

        Raises:
            InvalidInput: an input column is missing in the batch, or is there twice.
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
        """Preprocess a batch ahead of its call: return it with more columns, which `begin` finds."""
        return batch

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        """Begin to map a batch; several may be begun, and their results are asked for in the same order."""
        return _NotBegun(self, batch)

    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> BatchMapper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(eq=False)
class _NotBegun(BegunBatch):
    """A batch of calls that are made when the result is asked for."""

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
