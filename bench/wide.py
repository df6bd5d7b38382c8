"""Wide input and output rows: seconds against pylance alone, and the memory of all processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import airflow_geneva
from airflow_geneva.spark.local import open_session
from bench import floor, processes, udfs

FRAGMENTS = 4
KINDS = ("random", "repetitive")
_BATCH_BYTES = 32 << 20


def make(folder: str, rows: int, width: int, kind: str) -> dict[str, Any]:
    """Create a table of wide values."""
    schema = pa.schema({"id": pa.int64(), "x": pa.binary()})
    rng = np.random.default_rng(0)

    def value(number: int) -> bytes:
        if kind == "random":
            return rng.bytes(width)
        return (b"row %d is said again and " % number * (width // 20))[:width]

    def batches() -> Iterator[pa.RecordBatch]:
        step = max(1, (8 << 20) // width)
        for at in range(0, rows, step):
            numbers = range(at, min(at + step, rows))
            yield pa.record_batch([pa.array(numbers), pa.array([value(n) for n in numbers])], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    uri = str(Path(folder) / "docs.lance")
    lance.write_dataset(reader, uri, enable_stable_row_ids=True, max_rows_per_file=-(-rows // FRAGMENTS))
    return {}


def measure(folder: str, width: int, side: str) -> dict[str, Any]:
    """Compute the column once from a cold start, by pylance alone or by one of our runners."""
    table = airflow_geneva.connect(folder).open_table("docs")
    column = f"y_{side}"
    if side == "floor":
        floor.add_column(table.uri, column, udfs.backwards)
    else:
        table.add_columns({column: (udfs.backwards, ["x"])})
    if side == "spark":
        open_session(2).sparkContext.parallelize([0], 1).count()
    with processes.TreePeak() as peak:
        began, cpu = time.perf_counter(), processes.cpu_seconds()
        if side == "floor":
            # The baseline needs a suitable batch size; our side determines it.
            rows = floor.fill_column(table.uri, "x", column, udfs.backwards, max(1, _BATCH_BYTES // width))
        else:
            rows = table.backfill(column, udf=udfs.backwards, runner=side).rows_computed
        seconds, cpu = time.perf_counter() - began, processes.cpu_seconds() - cpu
    newest = lance.dataset(table.uri)
    looked_at = newest.take([0, newest.count_rows() // 2, newest.count_rows() - 1], columns=["x", column])
    agree = [value[::-1] for value in looked_at["x"].to_pylist()] == looked_at[column].to_pylist()
    return {"seconds": seconds, "cpu": cpu, "rows": rows, "agree": agree, "python": peak.python, "jvm": peak.jvm}
