"""UDFs that record every row on which they are called in a file, across threads, processes and kills."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from airflow_geneva import udf

TRACE = "GENEVA_TEST_TRACE"
NULL = -(1 << 62)
_CALL = np.int64(1 << 62)


@dataclass(frozen=True)
class Trace:
    """The file to which counting UDFs append the value of their first input, row by row."""

    path: Path

    def rows(self) -> list[int | None]:
        """First inputs of all recorded rows, in the order of the file."""
        seen = self._values()
        return [None if value == NULL else int(value) for value in seen[seen != _CALL]]

    def counts(self) -> Counter[int | None]:
        return Counter(self.rows())

    def calls(self) -> list[int]:
        """Number of rows of each call."""
        seen = self._values()
        marks = np.flatnonzero(seen == _CALL)
        return np.diff(np.append(marks, len(seen))).astype(int).__sub__(1).tolist()

    def clear(self) -> None:
        self.path.write_bytes(b"")

    def __len__(self) -> int:
        return len(self.rows())

    def _values(self) -> np.ndarray:
        # A killed process can leave a partial number at the end of its last write, never between two writes.
        data = self.path.read_bytes() if self.path.exists() else b""
        return np.frombuffer(data[: len(data) // 8 * 8], np.int64)


@dataclass(frozen=True)
class Stop:
    """Makes the call that reaches a number of rows wait for an action of the test, or die."""

    trace: Path

    def ask(self, rows: int, kill: bool) -> None:
        """Request one stop, after the given number of further rows."""
        size = self.trace.stat().st_size if self.trace.exists() else 0
        self._file("new").write_text(f"{size + 8 * rows} {int(kill)}")
        self._file("new").rename(self._file("asked"))

    @property
    def reached(self) -> bool:
        return self._file("reached").exists()

    def go_on(self) -> None:
        for name in ("asked", "reached"):
            self._file(name).unlink(missing_ok=True)

    def stop_if_asked(self) -> None:
        try:
            size, kill = map(int, self._file("asked").read_text().split())
            if self.trace.stat().st_size < size:
                return
            self._file("asked").rename(self._file("reached"))  # succeeds in only one of several processes
        except FileNotFoundError:
            return
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.reached:
            time.sleep(0.002)

    def _file(self, name: str) -> Path:
        return self.trace.with_name(f"{self.trace.name}.{name}")


def leave_trace(values: Iterable[int | None] | pa.Array, suffix: str = "") -> None:
    """Append the inputs of one call to the trace; one write, so that calls of several processes do not mix.

    Args:
        suffix: suffix of the file name, for UDFs with a separate trace.
    """
    path = os.environ.get(TRACE)
    if path is None:
        return
    if isinstance(values, pa.Array):
        found = values.cast(pa.int64()).fill_null(NULL).to_numpy(zero_copy_only=False)
    else:
        found = np.array([NULL if value is None else value for value in values], np.int64)
    handle = os.open(path + suffix, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, np.concatenate(([_CALL], found)).astype(np.int64).tobytes())
    finally:
        os.close(handle)
    Stop(Path(path)).stop_if_asked()


def tripled(x: int | None) -> int:
    """Return the value that :data:`triple` computes; never NULL, so that a missing row is noticed."""
    return -1 if x is None else 3 * x + 1


def doubled(x: int | None) -> int:
    """Return the value that :data:`double` computes."""
    return -2 if x is None else 2 * x


@udf(data_type=pa.int64())
def triple(x: pa.Int64Array) -> pa.Int64Array:
    """One array per call."""
    leave_trace(x)
    return pa.array([tripled(value) for value in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64())
def triple_row(x: int | None) -> int:
    """One row per call."""
    leave_trace([x])
    return tripled(x)


@udf(data_type=pa.int64())
def double(x: pa.Int64Array) -> pa.Int64Array:
    """Another function, for another column."""
    leave_trace(x)
    return pa.array([doubled(value) for value in x.to_pylist()], pa.int64())


@udf(data_type=pa.string())
def label(x: pa.Int64Array) -> pa.StringArray:
    """Variable-length values."""
    leave_trace(x)
    return pa.array([f"{'long ' * (value % 7 if value else 0)}{value}" for value in x.to_pylist()], pa.string())


def labelled(x: int | None) -> str:
    """Return the value that :data:`label` computes."""
    return f"{'long ' * (x % 7 if x else 0)}{x}"
