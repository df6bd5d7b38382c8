"""The archived database, and what is done with it: by the code that wrote it, and by the code under test."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from airflow_geneva import Database, View, connect

HERE = Path(__file__).parent
ROOT = Path("/tmp/airflow-geneva-written-before")
"""Checkpoint keys hold a hash of the table's URI, and views their source's URI: the archive works at one place only."""
ARCHIVE = HERE / "database.tar.xz"
RECORD = HERE / "written.json"
TRACE = ROOT / "trace"
SIZES: dict[str, Any] = {
    "batch_size": 5, "checkpoint_size": 10, "checkpoint_interval": 0, "shard_size": 2, "commit_granularity": 1,
}  # fmt: skip

if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # the UDFs are a module of their own


@contextmanager
def place() -> Iterator[Path]:
    """The folder of the archived database, empty and for this process alone; removed at the end."""
    with open(f"{ROOT}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(ROOT, ignore_errors=True)
        ROOT.mkdir()
        try:
            yield ROOT
        finally:
            shutil.rmtree(ROOT, ignore_errors=True)


def unpack(*tables: str) -> None:
    """Put the archived database, or some of its tables, where it was written."""
    shutil.rmtree(ROOT / "db", ignore_errors=True)
    folders = {f"{table}.lance" for table in tables}
    with tarfile.open(ARCHIVE) as archive:
        wanted = [found for found in archive if not tables or {*found.name.split("/")[1:2]} <= folders]
        archive.extractall(ROOT, wanted, filter="fully_trusted")  # the "data" filter takes a second


def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def database() -> Database:
    return connect(ROOT / "db")


def calls() -> list[str]:
    """What the UDFs saw since this was asked last: a line a row, the UDF's name and its first input."""
    seen = TRACE.read_text().splitlines() if TRACE.exists() else []
    TRACE.unlink(missing_ok=True)
    return sorted(seen)


def run(table: str, column: str | None = None, **options: Any) -> dict[str, Any]:
    """Backfill a column, or refresh a view, and say what became of it."""
    found = database().open_table(table)
    before = found.version
    calls()
    if isinstance(found, View):
        result = found.refresh(runner="inline", **options)
    else:
        result = found.backfill(str(column), runner="inline", **options)
    counts = ("rows_computed", "rows_reused", "rows_skipped", "rows_failed", "rows_left")
    return {
        "state": result.state,
        **{name: getattr(result, name) for name in counts},
        "commits": len(result.commits),
        "versions": found.version - before,
        "calls": calls(),
    }


def append(table: str, *rows: int) -> None:
    database().open_table(table).add([{"id": row, "x": row} for row in rows])


def appended(table: str, column: str, view: str | None = None) -> Any:
    """Add a row to a table whose column is complete, and to what is computed of it."""
    append(table, 9001)
    return [run(table, column), *([run(view)] if view else [])]


def update_and_run(table: str, column: str) -> Any:
    database().open_table(table).lance.update({"x": "x + 5000"}, where="id = 4")
    return run(table, column)


def compact_and_run(table: str, column: str) -> Any:
    database().open_table(table).lance.optimize.compact_files()
    return run(table, column)


def failed() -> Any:
    """What is listed of failed rows, before and after they were tried again."""
    table = database().open_table("skipped")

    def listed() -> Any:
        errors = [asdict(error) for error in table.get_errors(column_name="picky", history=True)]
        return {"addresses": table.get_failed_row_addresses(column_name="picky"), "errors": len(errors)}

    first = [asdict(error) for error in table.get_errors()]
    told = [{name: error[name] for name in sorted(error) if name != "traceback"} for error in first]
    return [told, listed(), run("skipped", "picky", errors_only=True), listed(), run("skipped", "picky"), listed()]


def jobs() -> Any:
    """All jobs as they are listed, and one by one with their shards."""
    found = database()
    listed = found.jobs(newest=None)
    short = [[job.id, job.state, job.dead, job.target] for job in listed]
    whole = [found.job(job.id).to_json() for job in listed]
    return [short, whole]


def rows() -> Any:
    """All rows of all tables."""
    found = database()
    names = found.table_names()
    return {name: found.open_table(name).to_arrow().to_pydict() for name in names}


ACTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "rows": ("", rows),
    "jobs": ("", jobs),
    "complete": ("complete", lambda: [run("complete", "score"), run("complete", "doubled")]),
    "complete, with a filter": ("complete", lambda: [run("complete", "some", where="x < 30"), run("complete", "some")]),
    "complete, a row appended": ("complete long_view", lambda: appended("complete", "score", "long_view")),
    "complete, a row updated": ("complete", lambda: update_and_run("complete", "score")),
    "complete, compacted": ("complete", lambda: compact_and_run("complete", "score")),
    "complete, without stable row ids": (
        "unstable unstable_view",
        lambda: [run("unstable_view"), appended("unstable", "score")],
    ),
    "failed rows": ("skipped", failed),
    "mixed": ("mixed", lambda: [run("mixed", "graded", on_code_change="new_rows"), appended("mixed", "graded")]),
    "killed": ("killed", lambda: [run("killed", "steady", **SIZES), run("killed", "steady")]),
    "killed after a commit": ("committed", lambda: [run("committed", "steady", **SIZES), run("committed", "steady")]),
    "killed under skip": ("killed_picky", lambda: [run("killed_picky", "picky", **SIZES)]),
    "packed": ("packed packed_view", lambda: [run("packed", "score"), appended("packed", "score", "packed_view")]),
    "views": (
        "complete long_view shuffled_view exploded_view packed packed_view",
        lambda: [run("long_view"), run("shuffled_view"), run("exploded_view"), run("packed_view")],
    ),
    "views, a row appended": (
        "complete long_view shuffled_view exploded_view",
        lambda: [append("complete", 9003), run("long_view"), run("shuffled_view"), run("exploded_view")],
    ),
    "a killed refresh": ("half half_view", lambda: [run("half_view", **SIZES), run("half_view")]),
    "a refresh killed while it computed": ("begun begun_view", lambda: [run("begun_view", **SIZES), run("begun_view")]),
}
"""What is done with which tables of the archived database, none for all; what comes of it is JSON."""


def outcome(act: str) -> Any:
    """What an act on the database as it was archived comes to, as JSON has it."""
    tables, do = ACTS[act]
    unpack(*tables.split())
    return json.loads(json.dumps(do(), default=str))
