"""A local session is started quietly: what Spark says meanwhile is logged, what it says later is shown."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_geneva.spark.local import _Lines

SCRIPT = """
import sys
import pyarrow as pa
from airflow_geneva import connect, udf

@udf(data_type=pa.int64())
def grow(x: int) -> int:
    if x == 1:
        print("said by the function", file=sys.stderr, flush=True)
    return x + 1

tables = [connect(sys.argv[1]).create_table(name, {"x": [2, first]}) for name, first in (("one", 1), ("two", 3))]
for table in tables:
    table.add_columns({"n": grow})
futures = [table.backfill_async("n", runner="spark") for table in tables]
print([future.result().rows_computed for future in futures])
"""


def wait_for(said: _Lines, lines: int) -> None:
    while len(said.kept) < lines:
        time.sleep(0.01)


def test_lines_of_the_start_are_logged_and_later_ones_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "airflow_geneva.spark")
    reading, writing = os.pipe()
    said = _Lines(reading)
    os.write(writing, b"WARN: one\nWARN: two\n")
    wait_for(said, 2)
    said.forward()
    os.write(writing, b"later\n")
    os.close(writing)
    said.thread.join()
    logged = [record.getMessage() for record in caplog.records if record.name == "airflow_geneva.spark"]
    assert logged == ["WARN: one", "WARN: two"]
    assert capsys.readouterr().err == "later\n"


def test_all_lines_are_printed_where_it_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    said = _Lines(reading)
    os.write(writing, b"no such class\n")
    wait_for(said, 1)
    said.show()
    os.close(writing)
    assert capsys.readouterr().err == "no such class\n"


@pytest.mark.spark
@pytest.mark.slow
def test_a_script_with_two_jobs_at_once_prints_what_it_prints(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "db")]
    # The workers' standard error stays open a moment longer than the program.
    with (tmp_path / "told").open("w+") as told:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=told, text=True, check=True)
        told.seek(0)
        # The first job says that it starts Spark for two rows.
        said = [line for line in told.read().splitlines() if not line.startswith("Spark is started for 2 rows")]
        assert (done.stdout, said) == ("[2, 2]\n", ["said by the function"])
