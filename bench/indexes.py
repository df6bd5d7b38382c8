"""A vector index that is kept up to date: its cost per hour, and its recall compared with that of a new index."""

from __future__ import annotations

import time
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import airflow_geneva
from airflow_geneva import udf

_WIDTH, _CENTERS, _NEAREST = 64, 500, 10
_SEARCH = {"nprobes": 16, "refine_factor": 10}
Vectors = npt.NDArray[np.float32]


def vectors_of(x: npt.NDArray[np.int64]) -> Vectors:
    """Vectors around many centers, the same for the same seed."""
    centers = np.random.default_rng(0).standard_normal((_CENTERS, _WIDTH))
    noise = np.sin(np.outer(x + 1.0, np.random.default_rng(1).uniform(1, 1_000, _WIDTH)))
    return (centers[x * 7_919 % _CENTERS] + 0.6 * noise).astype(np.float32)


@udf(data_type=pa.list_(pa.float32(), _WIDTH), version="1")
def embedded(x: pa.Int64Array) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(vectors_of(x.to_numpy()).ravel(), _WIDTH)


def measure(folder: str, rows: int, hours: int, added: int, ends: int) -> dict[str, Any]:
    """Index a column, append some rows each hour and compute them with `indexes="update"`.

    Args:
        ends: number of first and last hours to compare.
    """
    table = airflow_geneva.connect(folder).create_table("docs", _rows(0, rows), max_rows_per_file=-(-rows // 4))
    table.add_columns({"v": embedded})
    table.backfill("v", udf=embedded, runner="inline")
    made = {"index_type": "IVF_PQ", "num_partitions": max(rows // 3_000, 2), "num_sub_vectors": _WIDTH // 4}
    table.lance.create_index("v", **made)
    taken, unindexed, segments = [], [], []
    for hour in range(hours):
        table.add(_rows(rows + hour * added, added))
        began, cpu = time.perf_counter(), time.process_time()
        result = table.backfill("v", udf=embedded, runner="inline", indexes="update")
        taken.append((time.perf_counter() - began, time.process_time() - cpu))
        unindexed.append(result.unindexed_rows)
        segments.append(sum(len(index.segments) for index in table.lance.describe_indices()))
    searches = max(rows // 1_000, 100)
    kept = _recall(table.lance, searches)
    table.lance.create_index("v", replace=True, **made)
    return {
        "rows": rows,
        "hours": hours,
        "added": added,
        "ends": ends,
        "first": [sum(one[at] for one in taken[:ends]) for at in (0, 1)],
        "last": [sum(one[at] for one in taken[-ends:]) for at in (0, 1)],
        "unindexed": max(unindexed),
        "segments": max(segments),
        "recall": kept,
        "rebuilt": _recall(table.lance, searches),
    }


def _rows(first: int, count: int) -> pa.Table:
    return pa.table({"x": pa.array(range(first, first + count), pa.int64())})


def _recall(dataset: lance.LanceDataset, searches: int) -> float:
    """Return the fraction of the nearest vectors that the index finds, for queries near stored vectors."""
    count = dataset.count_rows()
    stored = vectors_of(np.arange(count))
    wanted = vectors_of(np.linspace(0, count - 1, searches).astype(np.int64)) + np.float32(0.05)
    found = 0
    for vector in wanted:
        near = {"column": "v", "q": vector, "k": _NEAREST, **_SEARCH}
        rows = dataset.to_table(columns=["x", "_distance"], nearest=near)["x"].to_pylist()
        nearest = np.argpartition(((stored - vector) ** 2).sum(axis=1), _NEAREST)[:_NEAREST]
        found += len(set(rows) & set(nearest.tolist()))
    return found / (searches * _NEAREST)
