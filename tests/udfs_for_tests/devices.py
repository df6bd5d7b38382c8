"""UDFs of models on a device that fails as CUDA does: after that, all calls of the process fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa

from airflow_geneva.engine.udf import udf

ASSERTS, HANGS = -1, -2
ECC = "CUDA error: uncorrectable ECC error encountered"

_failed = False


def broken(folder: str) -> Path:
    """While it is there the device is broken: for all processes, or for the one of which it holds the number."""
    return Path(folder) / "broken"


def loads(folder: str | Path) -> list[str]:
    """The processes that loaded a model, once for each time."""
    path = Path(folder) / "loads"
    return path.read_text().split() if path.exists() else []


def on_device(values: list[int], folder: str) -> list[int]:
    global _failed
    file = broken(folder)
    if file.exists() and file.read_text() in ("", str(os.getpid())):
        raise RuntimeError(ECC)
    if HANGS in values or (Path(folder) / "hangs").exists():
        time.sleep(60)
    if _failed or ASSERTS in values:
        _failed = True
        raise RuntimeError("CUDA error: device-side assert triggered")
    return [10 * value for value in values]


@udf(data_type=pa.int64(), version="1", on_error="skip")
def array(x: pa.Int64Array, folder: pa.StringArray) -> pa.Array:
    return pa.array(on_device(x.to_pylist(), folder[0].as_py()), pa.int64())


@udf(data_type=pa.int64(), version="1", on_error="skip")
def scalar(x: int, folder: str) -> int:
    return on_device([x], folder)[0]


@udf(data_type=pa.int64(), version="1")
def plain_array(x: pa.Int64Array, folder: pa.StringArray) -> pa.Array:
    return pa.array(on_device(x.to_pylist(), folder[0].as_py()), pa.int64())


@udf(data_type=pa.int64(), version="1")
def plain_scalar(x: int, folder: str) -> int:
    return on_device([x], folder)[0]


@udf(data_type=pa.int64(), version="1", on_error="skip", timeout=1.0, num_gpus=1)
def in_time(x: pa.Int64Array, folder: pa.StringArray) -> pa.Array:
    return pa.array(on_device(x.to_pylist(), folder[0].as_py()), pa.int64())


@udf(data_type=pa.int64(), version="1")
def breaks_the_first_process(x: pa.Int64Array, folder: pa.StringArray) -> pa.Array:
    """The device of the process that first gets row 0 is broken."""
    file = broken(folder[0].as_py())
    if 0 in x.to_pylist() and not file.exists():
        file.write_text(str(os.getpid()))
    return pa.array(on_device(x.to_pylist(), folder[0].as_py()), pa.int64())


class Loads:
    """A model of which each instance leaves a trace with its first call."""

    def __init__(self) -> None:
        self.called = False

    def __call__(self, x: pa.Int64Array, folder: pa.StringArray) -> pa.Array:
        if not self.called:
            self.called = True
            with open(Path(folder[0].as_py()) / "loads", "a") as file:
                file.write(f"{os.getpid()}\n")
        return pa.array([10 * value for value in x.to_pylist()], pa.int64())


class InProcess(Loads):
    """In the process of its task."""


class Apart(Loads):
    """In a process of its own."""


in_process = udf(data_type=pa.int64(), version="1", batch_size=10)(InProcess)
apart = udf(data_type=pa.int64(), version="1", batch_size=10, on_error="skip")(Apart)


@udf(data_type=pa.int64(), version="1", setup_timeout=1.0)
class NeverLoaded:
    def __init__(self) -> None:
        time.sleep(60)

    def __call__(self, x: pa.Int64Array) -> pa.Array:
        return x


@udf(data_type=pa.int64(), version="1", timeout=1.0, setup_timeout=60)
class LoadedLate:
    def __init__(self) -> None:
        time.sleep(1.5)

    def __call__(self, x: pa.Int64Array) -> pa.Array:
        return x
