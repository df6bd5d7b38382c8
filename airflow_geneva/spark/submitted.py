"""The work of the Spark application once it has a session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_geneva.job.heartbeat import writing_heartbeats
from airflow_geneva.lance_io.table_versions import reporting_remade
from airflow_geneva.plan.saved_plan import load_plan
from airflow_geneva.run.stages import planned_udfs
from airflow_geneva.spark.tasks import apply_on_spark
from airflow_geneva.storage.files import Storage, freeze_options
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.storage.uri import normalize_uri

if TYPE_CHECKING:
    from pyspark import SparkContext


def apply_submitted(
    context: SparkContext,
    job_uri: str,
    fingerprint: str,
    shard: int,
    credentials: Mapping[str, str],
    progress_seconds: float | None = None,
) -> dict[str, Any]:
    """Compute one shard of a stored plan; the code of its UDFs is in ``py_files``.

    Raises:
        InvalidInput: the plan was removed, or its fingerprint differs.
        UdfError: the UDF failed; rows computed before are checkpointed.
        TableRemade: a table was dropped and created again.
    """
    job = Storage(normalize_uri(job_uri), freeze_options(credentials))
    saved = load_plan(job, fingerprint)
    work = saved.work
    udfs = planned_udfs(work)
    location = TableLocation(work.table, work.table_name, job.options)
    every = {} if progress_seconds is None else {"every": progress_seconds}
    loaded = saved.load_shard(job, shard)
    # The submitting task writes heartbeats too, but it may die while the driver continues.
    with reporting_remade(work.tables, job.options), writing_heartbeats(job, "apply"):
        rows = apply_on_spark(context, location, work, loaded, udfs, **every)
    return {
        "shard": shard,
        "fingerprint": fingerprint,
        "rows_run": rows,
        "fragments_staged": len(loaded.to_apply),
    }


def write_result(path: str, credentials: Mapping[str, str], document: Mapping[str, Any]) -> None:
    """Write the result for the submitting task."""
    folder, _, name = normalize_uri(path).rpartition("/")
    Storage(folder, freeze_options(credentials)).write_bytes(name, json.dumps(document).encode())
