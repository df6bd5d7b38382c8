"""Rewrite the staged rows of a view in the requested order and fragment size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.checkpoint.records import StagedFragment
from airflow_geneva.lance_io.row_ranges import Offsets
from airflow_geneva.lance_io.task_memory import byte_limit
from airflow_geneva.views.row_order import RowIdArray, shuffle_hashes
from airflow_geneva.write.pieces import WINDOW_ROWS, FileWidths, fit_rows
from airflow_geneva.write.view_file import ViewFileWriter, read_source_ids, read_view_rows

if TYPE_CHECKING:
    import lance


def reorder_rows(
    view: lance.LanceDataset,
    staged: Sequence[StagedFragment],
    shuffle_seed: int | None,
    most: int | None,
    limit: int,
) -> list[tuple[str, int]]:
    """Rewrite staged rows; return the name and the row count of each new file.

    Args:
        staged: files of view rows.
        shuffle_seed: seed of the hash that the rows are sorted by; None: keep the order.
        most: rows per file; None: one file.
        limit: most bytes of rows to hold at once.

    Raises:
        BrokenFile: a staged file is damaged or missing.
        StorageError: the store is full, read-only or unreachable.
    """
    # Read the ids from the files, not from the checkpoint: explode may have made several rows of one source row.
    ids = [read_source_ids(view, fragment.file) for fragment in staged]
    lengths = [len(part) for part in ids]
    rows = sum(lengths)
    if rows == 0:
        return []
    order: Offsets = np.arange(rows)
    every: RowIdArray = np.concatenate(ids)
    if shuffle_seed is not None:
        # lexsort is stable, so rows of one source row keep their order.
        order = np.lexsort((every, shuffle_hashes(shuffle_seed, every)))
    firsts = np.concatenate(([0], np.cumsum(lengths)))
    widths = FileWidths(len(staged), limit)
    files = []
    size = most or rows
    for start in range(0, rows, size):
        chosen = order[start : start + size]
        writer = ViewFileWriter(view)
        at = 0
        while at < len(chosen):
            window = chosen[at : at + WINDOW_ROWS]
            sources = np.searchsorted(firsts, window, side="right") - 1
            read = partial(_rows, view, staged, firsts, window, widths)
            found, count = fit_rows(read, widths.rows(sources))
            writer.put(found, every[window[:count]].view(np.uint64))
            at += count
        files.append((writer.finish(), len(chosen)))
    return files


def _rows(
    view: lance.LanceDataset,
    staged: Sequence[StagedFragment],
    firsts: Offsets,
    window: Offsets,
    widths: FileWidths,
    count: int,
) -> pa.StructArray:
    """Read the first rows of a window.

    Args:
        firsts: position of each file's first row among all staged rows.
        window: positions of the rows among all staged rows.
    """
    window = window[:count]
    left = byte_limit(widths.limit, count)
    sorting = np.argsort(window, kind="stable")
    places = window[sorting]
    has_limit = np.searchsorted(places, firsts)
    parts = []
    for number, (fragment, low, high) in enumerate(zip(staged, has_limit[:-1], has_limit[1:], strict=True)):
        if low < high:
            read = partial(read_view_rows, view, fragment.file, places[low:high] - firsts[number])
            parts.append(widths.read(number, read, left))
            left -= parts[-1].nbytes
    back = np.empty(len(window), np.int64)
    back[sorting] = np.arange(len(window))
    return pa.concat_arrays(parts).take(pa.array(back))
