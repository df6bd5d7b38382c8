"""Planning for tables with very many fragments, which are created without writing their data."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import lance.commit
import pyarrow as pa
from lance.fragment import DataFile, FragmentMetadata

import airflow_geneva
from airflow_geneva.checkpoint.facts import Fact, append_ledger, fold_ledgers
from airflow_geneva.checkpoint.provenance import Provenance
from airflow_geneva.lance_io.fragments import columns_of, field_ids, read_manifest
from bench import processes, udfs
from bench.cases import TABLE, open_table

_ROWS = 10
_LINKS = 30_000
"""Hard links per file; common file systems allow 65,000."""
_LEDGERS = 20


def make_many(folder: str, fragments: int, computed: bool) -> dict[str, Any]:
    """Create a table with many fragments of ten rows: one data file with many hard links, appended in one commit.

    Args:
        computed: mark its column ``y`` as computed in the column's state.
    """
    table = airflow_geneva.connect(folder).create_table(TABLE, pa.table({"x": pa.array(range(_ROWS))}))
    table.add_columns({"y": udfs.double})
    if computed:
        table.backfill("y", udf=udfs.double, runner="inline")
    dataset = table.lance
    (pattern,) = dataset.get_fragments()
    gc.disable()
    made = [
        FragmentMetadata(
            id=0,
            files=[_linked(Path(dataset.uri) / "data", file, number) for file in pattern.metadata.files],
            physical_rows=_ROWS,
        )
        for number in range(fragments - 1)
    ]
    lance.LanceDataset.commit(dataset.uri, lance.LanceOperation.Append(made), read_version=dataset.version)
    if computed:
        dataset = table.lance
        field_id = field_ids(dataset, "y")[0]
        what = Provenance(udfs.double.code_version).what
        manifest = read_manifest(dataset, columns_of(dataset, ["x"], [], "y"))
        facts = [Fact(files.signature, what, None, dataset.version, files.deletion) for files in manifest.values()]
        size = -(-len(facts) // _LEDGERS)
        for at in range(0, len(facts), size):
            append_ledger(table.location.checkpoints, field_id, "bench", facts[at : at + size])
        fold_ledgers(table.location.checkpoints, field_id)
    return {}


def measure(folder: str, computed: bool, repeats: int) -> dict[str, Any]:
    """Measure planning on such a table, and pylance opening it and reading its file lists."""
    table = open_table(Path(folder))
    sides: dict[str, Callable[[], Any]] = {
        "floor": lambda: _read_file_lists(table.uri),
        "plan": lambda: table.plan_backfill("y", udf=udfs.double),
    }
    if computed:
        sides["backfill"] = lambda: table.backfill("y", udf=udfs.double, runner="inline")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            took = time.perf_counter() - began
            if turn:
                seconds[name].append(took)
    plan = table.plan_backfill("y", udf=udfs.double)
    return {**seconds, "rows_pending": plan.rows_pending, "rows": plan.rows_total, "peak_self": processes.peak_self()}


def _read_file_lists(uri: str) -> int:
    gc.disable()
    try:
        return sum(len(fragment.metadata.files) for fragment in lance.dataset(uri).get_fragments())
    finally:
        gc.enable()


def _linked(data: Path, file: DataFile, number: int) -> DataFile:
    """Link the data file under a new name, so that each fragment has its own signature, as in a real table."""
    name = f"{number:06}-{file.path}"
    source = data / f"{number // _LINKS}-{file.path}"
    if not source.exists():
        shutil.copy(data / file.path, source)
    os.link(source, data / name)
    version = file.file_major_version, file.file_minor_version
    return DataFile(name, file.fields, file.column_indices, *version, file.file_size_bytes)
