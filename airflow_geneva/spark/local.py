"""The session of a notebook or script: the active one, or a local one, which is started without Spark's chatter."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from airflow_geneva.engine.runtime import threading
from airflow_geneva.spark.installation import java_environment
from airflow_geneva.spark.submit import session_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("airflow_geneva.spark")

_EXIT_SECONDS = 10.0

_java_folders: list[tempfile.TemporaryDirectory[str]] = []
_starting = threading.Lock()


def open_session(concurrency: int) -> SparkSession:
    """Return the active session, or start a local one; `JavaNotFound` if there is no Java to start one."""
    with _starting:  # of jobs in the background, one starts a session, and the others get it
        return active_session() or _start_session(concurrency)


def active_session() -> SparkSession | None:
    """Return this process's session, also in a background thread, which has no active session of its own."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    with suppress(PySparkRuntimeError):
        return SparkSession.active()
    return None


def _start_session(concurrency: int) -> SparkSession:
    from pyspark.sql import SparkSession

    java = tempfile.TemporaryDirectory(prefix="geneva-java-")
    _java_folders.append(java)
    os.environ.update(java_environment(java.name))
    slots = max(1, min(concurrency, os.cpu_count() or 1))
    # Workers of a local session must use this Python; Spark would start the python3 on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Its UI has no login, so no other machine shall reach it.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {**session_settings(driver_here=True), "spark.log.level": "ERROR"}
    settings |= {"spark.master": f"local[{slots},4]", "spark.app.name": "airflow_geneva"}
    with _without_warnings(), _keeping_signals():
        _start_jvm(settings)
        builder = SparkSession.builder
        for name, value in settings.items():
            builder = builder.config(name, value)
        return builder.getOrCreate()


def _start_jvm(settings: dict[str, str]) -> None:
    """Start Spark's JVM, unless one runs, and log its output until it is up; later output goes to standard error."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    reading, writing = os.pipe()
    said = _Lines(reading)
    try:
        conf = SparkConf().setAll(list(settings.items()))
        gateway = launch_gateway(conf, {"stderr": writing})  # type: ignore[no-untyped-call]
        SparkContext(conf=conf, gateway=gateway)
    except BaseException:
        said.show()
        raise
    finally:
        os.close(writing)
    said.forward()


class _Lines:
    """Reads the lines that a JVM writes to its standard error, in a thread, and keeps those of its start."""

    def __init__(self, descriptor: int) -> None:
        self.kept: list[str] = []
        self.thread = threading.Thread(target=self._read, args=(descriptor,), name="geneva-jvm-stderr", daemon=True)
        self._printing = False
        self._lock = threading.Lock()
        self.thread.start()

    def _read(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with self._lock:
                    if not self._printing:
                        self.kept.append(line)
                        continue
                print(line, end="", file=sys.stderr, flush=True)

    def forward(self) -> None:
        """Log the lines until now, and print the later ones."""
        with self._lock:
            self._printing = True
        for line in self.kept:
            logger.info("%s", line.rstrip())

    def show(self) -> None:
        """Print all lines."""
        with self._lock:
            self._printing = True
        print("".join(self.kept), end="", file=sys.stderr, flush=True)


def end_session() -> None:
    """Stop the session of this process, and end the JVM that this process started for it, even if it hangs."""
    from pyspark import SparkContext

    gateway, context = SparkContext._gateway, SparkContext._active_spark_context
    jvm: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    if jvm is None:
        return
    if context is not None:
        stopping = threading.Thread(target=context.stop, name="geneva-stop-spark", daemon=True)
        stopping.start()
        stopping.join(_EXIT_SECONDS)
    if jvm.stdin is not None:
        jvm.stdin.close()  # it exits then
    try:
        jvm.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()


@contextmanager
def _keeping_signals() -> Iterator[None]:
    """Keep a program's own handler of Ctrl-C, which Spark replaces by one that cancels all of its jobs."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not signal.default_int_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide what Python's side of Spark warns of, and the user can do nothing about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lance is not fork-safe")  # the forked process becomes Java
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        yield
