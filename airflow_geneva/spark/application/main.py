"""The Spark application that spark-submit starts: it computes one shard of a plan. Never imported."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.documents import parse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_geneva.engine.job.meter import Stopwatch


def main(arguments: list[str]) -> int:
    """Compute and stage a shard; the commit task commits it."""
    began = time.time()
    parser = argparse.ArgumentParser(prog="airflow_geneva apply")
    parser.add_argument("--job", required=True, help="URI of the job's folder")
    parser.add_argument("--fingerprint", required=True, help="SHA-256 of the plan")
    parser.add_argument("--shard", required=True, type=int, help="index of the shard")
    parser.add_argument("--storage-option", action="append", default=[], help="NAME=VALUE; no secret")
    parser.add_argument("--archive", action="append", default=[], help="URI of a zip that Spark was not given")
    parser.add_argument("--leave-waiting", action="store_true", help="end while the service of a batch API works")
    parser.add_argument("--name", default=None, help="name of the application, if the one who submits it gives none")
    parser.add_argument("--progress-seconds", type=float, default=None, help="seconds between progress lines")
    parser.add_argument("--submitted", type=float, default=None, help="when spark-submit was started, since the epoch")
    parser.add_argument("--code-seconds", type=float, default=0.0, help="seconds that the code took before")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.WARNING)

    # PySpark warns at every start, and this program does not use pandas.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    # Create the session first: lance is not fork-safe and must not be loaded before the JVM is started.
    from pyspark.sql import SparkSession

    builder = SparkSession.builder if options.name is None else SparkSession.builder.appName(options.name)
    session = builder.getOrCreate()
    for archive in options.archive:
        session.sparkContext.addPyFile(archive)
    opened = time.time()
    from airflow_geneva.engine.apply.batch_api import StillWaiting
    from airflow_geneva.engine.job.meter import Stopwatch
    from airflow_geneva.errors import GenevaError

    watch = Stopwatch(time.time() - opened)
    watch.seconds |= {"code": options.code_seconds, "session": opened - began}
    if options.submitted is not None:
        watch.seconds["jvm"] = max(began - options.submitted, 0.0)

    storage_options = dict(option.split("=", 1) for option in options.storage_option)
    storage_options |= parse(os.environ.get("AIRFLOW_GENEVA_STORAGE_OPTIONS") or "{}")
    place = (options.job, options.fingerprint, options.shard)
    if threading.current_thread() is threading.main_thread():
        # The tasks of this driver then end after their current calls, and keep what they computed.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        apply_submitted(session, watch, *place, storage_options, options.progress_seconds, not options.leave_waiting)
    except StillWaiting as still:
        print(f"airflow_geneva: {still}", file=sys.stderr, flush=True)
    except GenevaError as error:
        session.stop()
        print(f"airflow_geneva: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    session.stop()
    return 0


def apply_submitted(
    session: SparkSession,
    watch: Stopwatch,
    job_uri: str,
    fingerprint: str,
    shard: int,
    credentials: Mapping[str, str],
    progress_seconds: float | None = None,
    waits: bool = True,
) -> None:
    """Compute one shard of a stored plan and record that; after an error, rows computed before are checkpointed."""
    from airflow_geneva.engine.plan.saved_plan import load_plan
    from airflow_geneva.engine.run.pipeline import PlannedJob
    from airflow_geneva.engine.storage.files import Storage
    from airflow_geneva.engine.storage.location import TableLocation
    from airflow_geneva.spark.runner import SparkRunner

    folder = Storage.at(job_uri, credentials)
    saved = load_plan(folder, fingerprint)
    job = PlannedJob(TableLocation(saved.spec.table, saved.spec.table_name, folder.options), saved)
    job.waits = waits
    every = {} if progress_seconds is None else {"every": progress_seconds}
    # The submitting task may write heartbeats and failures too, but it may die while the driver continues.
    with job.at_step("apply", shard):
        job.apply_on(SparkRunner(session, watch), job.load_shard(shard), **every)


if __name__ == "__main__":
    failed = main(sys.argv[1:])
    if failed:  # services such as Databricks may take any exit for a failure
        sys.exit(failed)
