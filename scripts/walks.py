"""Trace two jobs, and print the calls that lead to the function and to Lance's commit."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import lance
import pyarrow as pa

import airflow_geneva
from airflow_geneva import connect, udf

PACKAGE = Path(airflow_geneva.__file__).parent
THREAD = "in a thread of its own"

Stop = tuple[str, str]
Walk = list[Stop]


def trace(job: Callable[[Callable[[str], None]], None]) -> dict[str, Walk]:
    """Return the calls from a job's method to the first pass of each point.

    Args:
        job: runs the job; its argument is a function that records a point by its name.
    """
    walks: dict[str, Walk] = {}
    started: dict[int, Walk] = {}
    notes = threading.Lock()

    def here() -> Walk:
        frames = list(_frames(sys._getframe(2)))
        return [*started.get(threading.get_ident(), []), *frames]

    def note(point: str) -> None:
        with notes:
            walks.setdefault(point, here())

    start, submit, commit = threading.Thread.start, ThreadPoolExecutor.submit, lance.LanceDataset.commit

    def starting(thread: threading.Thread) -> None:
        way, run = here(), thread.run

        def running() -> None:
            started[threading.get_ident()] = [*way, ("", THREAD)]
            run()

        thread.run = running  # type: ignore[method-assign]
        start(thread)

    def submitting(pool: ThreadPoolExecutor, work: Any, /, *arguments: Any, **keywords: Any) -> Any:
        way = here()

        def working() -> Any:
            started[threading.get_ident()] = [*way, ("", THREAD)]
            return work(*arguments, **keywords)

        return submit(pool, working)

    def committing(*arguments: Any, **keywords: Any) -> Any:
        note("LanceDataset.commit")
        return commit(*arguments, **keywords)

    with (
        patch.object(threading.Thread, "start", starting),
        patch.object(ThreadPoolExecutor, "submit", submitting),
        patch.object(lance.LanceDataset, "commit", committing),
    ):
        job(note)
    return walks


def _frames(frame: FrameType | None) -> Iterator[Stop]:
    """Return the package's frames of a stack, outermost first."""
    found = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if PACKAGE in file.parents:
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace(".<locals>", "")
            found.append((file.relative_to(PACKAGE).as_posix(), name))
        frame = frame.f_back
    yield from reversed(found)


@contextmanager
def _database() -> Iterator[airflow_geneva.Database]:
    with tempfile.TemporaryDirectory() as folder:
        database = connect(Path(folder) / "db")
        database.create_table("docs", pa.table({"text": ["a", "bb", "ccc"]}))
        yield database


def walks() -> dict[str, Walk]:
    """Trace a backfill and a refresh of three rows in one process."""
    noted: list[Callable[[str], None]] = []

    @udf(data_type=pa.int64())
    def length(text: str) -> int:
        noted[-1]("the function")
        return len(text)

    with _database() as database:
        table = database.open_table("docs")
        table.add_columns({"length": length})
        view = table.search().select({"length": (length, ["text"])}).create_materialized_view(database, "lengths")

        def backfill(note: Callable[[str], None]) -> None:
            noted.append(note)
            table.backfill("length", runner="inline")

        def refresh(note: Callable[[str], None]) -> None:
            noted.append(note)
            view.refresh(runner="inline")

        found = {"Table.backfill": trace(backfill), "View.refresh": trace(refresh)}
    return {f"{job} to {point}": walk for job, points in found.items() for point, walk in points.items()}


def described(found: dict[str, Walk]) -> str:
    """Return the walks as text."""
    parts = []
    for name, walk in found.items():
        lines = [f"{file}: {function}" if file else f"({function})" for file, function in walk]
        calls = sum(1 for file, _ in walk if file)
        files = len({file for file, _ in walk if file})
        parts.append(f"From {name}: {calls} calls in {files} files.\n" + "\n".join(f"  {line}" for line in lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(described(walks()))
