"""The cost of table changes for the next backfill: planning time, and rows to run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

import airflow_geneva
from airflow_geneva import Table
from bench import udfs


def measure(folder: str, rows: int, fragments: int, repeats: int) -> dict[str, Any]:
    """Apply several kinds of changes to a computed table; after each, plan several times and backfill once.

    Args:
        rows, fragments: initial size of the table.
        repeats: number of measured plans.
    """
    data = pa.table({"id": pa.array(range(rows)), "x": pa.array(range(rows)), "other": pa.array(range(rows))})
    table = airflow_geneva.connect(folder).create_table("docs", data, max_rows_per_file=rows // fragments)
    table.add_columns({"y": udfs.double})
    table.backfill("y", udf=udfs.double, runner="inline")
    percent, hundred = rows // 100, min(rows // 10, 100)
    more = pa.table({name: pa.array(range(rows, rows + percent)) for name in ("id", "x", "other")})

    def everything() -> None:
        table.add(more)
        _compact(table, 8 * rows // fragments)
        table.lance.update({"x": "x + 1"}, where=_every(rows, hundred))
        table.lance.add_columns({"yet_more": "id"})

    changes: list[tuple[str, Callable[[], Any]]] = [
        ("nothing", lambda: None),
        ("append 1 %", lambda: table.add(more)),
        ("compaction into a quarter of the fragments", lambda: _compact(table, 4 * rows // fragments)),
        (f"update of {hundred} rows", lambda: table.lance.update({"x": "x + 1"}, where=_every(rows, hundred))),
        ("update of 1 %, in every fragment", lambda: table.lance.update({"x": "x + 1"}, where=_every(rows, percent))),
        (
            "update of an unrelated column in 1 %",
            lambda: table.lance.update({"other": "0"}, where=_every(rows, percent)),
        ),
        ("unrelated column added", lambda: table.lance.add_columns({"more": "id"})),
        ("all of it at once: append 1 %, compact, update, add a column", everything),
        ("nothing again", lambda: None),
    ]
    found = []
    for name, change in changes:
        change()
        seconds = []
        for turn in range(repeats + 1):
            began = time.perf_counter()
            plan = table.plan_backfill("y", udf=udfs.double)
            if turn:
                seconds.append(time.perf_counter() - began)
        result = table.backfill("y", udf=udfs.double, runner="inline")
        found.append(
            {
                "change": name,
                "fragments": len(table.lance.get_fragments()),
                "plan": seconds,
                "due": plan.rows_pending,
                "run": result.rows_computed,
                "versions": len(result.commits),
            }
        )
    values = table.to_arrow()
    if not np.array_equal(values["y"].to_numpy(), values["x"].to_numpy() * 2):
        raise SystemExit("A value is wrong.")
    return {"rows": rows, "fragments": fragments, "changes": found}


def _compact(table: Table, rows_per_fragment: int) -> None:
    table.lance.optimize.compact_files(target_rows_per_fragment=rows_per_fragment)


def _every(rows: int, count: int) -> str:
    return f"id % {rows // count} = 0"
