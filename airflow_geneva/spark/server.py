"""A Spark Connect server on this machine, for development and the demo."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from airflow_geneva.engine.runtime import time
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.spark.connect import check_reachable
from airflow_geneva.spark.installation import java_environment
from airflow_geneva.spark.submit import SparkMaster, find_spark_submit, session_settings

HOST = "127.0.0.1"
_START_SECONDS = 120.0
_STOP_SECONDS = 10.0


@contextmanager
def run_server(
    folder: Path,
    port: int,
    master: str = "local[*]",
    environment: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server for this machine only, wait until it answers, and stop it at the end.

    Args:
        folder: an existing folder for the files that Spark writes while it runs.
        environment: by default that of this process.
        log: destination of the server's log; by default the standard error of this process.

    Raises:
        InvalidInput: the port is taken, or Spark does not recognize the master URL.
        JavaNotFound: no Java that Spark supports was found.
        GenevaError: the server ended, or did not answer in time.
    """
    parsed = SparkMaster.parse(master, "--master")
    master = parsed.url if parsed.slots is None else parsed.limited(parsed.slots).url
    _check_free(port)
    settings = {
        **session_settings(driver_here=True),
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.bindAddress": HOST,
        "spark.driver.host": HOST,
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    given = dict(os.environ if environment is None else environment)
    given.setdefault("PATH", os.defpath)
    # Workers must use this Python, which has the packages; Spark would start the python3 on PATH.
    given.setdefault("PYSPARK_PYTHON", sys.executable)
    given.setdefault("SPARK_LOCAL_IP", HOST)  # of the UI, which has no login
    given = {**find_spark_submit("spark-submit", given), **java_environment(folder)}
    process = subprocess.Popen(
        [
            str(shutil.which("spark-submit", path=given["PATH"])), "--master", master,
            *(part for name, value in settings.items() for part in ("--conf", f"{name}={value}")),
            "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal",
        ],
        env=given, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        _wait_until_it_answers(process, port)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise InvalidInput(f"Port {port} on {HOST} cannot be used ({error}). Give another one: --port") from error


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + _START_SECONDS
    while True:
        if (status := process.poll()) is not None:
            raise GenevaError(f"The Spark Connect server ended with status {status}; its log says why.")
        try:
            return check_reachable(f"sc://{HOST}:{port}")
        except ConnectionError as error:
            if time.monotonic() > until:
                raise GenevaError(f"The Spark Connect server did not answer within {_START_SECONDS:.0f} s.") from error
        time.sleep(0.1)
