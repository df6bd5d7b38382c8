"""Open-source LanceDB, which computes columns and views of SQL expressions, in turn with this package."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import airflow_geneva
from airflow_geneva import Table
from bench import floor, udfs


class LanceDB:
    """A process in LanceDB's environment, with its own table; a context manager.

    Args:
        python: the interpreter of that environment.
        folder: folder for its database.
        rows, fragments: initial size of its table.
    """

    def __init__(self, python: str, folder: Path, rows: int, fragments: int) -> None:
        script = Path(__file__).with_name("lancedb_side.py")
        command = [python, str(script), str(folder), str(rows), str(fragments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, step: str) -> float:
        """Run one step and return its seconds."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"LanceDB's process ended during {step!r}.")
        return float(json.loads(answer))

    def __enter__(self) -> LanceDB:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
        if self._process.returncode and error[0] is None:
            raise SystemExit("LanceDB's process failed; see above.")


def measure_column(folder: str, rows: int, fragments: int, repeats: int, python: str) -> dict[str, Any]:
    """Fill a column with this package and with LanceDB in turn, first and after changes; each round has new tables.

    Args:
        rows, fragments: initial size of the tables.
        repeats: number of measured rounds; one more is a warm-up.
        python: the interpreter of LanceDB's environment.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(repeats + 1):
        place = Path(folder) / str(turn)
        table = airflow_geneva.connect(place / "ours").create_table(
            "docs", pa.table({"x": pa.array(np.arange(rows))}), max_rows_per_file=rows // fragments
        )
        table.add_columns({"y": (udfs.double, ["x"])})
        floor.add_column(table.uri, "floor", udfs.double)
        with LanceDB(python, place / "peer", rows, fragments) as lancedb:
            for name, change, alone in _changes(table, rows):
                change()
                taken = {"ours": _seconds(partial(table.backfill, "y", udf=udfs.double, runner="inline"))}
                if alone:
                    fill = partial(floor.fill_column, table.uri, "x", "floor", udfs.double)
                    taken["floor"] = _seconds(fill)
                taken["peer"] = lancedb.seconds(name)
                for side, seconds in taken.items():
                    found.setdefault(name, {}).setdefault(side, []).extend([seconds] if turn else [])
        values = table.to_arrow()
        if not np.array_equal(values["y"].to_numpy(), 2 * values["x"].to_numpy()):
            raise SystemExit("A value of ours is wrong.")
    return {"rows": rows, "changes": found}


def _changes(table: Table, rows: int) -> list[tuple[str, Callable[[], Any], bool]]:
    """Return the changes before each step, and whether pylance alone does the same work in it."""
    update = partial(table.lance.update, {"x": "x + 20000000000"}, where=f"x % {rows // 100} = 1")
    return [
        ("column: first", lambda: None, True),
        ("column: nothing to do", lambda: None, True),
        ("column: update of 100 rows", update, False),
        ("column: compaction", lambda: table.lance.optimize.compact_files(), False),
    ]


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
