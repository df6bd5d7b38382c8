"""Run a UDF under its error policy and its timeout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import pyarrow as pa

from airflow_geneva.apply.arrow_output import OutputMismatch
from airflow_geneva.apply.isolation.narrow import Narrowing, RowByRow
from airflow_geneva.apply.isolation.process import POOL, Chunk, UdfSetupFailed, WorkerLost, WorkerProcess
from airflow_geneva.apply.udf_call import BatchResults, CallFailure, MappedBatch, Mapper, call_failure_of
from airflow_geneva.errors import UdfCrashed, UdfError
from airflow_geneva.udf import UDF
from airflow_geneva.udf.error_policy import matching_rules_of, rules_of
from airflow_geneva.udf.shipping import UdfReference


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
        try:
            return MappedBatch(self.mapper(batch), (), batch.num_rows)
        except UdfError as error:
            own = error.__cause__
            if self.mapper.udf.form == "scalar" or own is None or isinstance(own, OutputMismatch):
                raise
            failed = error
        # Outside the handler, so that the next exception does not have this error as its context.
        return self._narrow(batch, failed)

    def _narrow(self, batch: pa.RecordBatch, error: UdfError) -> MappedBatch:
        function = self.mapper.set_up()
        results = BatchResults(self.mapper, self.mapper.inputs(batch), ())
        raised = error

        def call(start: int, stop: int) -> pa.Array | CallFailure:
            nonlocal raised
            results.called(start, stop)
            try:
                return self.mapper.map_batch(results.inputs.slice(start, stop - start), function)
            except UdfError as again:
                if again.__cause__ is None or isinstance(again.__cause__, OutputMismatch):
                    raise
                raised = again
                return call_failure_of(again, ())

        results.called(0, batch.num_rows)
        try:
            return Narrowing(results, call).run(call_failure_of(error, ()))
        except UdfError as failed:
            if failed.row_index is None:
                raise
            raise failed from raised.__cause__


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
