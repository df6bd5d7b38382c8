"""The benchmark cases: their tables and UDFs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

import airflow_geneva
from airflow_geneva import Table
from airflow_geneva.engine.udf import UDF
from bench import udfs

TABLE = "docs"


@dataclass(frozen=True)
class Case:
    """A benchmark of filling a column.

    Args:
        name: name on the command line.
        title: description.
        rows, fragments: size of the table.
        udf: the UDF that computes the column.
        column: the input column.
        kind: ``fill`` an empty column, run ``again`` with nothing to do, or ``grow`` by a tenth and fill that.
        peer: seconds of geneva, measured on another machine; see ``docs/benchmarks.md``.
        repeats: number of measured pairs of runs; 0: only from a cold start.
        cold: the runners that are also measured from a cold start, beside pylance alone.
    """

    name: str
    title: str
    rows: int
    fragments: int
    udf: UDF
    column: str = "x"
    kind: str = "fill"
    peer: str = ""
    repeats: int = 5
    cold: tuple[str, ...] = ()

    def small(self) -> Case:
        """Return a small version of the case, to check that it works."""
        cold = self.cold if self.name == "a" else ()
        return replace(self, rows=max(self.rows // 1_000, 160), repeats=min(self.repeats, 1), cold=cold)

    def make(self, folder: Path) -> None:
        """Create its table."""
        numbers = np.arange(self.rows)
        columns = {"x": pa.array(numbers)}
        if self.column == "text":
            columns["text"] = pa.array([f"row {number} " + "word " * (number % 7) for number in numbers.tolist()])
        per_file = -(-self.rows // self.fragments)
        airflow_geneva.connect(folder).create_table(TABLE, pa.table(columns), max_rows_per_file=per_file)

    def grow(self, table: Table) -> int:
        """Append a tenth of the rows as one fragment; return their number."""
        rows = self.rows // 10
        table.add(pa.table({"x": pa.array(np.arange(rows))}))
        return rows


_BOTH = ("inline", "spark")
CASES = {
    case.name: case
    for case in (
        Case("a", "a: 1M rows, 16 fragments, Arrow UDF x*2", 1_000_000, 16, udfs.double, peer="6.6 / 22", cold=_BOTH),
        Case("b", "b: 200k rows, Python UDF str -> int, row by row", 200_000, 4, udfs.length, "text", peer="7.8"),
        Case("c", "c: 20k rows -> 384 x float32", 20_000, 4, udfs.embed, peer="8.5", cold=_BOTH),
        Case("d", "d: a again, nothing to do", 1_000_000, 16, udfs.double, kind="again", peer="3.6"),
        Case("e", "e: a after 10 % more rows", 1_000_000, 16, udfs.double, kind="grow", peer="4.9"),
        Case("a16m", "a at 16M rows", 16_000_000, 16, udfs.double, peer="9.8 (8M rows)", repeats=2, cold=_BOTH),
        Case("20k", "20,000 fragments of 10 rows, x*2", 200_000, 20_000, udfs.double, repeats=0, cold=("inline",)),
    )
}


def open_table(folder: Path) -> Table:
    return airflow_geneva.connect(folder).open_table(TABLE)
