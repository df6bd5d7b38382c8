"""A Lance database with an Airflow connection to it, and UDFs in the DAGs folder."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import socket
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva import Database, Table

if TYPE_CHECKING:
    from tests.support.browsing import Get

_numbers = itertools.count()

UDFS = '''
"""UDFs of a DAG author, in a module of the DAGs folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa

from airflow_geneva import Skip, expect, udf

FOLDER = Path({folder!r})


@udf(data_type=pa.int64(), version="1")
def length(text: str) -> int:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(text + "\\n")
    if (FOLDER / f"broken-{{text}}").exists():
        raise ValueError(f"cannot measure {{text}}")
    if (FOLDER / f"once-{{text}}").exists():
        (FOLDER / f"once-{{text}}").unlink()
        raise ValueError(f"cannot measure {{text}} yet")
    return len(text)


@udf(data_type=pa.int64(), version="1", on_error=[Skip(ValueError, max_fraction=0.25)])
def lenient(text: str) -> int:
    return length(text)


@udf(data_type=pa.int64(), version="2")
def longer(text: str) -> int:
    return 2 * len(text)


@udf(version="1", data_type=pa.struct([("low", pa.int64()), ("high", pa.int64())]))
def bounds(text: str) -> dict:
    return {{"low": 0, "high": len(text)}}


@udf(version="2", data_type=pa.struct([("low", pa.int64()), ("high", pa.int64())]))
def other_bounds(text: str) -> dict:
    return {{"low": 1, "high": len(text)}}


def are_three(values: pa.Table) -> list[bool]:
    return [value == 3 for value in values.column(0).to_pylist()]


@udf(data_type=pa.int64(), version="1", expect=[expect.between(0, 2), expect.not_null()])
def bounded(text: str) -> int:
    return len(text)


@udf(
    data_type=pa.int64(),
    version="1",
    expect=[expect.between(0, 2, level="warn"), expect.satisfies(are_three, whole=True)],
)
def weighed(text: str) -> int:
    return len(text)


@udf(data_type=pa.string(), version="1")
def upper(text: str) -> str:
    return text.upper()


@udf(data_type=pa.int64(), version="1")
def watched(text: str) -> int:
    while (FOLDER / "once-watched").exists():
        time.sleep(0.05)
    return len(text)


@udf(data_type=pa.int64(), version="1", input_columns=["text"], batch_size=10, poll_interval=0.2)
class Later:
    def submit(self, batch: pa.RecordBatch, key: str) -> str:
        texts = batch["text"].to_pylist()
        (FOLDER / key).write_text(" ".join(texts))
        for text in texts:
            length.func(text)
        return key

    def poll(self, handle: str) -> bool:
        with (FOLDER / "polls").open("a") as polls:
            polls.write(" ".join([handle, os.environ.get("OPENAI_API_KEY", "none")]) + "\\n")
        return (FOLDER / "polls").read_text().count(handle) > 2

    def fetch(self, handle: str) -> list[int]:
        return [len(text) for text in (FOLDER / handle).read_text().split()]


@udf(data_type=pa.int64(), version="1", num_cpus=2, num_gpus=0.5, memory="2g")
def costly(text: str) -> int:
    return len(text)
'''


@dataclass
class Desk:
    """What a DAG author has at hand: a table of their own, and UDFs that keep count of what they are called with.

    Args:
        database: reached by the connection `lance_default`.
        table: named like no other test's; its rows are `{"text": "a00"}` and so on, a letter for a fragment.
        folder: where the UDFs leave their traces.
    """

    database: Database
    table: Table
    folder: Path

    @property
    def asset(self) -> str:
        return f"lance_default/{self.table.name}"

    def define(self, **columns: str) -> None:
        """Define columns by the names of the UDFs below."""
        udfs = importlib.import_module("geneva_dag_udfs")
        self.table.add_columns({column: getattr(udfs, name) for column, name in columns.items()})

    def append(self, letters: str, rows: int = 10) -> None:
        """Add a fragment for each letter."""
        for letter in letters:
            self.table.add([{"text": f"{letter}{row:02}"} for row in range(rows)])

    def calls(self) -> list[str]:
        """The inputs that `length` saw since this was asked last."""
        trace = self.folder / "calls"
        found = trace.read_text().split() if trace.exists() else []
        trace.unlink(missing_ok=True)
        return sorted(found)

    def break_at(self, text: str, once: bool = False) -> None:
        """Make `length` fail at an input, always or once."""
        (self.folder / f"{'once' if once else 'broken'}-{text}").touch()

    def mend(self) -> None:
        for flag in self.folder.glob("*-*"):
            flag.unlink()

    def values(self, column: str = "n") -> dict[str, int | str | None]:
        rows = self.table.to_arrow()
        return dict(zip(rows["text"].to_pylist(), rows[column].to_pylist(), strict=True))


@pytest.fixture(autouse=True)
def no_scheduler_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process nothing is between the end of a task that defers and its trigger."""
    monkeypatch.setattr("airflow_geneva.triggers.new_fragments._RESUME_DELAY", 0.0)


@pytest.fixture(scope="session")
def dag_udfs(airflow_db: Path, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of UDFs in the DAGs folder, which is on the Python path of every task."""
    folder = tmp_path_factory.mktemp("traces")
    module = airflow_db / "dags" / "geneva_dag_udfs.py"
    module.write_text(textwrap.dedent(UDFS).format(folder=str(folder)))
    sys.path.insert(0, str(module.parent))
    return importlib.import_module("geneva_dag_udfs")


@pytest.fixture
def desk(dag_udfs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    connection = {"conn_type": "lance", "host": str(tmp_path / "db")}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[2]"}))
    # Scratch of other test runs on this machine is none of a test's business.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    database = airflow_geneva.connect(tmp_path / "db")
    table = database.create_table(f"docs{os.getpid()}_{next(_numbers)}", schema=pa.schema({"text": pa.string()}))
    found = Desk(database, table, dag_udfs.FOLDER)
    yield found
    found.mend()
    found.calls()


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of a server that takes every connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            with suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()


@pytest.fixture
def browse(airflow_db: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Get]:
    from tests.support.browsing import browsing

    yield from browsing(monkeypatch)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    from tests.support.browsing import shelf_at

    return shelf_at(tmp_path / "shelf", monkeypatch)


@pytest.fixture
def reader(database: Database, browse: Get) -> Get:
    from tests.support.rights import Rights

    Rights.give("reader", connections=["shelf", "pg"])
    return browse


class Logs(logging.Handler):
    """Messages by task."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.by_task: dict[str, list[str]] = {}
        self.task = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.by_task.setdefault(self.task, []).append(record.getMessage())

    def of(self, task: str) -> list[str]:
        return self.by_task[f"backfill.{task}"]


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Logs]:
    """What operators, hooks and the engine say; Airflow's own words are its own."""
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    from airflow_geneva.operators import PlanBackfillOperator
    from tests.support.driving import Driver

    logs, engine, run = Logs(), logging.getLogger("airflow_geneva"), Driver._run

    def noting(driver: Driver, ti: Any, kill: str | None) -> None:
        again = " again" * (ti.try_number - 1)
        logs.task = (ti.task_id if ti.map_index < 0 else f"{ti.task_id}[{ti.map_index}]") + again
        run(driver, ti, kill)

    monkeypatch.setattr(Driver, "_run", noting)
    # Airflow decides while it is imported what it lets pass, and to where.
    for spoken in (PlanBackfillOperator, SparkSubmitHook):
        mixin = next(base for base in spoken.__mro__ if "log" in vars(base))
        monkeypatch.setattr(mixin, "log", engine)
    monkeypatch.setattr(engine, "level", logging.INFO)
    engine.addHandler(logs)
    yield logs
    engine.removeHandler(logs)
