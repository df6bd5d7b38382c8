"""Read rows of a version by their row ids. Lance silently leaves out ids that the version does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.lance_io.arrays import single_batch
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget, batch_bytes, task_memory_bytes

if TYPE_CHECKING:
    import lance

_BATCH_ROWS = 65_536


def take_rows(dataset: lance.LanceDataset, ids: Any, columns: Sequence[str] | Mapping[str, str]) -> pa.Table:
    """Read rows by id in one call; a mapping of `columns` gives SQL or a quoted column for each output name."""
    return dataset._take_rows(ids, columns=dict(columns) if isinstance(columns, Mapping) else list(columns))


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
