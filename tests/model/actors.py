"""The actors of traces: a table as the models have it, and what is seen on disk."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileWriter
from lance.fragment import DataFile

from airflow_geneva import connect
from airflow_geneva.engine import api
from airflow_geneva.engine.checkpoint.facts import load_state
from airflow_geneva.engine.checkpoint.view_snapshot import load_snapshot
from airflow_geneva.engine.job.outbox import find_commits, read_outbox
from airflow_geneva.engine.lance_io.fragments import columns_of, field_ids, read_fragments
from airflow_geneva.engine.views.state import (
    BASE_VERSION_KEY,
    SWAP_KEY,
    CommittedViewState,
    read_advance_note,
    read_intents,
)
from tests.simulation.actors import apply, commit, f, finish, saved_of
from tests.simulation.kernel import KERNEL
from tests.simulation.store import stamp_times

SIZES: dict[str, Any] = {"runner": "inline", "checkpoint_interval": 0.0}
CHANGED = 100
"""Is added to an input that the writer replaces."""


def make_column(folder: str, given: Any) -> None:
    table = connect(folder).create_table("t", pa.table({"id": pa.array([0, 1], pa.int64())}), max_rows_per_file=1)
    table.lance.add_columns({"x": "id"})
    connect(folder).open_table("t").add_columns({"n": (f, ["x"])})


def backfill(folder: str, given: Any) -> Any:
    return connect(folder).open_table("t").backfill("n", **SIZES).to_json()


def plan_column(folder: str, given: Any) -> Any:
    """What the plan task of Airflow does."""
    from airflow_geneva.engine.run.record import record_plan

    table = connect(folder).open_table("t")
    sizes = {name: value for name, value in SIZES.items() if name != "runner"}
    saved = record_plan(table.plan_backfill("n", **sizes), table.location)
    return {"table": "t", "job": saved.spec.job_id, "plan": saved.fingerprint, "since": 0}


def go_on(folder: str, given: Any) -> Any:
    """What its other tasks do."""
    return finish(folder, commit(folder, apply(folder, given)))


def change_column(folder: str, given: Any) -> None:
    KERNEL.step("change")
    replace_input(folder, 0)


def replace_input(folder: str, row: int) -> None:
    """Replace the input of a row in place, as another job does that computes it."""
    dataset = lance.LanceDataset(f"{folder}/t.lance")
    name = f"{uuid.uuid4().hex}.lance"
    rows = dataset.to_table({"x": f"x + {CHANGED}"}, f"id = {row}")
    with LanceFileWriter(f"{folder}/t.lance/data/{name}", rows.schema) as writer:
        writer.write_batch(rows.to_batches()[0])
    group = lance.LanceOperation.DataReplacementGroup(row, DataFile.create(dataset, name))
    made = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
    lance.LanceDataset.commit(dataset, made)
    stamp_times()


def observe(folder: str, given: Any) -> None:
    """Write what is on disk, in the words of a model, each time that it is asked."""
    while True:
        found = {"column": observe_column, "view": observe_view, "events": observe_events}[given](folder)
        Path(folder).with_name("seen").write_text(json.dumps(found))
        KERNEL.step("seen")


def observe_column(folder: str) -> Any:
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


def make_view(folder: str, given: Any) -> None:
    rows = {"id": [0, 1, 9], "x": [0, 1, 9]}
    table = connect(folder).create_table("t", pa.table(rows, pa.schema(dict.fromkeys(rows, pa.int64()))))
    query = table.query().where("id < 9").select({"id": "id", "x": "x", "y": (f, ["x"])})
    query.create_materialized_view(connect(folder), "v")


def refresh(folder: str, given: Any) -> Any:
    return connect(folder).open_view("v").refresh(**SIZES).to_json()


def plan_view(folder: str, given: Any) -> Any:
    from airflow_geneva.engine.plan.request import RefreshRequest
    from airflow_geneva.engine.run.record import record_plan

    opened = connect(folder).open_view("v")
    sizes = {name: value for name, value in SIZES.items() if name != "runner"}
    saved = record_plan(opened._plan_refresh_to_run(RefreshRequest.of({}, sizes), "inline")[0], opened.location)
    return {"table": "v", "job": saved.spec.job_id, "plan": saved.fingerprint, "since": 0}


def change_view(folder: str, given: Any) -> None:
    """Change a row of the source that the view shows."""
    KERNEL.step("change")
    lance.LanceDataset(f"{folder}/t.lance").update({"x": f"x + {CHANGED}"}, where="id = 0")
    stamp_times()


def note_view(folder: str, given: Any) -> None:
    """Change one that it does not show."""
    KERNEL.step("note")
    lance.LanceDataset(f"{folder}/t.lance").update({"x": f"x + {CHANGED}"}, where="id = 9")
    stamp_times()


def observe_view(folder: str) -> Any:
    opened = connect(folder).open_view("v")
    state = CommittedViewState(opened.location, opened.lance)
    rows = {row["id"]: row["x"] for row in opened.to_arrow().to_pylist()}
    metadata = opened.lance.schema.metadata or {}
    note, intents, newest = read_advance_note(opened.location), read_intents(opened.location), state.newest
    noted = note is not None and newest.job_id and note.swap == newest.snapshot
    return {
        "content": None if not rows else rows[0] // CHANGED if rows.keys() == {0, 1} and rows[1] == 1 else -1,
        "newest": newest.source_version - 1 if newest.job_id else None,
        "snapshot": bool(newest.job_id and load_snapshot(opened.location.checkpoints, newest.snapshot)),
        "mirrored": int(metadata[BASE_VERSION_KEY.encode()]) - 1 if SWAP_KEY.encode() in metadata else None,
        "note": note.source_version - 1 if noted and note is not None else None,
        "intents of others": bool(intents - {newest.snapshot}),
        "its intent": newest.snapshot in intents,
    }


RUNS = {name: f"20300101T000000000000-{name}" for name in ("A", "B", "C")}


def make_events(folder: str, given: Any) -> None:
    table = connect(folder).create_table("t", pa.table({"id": pa.array([0, 1, 2], pa.int64())}), max_rows_per_file=1)
    table.lance.add_columns({"x": "id"})
    connect(folder).open_table("t").add_columns({"n": (f, ["x"])})
    backfill(folder, None)


def plan_run(folder: str, given: Any) -> Any:
    """Plan a run as its task does, of a row of its own that has changed; C has nothing to compute."""
    row = list(RUNS).index(given)
    if given != "C":
        replace_input(folder, row)
    table = connect(folder).open_table("t")
    sizing = {name: value for name, value in SIZES.items() if name != "runner"}
    plan, _ = table._plan(api.BackfillRequest("n", where=f"id = {row}", job_id=RUNS[given], sizing=sizing), None)
    since = plan.spec.version if plan.shards else None
    job = api.record_job(plan, table.location, api.RunnerChoice("spark", ""), {}, announces_since=since)
    return {"table": "t", "job": RUNS[given], "plan": job.saved.fingerprint, "since": 0}


def commit_run(folder: str, given: Any) -> Any:
    return commit(folder, apply(folder, given))


def finish_run(folder: str, given: Any) -> None:
    finish(folder, given)
    location, saved, _ = saved_of(folder, given)
    found = api.find_unannounced(api.PlannedJob(location, saved), partial(last_announced, folder))
    KERNEL.step("event")
    if found is not None:
        event = [found.from_version, found.to_version, found.commit]
        Path(folder, "events.json").write_text(json.dumps([*events_in(folder), event]))


def last_announced(folder: str, is_ours: Any, since: Any) -> int | None:
    KERNEL.step("ask")
    return next((to for _, to, commit in reversed(events_in(folder)) if is_ours(to, commit)), None)


def events_in(folder: str) -> Any:
    """The events that Airflow has recorded."""
    path = Path(folder, "events.json")
    return json.loads(path.read_text()) if path.exists() else []


def observe_events(folder: str) -> Any:
    table, names = connect(folder).open_table("t"), {job: name for name, job in RUNS.items()}
    checkpoints, outbox = table.location.checkpoints, f"field-{field_ids(table.lance, 'n')[0]}"
    commits = find_commits(table.lance, 0, names)

    def commits_until(version: int) -> int:
        return sum(at <= version for at in commits)

    return {
        "versions": [names[job] for job in commits.values()],
        "marks": {names[mark.job_id]: commits_until(mark.since) for mark in read_outbox(checkpoints, outbox)},
        "events": [[commits_until(since), commits_until(to)] for since, to, _ in events_in(folder)],
        "ended": [name for name, job in RUNS.items() if api.JobFolder.of(checkpoints, job).record.get("ended")],
    }


def no_judge(folder: str, given: Any) -> None:
    """Look at nothing."""
