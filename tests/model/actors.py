"""The actors of traces: a table as the model of a column has it, and what is seen of it on disk."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileWriter
from lance.fragment import DataFile

from airflow_geneva import connect
from airflow_geneva.engine.checkpoint.facts import load_state
from airflow_geneva.engine.lance_io.fragments import columns_of, read_fragments
from tests.simulation.actors import apply, commit, f, finish
from tests.simulation.kernel import KERNEL
from tests.simulation.store import stamp_times

SIZES: dict[str, Any] = {"runner": "inline", "checkpoint_interval": 0.0}
CHANGED = 100
"""Is added to an input that the writer replaces."""


def make(folder: str, given: Any) -> None:
    table = connect(folder).create_table("t", pa.table({"id": pa.array([0, 1], pa.int64())}), max_rows_per_file=1)
    table.lance.add_columns({"x": "id"})
    connect(folder).open_table("t").add_columns({"n": (f, ["x"])})


def backfill(folder: str, given: Any) -> Any:
    return connect(folder).open_table("t").backfill("n", **SIZES).to_json()


def plan(folder: str, given: Any) -> Any:
    """What the plan task of Airflow does."""
    from airflow_geneva.engine.run.record import record_plan

    table = connect(folder).open_table("t")
    sizes = {name: value for name, value in SIZES.items() if name != "runner"}
    saved = record_plan(table.plan_backfill("n", **sizes), table.location)
    return {"table": "t", "job": saved.spec.job_id, "plan": saved.fingerprint, "since": 0}


def go_on(folder: str, given: Any) -> Any:
    """What its other tasks do."""
    return finish(folder, commit(folder, apply(folder, given)))


def change(folder: str, given: Any) -> None:
    """Replace the input of row 0 in place, as another job does that computes it."""
    KERNEL.step("change")
    dataset = lance.LanceDataset(f"{folder}/t.lance")
    name = f"{uuid.uuid4().hex}.lance"
    rows = pa.table({"x": pa.array([CHANGED], pa.int64())})
    with LanceFileWriter(f"{folder}/t.lance/data/{name}", rows.schema) as writer:
        writer.write_batch(rows.to_batches()[0])
    group = lance.LanceOperation.DataReplacementGroup(0, DataFile.create(dataset, name))
    made = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
    lance.LanceDataset.commit(dataset, made)
    stamp_times()


def observe(folder: str, given: Any) -> Any:
    """Return what is on disk, in the words of the model."""
    table = connect(folder).open_table("t")
    dataset = table.lance
    rows = dataset.to_table(columns=["id", "x", "n"], with_row_address=True).to_pylist()
    columns = columns_of(dataset, ("x",), (), "n")
    state = load_state(table.location.checkpoints, columns.output[0])
    files = read_fragments(dataset, columns, {row["_rowaddr"] >> 32 for row in rows})
    known = {at: bool(state.known(one.signature, one.physical_rows)) for at, one in files.items() if one.output}
    stale = {at: bool(state.stale(one.signature, one.physical_rows)) for at, one in files.items() if one.output}
    names = [str(path.relative_to(folder)) for path in Path(folder, "t.lance", "_checkpoints").rglob("*.lance")]
    kept = {found.groups() for name in names if (found := re.search(r"srcfiles-(\w+)/frag-(\d+)/range-", name))}
    staged = {found.groups() for name in names if (found := re.search(r"srcfiles-(\w+)/frag-(\d+)\.lance$", name))}
    return {
        "table": [
            [row["id"], row["x"] // CHANGED, None if row["n"] is None else (row["n"] - 1) // 2 // CHANGED]
            for row in sorted(rows, key=lambda row: row["id"])
        ],
        "known": sorted(at for at, said in known.items() if said),
        "stale": sorted(at for at, said in stale.items() if said),
        "rows": sorted(Counter(int(at) for _, at in kept).items()),
        "staged": sorted(Counter(int(at) for _, at in staged).items()),
    }


def no_judge(folder: str, given: Any) -> None:
    """Look at nothing."""
