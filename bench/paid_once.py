"""How many calls does `dedup` save for equal inputs, and what does the lookup cost?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva import Table, connect, udf

_CALL_SECONDS = 0.001


@udf(data_type=pa.int64(), version="1", deterministic=True, dedup=True)
def length(text: str, calls: str) -> int:
    """A call that costs money: it takes some time, and appends a letter to a file."""
    with open(calls, "a") as trace:
        trace.write(".")
    time.sleep(_CALL_SECONDS)
    return len(text)


def _doubled(x: pa.Int64Array) -> pa.Array:
    return pa.array(x.to_numpy() * 2)


plain = udf(data_type=pa.int64(), version="1", name="plain")(_doubled)
looked_up = udf(data_type=pa.int64(), version="1", name="looked_up", deterministic=True, dedup=True)(_doubled)


def measure(folder: str, rows: int, alone: int, runners: list[str]) -> dict[str, Any]:
    """Fill a column from texts of which four in ten are repeated, then another column with the same function.

    Args:
        alone: number of rows with distinct numbers, for a function of a whole array.
    """
    found: list[dict[str, Any]] = []
    for runner in runners:
        table, calls = _texts(Path(folder) / runner, rows)
        for column in ("n", "m"):
            table.add_columns({column: length})
            result = table.backfill(column, runner=runner, shard_size=5, concurrency=2, task_size=rows // 20)
            made = calls.stat().st_size
            calls.write_text("")
            saved = {"shared": result.rows_deduplicated, "cached": result.rows_cached, "raced": result.rows_raced}
            found.append({"runner": runner, "job": "first" if column == "n" else "later", "calls": made, **saved})
    numbers = connect(Path(folder) / "numbers").create_table("t", pa.table({"x": range(alone)}))
    seconds = {}
    for name, function in (("plain", plain), ("looked_up", looked_up)):
        numbers.add_columns({name: function})
        began = time.process_time()
        numbers.backfill(name, runner="inline", batch_size=8_192)
        seconds[name] = time.process_time() - began
    return {"rows": rows, "distinct": rows * 6 // 10, "jobs": found, "alone": alone, "seconds": seconds}


def _texts(folder: Path, rows: int) -> tuple[Table, Path]:
    distinct = rows * 6 // 10
    order = np.random.default_rng(0).permutation(np.concatenate([np.arange(distinct), np.arange(rows - distinct)]))
    calls = folder.with_name(f"{folder.name}.calls")
    data = {"text": [f"text {number}" for number in order], "calls": [str(calls)] * rows}
    return connect(folder).create_table("docs", pa.table(data), max_rows_per_file=rows // 20), calls
