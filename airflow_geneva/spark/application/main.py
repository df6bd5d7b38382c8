"""The Spark application that spark-submit starts: it computes one shard of a plan. Never imported."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings


def main(arguments: list[str]) -> int:
    """Compute and stage a shard; the commit task commits it."""
    parser = argparse.ArgumentParser(prog="airflow_geneva apply")
    parser.add_argument("--job", required=True, help="URI of the job's folder")
    parser.add_argument("--fingerprint", required=True, help="SHA-256 of the plan")
    parser.add_argument("--shard", required=True, type=int, help="index of the shard")
    parser.add_argument("--result", required=True, help="where to write the outcome, as JSON")
    parser.add_argument("--progress-seconds", type=float, default=None, help="seconds between progress lines")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("py4j").setLevel(logging.WARNING)

    # PySpark warns at every start, and this program does not use pandas.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    # Create the session first: lance is not fork-safe and must not be loaded before the JVM is started.
    from pyspark.sql import SparkSession

    session = SparkSession.builder.appName("airflow_geneva").getOrCreate()
    from airflow_geneva.errors import GenevaError
    from airflow_geneva.spark.submitted import apply_submitted, write_result

    began = time.monotonic()
    credentials = json.loads(os.environ.get("AIRFLOW_GENEVA_STORAGE_OPTIONS") or "{}")
    try:
        result = apply_submitted(
            session.sparkContext, options.job, options.fingerprint, options.shard, credentials, options.progress_seconds
        )
    except GenevaError as error:
        session.stop()
        print(f"airflow_geneva: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    result["seconds"] = round(time.monotonic() - began, 3)
    write_result(options.result, credentials, result)
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
