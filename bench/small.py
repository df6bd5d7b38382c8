"""Fragments of ten rows: seconds a fragment of a first backfill and a first refresh, and of pylance alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import airflow_geneva
from bench import floor, udfs
from bench.views import FILTER, Floor

_ROWS = 10


def measure(folder: str, fragments: int, repeats: int) -> dict[str, Any]:
    """Compute a column and a view in turn with pylance alone; each round has new tables, and the first is a warm-up."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for turn in range(repeats + 1):
        place = Path(folder) / str(turn)
        rows = pa.table({"x": pa.array(np.arange(fragments * _ROWS))})
        table = airflow_geneva.connect(place).create_table("docs", rows, max_rows_per_file=_ROWS)
        table.add_columns({"y": (udfs.double, ["x"])})
        floor.add_column(table.uri, "floor", udfs.double)
        query = table.query().where(FILTER).select(["x"]).add_columns({"y": (udfs.double, ["x"])})
        view = query.create_materialized_view(name="evens")
        by_hand = Floor(table.uri, str(place / "floor.lance"))
        runs: dict[str, dict[str, Callable[[], Any]]] = {
            "column": {
                "ours": lambda: table.backfill("y", udf=udfs.double, runner="inline"),  # noqa: B023  called at once
                "floor": lambda: floor.fill_column(table.uri, "x", "floor", udfs.double),  # noqa: B023
            },
            "view": {"ours": lambda: view.refresh(runner="inline"), "floor": by_hand.fill},  # noqa: B023
        }
        for name, sides in runs.items():
            for side, run in sides.items():
                began = time.perf_counter()
                run()
                taken = time.perf_counter() - began
                seconds.setdefault(name, {}).setdefault(side, []).extend([taken] if turn else [])
        if not np.array_equal(table.to_arrow()["y"].to_numpy(), 2 * np.arange(fragments * _ROWS)):
            raise SystemExit("Case small: a value is wrong.")
        shutil.rmtree(place)
    return {"fragments": fragments, "rows": _ROWS, "seconds": seconds}
