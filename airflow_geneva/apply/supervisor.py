"""A process that runs a UDF, started, watched and killed."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from airflow_geneva.apply import frames
from airflow_geneva.apply.child import MARK
from airflow_geneva.apply.outcome import Trouble
from airflow_geneva.udf_parcel import UdfParcel

_BOOT = """
import json, sys
orders, answers, shared = map(int, sys.argv[1:])
sys.path[:] = json.loads(open(orders, "rb", buffering=0, closefd=False).readline())
from airflow_geneva.apply.child import serve
serve(orders, answers, shared)
"""
_LOOK_SECONDS = 1.0
_DEATH_SECONDS = 5.0


class Lost(Exception):
    """A child is gone.

    Attributes:
        reason: what became of it, as the end of a sentence: `was killed by SIGSEGV`.
        row: the row it was called on, or None if it was not in a call.
        timed_out: whether it was killed because the call took too long.
    """

    def __init__(self, reason: str, row: int | None, timed_out: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.row = row
        self.timed_out = timed_out


class Unfit(Exception):
    """A UDF cannot be set up; says why."""


@dataclass(frozen=True)
class Chunk:
    """Values of some rows, NULL for those with a trouble."""

    start: int
    values: pa.Array
    troubles: list[tuple[int, Trouble]]

    @property
    def stop(self) -> int:
        return self.start + len(self.values)


@dataclass(frozen=True)
class Workplace:
    """What a child was started with; only for the same is it used again."""

    parcel: UdfParcel
    path: tuple[str, ...]
    folder: str
    environment: frozenset[tuple[str, str]]

    @staticmethod
    def of(parcel: UdfParcel) -> Workplace:
        return Workplace(parcel, tuple(map(str, sys.path)), os.getcwd(), frozenset(os.environ.items()))


class Child:
    """A process that runs one UDF, started with this process's import path, folder and environment.

    Args:
        workplace: these.
        when_gone: told, in a thread of its own, once it has ended by itself or was killed.

    Raises:
        Unfit: the UDF cannot be set up in it.
    """

    def __init__(self, workplace: Workplace, when_gone: Callable[[Child], None]) -> None:
        self.workplace = workplace
        self.when_gone = when_gone
        self.owner = os.getpid()
        self.at_rest = False
        with tempfile.TemporaryFile(prefix="geneva-udf-") as shared:
            shared.truncate(MARK.size)
            self.mark = mmap.mmap(shared.fileno(), MARK.size)
            orders, self.orders = os.pipe()
            self.answers, answers = os.pipe()
            self.pipes = [self.orders, self.answers]
            self.lock = threading.Lock()
            try:
                self.process, self.keeper = self._start((orders, answers, shared.fileno()))
            except BaseException:
                self.close_pipes()
                raise
            finally:
                os.close(orders)
                os.close(answers)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def load(self, batch: pa.RecordBatch) -> None:
        """Give it a batch to `map`, in place of the last one; `Lost` if it died."""
        self._ask({"order": "load"}, frames.batch_to_bytes(batch))

    def map(self, start: int, stop: int, data_type: pa.DataType, timeout: float | None) -> Iterator[Chunk]:
        """Map rows of the batch; ends early after a row whose trouble it may not decide.

        Args:
            data_type: type of the values.
            timeout: seconds a call may take.

        Raises:
            Lost: it died, or was killed because a call took longer.
        """
        self._order({"order": "map", "start": start, "stop": stop})
        while not self.at_rest:
            header, body = self._answer(timeout)
            values = frames.values_from_bytes(body, data_type)
            troubles = [(row, Trouble(**{**found, "fits": tuple(found["fits"])})) for row, found in header["troubles"]]
            self.at_rest = header["end"]
            yield Chunk(header["start"], values, troubles)

    def answers_still(self) -> bool:
        """Whether it is there; it leaves after a minute without work."""
        try:
            self._ask({"order": "ping"})
        except Lost:
            return False
        return True

    def rest(self) -> None:
        """Have it forget its batch; `Lost` if it died."""
        self._order({"order": "rest"})
        self.at_rest = True

    def close(self) -> None:
        """Kill it, and what it started."""
        # A process that was forked off this one has the child's number, but not the child.
        if os.getpid() == self.owner:
            with self.lock:
                if self.process.returncode is None:
                    _kill_group(self.process)
            self.keeper.join(_DEATH_SECONDS)
        self.close_pipes()

    def close_pipes(self) -> None:
        """Let go of it; without work it ends."""
        with self.lock:
            while self.pipes:
                os.close(self.pipes.pop())

    def _start(self, theirs: tuple[int, int, int]) -> tuple[subprocess.Popen[bytes], threading.Thread]:
        """Start it from a thread that lives as long as it does: Linux ends it with the thread that started it."""
        born: Future[subprocess.Popen[bytes]] = Future()
        command = [sys.executable, "-c", _BOOT, *map(str, theirs)]

        def keep() -> None:
            try:
                # Its output is no answer. A group of its own: what it started is killed with it.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=theirs, start_new_session=True
                )
            except BaseException as error:
                born.set_exception(error)
                return
            born.set_result(process)
            if hasattr(os, "waitid"):
                # Until it is waited for, its number is nobody else's: what it started can be killed by it.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                _kill_group(process)
                with self.lock:
                    process.wait()
            else:
                process.wait()
            self.when_gone(self)

        keeper = threading.Thread(target=keep, name="geneva-udf-keeper", daemon=True)
        keeper.start()
        return born.result(), keeper

    def _open(self) -> None:
        parcel = self.workplace.parcel
        header = {"order": "open", "import_path": parcel.import_path, "version": parcel.version}
        try:
            self._tell_path()
            answer = self._ask(header, parcel.pickled or b"")
        except Lost as lost:
            raise Unfit(f"the process that was to run it {lost.reason}") from None
        if "unfit" in answer:
            raise Unfit(answer["unfit"])

    def _tell_path(self) -> None:
        try:
            os.write(self.orders, json.dumps(self.workplace.path).encode() + b"\n")
        except OSError:
            raise self._lost() from None

    def _ask(self, header: dict[str, Any], body: Any = b"") -> dict[str, Any]:
        self._order(header, body)
        answer, _ = self._answer(None)
        self.at_rest = True
        return answer

    def _order(self, header: dict[str, Any], body: Any = b"") -> None:
        self.at_rest = False
        try:
            frames.send(self.orders, header, body)
        except OSError:
            raise self._lost() from None

    def _answer(self, timeout: float | None) -> tuple[dict[str, Any], bytearray]:
        poll = select.poll()
        poll.register(self.answers, select.POLLIN)
        while True:
            left = self._seconds_left(timeout)
            # What it has said already counts, even if it is to be killed now.
            if poll.poll(max(min(left, _LOOK_SECONDS), 0) * 1_000):
                try:
                    return frames.receive(self.answers)
                except (EOFError, OSError):
                    raise self._lost() from None
            if left <= 0:
                raise self._lost(timeout)
            # Processes that the UDF forked off may hold the pipe open.
            if self.process.returncode is not None and not poll.poll(0):
                raise self._lost()

    def _seconds_left(self, timeout: float | None) -> float:
        if timeout is None:
            return _LOOK_SECONDS
        _, began = MARK.unpack_from(self.mark)
        return began + timeout - time.monotonic() if began else timeout

    def _lost(self, overdue: float | None = None) -> Lost:
        """Make sure that it is dead, and tell what it was at.

        overdue: the seconds that a call may take, when it is to be killed for having taken more.
        """
        now = time.monotonic()
        if overdue is None:
            self.keeper.join(_DEATH_SECONDS)
        self.close()
        row, began = MARK.unpack_from(self.mark)
        # Only the mark of a dead process stands still: the call may have ended just before the kill.
        timed_out = overdue is not None and bool(began) and now - began >= overdue
        return Lost(_fate(self.process.returncode), row if began else None, timed_out)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # macOS refuses where only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
