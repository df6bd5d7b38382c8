"""Run one measurement in its own process, without memory, caches or sessions of other measurements.

Started by :mod:`bench.__main__` as ``python -m bench.measure OUTPUT NAME KEYWORDS-AS-JSON``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from airflow_geneva import Table
from bench import (
    aging,
    busy,
    calls,
    changes,
    duplicates,
    estimate,
    far,
    floor,
    gpu,
    groups,
    hourly,
    indexes,
    limits,
    links,
    load,
    pages,
    paid_once,
    peer,
    planning,
    processes,
    services,
    small,
    start,
    time_left,
    udfs,
    views,
    wide,
)
from bench.cases import CASES, Case, open_table

Measured = dict[str, Any]


def make(case: str, folder: str, quick: bool) -> Measured:
    """Create the table of a case."""
    _case(case, quick).make(Path(folder))
    return {}


def compare(case: str, folder: str, quick: bool, runner: str) -> Measured:
    """Run our side and the baseline in turn on one table; the first round is a warm-up."""
    what, table = _case(case, quick), open_table(Path(folder))
    prepared = None if what.kind == "fill" else _filled(table, what, runner)
    ours, theirs = [], []
    for turn in range(what.repeats + 1):
        mine, other = prepared or _new_columns(table, what)
        if what.kind == "grow":
            what.grow(table)
        # Alternate the order, because the second side finds the inputs in memory.
        if turn % 2:
            ours.append(_ours(table, what, mine, runner))
            theirs.append(_floor(table, what, other))
        else:
            theirs.append(_floor(table, what, other))
            ours.append(_ours(table, what, mine, runner))
    values = table.lance.to_table(columns=[mine, other])
    return {
        "ours": [run["seconds"] for run in ours[1:]],
        "floor": [run["seconds"] for run in theirs[1:]],
        "ours_cpu": [run["cpu"] for run in ours[1:]],
        "floor_cpu": [run["cpu"] for run in theirs[1:]],
        "rows": ours[-1]["rows"],
        "floor_rows": theirs[-1]["rows"],
        "files": ours[-1]["files"],
        "bytes": ours[-1]["bytes"],
        "agree": values.column(mine).equals(values.column(other)) and values.column(mine).null_count == 0,
    }


def once(case: str, folder: str, quick: bool, side: str) -> Measured:
    """Run one side once from a cold start; measure seconds since the process started, and memory."""
    what, table = _case(case, quick), open_table(Path(folder))
    mine, other = _new_columns(table, what)
    run = _floor(table, what, other) if side == "floor" else _ours(table, what, mine, side)
    return {
        "seconds": time.time() - psutil.Process().create_time(),
        "inside": run["seconds"],
        "peak_self": processes.peak_self(),
        "peak_children": processes.peak_children(),
    }


def slow(folder: str, rows: int, fragments: int, repeats: int) -> Measured:
    """Measure a UDF of 1 ms per row with two checkpoint intervals, and as a plain loop without checkpoints."""
    what = Case("slow", "", rows, fragments, udfs.slow_embed)
    what.make(Path(folder))
    table = open_table(Path(folder))
    sides: dict[str, Callable[[str], Measured]] = {
        "none": lambda column: _floor(table, what, column),
        "10 s": lambda column: _ours(table, what, column, "inline"),
        "1 s": lambda column: _ours(table, what, column, "inline", checkpoint_interval=1.0),
    }
    runs: dict[str, list[Measured]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            column, other = _new_columns(table, what)
            runs[name].append(side(other if name == "none" else column))
    return {
        name: {
            "seconds": [run["seconds"] for run in group],
            "cpu": [run["cpu"] for run in group],
            "files": group[-1].get("files", 0),
            "bytes": group[-1].get("bytes", 0),
            "rows": group[-1]["rows"],
        }
        for name, group in runs.items()
    }


def _case(name: str, quick: bool) -> Case:
    return CASES[name].small() if quick else CASES[name]


def _new_columns(table: Table, case: Case) -> tuple[str, str]:
    tag = uuid.uuid4().hex[:8]
    mine, other = f"ours_{tag}", f"floor_{tag}"
    table.add_columns({mine: (case.udf, [case.column])})
    floor.add_column(table.uri, other, case.udf)
    return mine, other


def _filled(table: Table, case: Case, runner: str) -> tuple[str, str]:
    mine, other = _new_columns(table, case)
    _ours(table, case, mine, runner)
    _floor(table, case, other)
    return mine, other


def _ours(table: Table, case: Case, column: str, runner: str, **sizing: Any) -> Measured:
    files, size = _checkpoints(table)
    began, cpu = time.perf_counter(), processes.cpu_seconds()
    result = table.backfill(column, udf=case.udf, runner=runner, **sizing)
    seconds, cpu = time.perf_counter() - began, processes.cpu_seconds() - cpu
    files_after, size_after = _checkpoints(table)
    return {
        "seconds": seconds,
        "cpu": cpu,
        "rows": result.rows_computed,
        "files": files_after - files,
        "bytes": size_after - size,
    }


def _floor(table: Table, case: Case, column: str) -> Measured:
    began, cpu = time.perf_counter(), processes.cpu_seconds(below=False)
    rows = floor.fill_column(table.uri, case.column, column, case.udf)
    return {"seconds": time.perf_counter() - began, "cpu": processes.cpu_seconds(below=False) - cpu, "rows": rows}


def _checkpoints(table: Table) -> tuple[int, int]:
    """Count files and bytes below ``_checkpoints``: checkpoints, plans, ledgers and job records."""
    sizes = [
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(table.location.checkpoints.root)
        for name in names
    ]
    return len(sizes), sum(sizes)


MEASUREMENTS: dict[str, Callable[..., Measured]] = {
    "make": make,
    "compare": compare,
    "once": once,
    "slow": slow,
    "make_many": planning.make_many,
    "plan": planning.measure,
    "changes": changes.measure,
    "make_wide": wide.make,
    "wide": wide.measure,
    "aging": aging.measure,
    "busy": busy.measure,
    "links": links.measure,
    "gpu": gpu.measure,
    "groups": groups.measure,
    "duplicates": duplicates.measure,
    "async": calls.measure,
    "hourly": hourly.measure,
    "estimate": estimate.measure,
    "far": far.measure,
    "indexes": indexes.measure,
    "limits": limits.measure,
    "load": load.measure_each,
    "pages": pages.measure,
    "paid_once": paid_once.measure,
    "services": services.measure,
    "small": small.measure,
    "start": start.measure,
    "time_left": time_left.measure,
    "view": views.measure,
    "peer_column": peer.measure_column,
}

if __name__ == "__main__":
    output, name, keywords = sys.argv[1:]
    Path(output).write_text(json.dumps(MEASUREMENTS[name](**json.loads(keywords))))
