"""LanceDB's side of the comparison; runs in a separate environment, without this package.

Started as ``python lancedb_side.py FOLDER ROWS FRAGMENTS``. It reads one step per line, and answers with its seconds;
the change of the table that precedes a step is not measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import lancedb  # type: ignore[import-not-found]
import numpy as np
import pyarrow as pa

FILTER = "x % 2 = 0"


def _rows(start: int, end: int) -> pa.Table:
    return pa.table({"x": pa.array(np.arange(start, end))})


def main(folder: str, rows: int, fragments: int) -> None:
    db = lancedb.connect(folder, storage_options={"new_table_enable_stable_row_ids": "true"})
    size = rows // fragments
    table = db.create_table("docs", _rows(0, size))
    for start in range(size, rows, size):
        table.add(_rows(start, min(start + size, rows)))
    columns = ["x", ("y", "x * 2")]
    view = db.create_materialized_view("evens", "docs", select=columns, where=FILTER, with_no_data=True)

    def update(where: str) -> None:
        table.update(where=where, values_sql={"x": "x + 20000000000"})

    def refresh_column() -> None:
        table.refresh_column("y")

    steps: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "first refresh": (lambda: None, view.refresh),
        "nothing to do": (lambda: None, view.refresh),
        "nothing again": (lambda: None, view.refresh),
        "10 % more rows": (lambda: table.add(_rows(rows, rows + rows // 10)), view.refresh),
        "update of 1 %, in every fragment": (lambda: update("x % 100 < 1"), view.refresh),
        "compaction": (table.optimize, view.refresh),
        "column: first": (lambda: table.add_columns(computed={"y": "x * 2"}), refresh_column),
        "column: nothing to do": (lambda: None, refresh_column),
        "column: update of 100 rows": (lambda: update(f"x % {rows // 100} = 1"), refresh_column),
        "column: compaction": (table.optimize, refresh_column),
    }
    for line in sys.stdin:
        change, step = steps[line.strip()]
        change()
        began = time.perf_counter()
        step()
        print(json.dumps(time.perf_counter() - began), flush=True)
    found = table.to_arrow() if line.startswith("column") else view.table.to_arrow()
    if not np.array_equal(found["y"].to_numpy(), 2 * found["x"].to_numpy()):
        raise SystemExit("A value of LanceDB's is wrong.")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
