"""The demo's report: runs, versions, and the verses nearest to a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from airflow_geneva import Table
from dags_examples.demo.runs import STEPS, Run
from dags_examples.demo.verses import COLUMN

_OPERATIONS = {
    "Overwrite": "table made",
    "Append": "rows appended",
    "Merge": "column added",
    "DataReplacement": "values committed",
}


def show_runs(title: str, runs: Sequence[Run], console: Console) -> None:
    """Print rows and seconds of every run."""
    grid = _grid(title)
    grid.add_column("")
    for run in runs:
        grid.add_column(run.name, justify="right")
    grid.add_row("state", *(str(run.result.get("state", run.state)) for run in runs))
    grid.add_row("rows computed", *(_count(run.result.get("rows_computed")) for run in runs))
    grid.add_row("rows counted inside the UDF", *(_count(run.counted) for run in runs))
    grid.add_row("rows skipped", *(_count(run.result.get("rows_skipped")) for run in runs))
    grid.add_row("table version", *(" → ".join(map(str, sorted(set(run.versions)))) for run in runs), end_section=True)
    for step in STEPS:
        seconds = [run.step_seconds(step) for run in runs]
        if any(seconds):
            grid.add_row(step, *map(_seconds, seconds))
    grid.add_row("trigger to end", *(_seconds(run.seconds) for run in runs))
    console.print(grid)


def show_versions(table: Table, runs: Sequence[Run], console: Console) -> None:
    """Print the history of the table's versions."""
    names = {run.result.get("job_id"): run.name for run in runs}
    dataset = table.lance
    grid = _grid(f"Versions of table {table.name}")
    for heading in ("version", "rows"):
        grid.add_column(heading, justify="right")
    for heading in ("what", "job"):
        grid.add_column(heading)
    for version in dataset.versions():
        transaction = dataset.read_transaction(version["version"])
        operation = type(transaction.operation).__name__ if transaction else "unknown"
        properties = (transaction.transaction_properties if transaction else None) or {}
        job_id = properties.get("geneva.job_id")
        grid.add_row(
            str(version["version"]),
            _count(int(version["metadata"]["total_rows"])),
            _OPERATIONS.get(operation, operation),
            f"{names.get(job_id, 'job')}: {job_id}" if job_id else "",
        )
    console.print(grid)


def show_nearest(table: Table, query: str, console: Console, count: int = 5) -> None:
    """Print the verses whose embeddings are nearest to a sentence's."""
    grid = _grid(Text(f"Verses nearest to: {query}"), show_header=False)
    grid.add_column("likeness", justify="right")
    grid.add_column("place", no_wrap=True)
    grid.add_column("text")
    for verse in nearest(table, query, count).to_pylist():
        place = f"{verse['book']} {verse['chapter']}:{verse['verse']}"
        grid.add_row(f"{1 - verse['_distance']:.2f}", place, Text(verse["text"]))
    console.print(grid)


def nearest(table: Table, query: str, count: int) -> pa.Table:
    """Find the verses nearest to a sentence by cosine distance, nearest first."""
    from embedding_udfs import embed

    vector = embed(pa.array([query]))[0].as_py()
    search = {"column": COLUMN, "q": vector, "k": count, "metric": "cosine"}
    return table.lance.to_table(columns=["book", "chapter", "verse", "text", "_distance"], nearest=search)


def _grid(title: str | Text, **options: Any) -> Grid:
    return Grid(title=title, title_justify="left", title_style="bold", **options)


def _count(rows: int | None) -> str:
    return "-" if rows is None else f"{rows:,}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
