"""Create small tables for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_geneva import connect
from airflow_geneva.table import Table

MakeTable = Callable[..., Table]


def make_docs(folder: Path) -> MakeTable:
    """Makes table ``docs`` with rows (id, x) where x is id, in fragments of ``per_fragment`` rows."""

    def make(rows: int | Iterable[int | None] = 100, per_fragment: int = 25, stable: bool = True, **more: Any) -> Table:
        values = list(range(rows)) if isinstance(rows, int) else list(rows)
        data = {"id": pa.array(range(len(values)), pa.int64()), "x": pa.array(values, pa.int64()), **more}
        options = None if stable else {"new_table_enable_stable_row_ids": "false"}
        db = connect(folder / "db")
        return db.create_table("docs", pa.table(data), storage_options=options, max_rows_per_file=per_fragment)

    return make
