"""Write the archived database, and what this code makes of it: `python -m tests.written_before.write`.

To be run with the code whose data later code has to read. The commit is noted in `written.json`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_geneva import Table
from tests.written_before import written
from tests.written_before.written import ACTS, ARCHIVE, HERE, RECORD, ROOT, SIZES, TRACE, database, outcome, place

import written_before_udfs as udfs  # isort: skip  # found by way of `written`

AGE = 30 * 24 * 3600.0
"""So long ago everything was written, by its own account: killed jobs are dead at once, and no clock moves that."""

Rows = pa.Table


def rows(count: int, first: int = 0) -> Rows:
    numbers = pa.array(range(first, first + count), pa.int64())
    return pa.table({"id": numbers, "x": numbers})


def make(name: str, count: int, per_fragment: int = 20, stable: bool = True, **columns: Any) -> Table:
    options = None if stable else {"new_table_enable_stable_row_ids": "false"}
    table = database().create_table(name, rows(count), storage_options=options, max_rows_per_file=per_fragment)
    table.add_columns(columns)
    return table


def view(source: str, name: str, where: str | None = None, **shape: Any) -> None:
    query = database().open_table(source).query()
    query = query.where(where) if where else query
    query = query.select({"id": "id", "twice": "x * 2"}).add_columns({"steady": (udfs.steady, ["x"])})
    for what, value in shape.items():
        query = getattr(query, what)(value)
    query.create_materialized_view(database(), name).refresh(runner="inline")


def write_complete() -> None:
    table = make("complete", 60, score=udfs.score, doubled=udfs.Doubled, some=(udfs.steady, ["x"]))
    table.backfill("score", runner="inline")
    table.backfill("doubled", runner="inline")
    table.backfill("some", where="x < 30", runner="inline")
    view("complete", "long_view", "x % 3 != 0")
    view("complete", "shuffled_view", shuffle=5, limit=25)
    exploded = table.query().select({"id": "id", "digit": udfs.digits})
    exploded.create_materialized_view(database(), "exploded_view").refresh(runner="inline")
    unstable = make("unstable", 40, stable=False, score=udfs.score)
    unstable.backfill("score", runner="inline")
    view("unstable", "unstable_view")


def write_skipped() -> None:
    make("skipped", 40, picky=udfs.picky).backfill("picky", runner="inline", **SIZES)
    mixed = make("mixed", 40, graded=udfs.graded_1)
    mixed.backfill("graded", runner="inline")
    mixed.add(rows(20, 40))
    mixed.alter_columns({"graded": udfs.graded_2})
    mixed.backfill("graded", on_code_change="new_rows", runner="inline")


def write_packed() -> None:
    """Many jobs and many fragments, until the documents beside the table are packed, folded and tidied away."""
    table = make("packed", 0, score=udfs.score)
    for _ in range(20):
        table.backfill("score", runner="inline")
    table.lance.insert(
        rows(70).append_column("score", pa.nulls(70, pa.int64())), mode="append", max_rows_per_file=1
    )  # fmt: skip
    table.backfill("score", runner="inline", shard_size=70, commit_granularity=4)
    query = table.query().select({"id": "id"})
    packed = query.create_materialized_view(database(), "packed_view")
    for number in range(17):
        packed.refresh(runner="inline")
        table.add(rows(1, 100 + number))


def write_planned() -> None:
    """What a run of Airflow plans, and computes and commits half of; see `write_airflow`."""
    make("planned", 80, steady=udfs.steady)
    make("source", 60)
    view("source", "planned_view", "x % 3 != 0")
    for first in (100, 200):
        database().open_table("source").add(rows(20, first))


def write_killed() -> None:
    """Jobs that are killed; see KILLS."""
    make("killed", 80, steady=udfs.steady)
    make("committed", 80, steady=udfs.steady)
    make("killed_picky", 80, picky=udfs.picky)
    for name in ("half", "begun"):
        source = make(name, 60)
        view(name, f"{name}_view", "x % 3 != 0")
        source.lance.update({"x": "x + 300"}, where="id % 4 = 1")
        source.lance.delete("id >= 55")
        source.add(rows(40, 100))


KILLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "killed": ("checkpoint.written:7", lambda: written.run("killed", "steady", **SIZES)),
    "killed_picky": ("apply.step:21", lambda: written.run("killed_picky", "picky", **SIZES)),
    "committed": ("apply.step:14", lambda: written.run("committed", "steady", **SIZES)),
    "half_view": ("swap.before:1", lambda: written.run("half_view", **SIZES)),
    "begun_view": ("checkpoint.written:7", lambda: written.run("begun_view", **SIZES)),
}
"""What is run in a process of its own, and where it dies."""


def kill(name: str) -> list[str]:
    """Run one in a process of its own, and return the rows that ran before it died."""
    environment = {**os.environ, "AIRFLOW_GENEVA_FAULT": KILLS[name][0]}
    died = subprocess.run([sys.executable, "-m", "tests.written_before.write", name], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL, (name, died.returncode)
    return written.calls()


def age(folder: Path, since: float) -> None:
    """Turn back the clock of everything that a job's documents say of the time it was written at."""
    until = time.time()

    def older(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: older(part) for name, part in value.items()}
        if isinstance(value, list):
            return [older(part) for part in value]
        return value - AGE if isinstance(value, float) and since <= value <= until else value

    for path in folder.rglob("*.json"):
        # What a plan consists of is named by its hash, and says nothing of the time.
        if not path.name.startswith(("plan-", "part-")):
            document = json.loads(path.read_text())
            if older(document) != document:
                path.write_text(json.dumps(older(document), separators=(",", ":")))


def archive() -> None:
    def normal(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = int(member.mtime - AGE)
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(ARCHIVE, "w:xz", preset=9) as target:
        target.add(ROOT / "db", "db", filter=normal)


def write_all() -> None:
    began = time.time()
    os.environ[udfs.TRACE] = str(TRACE)
    (ROOT / "db").mkdir()
    for write in (write_complete, write_skipped, write_packed, write_killed, write_planned):
        write()
    ran = {name: kill(name) for name in KILLS}
    from tests.written_before import write_airflow

    airflow = write_airflow.write()
    age(ROOT / "db", began)
    (ROOT / "new_airflow.db").unlink()
    archive()
    named = {name: value.code_version for name, value in sorted(vars(udfs).items()) if isinstance(value, udf_class())}
    git = ["git", "log", "-1", "--format=%H", "--", "airflow_geneva"]
    commit = subprocess.run(git, cwd=HERE.parent.parent, capture_output=True, text=True, check=True).stdout.strip()
    save({"commit": commit, "code_versions": named, "ran_before_kill": ran, "airflow": airflow})


def note_acts() -> None:
    """Do everything with what was archived, and note what it comes to."""
    os.environ[udfs.TRACE] = str(TRACE)
    from tests.written_before import write_airflow

    noted = written.record()
    acts = {act: outcome(act) for act in ACTS}
    airflow = {**noted["airflow"], "rest": write_airflow.go_on_with(noted["airflow"])}
    save({**noted, "airflow": airflow, "acts": acts})


def save(noted: dict[str, Any]) -> None:
    """Keep what is noted, a line for each thing."""
    parts = [
        f"{json.dumps(name)}: " + (json.dumps(part) if isinstance(part, str) else in_lines(part))
        for name, part in noted.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{ARCHIVE.stat().st_size:,} bytes archived, {RECORD.stat().st_size:,} bytes noted")


def in_lines(part: dict[str, Any]) -> str:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in part.items())
    return "{\n" + lines + "\n}"


def udf_class() -> type:
    return type(udfs.score)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        KILLS[sys.argv[1]][1]()
        raise SystemExit(f"{sys.argv[1]} was not killed")
    with place():
        write_all()
        note_acts()
