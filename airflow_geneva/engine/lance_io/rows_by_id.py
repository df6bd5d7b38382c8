"""Read rows of a version by their row ids. Lance silently leaves out ids that the version does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.lance_io.arrays import single_batch
from airflow_geneva.engine.lance_io.pylance_internals import take_rows
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget, batch_bytes, task_memory_bytes

if TYPE_CHECKING:
    import lance

_BATCH_ROWS = 65_536


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
