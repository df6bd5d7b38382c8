"""The worker process that runs a UDF, and the messages between it and its parent, which may kill it at any moment.

The worker reads orders from one pipe and answers on another; a message is a JSON header and bytes. It writes the
current row into a few shared bytes, so that the parent knows the row after the worker died.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.apply.source_rows import SourceRows
from airflow_geneva.engine.apply.udf_call import (
    Mapper,
    call_failure_of,
    describe_failure,
    describe_set_up,
    unfit_row,
    users_frames,
)
from airflow_geneva.engine.failures import CallFailure
from airflow_geneva.engine.lance_io.arrays import convert_array, to_storage
from airflow_geneva.engine.lance_io.sound_arrays import aligned
from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_values
from airflow_geneva.engine.limits.calls import calling
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.engine_errors import as_failure
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.error_policy import Skip, matching_rules_of, rules_of
from airflow_geneva.engine.udf.shipping import UdfReference
from airflow_geneva.errors import GenevaError, UdfError

CALL_MARK = struct.Struct("<qd")
"""The shared bytes: the row of the last call, and when the call began (monotonic seconds); 0 after it ended."""

IDLE_SECONDS = 60.0

DEVICE_FAILED = "device_failed"
"""The answer of a worker that ends because its device failed: no later call would succeed in it."""

_BEGAN = struct.Struct("<d")
_BEGAN_AT = CALL_MARK.size - _BEGAN.size
_CHUNK_SECONDS = 0.2
_CHUNK_TROUBLES = 1_000
_EXIT_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_OOM_SCORE_MORE, _OOM_SCORE_MOST = 500, 1_000
_LANCE_TYPE = b"lance."
_SIZES = struct.Struct("<IQ")


def serve(orders: int, answers: int, shared: int) -> None:
    """Process the parent's orders until the parent is gone or sends no order for a minute."""
    if sys.platform == "linux":
        # On other systems the worker first finishes a running call when the parent dies.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _die_first_without_memory()
    for inherited in (orders, answers):
        os.set_inheritable(inherited, False)
    mark = mmap.mmap(shared, CALL_MARK.size)
    os.close(shared)
    # On a crash, print Python's traceback to stderr instead of writing a core file of many gigabytes.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(EOFError, BrokenPipeError):
        _work(orders, answers, mark)
    os.close(orders)
    os.close(answers)
    # Threads that the UDF left behind must not keep the process alive.
    last = threading.Timer(_EXIT_SECONDS, os._exit, (0,))
    last.daemon = True
    last.start()


def _die_first_without_memory() -> None:
    """Make the OOM killer choose this process, not the Spark or Airflow worker: its death becomes an error record."""
    with contextlib.suppress(OSError):
        score = int(_OOM_SCORE.read_text())
        _OOM_SCORE.write_text(str(min(score + _OOM_SCORE_MORE, _OOM_SCORE_MOST)))


def _work(orders: int, answers: int, mark: mmap.mmap) -> None:
    """Process orders: `open` a UDF, `load` a batch, `map` rows of it, `rest` (drop the batch), and `ping`."""
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    udf: UDF
    run: _BatchRun | None = None
    table: TableLocation | None = None
    while poll.poll(IDLE_SECONDS * 1_000):
        header, body = receive(orders)
        match header["order"]:
            case "open":
                try:
                    udf = _open(header, body)
                except GenevaError as error:
                    send(answers, {"unfit": str(error)})
                except BaseException as raised:
                    send(answers, {"unfit": describe_set_up(as_failure(raised))})
                else:
                    send(answers, {})
            case "load":
                run = _BatchRun(udf, batch_from_bytes(body), answers, mark, header["reads"])
                table = header["table"] and TableLocation.of_document(header["table"])
                send(answers, {})
            case "map":
                assert run is not None
                map_them = run.map_rows if udf.form == "scalar" else run.map_batch
                with calling(table, run.meter):
                    map_them(header["start"], header["stop"])
            case "rest":
                run = None
            case "ping":
                send(answers, {})


def _open(header: dict[str, Any], body: bytearray) -> UDF:
    named = {name: header[name] for name in ("import_path", "version", "stage", "groups")}
    udf = UdfReference(**named, pickled=bytes(body)).open().without_stage
    _ = udf.function
    # Arrow imports pandas when it makes its first array; that must not count as time of a call.
    pa.array([None])
    return udf


class _BatchRun:
    def __init__(
        self, udf: UDF, inputs: pa.RecordBatch, answers: int, mark: mmap.mmap, reads: dict[str, Any] | None
    ) -> None:
        self.udf = udf
        self.inputs = inputs
        self.answers = answers
        self.mark = mark
        self.rules = rules_of(udf.on_error)
        columns, source = inputs.schema.names, None
        if reads is not None:
            columns, source = reads["columns"], SourceRows.of_document(reads["source"])
        self.mapper = Mapper(udf, columns, source=source)
        self.meter = Meter()

    def map_rows(self, start: int, stop: int) -> None:
        """Map rows up to a failing row that no `Skip` covers; the parent decides on that row."""
        function = self.mapper.set_up(self._mark_call)
        columns, missing = self.mapper.arguments(self.inputs.slice(start, stop - start))
        first = start
        values: list[Any] = []
        troubles: dict[int, CallFailure] = {}
        since = time.monotonic()
        for row, arguments in enumerate(zip(*columns, strict=True), start):
            now = time.monotonic()
            if now - since >= _CHUNK_SECONDS or len(troubles) >= _CHUNK_TROUBLES:
                if self._answer_rows(start, values, troubles):
                    return
                start, values, troubles = row, [], {}
                since = now = time.monotonic()
            if missing and (unfit := missing.get(row - first)) is not None:
                values.append(None)
                troubles[row] = unfit_row(unfit, self.rules)
                if not self._skips(troubles[row]):
                    break
                continue
            CALL_MARK.pack_into(self.mark, 0, row, now)
            try:
                values.append(function(*arguments))
            except BaseException as raised:
                error = as_failure(raised)
                values.append(None)
                fits = matching_rules_of(self.rules, type(error))
                trouble = describe_failure(error, fits, users_frames(error), udf=self.udf)
                self._end_with_device(trouble)
                troubles[row] = trouble
                if not self._skips(troubles[row]):
                    break
        self._answer_rows(start, values, troubles, end=True)

    def _answer_rows(self, start: int, values: list[Any], troubles: dict[int, CallFailure], end: bool = False) -> bool:
        """Send values; return whether the order ends: all rows are done, or the parent has to decide on one."""
        self._call_ended()
        try:
            made = array_from_values(values, self.udf.data_type)
        except OutputMismatch:
            made = pa.concat_arrays([self._one(start + at, value, troubles) for at, value in enumerate(values)])
        end = end or not all(self._skips(trouble) for trouble in troubles.values())
        self._answer(start, made, sorted(troubles.items()), end)
        return end

    def _one(self, row: int, value: Any, troubles: dict[int, CallFailure]) -> pa.Array:
        try:
            return array_from_values([value], self.udf.data_type)
        except OutputMismatch as mismatch:
            troubles[row] = self.mapper.unfit(mismatch, value, self.inputs, row, self.rules)
            return pa.nulls(1, self.udf.data_type)

    def map_batch(self, start: int, stop: int) -> None:
        inputs = self.inputs.slice(start, stop - start)
        function = self.mapper.set_up(self._mark_call)
        CALL_MARK.pack_into(self.mark, 0, start, time.monotonic())
        troubles = []
        try:
            made = self.mapper.map_batch(inputs, function)
        except UdfError as error:
            made = pa.nulls(stop - start, self.udf.data_type)
            troubles.append((start, call_failure_of(error, self.rules, self.udf)))
            self._end_with_device(troubles[0][1])
        self._call_ended()
        self._answer(start, made, troubles, end=True)

    def _answer(self, start: int, values: pa.Array, troubles: Iterable[tuple[int, CallFailure]], end: bool) -> None:
        header = {"start": start, "troubles": [(row, vars(trouble)) for row, trouble in troubles], "end": end}
        header["usage"] = asdict(self.meter.take())
        send(self.answers, header, values_to_bytes(values))

    def _end_with_device(self, trouble: CallFailure) -> None:
        """End this process if its device failed; the shared call mark still names the row."""
        if trouble.device_failed:
            send(self.answers, {DEVICE_FAILED: f"{trouble.name}: {trouble.message}"})
            os._exit(1)

    def _skips(self, trouble: CallFailure) -> bool:
        return bool(trouble.fits) and isinstance(self.rules[trouble.fits[0]], Skip)

    def _call_ended(self) -> None:
        _BEGAN.pack_into(self.mark, _BEGAN_AT, 0.0)

    def _mark_call(self, begins: bool) -> None:
        """Mark that a call begins, or that it waits for its limit: waiting does not count as time of the call."""
        _BEGAN.pack_into(self.mark, _BEGAN_AT, time.monotonic() if begins else 0.0)


def send(pipe: int, header: dict[str, Any], body: Any = b"") -> None:
    """Write one message; `OSError` if the reader is gone."""
    head = json.dumps(header).encode()
    view = memoryview(body)
    _write(pipe, memoryview(_SIZES.pack(len(head), view.nbytes) + head))
    _write(pipe, view)


def receive(pipe: int) -> tuple[dict[str, Any], bytearray]:
    """Read one message; `EOFError` if the writer is gone, even in the middle of a message."""
    head_size, body_size = _SIZES.unpack(_read(pipe, _SIZES.size))
    return json.loads(_read(pipe, head_size)), _read(pipe, body_size)


def batch_to_bytes(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def batch_from_bytes(data: bytearray) -> pa.RecordBatch:
    """Deserialize a batch from `batch_to_bytes`, without copying."""
    stream = pa.ipc.open_stream(pa.py_buffer(data))
    if _LANCE_TYPE in stream.schema.serialize().to_pybytes():
        # Importing the module registers Lance's extension types with Arrow.
        import lance.arrow  # noqa: F401

        stream = pa.ipc.open_stream(pa.py_buffer(data))
    return stream.read_next_batch()


def values_to_bytes(values: pa.Array) -> pa.Buffer:
    """Serialize an array without extension types, which not every process has registered."""
    return batch_to_bytes(pa.record_batch([to_storage(values)], names=["values"]))


def values_from_bytes(data: bytearray, data_type: pa.DataType) -> pa.Array:
    return convert_array(aligned(batch_from_bytes(data).column(0)), data_type)


def _write(pipe: int, view: memoryview) -> None:
    view = view.cast("B")
    while view.nbytes:
        view = view[os.write(pipe, view) :]


def _read(pipe: int, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view.nbytes:
        count = os.readv(pipe, [view])
        if count == 0:
            raise EOFError
        view = view[count:]
    return data
