"""UDFs with error policies, as Spark workers import them; what a row does is in its input."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.udf import Skip, udf


def is_bad(x: int) -> bool:
    return x % 1_000 == 999


@udf(data_type=pa.int64(), on_error="skip", version="1")
def skipping(x: int) -> int:
    if is_bad(x):
        raise ValueError(f"not {x}")
    return 2 * x


@udf(data_type=pa.int64(), on_error="skip", version="1")
def deadly(x: pa.Int64Array) -> pa.Array:
    """Kills the process that runs it."""
    if any(is_bad(value) for value in x.to_pylist()):
        os.kill(os.getpid(), signal.SIGSEGV)
    return pc.multiply(x, 2)


@udf(data_type=pa.int64(), on_error=[Skip(ValueError, max_count=9)], version="1")
def limited(x: int, died: str) -> int:
    """At row 1,500 kills the worker that runs it, once."""
    if x == 1_500 and not Path(died).exists():
        Path(died).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return skipping(x)  # type: ignore[no-any-return]


@udf(data_type=pa.int64(), version="1")
def deadly_without_a_policy(x: int) -> int:
    if x == 700:
        os.kill(os.getpid(), signal.SIGSEGV)
    return 2 * x
