"""The progress bar of a job in this process: on a terminal and in a notebook, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import bar, udf
from airflow_geneva.bar import _html
from airflow_geneva.engine.job.meter import JobMeter
from airflow_geneva.engine.job.progress import ProgressReporter
from airflow_geneva.spark import local
from airflow_geneva.spark.installation import JavaNotFound
from tests.support.tables import MakeTable

SCRIPT = """
import sys, time
import pyarrow as pa
from airflow_geneva import connect, udf

@udf(data_type=pa.int64(), batch_size=5)
def slow(x: int) -> int:
    time.sleep(0.04)
    return x

table = connect(sys.argv[1]).open_table("docs")
table.add_columns({"n": slow})
print(table.backfill("n", runner="inline").rows_computed)
"""


@udf(data_type=pa.int64())
def same(x: int) -> int:
    return x


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows, one after the other."""
    said: list[str] = []
    monkeypatch.setattr(bar, "_FIRST_AFTER", 0.05)
    monkeypatch.setattr(bar, "_EVERY", 0.05)
    handle = SimpleNamespace(update=said.append)
    display: Any = ModuleType("IPython.display")
    display.HTML, display.display = str, lambda html, display_id: (said.append(html), handle)[1]
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=None)
    for module in (ipython, display):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_script_shows_it_on_a_terminal_only(make_table: MakeTable, tmp_path: Path, terminal: bool) -> None:
    make_table(40)
    (tmp_path / "script.py").write_text(SCRIPT)
    reading, writing = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "db")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, text=True, check=True, env=environment)
    os.write(writing, b"\n")
    told = os.read(reading, 1 << 20).decode()
    assert done.stdout == "40\n"
    if terminal:
        assert re.search(r"docs\.n .*computing, \d+ s, \d+ of 40 rows, \d+ rows/s, about \d+ s left", told)
    else:
        assert told == "\n"


def wait_until_shown(pattern: str, shown: list[str]) -> None:
    while not any(re.search(pattern, html) for html in shown):
        time.sleep(0.01)


def test_a_notebook_shows_it_as_html(
    make_table: MakeTable, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    computing = r"<b>docs\.n</b> <progress value=\"\d+\" max=\"40\"></progress> computing, \d+ s, \d+ of 40"

    @udf(data_type=pa.int64(), batch_size=5, version="1")
    def held(x: int) -> int:
        if x == 35:
            wait_until_shown(computing, shown)
        return x

    table = make_table(40)
    table.add_columns({"n": held})
    table.backfill("n", udf=held, runner="inline")
    assert re.search(r'value="40" max="40".* done, \d+ s, 40 of 40 rows<', shown[-1])
    before = len(shown)
    monkeypatch.setattr(bar, "_FIRST_AFTER", 3600.0)
    assert table.backfill("n", udf=held, runner="inline").rows_computed == 0
    assert len(shown) == before  # what takes no time needs no bar


def test_waiting_for_a_job_in_the_background_shows_it(
    make_table: MakeTable, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    @udf(data_type=pa.int64(), batch_size=5, version="1")
    def held(x: int) -> int:
        go_on.wait()
        if x == 35:
            wait_until_shown(r'<progress value="\d+" max="40"', shown)
        return x

    table = make_table(40)
    table.add_columns({"n": held})
    future = table.backfill_async("n", udf=held, runner="inline")
    while not re.search(r"<b>docs\.n</b> <progress[^>]*></progress> computing, \d+ s", "".join(shown[-1:])):
        with pytest.raises(TimeoutError):
            future.result(timeout=0.7)
    go_on.set()
    assert future.result().rows_computed == 40
    assert re.search(r'value="40" max="40".* done, \d+ s, 40 of 40 rows<', shown[-1])
    before = len(shown)
    monkeypatch.setattr(bar, "_FIRST_AFTER", 3600.0)
    assert future.result().rows_computed == 40
    assert len(shown) == before


def test_it_says_that_spark_starts(make_table: MakeTable, shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    starting = r"<b>v</b> <progress></progress> starting Spark…, \d+ s, then"

    def start(_concurrency: int) -> None:
        wait_until_shown(starting, shown)
        raise JavaNotFound("no Java")

    monkeypatch.setattr(local, "open_session", start)
    table = make_table(40)
    view = table.query().select(["id"]).add_columns({"n": (same, ["x"])}).create_materialized_view(name="v")
    with pytest.raises(JavaNotFound):
        view.refresh(runner="spark")
    assert re.search(r" failed, \d+ s", shown[-1])


def test_it_tells_failed_rows_and_escapes_names() -> None:
    meter = JobMeter("<b>&", "commit", 10, reporters={0: ProgressReporter(6, 1, rows_done=6, rows_failed=2)})
    meter.reporters[1] = ProgressReporter(4, 1, rows_done=1)
    assert str(meter) == "committing, 0 s, 7 of 10 rows, 2 failed"
    assert "<b>&lt;b&gt;&amp;</b>" in _html(meter)
