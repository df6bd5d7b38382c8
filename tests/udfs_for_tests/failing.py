"""UDFs that fail in every way there is; what happens to a row, its input says."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.udf import Fail, Retry, Skip, udf

RAISE, SEGFAULT, EXIT, SLEEP, WRONG = -1, -2, -3, -4, -5
OTHER = -6
KILL = -7


class Unlucky(ValueError):
    """An exception of our own."""


def do(what: int) -> int:
    """Give ten times what is asked, or fail as it says."""
    if what == RAISE:
        raise Unlucky(f"no {what}")
    if what == OTHER:
        raise KeyError(what)
    if what == SEGFAULT:
        ctypes.string_at(0)
    if what == EXIT:
        os._exit(3)
    if what == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == SLEEP:
        time.sleep(60)
    return what * 10


def do_each(what: pa.Array) -> pa.Array:
    return pa.array([do(value) for value in what.to_pylist()], pa.int64())


@udf(on_error="skip", version="1")
def scalar(x: int) -> int:
    return "wrong" if x == WRONG else do(x)  # type: ignore[return-value]


@udf(data_type=pa.int64(), on_error="skip", version="1")
def array(x: pa.Int64Array) -> pa.Array:
    return pa.array(["wrong"] * len(x)) if WRONG in x.to_pylist() else do_each(x)


@udf(data_type=pa.int64(), on_error="skip", version="1")
def record_batch(batch: pa.RecordBatch) -> pa.Array:
    if WRONG in batch.column("x").to_pylist():
        return pa.array([1] * (batch.num_rows + 1))
    return do_each(batch.column("x"))


@udf(on_error="skip", timeout=1.0, version="1")
def scalar_in_time(x: int) -> int:
    return do(x)


@udf(data_type=pa.int64(), on_error="skip", timeout=1.0, version="1")
def array_in_time(x: pa.Int64Array) -> pa.Array:
    return do_each(x)


@udf(timeout=1.0, version="1")
def scalar_on_time(x: int) -> int:
    """With a timeout alone, under "fail"."""
    return do(x)


@udf(data_type=pa.int64(), version="1")
def plain_array(x: pa.Int64Array) -> pa.Array:
    """In the caller's process."""
    return pa.array(["wrong"] * len(x)) if WRONG in x.to_pylist() else do_each(x)


@udf(on_error=[Retry(ValueError, attempts=3, backoff=0.01), Skip(Unlucky), Skip(TimeoutError), Fail()], version="1")
def scalar_listed(x: int, marks: str) -> int:
    """Counts its calls in a file for each value, and gets better at the third where the value is 100 or more."""
    return _counted(x, marks)


@udf(
    data_type=pa.int64(),
    on_error=[Retry(ValueError, attempts=3, backoff=0.01), Skip(Unlucky), Fail()],
    version="1",
)
def array_listed(x: pa.Int64Array, marks: pa.StringArray) -> pa.Array:
    return pa.array([_counted(value, folder) for value, folder in zip(x.to_pylist(), marks.to_pylist(), strict=True)])


def _counted(x: int, marks: str) -> int:
    file = Path(marks, str(x))
    calls = len(file.read_text()) + 1 if file.exists() else 1
    file.write_text("." * calls)
    if x >= 100 and calls < 3:
        raise ConnectionRefused(x)
    return do(x)


class ConnectionRefused(ValueError):
    """Goes away by itself."""


@udf(on_error=[Fail(), Skip(ValueError)], version="1")
def fail_first(x: int) -> int:
    return do(x)


@udf(on_error=[Skip((KeyError, TypeError)), Skip(ValueError), Skip(KeyError)], version="1")
def in_order(x: int) -> int:
    return do(x)


@udf(data_type=pa.large_binary(), on_error="skip", version="1")
def repeat(data: bytes, n: int) -> bytes:
    return data * n


@udf(data_type=pa.string(), on_error="skip", version="1")
def talkative(x: int) -> str:
    """Writes to stdout in every way, and says where it runs."""
    if x < 0:
        do(x)
    print("hello", x)
    sys.stdout.write("x" * 100_000)
    os.write(1, b"raw")
    return str(os.getpid())


@udf(data_type=pa.string(), on_error="skip", version="1")
def loaded_modules(x: int) -> str:
    return ",".join(sorted(name for name in ("lance", "pyspark", "airflow", "pandas") if name in sys.modules))


@udf(on_error="skip", version="1")
class NeverReady:
    def __init__(self) -> None:
        raise OSError("no model")

    def __call__(self, x: int) -> int:
        return x


@udf(on_error="skip", version="1")
class DiesBeforeReady:
    def __init__(self) -> None:
        os._exit(7)

    def __call__(self, x: int) -> int:
        return x


@udf(on_error="skip", version="1")
class SetUpOnce:
    """Gives the process and the number of times it was set up there."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __call__(self, x: int) -> int:
        return os.getpid() * 100 + self.made


@udf(data_type=pa.int64(), on_error="skip", version="1")
def sensitive(x: pa.Int64Array) -> pa.Array:
    """Cannot take more than two rows at a time."""
    if len(x) > 2:
        raise MemoryError("too many")
    return pc.multiply(x, 10)


@udf(on_error="skip", version="1")
def unspeakable(x: int) -> int:
    raise ValueError("\ud800" + "x" * 100_000)


@udf(on_error="skip", version="1")
def leaves_a_process(x: int) -> int:
    """Leaves a copy of itself behind that holds every file open, and dies."""
    if os.fork() == 0:
        time.sleep(60)
    os._exit(1)


@udf(on_error="skip", version="1")
def slow_and_counted(x: int, marks: str) -> int:
    time.sleep(0.21)
    return _counted(x, marks)


@udf(data_type=pa.int64(), on_error=[Skip(ValueError)], version="1")
def array_skips_some(x: pa.Int64Array) -> pa.Array:
    return do_each(x)


@udf(on_error=[Retry(Exception, attempts=2, backoff=0.01), Skip(Exception)], version="1")
def retried(x: int) -> int:
    return "wrong" if x == WRONG else do(x)  # type: ignore[return-value]
