"""A backfill and a refresh through a Spark Connect server, whose client has no Spark of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

CLIENT = """
import json
import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

import airflow_geneva
from airflow_geneva.errors import JobFailed

sys.path.insert(0, sys.argv[2])
import udfs_of_the_client as udfs

session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
database = airflow_geneva.connect(Path(sys.argv[2]) / "db")
rows = pa.table({"x": pa.array(range(2_000)), "log": pa.array([sys.argv[3]] * 2_000)})
table = database.create_table("numbers", rows, max_rows_per_file=300)
table.add_columns({"y": udfs.logged, "z": udfs.fails_at_700})
view = table.query().select({"x": "x", "y2": udfs.logged}).create_materialized_view(database, "v")
filled = table.backfill("y", runner="spark", concurrency=2, task_size=200)
refreshed = view.refresh(runner="spark", concurrency=2)
try:
    table.backfill("z", runner="spark", concurrency=2)
except JobFailed as error:
    failed = str(error)
values = table.to_arrow()
print(json.dumps({
    "session": type(session).__module__,
    "computed": [filled.rows_computed, refreshed.rows_computed],
    "right": values["y"].to_pylist() == [2 * x for x in values["x"].to_pylist()],
    "view": sorted(view.to_arrow()["y2"].to_pylist()) == [2 * x for x in range(2_000)],
    "failed": failed,
}))
"""

UDFS = """
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf


@udf(data_type=pa.int64())
def logged(x: pa.Int64Array, log: pa.StringArray) -> pa.Array:
    with open(log[0].as_py(), "a") as file:
        file.write("".join(f"{row}\\n" for row in x.to_pylist()))
    return pc.multiply(x, 2)


@udf(data_type=pa.int64())
def fails_at_700(x: int) -> int:
    if x == 700:
        raise ValueError("seven hundred is too much")
    return x
"""


@pytest.fixture(scope="module")
def server(java_home: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of two slots, which does not have this package on its path."""
    folder = tmp_path_factory.mktemp("connect")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": folder / "local",
        "spark.sql.warehouse.dir": folder / "warehouse",
        "spark.ui.enabled": "false",
    }
    given = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    main = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "spark-submit", "--master", "local[2]", *given, *main],
            cwd=folder, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while "Spark Connect server started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_columns_and_views_are_computed_by_a_server(server: str, tmp_path: Path) -> None:
    (tmp_path / "udfs_of_the_client.py").write_text(UDFS)
    trace = tmp_path / "trace"
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, server, str(tmp_path), str(trace)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["session"] == "pyspark.sql.connect.session"
    assert found["computed"] == [2_000, 2_000]
    assert found["right"]
    assert found["view"]
    assert sorted(map(int, trace.read_text().split())) == sorted([*range(2_000), *range(2_000)])
    assert "seven hundred is too much" in found["failed"]
    assert "row 100 of fragment 2" in found["failed"]
