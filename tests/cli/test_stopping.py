"""Ctrl-C and SIGTERM while a command computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_geneva import connect

UDFS = """
import time
from pathlib import Path

from airflow_geneva import udf

@udf(batch_size=1)
def slow(x: int) -> int:
    Path("begun").touch()
    time.sleep(0.05)
    return 2 * x
"""
RUN = "import sys; from airflow_geneva.cli.app import app; sys.argv[0] = 'airflow-geneva'; app()"
FEW, MANY = 10, 20_000


@pytest.fixture
def db(tmp_path: Path) -> str:
    """A database with a column that takes a thousand seconds."""
    (tmp_path / "slow_udfs.py").write_text(UDFS)
    table = connect(tmp_path / "db").create_table("docs", {"x": range(MANY)}, max_rows_per_file=100)
    table.query().select(["x"]).limit(FEW).create_materialized_view(name="few")
    define = [sys.executable, "-c", RUN, "define", "db", "docs", "y", "slow_udfs:slow"]
    subprocess.run(define, cwd=tmp_path, check=True)
    return str(tmp_path / "db")


def processes_of(group: int) -> list[str]:
    """Return the commands of the processes of a group that have not exited."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            about = (place / "stat").read_text().rpartition(")")[2].split()
            if int(about[2]) == group and about[0] != "Z":
                found.append((place / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["backfill", "db", "docs", "y", "--runner", "inline"], signal.SIGINT),
        (["plan", "db", "--all", "--run", "--runner", "inline"], signal.SIGTERM),
        pytest.param(["backfill", "db", "docs", "y", "--runner", "spark"], signal.SIGINT, marks=pytest.mark.spark),
    ],
)
def test_the_job_ends_at_its_next_checkpoint_and_leaves_no_process(
    db: str, tmp_path: Path, arguments: list[str], number: int
) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], cwd=tmp_path, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        while not (tmp_path / "begun").exists():
            assert command.poll() is None, command.communicate()
            time.sleep(0.05)
        os.killpg(command.pid, number)
        told, warned = command.communicate(timeout=300)
        assert processes_of(command.pid) == []
    finally:
        command.kill()
    assert command.returncode == 128 + number, warned
    assert "The job ends after its current calls. What it computed is kept" in warned
    [job] = connect(db).jobs(table="docs")
    assert job.state == "PARTIAL"
    assert f"PARTIAL: {job.rows_computed:,} row" in told
    assert "left for the next run: canceled by" in told
    assert job.rows_left == MANY - job.rows_computed > 0
    assert job.rows_computed > 0


STUCK = """
import os, signal, threading
from airflow_geneva.cli.stopping import _canceling
from airflow_geneva.engine.api import JobMeter

asked, meter = threading.Event(), JobMeter("docs.y")

def hang():
    asked.set()
    threading.Event().wait()

meter.cancel = hang
with _canceling(), meter.measuring():
    os.kill(os.getpid(), signal.SIGINT)
    asked.wait()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
"""


def test_the_second_signal_ends_the_process_while_the_store_does_not_answer() -> None:
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=60, stderr=subprocess.DEVNULL).returncode in (1, -2)
