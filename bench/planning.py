"""Planning for tables with very many fragments, which are created without writing their data."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import lance.commit
import pyarrow as pa
from lance.fragment import DataFile, FragmentMetadata

import airflow_geneva
from airflow_geneva.engine.checkpoint.facts import Fact, append_ledger, fold_ledgers
from airflow_geneva.engine.checkpoint.provenance import Provenance
from airflow_geneva.engine.lance_io.fragments import columns_of, field_ids
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.saved_plan import shard_summaries
from airflow_geneva.engine.plan.shard import fragments_per_commit
from bench import processes, udfs
from bench.cases import TABLE, open_table
from tests.support.plans import save_plan

ROWS = 1_000_000
"""Rows of a fragment according to its metadata: no row is ever read."""
FIRST_ROWS = 10
"""Rows of the first fragment, which is real."""
_LEDGERS = 20
_A_COMMIT = 250_000
"""Fragments that are appended at a time, which bounds the memory of the commit."""


def make_many(folder: str, fragments: int, computed: bool, columns: int = 3) -> dict[str, Any]:
    """Create a table with many fragments, all but the first without data.

    Args:
        computed: mark its column ``y`` as computed in the column's state.
        columns: number of columns, ``y`` included.
    """
    data = {name: pa.array(range(FIRST_ROWS)) for name in ("x", *(f"c{at}" for at in range(columns - 2)))}
    table = airflow_geneva.connect(folder).create_table(TABLE, pa.table(data))
    table.add_columns({"y": udfs.double})
    if computed:
        table.backfill("y", udf=udfs.double, runner="inline")
    dataset = table.lance
    (pattern,) = dataset.get_fragments()
    gc.disable()
    for begin in range(0, fragments - 1, _A_COMMIT):
        made = [
            FragmentMetadata(id=0, files=[_named(file, at) for file in pattern.metadata.files], physical_rows=ROWS)
            for at in range(begin, min(begin + _A_COMMIT, fragments - 1))
        ]
        append = lance.LanceOperation.Append(made)
        dataset = lance.LanceDataset.commit(dataset.uri, append, read_version=dataset.version)
    if computed:
        dataset = table.lance
        field_id = field_ids(dataset, "y")[0]
        kind = Provenance(udfs.double.code_version).kind
        signatures = read_manifest(dataset, columns_of(dataset, ["x"], [], "y")).signatures.to_pylist()
        size = -(-len(signatures) // _LEDGERS)
        for at in range(0, len(signatures), size):
            facts = [Fact(signature, kind, None, dataset.version, "") for signature in signatures[at : at + size]]
            append_ledger(table.location.checkpoints, field_id, "bench", facts)
        fold_ledgers(table.location.checkpoints, field_id)
    return {}


def measure(folder: str, computed: bool, repeats: int) -> dict[str, Any]:
    """Measure planning on such a table, and pylance opening it and listing its fragments."""
    table = open_table(Path(folder))
    sides: dict[str, Callable[[], Any]] = {
        "floor": lambda: lance.dataset(table.uri).__reduce__(),
        "plan": lambda: table.plan_backfill("y", udf=udfs.double),
    }
    if computed:
        sides["backfill"] = lambda: table.backfill("y", udf=udfs.double, runner="inline")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, int] = {}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            took = time.perf_counter() - began
            # Memory only grows, and the baseline comes first.
            peaks.setdefault(name, processes.peak_self())
            if turn:
                seconds[name].append(took)
    plan = table.plan_backfill("y", udf=udfs.double)
    found = {**seconds, "rows_pending": plan.rows_pending, "rows": plan.rows_total, **sizes(plan, table)}
    return {**found, "peak_floor": peaks["floor"], "peak_plan": peaks["plan"]}


def sizes(plan: Plan, table: airflow_geneva.Table) -> dict[str, Any]:
    """Store a plan; return the seconds, and the sizes of the parts that grow with the number of fragments."""
    job = table.location.checkpoints.folder("jobs", plan.spec.job_id)
    began = time.perf_counter()
    saved = save_plan(plan, job)
    seconds = time.perf_counter() - began
    shards = [len(shard.fragments) for shard in plan.shards]
    return {
        "save": seconds,
        "shards": len(shards),
        "commits": sum(-(-fragments // fragments_per_commit(fragments, len(shards))) for fragments in shards),
        "plan_bytes": sum(len(job.read_bytes(entry["file"])) for entry in saved.shards),
        "xcom_bytes": len(json.dumps(shard_summaries(plan, saved, job))),
    }


def _named(file: DataFile, number: int) -> DataFile:
    """Give the data file a unique name, so that each fragment has its own signature, as in a real table."""
    version = file.file_major_version, file.file_minor_version
    return DataFile(f"{number:07}-{file.path}", file.fields, file.column_indices, *version, file.file_size_bytes)
