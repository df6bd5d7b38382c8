"""Start, watch and kill worker processes that run a UDF, and keep idle ones: a new one may have to load a model."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.apply.isolation.worker import (
    CALL_MARK,
    DEVICE_FAILED,
    batch_to_bytes,
    receive,
    send,
    values_from_bytes,
)
from airflow_geneva.engine.apply.udf_call import Mapper
from airflow_geneva.engine.counts import Usage
from airflow_geneva.engine.failures import CallFailure
from airflow_geneva.engine.limits.calls import table_at_hand
from airflow_geneva.engine.limits.rate_limit import count
from airflow_geneva.engine.runtime import Future, threading, time
from airflow_geneva.engine.udf.shipping import UdfReference

_BOOT = """
import json, sys
orders, answers, shared = map(int, sys.argv[1:])
sys.path[:] = json.loads(open(orders, "rb", buffering=0, closefd=False).readline())
from airflow_geneva.engine.apply.isolation.worker import serve
serve(orders, answers, shared)
"""
_LOOK_SECONDS = 1.0
_DEATH_SECONDS = 5.0
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""Signals that a process causes itself; others come from the kernel, for lack of memory, or from other processes."""


@dataclass(eq=False)
class WorkerLost(Exception):
    """A worker process died or was killed; ``reason`` completes a sentence, ``row`` is None outside of a call.

    `by_itself`: it exited or crashed, and neither lack of memory, a failed device nor another process explains that.
    """

    reason: str
    row: int | None
    timed_out: bool
    by_device: bool = False
    by_itself: bool = False


class UdfSetupFailed(Exception):
    """A UDF cannot be set up in a worker process; the message says why."""


@dataclass(frozen=True)
class Chunk:
    """Values of consecutive rows; NULL for rows that failed."""

    start: int
    values: pa.Array
    troubles: list[tuple[int, CallFailure]]


@dataclass(frozen=True)
class WorkerKey:
    """The UDF, import path, working directory and environment of a worker, which is reused only for an equal key."""

    udf_reference: UdfReference
    path: tuple[str, ...]
    folder: str
    environment: frozenset[tuple[str, str]]

    @staticmethod
    def of(udf_reference: UdfReference) -> WorkerKey:
        return WorkerKey(udf_reference, tuple(map(str, sys.path)), os.getcwd(), frozenset(os.environ.items()))


class WorkerProcess:
    """A worker process that runs one UDF, with this process's import path, working directory and environment.

    ``when_gone`` is called, in a separate thread, after the worker exited or was killed. `UdfSetupFailed` is raised if
    the UDF cannot be set up in it, or takes longer than ``within`` seconds.
    """

    def __init__(
        self, worker_key: WorkerKey, when_gone: Callable[[WorkerProcess], None], within: float | None = None
    ) -> None:
        self.worker_key = worker_key
        self.when_gone = when_gone
        self.owner = os.getpid()
        self.at_rest = False
        with tempfile.TemporaryFile(prefix="geneva-udf-") as shared:
            shared.truncate(CALL_MARK.size)
            self.mark = mmap.mmap(shared.fileno(), CALL_MARK.size)
            orders, self.orders = os.pipe()
            self.answers, answers = os.pipe()
            self.pipes = [self.orders, self.answers]
            self.lock = threading.Lock()
            try:
                self.process, self.reaper = self._start((orders, answers, shared.fileno()))
            except BaseException:
                self.close_pipes()
                raise
            finally:
                os.close(orders)
                os.close(answers)
        try:
            self._open(within)
        except BaseException:
            self.close()
            raise

    def load(self, batch: pa.RecordBatch, mapper: Mapper | None = None) -> None:
        """Send a batch for `map`, which replaces the previous one; `WorkerLost` if the worker died."""
        table = table_at_hand()
        reads = None
        if mapper is not None and mapper.source is not None and mapper.udf.groups == "batches":
            reads = {"columns": mapper.input_columns, "source": mapper.source.to_document()}
        self._ask({"order": "load", "table": table and table.to_document(), "reads": reads}, batch_to_bytes(batch))

    def map(self, start: int, stop: int, data_type: pa.DataType, timeout: float | None) -> Iterator[Chunk]:
        """Map rows of the batch; end early after a failed row on which the caller has to decide.

        `WorkerLost` if the worker died, or was killed because a call took longer than ``timeout`` seconds.
        """
        self._order({"order": "map", "start": start, "stop": stop})
        while not self.at_rest:
            header, body = self._answer(timeout)
            values = values_from_bytes(body, data_type)
            troubles = [
                (row, CallFailure(**{**found, "fits": tuple(found["fits"])})) for row, found in header["troubles"]
            ]
            self.at_rest = header["end"]
            count(Usage.from_json(header["usage"]))
            yield Chunk(header["start"], values, troubles)

    def answers_still(self) -> bool:
        """Whether the worker is still alive; an idle worker exits after a minute."""
        try:
            self._ask({"order": "ping"})
        except WorkerLost:
            return False
        return True

    def rest(self) -> None:
        self._order({"order": "rest"})
        self.at_rest = True

    def close(self) -> None:
        """Kill the worker and the processes that it started."""
        # A forked copy of this process knows the worker's process id, but the worker is not its child.
        if os.getpid() == self.owner:
            with self.lock:
                if self.process.returncode is None:
                    _kill_group(self.process)
            self.reaper.join(_DEATH_SECONDS)
        self.close_pipes()

    def close_pipes(self) -> None:
        """Close the pipes; an idle worker then exits."""
        with self.lock:
            while self.pipes:
                os.close(self.pipes.pop())

    def _start(self, theirs: tuple[int, int, int]) -> tuple[subprocess.Popen[bytes], threading.Thread]:
        """Start the worker from a thread that lives as long as the worker: Linux kills it when that thread ends."""
        born: Future[subprocess.Popen[bytes]] = Future()
        command = [sys.executable, "-c", _BOOT, *map(str, theirs)]

        def keep() -> None:
            try:
                # Its standard output goes to stderr. Its own process group lets us kill the processes that it started.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=theirs, start_new_session=True
                )
            except BaseException as error:
                born.set_exception(error)
                return
            born.set_result(process)
            if hasattr(os, "waitid"):
                # Until wait(), no other process gets its id, so its group can be killed safely.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                _kill_group(process)
                with self.lock:
                    process.wait()
            else:
                process.wait()
            self.when_gone(self)

        reaper = threading.Thread(target=keep, name="geneva-udf-keeper", daemon=True)
        reaper.start()
        return born.result(), reaper

    def _open(self, within: float | None) -> None:
        self._deadline = None if within is None else time.monotonic() + within
        udf_reference = self.worker_key.udf_reference
        named = {"import_path": udf_reference.import_path, "version": udf_reference.version}
        header = {"order": "open", **named, "stage": udf_reference.stage, "groups": udf_reference.groups}
        try:
            try:
                os.write(self.orders, json.dumps(self.worker_key.path).encode() + b"\n")
            except OSError:
                raise self._lost() from None
            answer = self._ask(header, udf_reference.pickled or b"")
        except WorkerLost as lost:
            reason = lost.reason
            if self._deadline is not None and time.monotonic() >= self._deadline:
                reason = f"had not loaded it after {within:g} seconds, its setup_timeout, and was ended"
            raise UdfSetupFailed(f"the process that was to run it {reason}") from None
        self._deadline = None
        if "unfit" in answer:
            raise UdfSetupFailed(answer["unfit"])

    def _ask(self, header: dict[str, Any], body: Any = b"") -> dict[str, Any]:
        self._order(header, body)
        answer, _ = self._answer(None)
        self.at_rest = True
        return answer

    def _order(self, header: dict[str, Any], body: Any = b"") -> None:
        self.at_rest = False
        try:
            send(self.orders, header, body)
        except OSError:
            raise self._lost() from None

    def _answer(self, timeout: float | None) -> tuple[dict[str, Any], bytearray]:
        poll = select.poll()
        poll.register(self.answers, select.POLLIN)
        while True:
            left = self._seconds_left(timeout)
            # An answer that has arrived counts, even if the timeout has passed.
            if poll.poll(max(min(left, _LOOK_SECONDS), 0) * 1_000):
                try:
                    header, body = receive(self.answers)
                except (EOFError, OSError):
                    raise self._lost() from None
                if (failed := header.get(DEVICE_FAILED)) is not None:
                    raise self._lost(device=failed)
                return header, body
            if left <= 0:
                raise self._lost(timeout if self._deadline is None else 0.0)
            # Processes that the UDF forked may hold the pipe open.
            if self.process.returncode is not None and not poll.poll(0):
                raise self._lost()

    def _seconds_left(self, timeout: float | None) -> float:
        if self._deadline is not None:
            return self._deadline - time.monotonic()
        if timeout is None:
            return _LOOK_SECONDS
        _, began = CALL_MARK.unpack_from(self.mark)
        return began + timeout - time.monotonic() if began else timeout

    def _lost(self, overdue: float | None = None, device: str | None = None) -> WorkerLost:
        """Make sure that the worker is dead, and report what it was running when it exceeded the timeout or died."""
        now = time.monotonic()
        if overdue is None:
            self.reaper.join(_DEATH_SECONDS)
        self.close()
        row, began = CALL_MARK.unpack_from(self.mark)
        # Read the mark after the kill, when it no longer changes: the call may have ended just before the kill.
        timed_out = overdue is not None and bool(began) and now - began >= overdue
        if device is not None:
            return WorkerLost(f"ended because its device failed ({device})", row, False, by_device=True)
        by_itself = overdue is None and _ended_by_itself(self.process.returncode)
        return WorkerLost(_fate(self.process.returncode), row if began else None, timed_out, by_itself=by_itself)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # macOS refuses if only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _ended_by_itself(returncode: int | None) -> bool:
    """Whether a process exited or crashed, and no limit of its memory, which other rows may use up, is the cause."""
    crashed = returncode is not None and (returncode >= 0 or -returncode in _CRASHES)
    return crashed and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def _fate(returncode: int | None) -> str:
    if returncode is None:
        return "does not answer"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class WorkerPool:
    """The idle worker processes of this process; each exits after a minute without orders."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[WorkerProcess] = []
        self.spares: dict[WorkerKey, threading.Thread] = {}
        os.register_at_fork(after_in_child=self._after_fork)

    def acquire(self, udf_reference: UdfReference, within: float | None = None) -> WorkerProcess:
        """Return a worker process for a UDF: an idle one or a new one, see `WorkerProcess`."""
        worker_key = WorkerKey.of(udf_reference)
        with self.lock:
            starting = self.spares.pop(worker_key, None)
        if starting is not None:
            starting.join()
        while (child := self._take(worker_key)) is not None:
            if child.answers_still():
                return child
        return WorkerProcess(worker_key, self.forget, within)

    def start_spare(self, udf_reference: UdfReference, within: float | None = None) -> None:
        """Start an idle worker for a UDF in the background, unless there is one: after one died, more may die."""
        worker_key = WorkerKey.of(udf_reference)

        def start() -> None:
            with contextlib.suppress(UdfSetupFailed, OSError):  # raised again when a worker is needed
                self.release_worker(WorkerProcess(worker_key, self.forget, within))
            with self.lock:
                if self.spares.get(worker_key) is threading.current_thread():
                    del self.spares[worker_key]

        with self.lock:
            if worker_key in self.spares or any(child.worker_key == worker_key for child in self.idle):
                return
            starting = self.spares[worker_key] = threading.Thread(target=start, name="geneva-spare", daemon=True)
            starting.start()

    def release_worker(self, child: WorkerProcess) -> None:
        """Return a worker to the pool; kill it if it is in the middle of an order."""
        if not child.at_rest or child.owner != os.getpid():
            child.close()
            return
        try:
            child.rest()
        except WorkerLost:
            return
        with self.lock:
            self.idle.append(child)
        if child.process.returncode is not None:
            self.forget(child)

    def dismiss(self) -> None:
        """Kill the idle workers."""
        with self.lock:
            spares, self.spares = self.spares, {}
        for starting in spares.values():
            starting.join()
        with self.lock:
            idle, self.idle = self.idle, []
        for child in idle:
            child.close()

    def forget(self, child: WorkerProcess) -> None:
        """Remove a worker that exited while it was idle."""
        with self.lock:
            if child not in self.idle:
                return
            self.idle.remove(child)
        child.close_pipes()

    def _take(self, worker_key: WorkerKey) -> WorkerProcess | None:
        with self.lock:
            # The worker returned last is the least likely to exit now.
            for at in range(len(self.idle) - 1, -1, -1):
                if self.idle[at].worker_key == worker_key:
                    return self.idle.pop(at)
        return None

    def _after_fork(self) -> None:
        """Drop the pool in a forked process: it has only copies of the pipes, and the workers belong to its parent."""
        for child in self.idle:
            for pipe in child.pipes:
                os.close(pipe)
        self.idle, self.spares = [], {}
        self.lock = threading.Lock()


POOL = WorkerPool()
