"""Case groups: views of groups by SQL aggregates and by a function, beside jobs that compute all groups again.

DuckDB aggregates, and where the view is computed on Spark, a plain job of Spark computes from Parquet files of the same
rows, which are written before and not measured.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import airflow_geneva
from airflow_geneva import Table
from bench import udfs

AGGREGATES = {"n": "count(*)", "total": "sum(amount)", "newest": "max(moment)", "mean": "avg(amount)"}
SIDES = {"SQL aggregates": AGGREGATES, "a function of Arrow arrays": {"slope": (udfs.slope, ["moment", "amount"])}}
_FRAGMENTS, _SEED = 16, 7


def measure(folder: str, rows: int, groups: int, runner: str, repeats: int) -> list[dict[str, Any]]:
    """Change a source in several ways; after each, refresh a view of its groups, and aggregate all rows with DuckDB.

    Args:
        rows: the rows of the source at first.
        groups: the number of their keys; with a hot key, that key has half of all rows.
        repeats: number of measured rounds, each on new tables; one more round is a warm-up.
    """
    found = []
    for keys in ("even", "hot"):
        for side, columns in SIDES.items():
            changes: dict[str, dict[str, Any]] = {}
            for turn in range(repeats + 1):
                place = Path(folder) / f"{keys}-{turn}"
                for name, about in _round(place, rows, groups, keys == "hot", columns, runner):
                    kept = changes.setdefault(name, {"ours": [], "duckdb": [], "spark": []}) | about["counts"]
                    if turn:
                        kept["ours"].append(about["seconds"])
                        kept["duckdb"].extend(about["duckdb"])
                        kept["spark"].extend(about["spark"])
                    changes[name] = kept
                shutil.rmtree(place)
            found.append(
                {"keys": keys, "side": side, "rows": rows, "groups": groups, "runner": runner, "changes": changes}
            )
    return found


def _round(
    place: Path, rows: int, groups: int, hot: bool, columns: dict[str, Any], runner: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    draw = np.random.default_rng(_SEED)
    made = _events(_keys(draw, rows, groups, hot), 0, draw)
    table = airflow_geneva.connect(place).create_table("events", made, max_rows_per_file=-(-rows // _FRAGMENTS))
    view = table.query().group_by("key").agg(columns, order_by=["moment"]).create_materialized_view(name="groups")
    more = max(rows // 100, 1)
    changes: list[tuple[str, Callable[[], object]]] = [
        ("first refresh", lambda: None),
        ("nothing to do", lambda: None),
        ("1 % more rows, of new keys", lambda: table.add(_events(groups + np.arange(more), rows, draw))),
        ("1 % more rows, of old keys", lambda: table.add(_events(_keys(draw, more, groups, hot), rows + more, draw))),
    ]
    for name, change in changes:
        change()
        began = time.perf_counter()
        result = view.refresh(runner=runner)
        seconds = time.perf_counter() - began
        theirs, expected = _duckdb(table) if columns is AGGREGATES and find_spec("duckdb") else ([], None)
        by_spark, also_expected = _spark(table, place / "plain", columns) if runner == "spark" else ([], None)
        counts = {"groups_computed": result.rows_computed}
        yield name, {"seconds": seconds, "duckdb": theirs, "spark": by_spark, "counts": counts}
        mine = view.to_arrow().select(["key", *columns]).sort_by("key")
        if expected is not None and not _agree(mine, expected):
            raise SystemExit(f"Case groups, {name}: the view differs from what DuckDB computes.")
        if also_expected is not None and mine.num_rows != also_expected:
            raise SystemExit(f"Case groups, {name}: a plain job of Spark finds another number of groups.")


def _keys(draw: np.random.Generator, rows: int, groups: int, hot: bool) -> npt.NDArray[np.int64]:
    keys = draw.integers(0, groups, rows)
    if hot:
        keys[draw.random(rows) < 0.5] = 0
    return keys


def _events(keys: npt.NDArray[np.int64], first: int, draw: np.random.Generator) -> pa.Table:
    moments, amounts = np.arange(first, first + len(keys)), draw.integers(0, 1_000, len(keys))
    return pa.table({"key": keys, "moment": moments, "amount": amounts, "other": np.zeros(len(keys))})


def _duckdb(table: Table) -> tuple[list[float], pa.Table]:
    """Aggregate all rows of a table; return the seconds, with those to read it, and the result."""
    import duckdb

    began = time.perf_counter()
    rows = table.lance.scanner(columns=["key", "moment", "amount"]).to_reader()
    listed = ", ".join(f"{sql} AS {name}" for name, sql in AGGREGATES.items())
    with duckdb.connect() as connection:
        connection.register("events", rows)
        found = connection.sql(f"SELECT key, {listed} FROM events GROUP BY key").to_arrow_table()
    seconds = time.perf_counter() - began
    return [seconds], found.sort_by("key")


def _spark(table: Table, place: Path, columns: dict[str, Any]) -> tuple[list[float], int]:
    """Compute all groups by a plain job of Spark, to Parquet files; return the seconds, and the number of groups."""
    import pyarrow.parquet as pq
    from pyspark.sql import SparkSession

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for number, fragment in enumerate(table.lance.get_fragments()):
        rows = fragment.to_table(columns=["key", "moment", "amount"])
        pq.write_table(rows, place / f"{number}.parquet")
    session = SparkSession.builder.getOrCreate()
    began = time.perf_counter()
    frame = session.read.parquet(str(place))
    if columns is AGGREGATES:
        frame.createOrReplaceTempView("events")
        listed = ", ".join(f"{sql} AS {name}" for name, sql in AGGREGATES.items())
        found = session.sql(f"SELECT key, {listed} FROM events GROUP BY key")
    else:
        found = frame.groupBy("key").applyInArrow(_slope_of_group, "key long, slope double")
    found.write.mode("overwrite").parquet(f"{place}-found")
    seconds = time.perf_counter() - began
    return [seconds], int(pq.read_table(f"{place}-found", columns=["key"]).num_rows)


def _slope_of_group(rows: pa.Table) -> pa.Table:
    rows = rows.sort_by("moment").combine_chunks()
    arrays = [rows.column(name).combine_chunks() for name in ("moment", "amount")]
    return pa.table({"key": rows["key"].slice(0, 1), "slope": [udfs.slope.func(*arrays)]})


def _agree(mine: pa.Table, theirs: pa.Table) -> bool:
    for name in ("key", "n", "total", "newest"):
        if mine.column(name).cast(pa.int64()).to_pylist() != theirs.column(name).cast(pa.int64()).to_pylist():
            return False
    means = (side.column("mean").to_numpy() for side in (mine, theirs))
    return bool(np.allclose(*means))
