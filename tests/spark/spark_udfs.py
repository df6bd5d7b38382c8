"""UDFs that Spark workers import, and that leave a trace of every row they saw."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import RateLimit, report
from airflow_geneva.engine.udf import Retry, udf


def seen(log: str) -> list[int]:
    """The rows that UDFs with this log ran on, in any order."""
    path = Path(log)
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def note(log: str, rows: list[int]) -> None:
    # One write of one buffer: appends of several processes do not mix.
    with open(log, "a") as file:
        file.write("".join(f"{row}\n" for row in rows))


@udf
def double(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 2)


@udf
def triple(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 3)


@udf(batch_size=100, limit=RateLimit("spark-tests", requests_per_minute=60_000))
def limited(x: pa.Int64Array) -> pa.Int64Array:
    report(cost=0.5)
    return pc.multiply(x, 2)


@udf(data_type=pa.int64())
def logged(x: pa.Int64Array, log: pa.StringArray) -> pa.Array:
    note(log[0].as_py(), x.to_pylist())
    return pc.multiply(x, 2)


@udf(data_type=pa.int64())
def slow(x: int, log: str) -> int:
    note(log, [x])
    time.sleep(0.004)
    return x * 2


@udf(data_type=pa.int64())
def fails_at_700(x: int, log: str) -> int:
    note(log, [x])
    if x == 700:
        raise ValueError("seven hundred is too much")
    return x * 2


@udf(data_type=pa.int64())
def dies_once_at_700(x: int, log: str) -> int:
    note(log, [x])
    if x == 700 and seen(log).count(700) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x * 2


@udf(data_type=pa.int64())
def slow_and_dies_once_at_700(x: int, log: str) -> int:
    time.sleep(0.004)
    return int(dies_once_at_700.func(x, log))


@udf(data_type=pa.int64())
def compacts_once_at_700(x: int, log: str) -> int:
    """As if another process compacted the table, and updated a column that is no input, while tasks run."""
    note(log, [x])
    if x == 700 and seen(log).count(700) == 1:
        table = lance.dataset(str(Path(log).parent / "db" / "numbers.lance"))
        table.update({"other": "other + 1"}, where="x % 7 = 0")
        table.optimize.compact_files()
    return x * 2


@udf(data_type=pa.struct({"double": pa.int64(), "installed": pa.bool_(), "gpus": pa.string()}), timeout=60)
def surroundings(x: int, log: str) -> dict[str, object]:
    """Whether the package is installed, and the GPUs in sight; the timeout asks for a process of its own."""
    import airflow_geneva

    installed, gpus = ".zip" not in airflow_geneva.__file__, os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"double": slow(x, log), "installed": installed, "gpus": gpus}


@udf(data_type=pa.int64(), cost=1.0, on_error=[Retry(ConnectionError, attempts=3, backoff=0.0)])
def tried(x: int, log: str) -> int:
    """Odd rows are called three times."""
    note(log, [x])
    if x % 2 and seen(log).count(x) < 3:
        raise ConnectionError(x)
    return 2 * x


@udf(data_type=pa.int64(), cost=0.001)
def priced(x: int, log: str) -> int:
    time.sleep(0.005)
    note(log, [x])
    report(cost=1.0)
    return 2 * x


@udf(data_type=pa.int64(), input_columns=["x", "log"], batch_size=500, poll_interval=0.1)
class doubled_later:
    """A service that keeps batches in files beside the log, and answers what it was asked for twice."""

    def submit(self, batch: pa.RecordBatch, key: str) -> str:
        log, rows = batch["log"][0].as_py(), batch["x"].to_pylist()
        note(log, rows)
        report(cost=0.5)
        Path(f"{log}-{key}").write_text(json.dumps(rows))
        return f"{log}-{key}"

    def poll(self, handle: str) -> bool:
        asked = Path(f"{handle}-asked")
        if asked.exists():
            return True
        asked.touch()
        return False

    def fetch(self, handle: str) -> list[int]:
        report(cost=0.5)
        return [2 * x for x in json.loads(Path(handle).read_text())]


@udf(data_type=pa.int64())
def logged_total(g: pa.Int64Array, x: pa.Int64Array, log: pa.StringArray) -> int:
    """Called once per group."""
    note(log[0].as_py(), [g[0].as_py()])
    return int(sum(x.to_pylist()))


@udf(data_type=pa.int64())
def total_that_dies_once(g: pa.Int64Array, x: pa.Int64Array, log: pa.StringArray) -> int:
    """Called once per group; kills its process in the first call for group 350."""
    logged_total.func(g, x, log)
    if g[0].as_py() == 350 and seen(log[0].as_py()).count(350) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(sum(value * at for at, value in enumerate(x.to_pylist())))


@udf(data_type=pa.int64())
def total_of_batches(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(sum(batch["x"].to_pylist()) for batch in batches)


@udf(data_type=pa.int64(), requirements=["geneva-probe==3.*"])
def of_package(x: int) -> int:
    from geneva_probe import SUMMAND  # type: ignore[import-not-found]

    return x + int(SUMMAND)
