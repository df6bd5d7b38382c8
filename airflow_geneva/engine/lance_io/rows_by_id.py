"""Read rows of a version by their row ids. Lance silently leaves out ids that the version does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.lance_io.arrays import rows_at, single_batch
from airflow_geneva.engine.lance_io.pylance_internals import take_rows
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget, batch_bytes, task_memory_bytes

if TYPE_CHECKING:
    import lance

_BATCH_ROWS = 65_536


def rows_in_order(
    dataset: lance.LanceDataset, ids: npt.NDArray[np.int64], columns: Sequence[str], most_bytes: float = inf
) -> pa.RecordBatch | None:
    """Read rows by id, in this order; None if they have more bytes."""
    batches = list[pa.RecordBatch]()
    for batch in rows_in_batches(dataset, ids, columns):
        batches.append(batch)
        if sum(one.nbytes for one in batches) > most_bytes:
            return None
    found = single_batch(pa.Table.from_batches(batches))
    order = np.argsort(found.column("_rowid").to_numpy().view(np.int64), kind="stable")
    back = np.empty(len(ids), np.int64)
    back[np.argsort(ids, kind="stable")] = order
    return rows_at(found, pa.array(back)).select(list(columns))


def rows_in_batches(dataset: lance.LanceDataset, ids: Any, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read rows by id (a NumPy array), with their ids as column `_rowid`, in batches of bounded size in bytes."""
    fitting = RowsPerBudget(batch_bytes(task_memory_bytes()))
    wanted = list(dict.fromkeys([*columns, "_rowid"]))
    while len(ids):
        size = min(fitting.careful_rows, _BATCH_ROWS)
        rows = single_batch(take_rows(dataset, ids[:size].tolist(), wanted))
        fitting.record(rows.num_rows, rows.nbytes)
        ids = ids[size:]
        yield rows
