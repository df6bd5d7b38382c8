"""The cost of a table's age: a backfill and a refresh after the changes of each hour, without any cleanup."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

import airflow_geneva
from airflow_geneva import Table
from airflow_geneva.view import View
from bench import udfs

_ADDED, _UPDATED, _DELETED, _COMPACTED_EVERY = 100, 10, 5, 10
_OURS, _LANCES = "_checkpoints", ("_versions", "_transactions", "_deletions")


def measure(folder: str, cycles: int, ends: int) -> dict[str, Any]:
    """Run many hours of changes on a table and a view.

    Args:
        cycles: number of hours.
        ends: number of first and last hours to compare.
    """
    db = airflow_geneva.connect(folder)
    table = db.create_table("docs", _rows(0))
    table.add_columns({"y": udfs.double})
    query = table.query().where("x % 2 = 0").select(["id", "x"]).add_columns({"z": (udfs.double, ["x"])})
    view = query.create_materialized_view(name="evens")
    names = ("pylance alone: open", "backfill", "refresh", "backfill, compacted", "refresh, compacted")
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for hour in range(cycles):
        compacted = _change(table, view, hour)
        kind = ", compacted" if compacted else ""
        steps: dict[str, Callable[[], Any]] = {
            "pylance alone: open": lambda: lance.dataset(table.uri).get_fragments(),
            f"backfill{kind}": lambda: table.backfill("y", udf=udfs.double, runner="inline"),
            f"refresh{kind}": lambda: view.refresh(runner="inline"),
        }
        for name, step in steps.items():
            began, cpu = time.perf_counter(), time.process_time()
            step()
            taken[name].append((time.perf_counter() - began, time.process_time() - cpu))
    _check(table, view.to_arrow())
    ends_compacted = max(ends // 4, 1)
    return {
        "cycles": cycles,
        "ends": ends,
        "ends_compacted": ends_compacted,
        "versions": table.version,
        "seconds": {
            name: _ends(took, ends_compacted if name.endswith("compacted") else ends) for name, took in taken.items()
        },
        "ours": _size(table.uri, view.uri, folders=(_OURS,)),
        "lances": _size(table.uri, view.uri, folders=_LANCES),
        "data": _size(table.uri, view.uri, folders=("data",)),
    }


def _rows(hour: int) -> pa.Table:
    ids = range(hour * _ADDED, (hour + 1) * _ADDED)
    return pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array(ids, pa.int64())})


def _change(table: Table, view: View, hour: int) -> bool:
    """Make one hour's changes; return whether there was a compaction."""
    rows = (hour + 1) * _ADDED
    table.add(_rows(hour + 1))
    every = rows // _UPDATED
    table.lance.update({"x": "x + 2000000"}, where=f"id % {every} = {hour % every}")
    every = rows // _DELETED
    table.lance.delete(f"id % {every} = {(hour + 1) % every}")
    if hour % _COMPACTED_EVERY == _COMPACTED_EVERY - 1:
        for grown in (table, view):
            grown.lance.optimize.compact_files()
        return True
    return False


def _check(table: Table, view: pa.Table) -> None:
    values = table.to_arrow()
    if values["y"].to_pylist() != [2 * x for x in values["x"].to_pylist()]:
        raise SystemExit("A value of the column is wrong.")
    wanted = sorted(
        (i, x, 2 * x) for i, x in zip(values["id"].to_pylist(), values["x"].to_pylist(), strict=True) if x % 2 == 0
    )
    if wanted != sorted(zip(*(view[name].to_pylist() for name in ("id", "x", "z")), strict=True)):
        raise SystemExit("The view does not equal its query.")


def _ends(took: Sequence[tuple[float, float]], ends: int) -> dict[str, float]:
    found = {}
    for side, part in (("first", took[:ends]), ("last", took[-ends:])):
        found[side] = statistics.median(seconds for seconds, _ in part)
        found[f"{side}_cpu"] = statistics.median(cpu for _, cpu in part)
    return found


def _size(*uris: str, folders: Sequence[str]) -> Mapping[str, int]:
    """Count files and bytes below some folders of tables."""
    paths = [
        Path(base, name)
        for uri in uris
        for part in folders
        for base, _, names in os.walk(Path(uri, part))
        for name in names
    ]
    return {"files": len(paths), "bytes": sum(path.stat().st_size for path in paths)}
